"""Video against Transformers: the same frames, prompts and 24 greedy tokens, for each family that takes video."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from saccade import LLM, SamplingParams
from tests.helpers.families.families import FAMILIES as ALL
from tests.helpers.media.videos import FAMILIES, VIDEO, VideoReference, frames, metadata, video_reference

pytestmark = pytest.mark.transformers

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


class Pair:
    def __init__(self, name: str, folder: Path) -> None:
        self.llm = LLM(model=str(folder), max_model_len=2048, kv_cache_gb=0.05, use_tqdm=False)
        self.reference: VideoReference = video_reference(name, folder)

    def check(self, text: str, given: np.ndarray, fps: float | None = None) -> None:
        """`fps` is the rate the frames were taken at; None leaves it unsaid."""
        asked = {"prompt": text, "multi_modal_data": {"video": given}}
        asked |= {"mm_processor_kwargs": {"fps": fps}} if fps else {}
        out = self.llm.generate(asked, GREEDY, use_tqdm=False)[0]
        inputs = self.reference.inputs(text, given, metadata(len(given), fps or 24.0))
        assert out.prompt_token_ids == inputs["input_ids"][0].tolist()
        assert out.outputs[0].token_ids == self.reference.greedy(inputs)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(request.param, ALL[request.param].build(tmp_path_factory.mktemp(request.param)))
    yield made
    made.llm.close()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_prompt_ids_and_24_greedy_tokens_equal_transformers(pair: Pair, count: int) -> None:
    if count == 1 and pair.reference.is_qwen3:
        count = 3  # Transformers refuses a single frame there; ours repeats it
    pair.check(f"Look: {VIDEO}what happens?", frames(count))


def test_frames_that_need_resizing_give_the_same_tokens(pair: Pair) -> None:
    pair.check(f"{VIDEO}Describe this.", frames(4, 101, 73))


def test_a_long_video_before_the_text_gives_the_same_tokens(pair: Pair) -> None:
    """More groups than tokens along a side: time runs ahead of the text's positions."""
    pair.check(f"{VIDEO}How many?", frames(24, 64, 64))


def test_the_rate_of_the_frames_counts_as_in_transformers(pair: Pair) -> None:
    for fps in (0.7, 2.0):
        pair.check(f"{VIDEO}When?", frames(7), fps)
