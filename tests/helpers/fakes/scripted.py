"""A checkpoint that says what is written here: thinking, tool calls, and an answer after their results.

It is a Qwen2-VL whose layers add nothing, so that the next token depends on the last one alone. The chat template ends
a prompt with a cue, by what was asked; from there each token leads to the next one of the cue's line.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from benchmarks import checkpoints

ANSWER = "A dog sits on the dock."
THOUGHT = "There is fur, so it barks."
AFTER_THOUGHT = "It is a dog."
AFTER_TOOLS = "The dog is 40 pixels wide."
CROP = {"left": 10, "right": 50}
MEASURE = {"name": "dog"}

# Pieces are tokens; no two are the same.
LINES: dict[str, tuple[str, ...]] = {
    "<|cue_plain|>": ("A dog", " sits on", " the dock."),
    "<|cue_think|>": ("<think>", "There is fur,", " so it barks.", "</think>", "\n\nIt is", " a dog."),
    "<|cue_tools_0|>": ('<tool_call>\n{"name": "crop", ', '"arguments": {"left": 10', ', "right": 50}}\n</tool_call>'),
    "<|cue_tools_1|>": ('<tool_call>\n{"name": "measure",', ' "arguments": {"name":', ' "dog"}}\n</tool_call>'),
    "<|cue_tools_2|>": ("The dog", " is 40", " pixels wide."),
}
END = "<|im_end|>"
PROMPT_END = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CUES = (
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if tools %}<|cue_tools_{{ messages | selectattr('role', 'equalto', 'tool') | list | length }}|>"
    "{% elif enable_thinking %}<|cue_think|>{% else %}<|cue_plain|>{% endif %}{% endif %}"
)
FLAGS = ("--reasoning-parser", "think", "--tool-call-parser", "hermes")


def scripted(folder: Path) -> Path:
    tokenizer = checkpoints.qwen_tokenizer()
    pieces = [piece for line in LINES.values() for piece in line]
    assert len(set(pieces)) == len(pieces)
    tokenizer.add_special_tokens([AddedToken(cue, normalized=False, special=True) for cue in LINES])
    tokenizer.add_tokens([AddedToken(piece, normalized=False, special=False) for piece in pieces])
    checkpoints.qwen2_vl(folder, tokenizer=tokenizer, text={"tie_word_embeddings": False})
    assert PROMPT_END in checkpoints.QWEN_TEMPLATE
    (folder / "chat_template.jinja").write_text(checkpoints.QWEN_TEMPLATE.replace(PROMPT_END, CUES))
    _learn_lines(folder / "model.safetensors", tokenizer)
    return folder


def _learn_lines(path: Path, tokenizer: Tokenizer) -> None:
    weights = load_file(path)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    (embedded,) = [weight for name, weight in weights.items() if name.endswith("embed_tokens.weight")]
    embeddings = torch.nn.functional.normalize(embedded)
    head = weights["lm_head.weight"].zero_()
    for cue, line in LINES.items():
        tokens = [tokenizer.token_to_id(token) for token in (cue, *line, END)]
        for token, following in pairwise(tokens):
            head[following] += 20 * embeddings[token]  # far enough ahead of the others at any usual temperature
    save_file(weights, path, metadata={"format": "pt"})
