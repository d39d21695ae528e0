"""Prompts by FlashInfer: what it is told, beside a stand-in that computes with the reference; when it is chosen."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from PIL import Image
from torch import Tensor

from saccade import LLM
from saccade.checkpoint.config import model_config
from saccade.engine.async_core import AsyncEngineCore
from saccade.errors import ConfigError
from saccade.kernels.attention.prefill_flashinfer import Capacity, FlashInferPrefill, lay_out
from saccade.kernels.launch.device import Heads
from saccade.runner.cuda.attention_selector import MIN_TOKENS, AttentionTarget, check, choose
from saccade.runner.cuda.forward import CudaForward
from tests.helpers.engine.async_engine import OPTIONS, QWEN2_VL, answers, prompts
from tests.helpers.fakes import fake_flashinfer
from tests.helpers.families.published import PUBLISHED
from tests.helpers.kernels.paged import BLOCK, DEVICE, Paged, assert_close, ints, random

pytestmark = pytest.mark.transformers

HEADS = Heads(num_heads=6, num_kv_heads=2, head_dim=16)
ROOM = Capacity(tokens=64, windows=5, blocks=40)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)


def flash(min_tokens: int = 1, capacity: Capacity = ROOM) -> FlashInferPrefill:
    return FlashInferPrefill(HEADS, capacity, BLOCK, 0.2, torch.float32, DEVICE, min_tokens=min_tokens)


def blocks_of(paged: Paged) -> Tensor:
    """As many as the contexts fill, one request after the other."""
    counts = [-(-seq_len // BLOCK) for seq_len in paged.seq_lens]
    return torch.cat([table[:count] for table, count in zip(paged.tables, counts, strict=True)])


def found(prefill: FlashInferPrefill, paged: Paged, lengths: list[int], q: Tensor) -> Tensor:
    prefill.plan(lengths, paged.seq_lens, blocks_of(paged))
    return prefill(q, paged.k, paged.v)


# --- what it is told ----------------------------------------------------------------------------------------------


def test_windows_become_rows_pages_and_the_tokens_of_each_last_page() -> None:
    pages = lay_out([5, 3], [9, 3], block_size=4, windows=3, pin=False)
    assert [part.tolist() for part in pages] == [[0, 5, 8, 8], [0, 3, 4, 4], [1, 3, 0], [9, 3, 0]]


def test_a_context_that_ends_with_its_block_fills_it() -> None:
    pages = lay_out([1, 4], [8, 4], block_size=4, windows=2, pin=False)
    assert (pages.pages.tolist(), pages.filled.tolist()) == ([0, 2, 3], [4, 4])


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("lengths", "seq_lens"),
    [([40], [40]), ([7, 20, 1], [7, 53, 33]), ([3, 16, 5, 9, 1], [64, 16, 100, 9, 32])],
    ids=["one", "prefixes", "as many as there is room for"],
)
def test_windows_attend_to_their_own_past_wherever_its_blocks_lie(lengths: list[int], seq_lens: list[int]) -> None:
    paged, q = Paged.of(seq_lens, HEADS.num_kv_heads, HEADS.head_dim, torch.float32), random(sum(lengths), 6, 16)
    assert_close(found(flash(), paged, lengths, q), paged.expected(q, lengths))


@pytest.mark.usefixtures("installed")
def test_queries_are_read_inside_a_merged_projection() -> None:
    paged, qkv = Paged.of([21], HEADS.num_kv_heads, HEADS.head_dim, torch.float32), random(21, 10, 16)
    assert_close(found(flash(), paged, [21], qkv[:, :6]), paged.expected(qkv[:, :6], [21]))


@pytest.mark.usefixtures("installed")
def test_rows_of_padding_change_nothing() -> None:
    paged, q = Paged.of([30, 12], HEADS.num_kv_heads, HEADS.head_dim, torch.float32), random(32, 6, 16)
    assert_close(found(flash(), paged, [14, 12], q)[:26], paged.expected(q[:26], [14, 12]))


@pytest.mark.usefixtures("installed")
def test_nothing_of_a_longer_step_is_left_in_the_next() -> None:
    prefill, long = flash(), Paged.of([90, 64, 40, 33], HEADS.num_kv_heads, HEADS.head_dim, torch.float32)
    found(prefill, long, [20, 20, 10, 5], random(55, 6, 16))
    short, q = Paged.of([18], HEADS.num_kv_heads, HEADS.head_dim, torch.float32), random(9, 6, 16)
    assert_close(found(prefill, short, [9], q), short.expected(q, [9]))


@pytest.mark.usefixtures("installed")
def test_a_step_without_windows_can_be_planned_for_recording() -> None:
    prefill = flash()
    prefill.plan([], [], ints([]))
    assert prefill(random(16, 6, 16), *Paged.of([4], HEADS.num_kv_heads, HEADS.head_dim, torch.float32)[:2]).shape == (
        16,
        6,
        16,
    )


@pytest.mark.usefixtures("installed")
def test_short_contexts_leave_room_for_the_largest_step() -> None:
    assert flash(capacity=Capacity(640, 2, 4)).takes(640, 2)


@pytest.mark.usefixtures("installed")
def test_steps_below_the_least_or_beyond_the_room_are_not_taken() -> None:
    prefill = flash(min_tokens=32)
    sizes = [(31, 1), (32, 1), (64, 5), (65, 1), (64, 6)]
    assert [prefill.takes(*size) for size in sizes] == [False, True, True, False, False]


# --- in the engine ------------------------------------------------------------------------------------------------


def engine(folder: Path, min_tokens: int, **options: Any) -> tuple[LLM, Any]:
    """An engine that runs in kernels, with the stand-in for steps from so many tokens on."""
    with mock.patch("saccade.runner.build.pack_where_faster"):  # kernels read weights as they are
        llm = LLM(str(folder), **{**OPTIONS, **options})
    core = llm.engine.core
    runner, limits, text = core.runner, core.limits, core.runner.model.config.text
    blocks = limits.max_model_len // limits.block_size
    heads, scale = Heads(text.num_heads, text.num_kv_heads, text.head_dim), runner.model.decoder.scale
    capacity = Capacity(limits.max_num_batched_tokens, 4, 4 * blocks)
    prefill = FlashInferPrefill(
        heads, capacity, limits.block_size, scale, torch.float32, runner.kv.k.device, min_tokens=min_tokens
    )
    runner.forward = CudaForward(
        runner.model.decoder,
        runner.kv,
        block_size=limits.block_size,
        max_requests=limits.max_num_seqs,
        max_blocks=blocks,
        axes=3,
        flash=prefill,
    )
    llm.engine._core = AsyncEngineCore(limits, runner)
    return llm, prefill._wrapper


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("chunk", [24, 2048])
def test_prompts_give_the_tokens_of_the_plain_engine(
    two_layers: Path, photo: Callable[..., Image.Image], chunk: int
) -> None:
    given = prompts(photo, QWEN2_VL)
    llm, wrapper = engine(two_layers, min_tokens=1, max_num_batched_tokens=chunk)
    assert answers(llm, given) == answers(LLM(str(two_layers), **OPTIONS), given)
    assert wrapper.plans > 1


@pytest.mark.usefixtures("installed")
def test_a_step_is_planned_once_for_all_layers(two_layers: Path) -> None:
    llm, wrapper = engine(two_layers, min_tokens=1)
    wrapper.plans = 0
    answers(llm, [{"prompt": "Count to three."}])
    assert (wrapper.plans, wrapper.runs) == (1, llm.engine.core.runner.model.config.text.num_layers)


@pytest.mark.usefixtures("installed")
def test_short_prompts_stay_with_our_kernels(two_layers: Path) -> None:
    llm, wrapper = engine(two_layers, min_tokens=500)
    answers(llm, [{"prompt": "Count to three."}])
    assert wrapper.runs == 0


# --- when it is chosen --------------------------------------------------------------------------------------------

TEXT = model_config(PUBLISHED).text
HOPPER = AttentionTarget(TEXT, torch.bfloat16, torch.device("cuda"))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU for which there is a kernel of ours, though not for this model."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("saccade.kernels.attention.prefill.can_use_hopper", lambda *given: False)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """With what it was built: there is no GPU here to build it for."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    target = "saccade.kernels.attention.prefill_flashinfer.FlashInferPrefill"
    monkeypatch.setattr(target, lambda *given, **named: calls.append((given, named)) or "built")
    return calls


