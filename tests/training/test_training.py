"""The recipe of the built-in model, in a tiny setting."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from random import Random
from typing import Any

import jinja2
import pytest
import torch
from llguidance import LLTokenizer
from tokenizers import Tokenizer
from transformers import Qwen2VLForConditionalGeneration

import saccade
from saccade import SamplingParams
from saccade.apps.evaluation.questions import load_questions
from saccade.structured.schema import compiled
from training import chat
from training.batches import IGNORED, BatchSizes, Encoder, Mix, held_out_batch, train_batch
from training.calls import tool
from training.export import export, read_weights, write_weights
from training.extract import MOST_LETTERS, AnswerScene
from training.held_out import check as check_set
from training.held_out import write as write_set
from training.keys import absent, field_names
from training.losses import exact_matches, losses
from training.model import MEAN, STD, TINY, Model, in_patch_order, patches
from training.optim import Average, optimizers, orthogonal
from training.palette import COLORS
from training.records import Record, text_field
from training.samples import MOST_JSON_TOKENS, SKILLS, Question, Sample
from training.scenes import TRAIN, TRAINING, Shape, held_out, sample
from training.schemas import closed
from training.tokenizer import corpus, read_tokenizer, train_tokenizer
from training.train import Settings, Trainer

pytestmark = pytest.mark.transformers

VOCABULARY = 640
SIZES = dataclasses.replace(TINY, vocabulary=VOCABULARY)
SMALL = BatchSizes(patches=1200, text=96, page_text=200)
EVEN = Mix((1.0,) * len(SKILLS), TRAINING)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(corpus(150), VOCABULARY)


@pytest.fixture(scope="module")
def encoder(tokenizer: Tokenizer) -> Encoder:
    return Encoder(tokenizer)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    settings = Settings(
        folder, minutes=20, workers=1, held_out=1, steps=8, sizes=SIZES, batch=SMALL, corpus=150, compile=False
    )
    Trainer(settings).run()
    return folder


def tensors(arrays: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


# --- samples ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skill", SKILLS)
def test_a_seed_always_makes_the_same_sample(skill: str) -> None:
    one, two = (sample(7, skill=skill) for _ in range(2))
    assert one.questions == two.questions
    for a, b in zip(one.pictures, two.pictures, strict=True):
        assert a.image.tobytes() == b.image.tobytes()
        assert (a.glyphs == b.glyphs).all()


def test_training_and_evaluation_never_share_a_picture() -> None:
    trained_on = {p.image.tobytes() for seed in range(40) for p in sample(seed, TRAIN, skill="words").pictures}
    asked_about = {p.image.tobytes() for seed in range(40) for p in sample(seed, skill="words").pictures}
    assert not trained_on & asked_about


def test_every_canonical_answer_is_right_and_others_are_wrong() -> None:
    for made in held_out(6 * len(SKILLS), SKILLS):
        for question in made.questions:
            assert question.rule.is_right(question.answer), question
            assert not question.rule.is_right("I do not know."), question
            assert not question.rule.is_right(""), question


def test_a_call_copies_the_name_of_a_tool_that_is_offered() -> None:
    asked = [q for seed in range(80) for q in sample(seed, TRAIN, skill="tool", plan=TRAINING).questions]
    calls = [q for q in asked if q.answer.startswith("<tool_call>")]
    for question in calls:
        offered = {one["function"]["name"]: one["function"]["parameters"] for one in question.tools}
        called = json.loads(question.answer.split("\n")[1])
        assert list(called["arguments"]) == offered[called["name"]]["required"]
    assert len({q.answer.split('"')[3] for q in calls}) > 25


def test_most_questions_about_documents_name_what_they_ask_for() -> None:
    asked = [q for seed in range(60) for q in sample(seed, TRAIN, skill="document", turns=3, plan=TRAINING).questions]
    captions = [q.answer for q in asked if q.answer.startswith("The picture shows")]
    assert any(' receipt of "' in answer for answer in captions)
    assert 0.02 < len(captions) / len(asked) < 0.2


def test_options_have_letters_or_numbers() -> None:
    asked = [q for seed in range(60) for q in sample(seed, TRAIN, skill="choice", turns=3, plan=TRAINING).questions]
    signs = {q.answer for q in asked}
    assert {"A", "B", "1", "2", "Yes.", "No."} <= signs <= {*"ABCD1234", "Yes.", "No."}


def test_pictures_have_the_sizes_the_image_processor_expects() -> None:
    for seed in range(60):
        for picture in sample(seed).pictures:
            assert picture.size == tuple(16 * round(side / 16) for side in picture.image.size)
            assert picture.glyphs.shape == (picture.size[1] // 8, picture.size[0] // 8)


def test_the_held_out_questions_are_written_with_the_pixels_that_were_drawn(tmp_path: Path) -> None:
    samples = [*held_out(len(SKILLS), SKILLS), sample(1, skill="color")]
    write_set(tmp_path / "set.zip", samples)
    check_set(tmp_path / "set.zip", samples)
    questions = load_questions(str(tmp_path / "set.zip")).questions
    assert [question.rule for question in questions] == [made.questions[0].rule for made in samples]
    with pytest.raises(AssertionError, match="than was drawn"):
        check_set(tmp_path / "set.zip", [sample(2, skill="color")])


# --- text ---------------------------------------------------------------------------------------------------------


def test_the_template_writes_what_training_writes() -> None:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    parts = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Which one?"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "The first."},
        {"role": "user", "content": "Why?"},
    ]
    written = environment.from_string(chat.TEMPLATE).render(messages=messages, add_generation_prompt=True)
    expected = chat.user("Which one?", 2) + chat.assistant("The first.") + chat.user("Why?")
    assert written == expected + f"{chat.START}assistant\n"


def test_the_template_shows_tools_and_calls_as_training_writes_them() -> None:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    tools = [tool("get_price", "Get a price.", {"item": "string", "count": "integer"}), tool("stop", "", {})]
    call = {"function": {"name": "get_price", "arguments": {"count": 2, "item": "Milk"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How much?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3.50"},
    ]
    written = environment.from_string(chat.TEMPLATE).render(messages=messages, tools=tools)
    called = chat.call('{"name": "get_price", "arguments": {"count": 2, "item": "Milk"}}')
    expected = chat.tools_turn(tools, "Be brief.") + chat.user("How much?") + chat.assistant(called)
    assert written == expected + chat.turn("tool", "3.50")


def test_answers_in_json_end_within_their_limit() -> None:
    shipped = read_tokenizer(Path(saccade.__file__).parent / "builtin")
    made = [sample(seed, skill=skill).questions[0] for skill in ("extract", "tool") for seed in range(60)]
    lengths = [len(shipped.encode(question.answer).ids) for question in made]
    assert 60 < max(lengths) < MOST_JSON_TOKENS


@pytest.fixture(scope="module")
def extracts() -> list[Question]:
    made = [sample(seed, TRAIN, skill="extract", turns=4, plan=TRAINING) for seed in range(150)]
    return [question for one in made for question in one.questions if question.skill == "extract"]


def test_a_schema_allows_the_canonical_answer(extracts: list[Question]) -> None:
    held = [question for question in extracts if question.schema][:50]
    assert len(held) == 50
    tokenizer = LLTokenizer("byte")
    for question in held:
        matcher = compiled(tokenizer, json.dumps(question.schema), answers=1)
        assert matcher.try_consume_tokens(list(question.answer.encode())) == len(question.answer.encode())
        assert matcher.is_accepting()


def test_answers_in_json_have_what_people_ask_for(extracts: list[Question]) -> None:
    answers = [json.loads(question.answer) for question in extracts]
    objects = [answer for answer in answers if isinstance(answer, dict)]
    lists = [[isinstance(value, list) for value in answer.values()] for answer in objects]
    assert sum(True in some and not some[-1] for some in lists) > 5, "no field behind rows"
    plain = [value[0] for answer in objects for value in answer.values() if isinstance(value, list) and value]
    assert {type(value) for value in plain} >= {str, int, float, dict}
    assert {type(answer["answer"]) for answer in objects if "answer" in answer} >= {str, int}
    assert 140 < max(len(question.answer) for question in extracts) <= MOST_LETTERS
    assert any(None in answer.values() for answer in objects) and any("" in answer.values() for answer in objects)


class _OneQuestion:
    """A scene that is always asked the same."""

    skills: tuple[str, ...] = ("absent", "extract")
    pictures = ()

    def __init__(self, answer: str, key: str) -> None:
        self.question = Question("absent", "What is it?", answer, (key,))

    def ask(self, rng: Random, skill: str) -> Question:
        return self.question


@pytest.mark.parametrize(
    ("answer", "key", "has_json"),
    [
        ("It is red.", "red", True),
        ("The red circle is above the ring.", "red circle is above", False),
        ("I can only answer questions about the picture.", "only", False),
    ],
)
def test_only_a_whole_answer_becomes_a_value_in_json(answer: str, key: str, has_json: bool) -> None:
    scene = AnswerScene(_OneQuestion(answer, key))
    made = [scene.ask(Random(seed), "extract") for seed in range(100)]
    assert any(one is not None and one.skill == "extract" for one in made) is has_json


def test_a_picture_outside_under_a_schema_gets_an_answer_that_ends_at_once() -> None:
    plan = TRAINING._replace(closed=1.0)
    made = [q for seed in range(30) for q in sample(seed, TRAIN, skill="extract", turns=3, plan=plan).questions]
    held = [question for question in made if question.skill == "extract"]
    assert len(held) > 40
    for question in held:
        assert question.schema
        found = json.loads(question.answer)
        values = found.values() if isinstance(found, dict) else [found]
        assert all(value in (None, "", 0, False, []) for value in values)


def test_a_closed_answer_is_null_where_that_is_allowed() -> None:
    kinds = {"a": {"type": ["string", "null"]}, "b": {"type": "string"}, "c": {"type": "array", "items": {}}}
    kinds |= {"d": {"anyOf": [{"type": "number"}, {"type": "null"}]}, "e": {"type": "number"}, "f": {"type": "boolean"}}
    closed_answer = closed({"type": "object", "properties": kinds})
    assert closed_answer == '{"a": null, "b": "", "c": [], "d": null, "e": 0, "f": false}'


def test_a_key_means_one_field() -> None:
    both = Record("invoice", (text_field(("name", "customer"), "Ann"), text_field(("to",), "Bob")))
    name, to = field_names(both)
    assert "customer" not in (*name, *to) and "bill_to" in to
    assert not {one.name for one in absent(both)} & {"customer", "customer_name", "company"}


def test_keys_that_a_grammar_writes_are_not_learned(encoder: Encoder) -> None:
    answer = '{"total": 3, "rows": [{"name": "Ann"}]}'
    asked = Question("extract", "Give it as JSON.", answer, (answer,), schema={"type": "object"})
    ids, skills = encoder.conversation(Random(0), Sample((), (asked,)), 200, plain=True)
    learned = [token for token, skill in zip(ids, skills, strict=True) if skill >= 0]
    text = encoder.tokenizer.decode(learned, skip_special_tokens=False)
    assert text == ' 3, [{ "Ann"}]}' + chat.END


def test_read_words_and_numbers_are_spelled(tokenizer: Tokenizer) -> None:
    spelled = tokenizer.encode('"circle"').tokens
    assert [t for t in spelled if t.isalpha()] == list("circle")
    assert tokenizer.encode("90210").tokens == list("90210")
    text = 'It says "Zebra" — naïve, 3 circles.\n'
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


# --- batches ------------------------------------------------------------------------------------------------------


def test_only_answers_are_labelled(encoder: Encoder) -> None:
    batch = held_out_batch(encoder, 0, SMALL)
    for ids, targets in zip(batch["ids"], batch["targets"], strict=True):
        said = encoder.tokenizer.decode([t for t in targets.tolist() if t != IGNORED], skip_special_tokens=False)
        whole = encoder.tokenizer.decode([t for t in ids.tolist() if t != encoder.image], skip_special_tokens=False)
        assert said.endswith(chat.END)
        assert chat.assistant(said.removesuffix(chat.END)) in whole


def test_a_batch_depends_on_its_seed_alone(encoder: Encoder) -> None:
    one, two = (train_batch(encoder, 3, SMALL, EVEN) for _ in range(2))
    assert all((one[name] == two[name]).all() for name in one)


def test_dense_labels_lie_where_the_colors_are(encoder: Encoder) -> None:
    """In the order the tower sees patches: the pixel in the middle of a labelled patch has the colour of its label."""
    only_counting = Mix(tuple(float(skill == "count") for skill in SKILLS), TRAINING)
    batch = tensors(train_batch(encoder, 2, BatchSizes(6000, 96), only_counting))
    middles = patches(batch["pixels"]).view(len(batch["pixels"]), -1, 3, 8, 8)[..., 4, 4]  # [P, N, 3]
    labels = in_patch_order(batch["colors"])
    named = torch.tensor(list(COLORS.values()))[labels[labels > 0].long() - 1]
    off = (middles[labels > 0].int() - named).abs().amax(-1)
    assert len(off) > 100
    assert (off < 60).float().mean() > 0.85  # the rest are edges


# --- the model ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 3, 5])  # 3 has videos, 5 several pictures
def test_the_training_forward_equals_transformers(
    encoder: Encoder, tokenizer: Tokenizer, tmp_path: Path, seed: int
) -> None:
    torch.manual_seed(0)
    model = Model(SIZES)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, 0.5, 0.2)
    export(tmp_path, model, tokenizer, torch.float32)
    reference = Qwen2VLForConditionalGeneration.from_pretrained(tmp_path).eval()
    batch = tensors(held_out_batch(encoder, seed, SMALL))
    with torch.no_grad():
        hidden, _ = model(batch["pixels"], batch["ids"], batch["positions"], batch["slots"].flatten().long())
        for row in range(min(2, len(hidden))):
            expected = _transformers_logits(reference, encoder, batch, row)
            torch.testing.assert_close(model.logits(hidden[row, : len(expected)]), expected, atol=2e-4, rtol=1e-3)


def _transformers_logits(reference: Any, encoder: Encoder, batch: dict[str, torch.Tensor], row: int) -> torch.Tensor:
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    ids = batch["ids"][row]
    ids = ids[: int((ids != encoder.pad).nonzero().max()) + 1].long()[None]
    each = len(batch["pixels"]) // len(batch["ids"])
    shown = batch["pixels"][row * each : (row + 1) * each]
    if shown.dim() == 5:
        return _video_logits(reference, encoder, ids, shown)
    pictures = [Image.fromarray(p.numpy()) for p in shown]
    processor = Qwen2VLImageProcessorPil(patch_size=8, min_pixels=96 * 96, max_pixels=320 * 320)
    is_picture = (ids == encoder.image).int()
    if not is_picture.any():
        return torch.as_tensor(reference(input_ids=ids).logits[0])
    made = processor(pictures, return_tensors="pt")
    return torch.as_tensor(reference(input_ids=ids, mm_token_type_ids=is_picture, **made).logits[0])


def _video_logits(reference: Any, encoder: Encoder, ids: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Frame groups [G, 2, H, W, 3] as Transformers lays out a video: patch by patch, in the order of tokens."""
    count, frames, height, width, _ = groups.shape
    normalised = (groups.float() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    cells = normalised.view(count, frames, height // 16, 2, 8, width // 16, 2, 8, 3)
    flat = cells.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, 3 * frames * 64)
    grid = torch.tensor([[count, height // 8, width // 8]])
    kinds = 2 * (ids == encoder.video).int()
    made = reference(input_ids=ids, mm_token_type_ids=kinds, pixel_values_videos=flat, video_grid_thw=grid)
    return torch.as_tensor(made.logits[0])


def test_an_export_can_be_read_back(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = Model(SIZES)
    export(tmp_path, model, tokenizer, torch.float32)
    state = read_weights(tmp_path)
    assert state.keys() == model.exported().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.exported().items())


def test_weights_written_without_transformers_can_be_read_back(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = Model(SIZES)
    write_weights(tmp_path, model, tokenizer)
    state = read_weights(tmp_path)
    assert state.keys() == model.exported().keys()
    assert all(torch.equal(state[name], t.bfloat16().float()) for name, t in model.exported().items())


def test_the_shipped_model_fits_its_budget() -> None:
    with torch.device("meta"):
        model = Model(Settings(Path()).sizes)
    count = sum(tensor.numel() for tensor in model.exported().values())
    assert 10e6 < count < 19e6


# --- training -----------------------------------------------------------------------------------------------------


def test_muon_updates_are_orthogonal() -> None:
    made = orthogonal(torch.randn(2, 24, 40)).float()
    singular = torch.linalg.svdvals(made)
    assert singular.min() > 0.6 and singular.max() < 1.3


def test_the_average_is_put_back() -> None:
    model = Model(SIZES)
    average = Average(model, 0.9)
    before = [p.detach().clone() for p in model.parameters()]
    average.weights = [torch.zeros_like(w) for w in average.weights]
    with average.applied():
        assert all(not p.any() for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_batch_can_be_learned(encoder: Encoder) -> None:
    torch.manual_seed(0)
    model = Model(SIZES)
    batch = tensors(train_batch(encoder, 3, SMALL, EVEN))
    steppers = optimizers(model, 4e-3, 0.0)
    seen = []
    for _ in range(40):
        found = losses(model, batch)
        (found.answers + 0.1 * found.dense).backward()
        for optimizer in steppers:
            optimizer.step()
            optimizer.zero_grad()
        seen.append(found.answers.item())
    assert seen[-1] < 0.3 * seen[0]
    right, total = exact_matches(model, batch).sum(1).tolist()
    assert 0 <= right <= total == len(batch["ids"])


def test_training_writes_a_folder_that_training_goes_on_from(trained: Path) -> None:
    log = (trained / "log.txt").read_text()
    assert "held out" in log and "saved after 8 steps" in log
    settings = Settings(
        trained / "more",
        minutes=2,
        workers=1,
        held_out=1,
        steps=2,
        resume=trained,
        sizes=SIZES,
        batch=SMALL,
        compile=False,
    )
    trainer = Trainer(settings)
    trainer.run()
    assert (trainer.progress.runs, trainer.progress.steps) == (2, 10)


def test_saccade_serves_the_trained_folder(trained: Path) -> None:
    llm = saccade.LLM(model=str(trained), kv_cache_gb=0.05, use_tqdm=False)
    made = sample(3, skill="color", shape=Shape(8, 7))
    content = [{"type": "image", "image": made.pictures[0].image}, {"type": "text", "text": made.questions[0].text}]
    [out] = llm.chat(
        [{"role": "user", "content": content}], SamplingParams(max_tokens=8, temperature=0), use_tqdm=False
    )
    llm.close()
    assert out.error is None
    assert 1 <= len(out.outputs[0].token_ids) <= 8
