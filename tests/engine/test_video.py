"""Video through the engine: the same tokens however the work is cut, and no work twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from saccade import LLM
from saccade.errors import RequestError
from saccade.models.cuda.vision import FusedVision
from saccade.models.families.qwen2_vl import Qwen2VL
from saccade.models.vision.backend import TorchVision
from saccade.types.media import Geometry, Grid, Size
from tests.helpers.families.vision_towers import DEVICE, QWEN, model
from tests.helpers.media.images import make_photo
from tests.helpers.media.videos import GREEDY, VIDEO, answers, film, frames

pytestmark = pytest.mark.transformers

FILM = film(30, images=frames(30, seed=3))


def prompts() -> list[dict[str, Any]]:
    """Frames, a file, a file beside a picture, a longer list that begins with the same frames."""
    array = frames(8)
    return [
        {"prompt": f"Look: {VIDEO}what happens?", "multi_modal_data": {"video": array[:5]}},
        {"prompt": f"{VIDEO}Describe this.", "multi_modal_data": {"video": FILM}},
        {
            "prompt": f"<|image_pad|> or {VIDEO}?",
            "multi_modal_data": {"image": make_photo(112, 84), "video": FILM},
        },
        {"prompt": f"Look: {VIDEO}what happens?", "multi_modal_data": {"video": array}},
    ]


def run(folder: Path, **given: Any) -> list[list[int]]:
    return answers(folder, prompts(), **given)


@pytest.fixture(scope="module")
def alone(qwen2_vl_folder: Path) -> list[list[int]]:
    """The plain way: one request at a time, whole windows, no cache."""
    return run(qwen2_vl_folder, together=False, enable_prefix_caching=False, encoder_cache_gb=0.0)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({}, id="batched"),
        pytest.param({"max_num_batched_tokens": 16}, id="chunks of 16, which end inside groups"),
        pytest.param({"max_num_batched_tokens": 7, "encoder_cache_gb": 0.0}, id="chunks of 7, no encoder cache"),
        pytest.param({"encode_layers_per_step": 1, "max_num_batched_tokens": 32}, id="sliced, chunks of 32"),
        pytest.param({"encoder_budget": 400, "max_num_seqs": 1}, id="one at a time, small encoder budget"),
    ],
)
def test_tokens_do_not_depend_on(given: dict[str, Any], qwen2_vl_folder: Path, alone: list[list[int]]) -> None:
    pixels = {"max_pixels": 300_000, "max_video_pixels": 300_000}
    assert run(qwen2_vl_folder, **{**pixels, **given}) == alone


@pytest.fixture
def llm(qwen2_vl_folder: Path) -> Iterator[LLM]:
    made = LLM(model=str(qwen2_vl_folder), use_tqdm=False, max_model_len=512, kv_cache_gb=0.02)
    yield made
    made.close()


def ask(llm: LLM, video: Any, text: str = "what happens?") -> Any:
    asked = {"prompt": f"Look: {VIDEO}{text}", "multi_modal_data": {"video": video}}
    return llm.generate(asked, GREEDY, use_tqdm=False)[0]


def encoded(llm: LLM) -> tuple[int, int]:
    stats = llm.stats()["encoder"]
    return stats["decoded"], stats["encoded"]


def test_a_growing_video_decodes_and_encodes_only_its_new_groups(llm: LLM) -> None:
    array = frames(10)
    seen = []
    for count in (4, 6, 10):
        ask(llm, array[:count])
        seen.append(encoded(llm))
    assert seen == [(2, 2), (3, 3), (5, 5)]


def test_a_growing_video_prefills_only_what_is_new(llm: LLM) -> None:
    array = frames(24, 112, 84)  # 12 tokens a group
    ask(llm, array[:20])
    out = ask(llm, array)
    assert out.num_cached_tokens >= 112  # of 120 tokens in the old groups, in whole blocks


def test_a_window_that_moves_on_encodes_only_its_last_group(llm: LLM) -> None:
    """Old frames leave at the front: other positions, so the prefix is new, but every embedding is at hand."""
    array = frames(10)
    ask(llm, array[:8])
    ask(llm, array[2:])
    assert encoded(llm) == (5, 5)


def test_a_moved_window_gives_what_a_fresh_engine_gives(llm: LLM, qwen2_vl_folder: Path) -> None:
    array = np.repeat(frames(2), 2, axis=0)[[0, 1, 0, 1, 2, 3, 0, 1]]
    ask(llm, array[:6])
    warm = ask(llm, array[2:])
    fresh = LLM(model=str(qwen2_vl_folder), use_tqdm=False, max_model_len=512, kv_cache_gb=0.02)
    assert ask(fresh, array[2:]).outputs[0].token_ids == warm.outputs[0].token_ids
    fresh.close()


def test_the_same_file_again_is_not_decoded(llm: LLM) -> None:
    first = ask(llm, FILM)
    before = encoded(llm)
    second = ask(llm, FILM, "what else?")
    assert encoded(llm) == before
    assert (first.bill.items[0].cached, second.bill.items[0].cached) == (False, True)


def test_a_long_video_never_has_many_frames_in_memory(qwen2_vl_folder: Path) -> None:
    """Two passes of 192 patches may be decoded ahead of the one under way; the video has 1,440."""
    sizes = {"encoder_budget": 48, "max_pixels": 9408, "max_video_pixels": 9408, "max_num_batched_tokens": 12}
    llm = LLM(model=str(qwen2_vl_folder), use_tqdm=False, max_model_len=1024, kv_cache_gb=0.02, **sizes)
    ask(llm, film(60, size=(112, 84), fps=2))
    stats = llm.stats()["encoder"]
    assert stats["encoded"] == 30 and stats["peak_patches"] <= 3 * 192
    llm.close()


def test_kernels_cut_a_group_as_plain_code_does() -> None:
    """In Triton's interpreter where there is no device."""
    made = [model(QWEN, ops, Qwen2VL) for ops in (TorchVision(), FusedVision())]
    array = torch.from_numpy(frames(2, 40, 28)).to(DEVICE)
    geometry = Geometry(Size(20, 12), Grid(1, 6, 10), 15, 15)
    for group in (array, array[:1]):
        plain, fused = (one.prepare(group, geometry) for one in made)
        torch.testing.assert_close(fused, plain)
    still = made[0].prepare(array[0], geometry)
    torch.testing.assert_close(made[0].prepare(array[:1], geometry), still)


def test_the_bill_is_what_the_engine_charges(llm: LLM) -> None:
    out = ask(llm, FILM)
    (video,) = out.bill.items
    assert (video.kind, video.frames, video.grid) == ("video", 6, (3, 4, 6))
    assert out.bill.video_tokens == video.tokens == 18
    assert out.bill.prompt_tokens == len(out.prompt_token_ids)


def test_a_video_that_breaks_off_ends_only_its_own_request(llm: LLM) -> None:
    """The index is whole, the second half of the pictures is gone: only their decoder can know."""
    broken = bytearray(FILM)
    start, end = broken.index(b"mdat"), broken.index(b"moov")
    broken[(start + end) // 2 : end - 8] = bytes(end - 8 - (start + end) // 2)
    asked = [
        {"prompt": f"{VIDEO}?", "multi_modal_data": {"video": bytes(broken)}},
        {"prompt": f"{VIDEO}?", "multi_modal_data": {"video": FILM}},
    ]
    bad, good = llm.generate(asked, GREEDY, use_tqdm=False)
    assert isinstance(bad.error, RequestError) and "damaged or cut short" in bad.error.message
    assert good.error is None and len(good.outputs[0].token_ids) == 8
    llm.engine.core.scheduler.check()