@pytest.mark.usefixtures("installed", "hopper")
@pytest.mark.parametrize(("asked", "minimum"), [("auto", MIN_TOKENS), ("flashinfer", 1)])
def test_auto_leaves_short_steps_to_our_kernels(asked: str, minimum: int, made: list[Any]) -> None:
    assert choose(asked, HOPPER, 16, 100, 0.1) == "built"
    [(given, named)] = made
    assert given[:4] == (Heads(12, 2, 128), Capacity(8192, 16, 1600), 16, 0.1) and named == {"min_tokens": minimum}


@pytest.mark.usefixtures("installed", "hopper")
@pytest.mark.parametrize(("asked", "expected"), [("auto", None), ("flashinfer", "built")])
def test_it_is_used_beside_our_kernel_for_hopper_only_if_asked_for(
    asked: str, expected: str | None, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr("saccade.kernels.attention.prefill.can_use_hopper", lambda *a: not given.extend(a))
    assert choose(asked, HOPPER, 16, 100, 0.1) == expected
    assert given in ([], [Heads(12, 2, 128), torch.bfloat16, 16, HOPPER.device])
    assert (len(made), len(given)) == ((0, 4) if expected is None else (1, 0))


@pytest.mark.usefixtures("installed", "hopper")
def test_triton_is_left_alone_with_prompts(made: list[Any]) -> None:
    assert choose("triton", HOPPER, 16, 100, 0.1) is None and made == []


@pytest.mark.usefixtures("hopper")
def test_asking_for_what_is_not_installed_says_how_to_get_it(made: list[Any]) -> None:
    with pytest.raises(ConfigError, match=r"not installed \(pip install saccade\[flashinfer\]\)"):
        check("flashinfer", HOPPER)
    assert choose("auto", HOPPER, 16, 100, 0.1) is None and made == []


@pytest.mark.usefixtures("installed", "hopper")
@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (HOPPER._replace(device=torch.device("cpu")), "CUDA device, not cpu"),
        (HOPPER._replace(dtype=torch.float32), "float16 or bfloat16, not float32"),
        (HOPPER._replace(text=replace(TEXT, head_dim=80)), "64, 128, 256 dimensions, this model's 80"),
        (HOPPER._replace(has_fp8_kv=True), "kv_cache_dtype is fp8"),
    ],
    ids=["device", "type", "heads", "fp8"],
)
def test_what_it_has_no_kernels_for_is_refused_if_asked_and_else_done_by_ours(
    place: AttentionTarget, reason: str, made: list[Any]
) -> None:
    with pytest.raises(ConfigError, match=reason):
        check("flashinfer", place)
    assert choose("auto", place, 16, 100, 0.1) is None and made == []


@pytest.mark.usefixtures("installed")
def test_other_gpus_are_named_by_their_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ConfigError, match=r"Hopper GPUs \(compute capability 9\.x\), not on 8\.6"):
        check("flashinfer", HOPPER)


@pytest.mark.usefixtures("installed", "hopper")
def test_an_installation_that_fails_is_an_error_if_asked_and_a_warning_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*given: Any, **named: Any) -> None:
        raise RuntimeError("no nvcc")

    monkeypatch.setattr("saccade.kernels.attention.prefill_flashinfer.FlashInferPrefill", fails)
    with pytest.raises(ConfigError, match="FlashInfer failed: no nvcc"):
        choose("flashinfer", HOPPER, 16, 100, 0.1)
    assert choose("auto", HOPPER, 16, 100, 0.1) is None and "no nvcc" in caplog.text


def test_an_engine_on_a_cpu_refuses_it_before_it_loads(two_layers: Path) -> None:
    with pytest.raises(ConfigError, match="attention_backend=flashinfer cannot be used: it needs a CUDA device"):
        LLM(str(two_layers), attention_backend="flashinfer", **OPTIONS)
