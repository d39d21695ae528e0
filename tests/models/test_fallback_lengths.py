"""Ropes that depend on how long a sequence is: each request is turned by its own length, whoever runs beside it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from saccade import LLM, SamplingParams
from saccade.checkpoint.config import model_config
from saccade.errors import ConfigError
from saccade.models.bridge import model as bridge_model
from saccade.models.bridge.errors import Unfit
from saccade.models.bridge.rope import follow_lengths
from tests.helpers.families import family_fallback
from tests.helpers.families.family_fallback import LONGROPE, SWITCH, TEXT
from tests.helpers.media.images import make_photo

pytestmark = pytest.mark.transformers

WORDS = "The quick brown fox jumps over the lazy dog. "
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SIZES = {"max_model_len": 512, "kv_cache_gb": 0.02, "use_tqdm": False}


class Asked:
    """Prompts on both sides of the switch, one whose answer crosses it, and what Transformers says to each alone."""

    def __init__(self, folder: Path) -> None:
        image, theirs = make_photo(90, 90, seed=1), family_fallback.reference("<image>")(folder)
        given: list[tuple[str, list[Any]]] = [
            ("What?", []),
            (WORDS * 12, []),
            (WORDS * 4, []),
            ("<image> What is it?", [image]),
            (WORDS, []),
        ]
        self.folder = folder
        self.prompts = [{"prompt": text, "multi_modal_data": {"image": images or None}} for text, images in given]
        self.lengths = [theirs.inputs(*pair)["input_ids"].shape[1] for pair in given]
        self.theirs = [theirs.greedy(*pair, GREEDY.max_tokens or 0) for pair in given]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    return Asked(family_fallback.idefics3(tmp_path_factory.mktemp("longrope"), rope=LONGROPE))


def answers(llm: LLM, prompts: list[dict[str, Any]]) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY, use_tqdm=False)]


def test_the_prompts_lie_on_both_sides_and_cross(asked: Asked) -> None:
    ends = [length + 16 for length in asked.lengths]
    assert min(ends) < SWITCH and max(asked.lengths) > SWITCH, asked.lengths
    assert any(length <= SWITCH < end for length, end in zip(asked.lengths, ends, strict=True)), asked.lengths


@pytest.mark.parametrize("chunk", [2048, 16])
def test_a_neighbours_length_changes_no_answer(asked: Asked, chunk: int) -> None:
    with LLM(str(asked.folder), max_num_batched_tokens=chunk, **SIZES) as llm:
        assert answers(llm, asked.prompts) == asked.theirs  # together
        assert answers(llm, asked.prompts) == asked.theirs  # and warm
        assert [answers(llm, [prompt])[0] for prompt in asked.prompts] == asked.theirs


def test_prompts_on_the_two_sides_share_no_prefix(asked: Asked) -> None:
    """The short one is the beginning of the long one, but its keys are turned by other frequencies."""
    short, long = asked.prompts[2], asked.prompts[1]
    with LLM(str(asked.folder), **SIZES) as llm:
        assert answers(llm, [short]) == [asked.theirs[2]]
        first = llm.generate(long, GREEDY, use_tqdm=False)
        again = llm.generate(long, GREEDY, use_tqdm=False)
    assert (first[0].num_cached_tokens, again[0].num_cached_tokens > 0) == (0, True)
    assert first[0].outputs[0].token_ids == again[0].outputs[0].token_ids == asked.theirs[1]


def test_an_answer_that_is_thrown_out_and_comes_back_is_the_same(asked: Asked) -> None:
    blocks = 2 * (max(asked.lengths) + 16) // 16
    with LLM(str(asked.folder), kv_cache_gb=blocks * 16 * 512 / 2**30, use_tqdm=False) as llm:
        assert answers(llm, [asked.prompts[1], asked.prompts[4], asked.prompts[2], asked.prompts[0]] * 2) == 2 * [
            asked.theirs[i] for i in (1, 4, 2, 0)
        ]
        assert llm.stats()["preemptions"] > 0


def test_the_proof_sees_a_rope_that_goes_by_the_whole_step(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge_model, "follow_lengths", lambda *_: None)
    with pytest.raises(ConfigError, match=r"'idefics3'.*beside another request, and in pieces, its logits differ by"):
        LLM(str(asked.folder), **SIZES)


def test_a_context_that_ends_at_the_switch_is_served(asked: Asked) -> None:
    with LLM(str(asked.folder), **{**SIZES, "max_model_len": SWITCH}) as llm:
        assert answers(llm, [asked.prompts[0]]) == [asked.theirs[0]]


def test_a_dynamic_rope_is_plain_within_the_trained_length(tmp_path: Path) -> None:
    plain = family_fallback.idefics3(tmp_path / "plain")
    dynamic = family_fallback.idefics3(
        tmp_path / "dynamic", rope={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    )
    found = []
    for folder in (plain, dynamic):
        with LLM(str(folder), **SIZES) as llm:
            found.append(answers(llm, [{"prompt": "What?"}, {"prompt": WORDS * 12}]))
    assert found[0] == found[1]


@pytest.mark.parametrize("is_inside", [True, False])
def test_the_switch_may_stand_inside_the_rope_or_beside_it(is_inside: bool) -> None:
    where = {"original_max_position_embeddings": 32}
    text = {**TEXT, "vocab_size": 100, "rope_scaling": {"type": "longrope", **(where if is_inside else {})}}
    config = model_config({"model_type": "nonesuch", "text_config": {**text, **({} if is_inside else where)}})
    assert config.text.rope_switch == 32
    assert model_config({"model_type": "nonesuch", "text_config": {**TEXT, "vocab_size": 9}}).text.rope_switch is None


# --- what cannot be followed --------------------------------------------------------------------------------------


class FakeRope(nn.Module):
    def __init__(self, kind: Any, rules: dict[str, Any]) -> None:
        super().__init__()
        self.rope_type = kind
        self.original_max_seq_len = 100
        self.config = SimpleNamespace(rope_parameters=rules)


@pytest.fixture
def ropes() -> dict[str, nn.Module]:
    rules = {"original_max_position_embeddings": 64}
    by_layer = {"full_attention": rules, "sliding_attention": {}}
    return {
        "dynamic": nn.ModuleDict({"rope": FakeRope("dynamic", {})}),
        "by layer": nn.ModuleDict(
            {"rope": FakeRope({"full_attention": "longrope", "sliding_attention": "default"}, by_layer)}
        ),
        "another switch": nn.ModuleDict({"rope": FakeRope("longrope", rules)}),
        "plain": nn.ModuleDict({"rope": FakeRope("yarn", rules)}),
    }


@pytest.mark.parametrize(("name", "maximum"), [("dynamic", 100), ("by layer", 64), ("another switch", 64)])
def test_ropes_that_change_otherwise_are_refused_where_it_matters(
    ropes: dict[str, nn.Module], name: str, maximum: int
) -> None:
    assert follow_lengths(ropes[name], None, maximum) is None
    with pytest.raises(Unfit, match=f"beyond {maximum} tokens .* --max-model-len {maximum} avoids that"):
        follow_lengths(ropes[name], None, maximum + 1)


def test_ropes_that_go_by_position_alone_are_left_alone(ropes: dict[str, nn.Module]) -> None:
    assert follow_lengths(ropes["plain"], None, 10_000) is None
