"""The whole engine against Transformers: the same expanded prompt, the same 24 greedy tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from saccade import LLM, SamplingParams
from tests.helpers.families.families import FAMILIES, ModelFamily
from tests.helpers.media.images import make_photo

pytestmark = pytest.mark.transformers

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
CASES = {
    "no picture": ("The quick brown fox jumps over the lazy dog", 0),
    "picture first": ("{P}What is in the picture?", 1),
    "picture in the middle of text": ("Look at this: {P} and describe it.", 1),
    "two pictures": ("{P}{P}Compare these two pictures.", 2),
    "two pictures apart": ("Before {P} between {P} after", 2),
}


class Pair:
    def __init__(self, family: ModelFamily, folder: Path) -> None:
        self.llm = LLM(model=str(folder), max_model_len=1024, kv_cache_gb=0.05, use_tqdm=False)
        self.reference = family.reference(folder)
        self.image = family.image

    def prompt(self, template: str) -> str:
        return template.replace("{P}", self.image)


FIRST = [f"{name}-{family.layouts[0]}" for name, family in FAMILIES.items()]
OTHERS = [f"{name}-{layout}" for name, family in FAMILIES.items() for layout in family.layouts[1:]]


@pytest.fixture(scope="module", params=FIRST)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    name, layout = request.param.split("-")
    family = FAMILIES[name]
    made = Pair(family, family.build(tmp_path_factory.mktemp(request.param), layout=layout))
    yield made
    made.llm.close()


def pictures(count: int) -> list[Image.Image]:
    return [make_photo(112 + 30 * i, 84 + 50 * i, seed=i) for i in range(count)]


def assert_greedy_tokens_equal(pair: Pair, template: str, count: int) -> None:
    text, images = pair.prompt(template), pictures(count)
    out = pair.llm.generate({"prompt": text, "multi_modal_data": {"image": images}}, GREEDY, use_tqdm=False)[0]
    expected_ids = pair.reference.inputs(text, images)["input_ids"][0].tolist()
    assert out.prompt_token_ids == expected_ids
    assert len(out.outputs[0].token_ids) == GREEDY.max_tokens
    assert out.outputs[0].token_ids == pair.reference.chosen(text, images, out.outputs[0].token_ids)


@pytest.mark.parametrize("case", CASES)
def test_prompt_ids_and_24_greedy_tokens_equal_transformers(pair: Pair, case: str) -> None:
    assert_greedy_tokens_equal(pair, *CASES[case])


@pytest.mark.parametrize("pair", OTHERS, indirect=True)  # another layout is read once, at the start
def test_another_layout_of_a_checkpoint_gives_the_same(pair: Pair) -> None:
    assert_greedy_tokens_equal(pair, *CASES["two pictures apart"])


def test_log_probabilities_of_the_first_token_equal_transformers(pair: Pair) -> None:
    text, images = pair.prompt("{P}What is in the picture?"), pictures(1)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5, ignore_eos=True)
    out = pair.llm.generate({"prompt": text, "multi_modal_data": {"image": images}}, params, use_tqdm=False)[0]
    expected = pair.reference.logits(text, images)[-1].log_softmax(-1)
    assert out.outputs[0].logprobs is not None
    for token, value in out.outputs[0].logprobs[0].top:
        assert value == pytest.approx(float(expected[token]), rel=1e-4, abs=1e-4)


def test_the_answer_depends_on_the_image(pair: Pair) -> None:
    text = pair.prompt("{P}What is in the picture?")
    answers = [
        pair.llm.generate({"prompt": text, "multi_modal_data": {"image": make_photo(seed=s)}}, GREEDY, use_tqdm=False)
        for s in (1, 2)
    ]
    assert answers[0][0].outputs[0].token_ids != answers[1][0].outputs[0].token_ids
