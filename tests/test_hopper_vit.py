"""What is chosen for the Hopper kernel. The kernel itself needs the device: `fused_vision` tries it there at start."""

from __future__ import annotations

import pytest
import torch

from saccade.kernels.hopper_vit import RINGS, choose_ring, suits
from saccade.models.fused_vision import FusedVision
from tests.test_fused_vision import DEVICE, random

THREE, TWO = RINGS


def waves(lengths: list[int], rows: int) -> int:
    return -(-16 * sum(-(-length // rows) for length in lengths) // 132)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([6256], THREE), ([1564] * 8, THREE), ([18768], THREE), ([1564], TWO), ([4784], TWO)],
    ids=str,
)
def test_rings_are_chosen_as_they_were_measured(lengths: list[int], expected: object) -> None:
    assert choose_ring(lengths, heads=16, multiprocessors=132) is expected


def test_a_wave_that_would_be_almost_empty_is_avoided() -> None:
    assert waves([4784], THREE.rows) * THREE.rows > waves([4784], TWO.rows) * TWO.rows
    assert choose_ring([4784], 16, 132) is TWO


@pytest.mark.parametrize(
    ("lengths", "dim", "dtype", "expected"),
    [
        ([300], 80, torch.bfloat16, True),
        ([300], 72, torch.bfloat16, True),
        ([300], 64, torch.bfloat16, False),
        ([300], 96, torch.bfloat16, False),
        ([300], 80, torch.float16, False),
        ([300, 64], 80, torch.bfloat16, False),
    ],
    ids=str,
)
def test_heads_and_pictures_it_is_not_made_for_go_another_way(
    lengths: list[int], dim: int, dtype: torch.dtype, expected: bool
) -> None:
    assert suits(lengths, dim, dtype) is expected


def test_such_pictures_get_the_plain_kernel_s_result() -> None:
    qkv = random(20, 3, 2, 64)
    ways = [FusedVision(name)._attention([12, 8], DEVICE) for name in ("hopper", "triton")]
    assert torch.equal(ways[0](qkv, 0.2), ways[1](qkv, 0.2))
