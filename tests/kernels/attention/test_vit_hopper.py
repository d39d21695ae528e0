"""What the Hopper kernel is used for. The kernel itself needs the device: `fused_vision` tries it there at start."""

from __future__ import annotations

import pytest
import torch

from saccade.kernels.attention.registry import VIT
from saccade.kernels.attention.vit_hopper import suits
from saccade.models.cuda.vision import FusedVision
from tests.helpers.families.vision_towers import DEVICE, random


@pytest.mark.parametrize(
    ("lengths", "dim", "dtype", "expected"),
    [
        ([300], 80, torch.bfloat16, True),
        ([300], 72, torch.bfloat16, True),
        ([300], 64, torch.bfloat16, False),
        ([300], 96, torch.bfloat16, False),
        ([300], 68, torch.bfloat16, False),  # rows of an odd number of heads would not be whole 16 bytes
        ([300], 80, torch.float16, False),
        ([300, 64], 80, torch.bfloat16, False),
    ],
    ids=str,
)
def test_heads_and_images_it_is_not_made_for_go_another_way(
    lengths: list[int], dim: int, dtype: torch.dtype, expected: bool
) -> None:
    assert suits(lengths, dim, dtype) is expected


def test_such_images_get_the_plain_kernel_s_result() -> None:
    qkv = random(20, 3, 2, 64)
    kernels = [row.build(DEVICE) for row in VIT]
    ways = [FusedVision(chosen)._attention((12, 8), DEVICE) for chosen in (kernels, kernels[1:])]
    assert torch.equal(ways[0](qkv, 0.2), ways[1](qkv, 0.2))
