"""A small byte-level BPE for the texts the recipe makes, and the tokenizer files of a Hugging Face folder.

Words are merged as usual, with two exceptions that make reading learnable: each digit is a token, and so is each
letter of a word that follows a quotation mark. What is read from a picture is answered in quotes, letter by letter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from training import chat
from training.samples import SKILLS
from training.scenes import TRAIN, TRAINING, Shape, sample
from training.words import COLUMNS, LABELS, LETTERS

VOCABULARY = 1280  # with the special tokens
CORPUS_SAMPLES = 3000

_PIECES = "|".join(
    (
        r' ?"(?:shape|color)": "[a-z]+"',  # JSON about shapes has few words: no need to spell them
        r" [A-Za-z]+",
        r"(?<![\"A-Za-z])[A-Za-z]+",
        r"[A-Za-z]",  # after a quotation mark
        r"[0-9]",
        r' ?(?:[^\sA-Za-z0-9"]+|"[^\sA-Za-z0-9"]*)',
        r"\s",
    )
)


def train_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(chat.SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in chat.SPECIALS])
    return tokenizer


def corpus(samples: int = CORPUS_SAMPLES) -> Iterator[str]:
    """Questions and answers of training samples, and every label in the places it can stand."""
    shapes = {"compare": Shape(9, 8, 2), "video": Shape(9, 8, frames=4)}
    for seed in range(samples):
        skill = SKILLS[seed % len(SKILLS)]
        made = sample(seed, TRAIN, skill=skill, shape=shapes.get(skill, Shape(9, 8)), turns=3, plan=TRAINING)
        for question in made.questions:
            yield chat.user(question.text).replace(chat.START, "").replace(chat.END, "")
            yield question.answer
    for label in (*LABELS, *LETTERS, *COLUMNS):
        yield from (f"the value of {label} is", f"What is the {label.lower()} of {label}?") * 4


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(chat.TEMPLATE)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": chat.END,
        "pad_token": chat.END_OF_TEXT,
        "model_max_length": 2048,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def token_id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None, f"the tokenizer has no token {token}"
    return found


def read_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
