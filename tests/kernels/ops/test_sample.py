"""Drawing in one launch against plain PyTorch: in Triton's interpreter on the CPU, on the device where there is one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade.kernels.ops.argmax import TokenSink
from saccade.kernels.ops.sample import sample_rows
from saccade.runner import sampler

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEVER, ALL = float("-inf"), float("inf")
LAST = 1 - 2**-53  # the largest number below one
KINDS = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 900},
    {"top_p": 1e-9},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 300, "top_p": 0.97, "min_p": 0.02},
]


def numbers(
    uniforms: list[float], temperature: float = 1.0, top_k: float = ALL, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    rows = [(temperature, top_k, top_p, min_p, uniform) for uniform in uniforms]
    return torch.tensor(rows, dtype=torch.float64, device=DEVICE).T


def drawn(logits: Tensor, asked: Tensor, block: int = 512) -> list[int]:
    """Smaller blocks than on a device: few values are many chunks."""
    which = torch.arange(len(logits), device=DEVICE)
    out = torch.full((len(logits),), -1, dtype=torch.int64, device=DEVICE)
    found: list[int] = sample_rows(logits, which, asked, out, block=block).tolist()
    return found


def expected(logits: Tensor, asked: Tensor) -> list[int]:
    found: list[int] = sampler.sample_rows(logits, asked, has_filters=True).tolist()
    return found


def random(rows: int, size: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (3 * torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))).to(DEVICE, dtype)


def is_decided_by_rounding(logits: Tensor, asked: Tensor) -> bool:
    """Whether numbers a millionth smaller or larger draw another token from this row [1, N]."""
    near = [asked.clone(), asked.clone()]
    near[0][4] = (near[0][4] - 1e-6).clamp(min=0)
    near[1][4] = (near[1][4] + 1e-6).clamp(max=LAST)
    return expected(logits, near[0]) != expected(logits, near[1])


def assert_same(logits: Tensor, asked: Tensor) -> None:
    pairs = enumerate(zip(drawn(logits, asked), expected(logits, asked), strict=True))
    differing = [i for i, (found, wanted) in pairs if found != wanted]
    assert all(is_decided_by_rounding(logits[i : i + 1], asked[:, i : i + 1]) for i in differing), differing
    assert len(differing) <= len(logits) / 3


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("size", "temperature"), [(1001, 1.0), (1000, 0.1), (37, 5.0)])
def test_the_tokens_are_those_of_the_reference(kind: dict[str, Any], size: int, temperature: float) -> None:
    assert_same(random(3, size), numbers([0.13, 0.47, 0.91], temperature, **kind))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [{}, {"top_k": 300, "top_p": 0.97, "min_p": 0.02}], ids=str)
def test_a_larger_vocabulary_is_drawn_from_in_every_type(kind: dict[str, Any], dtype: torch.dtype) -> None:
    logits, asked = random(3, 4999, dtype=dtype), numbers([0.2, 0.5, 0.8], 1.3, **kind)
    assert drawn(logits, asked, block=2048) == expected(logits, asked)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_no_end_of_the_distribution_is_stepped_over(kind: dict[str, Any]) -> None:
    """Tokens at both ends cannot be drawn: rounding must not reach them."""
    logits = random(2, 1001)
    logits[:, [0, 1, 300, 999, 1000]] = NEVER
    logits[:, [2, 998]] = logits.amax() + 1.0  # the first and the last one that can, whatever is cut off
    asked = numbers([0.0, LAST], **kind)
    assert drawn(logits, asked) == expected(logits, asked) == [2, 998]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_of_one_possible_token_that_one_is_drawn(kind: dict[str, Any]) -> None:
    logits = torch.full((3, 1000), NEVER, device=DEVICE)
    logits[[0, 1, 2], [0, 500, 999]] = torch.tensor([-3.0, 0.0, 80.0], device=DEVICE)
    assert drawn(logits, numbers([0.0, 0.4, LAST], **kind)) == [0, 500, 999]


@pytest.mark.parametrize("kind", [{"top_k": 1}, {"top_k": 2}, {"top_p": 0.2}, {"top_p": 0.39}, {"min_p": 0.9}], ids=str)
def test_values_that_are_equal_stay_or_go_together(kind: dict[str, Any]) -> None:
    logits = torch.tensor([[0.4, 0.2, 0.4]], device=DEVICE).log().repeat(4, 1)
    asked = numbers([0.0, 0.49, 0.51, LAST], **kind)
    assert drawn(logits, asked) == expected(logits, asked) == [0, 0, 2, 2]


def test_only_as_many_equal_values_as_top_k_counts_have_a_part_in_its_sum() -> None:
    """Of 0.4, 0.2, 0.2, 0.2 the first two are 0.6: 0.4 of them is more than a top-p of 0.6, less than one of 0.7."""
    logits = torch.tensor([[0.4, 0.2, 0.2, 0.2]], device=DEVICE).log().repeat(3, 1)
    for top_p in (0.6, 0.7):
        asked = numbers([0.1, 0.5, 0.9], top_k=2, top_p=top_p)
        assert drawn(logits, asked) == expected(logits, asked)


def test_zero_and_minus_zero_are_equal() -> None:
    logits = torch.tensor([[-0.0, -5.0, 0.0]], device=DEVICE).repeat(2, 1)
    assert drawn(logits, numbers([0.25, 0.75], top_k=1)) == [0, 2]
    logits = torch.tensor([[1.0, -0.0, 0.0]], device=DEVICE).repeat(2, 1)  # 0.58, 0.21, 0.21
    assert drawn(logits, numbers([0.7, 0.9], top_p=0.7)) == [1, 2]


@pytest.mark.parametrize("shift", [-1000.0, 0.0, 1000.0])
def test_values_far_from_zero_are_drawn_alike(shift: float) -> None:
    logits = random(4, 1001) + shift
    assert_same(logits, numbers([(i + 0.5) / 4 for i in range(4)], top_k=50, top_p=0.9))


@pytest.mark.parametrize("temperature", [1e-5, 1e-40, 1e6])
def test_the_coldest_and_the_hottest_rows_are_drawn(temperature: float) -> None:
    assert_same(random(4, 1000), numbers([0.1, 0.3, 0.7, 0.9], temperature))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = random(6, 1001)
    kinds = [KINDS[i] for i in (0, 9, 5, 7, 10, 2)]
    asked = torch.cat([numbers([(i + 0.3) / 6], 1.3, **kind) for i, kind in enumerate(kinds)], dim=1)
    alone = [drawn(logits[i : i + 1], asked[:, i : i + 1])[0] for i in range(6)]
    assert drawn(logits, asked) == alone
    assert drawn(logits.flip(0), asked.flip(1)) == alone[::-1]


def test_tokens_are_written_to_their_rows_and_for_the_step_that_follows() -> None:
    logits, which = random(4, 1001), torch.tensor([3, 1], device=DEVICE)
    out, last_tokens = (torch.full((5,), -1, dtype=torch.int64, device=DEVICE) for _ in range(2))
    asked = numbers([0.2, 0.6])
    sample_rows(logits, which, asked, out, TokenSink(last_tokens, torch.tensor([0, 4], device=DEVICE)), block=512)
    third, first = expected(logits[which], asked)
    assert out.tolist() == [-1, first, -1, third, -1]
    assert last_tokens.tolist() == [third, -1, -1, -1, first]


@pytest.mark.parametrize("value", [NEVER, math.nan, math.inf])
def test_rows_that_mean_nothing_still_give_a_token(value: float) -> None:
    """Nobody can say which, but the next step looks it up."""
    logits = torch.full((2, 1001), value, device=DEVICE)
    found = drawn(logits, numbers([0.5, LAST], top_k=20, top_p=0.5))
    assert all(0 <= token < 1001 for token in found)
