"""Queries and keys that are turned by their product: what is chosen, which tile is whose, what towers get.

The kernel itself needs the device: `qkv_rope` tries it there at start, `benchmarks.kernels` compares it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from saccade.kernels.attention.vit import Attend, TiledVit, VisionHeads
from saccade.kernels.gemm import hopper_mainloop, hopper_vit_qkv_rope
from saccade.kernels.gemm.hopper_mainloop import BOX, num_tiles, num_whole
from saccade.kernels.gemm.hopper_vit_qkv_rope import DIM, suits
from saccade.kernels.gemm.vit_qkv_rope import qkv_rope
from saccade.kernels.ops import reference, vit_elementwise
from saccade.kernels.ops.reference import parted_columns
from saccade.models.cuda import vision
from saccade.models.cuda.vision import FusedVision
from saccade.models.families.qwen2_vl import Qwen2VL
from saccade.models.layers.torch_attention import packed_attention
from saccade.models.vision.backend import TorchVision
from tests.helpers.families.vision_towers import GRIDS, QWEN, encode, model, random
from tests.helpers.kernels.tiles import PROGRAMS, QUICK, tile_start

HEADS = 16


@pytest.fixture(autouse=True)
def numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own functions see numbers in place of what they see on a device."""
    monkeypatch.setattr(hopper_mainloop.gl, "minimum", min)
    monkeypatch.setattr(hopper_vit_qkv_rope.gl, "where", lambda condition, one, other: one if condition else other)


@lru_cache
def rows_of_tile(output: int, wide: int, heads: int) -> list[int]:
    """The rows of the weight that a tile's copies bring, one after the other."""
    index = torch.arange(3 * heads * DIM)[:, None]
    descriptors = hopper_vit_qkv_rope._pair_boxes(index)
    columns = hopper_vit_qkv_rope._columns_at.fn(output, heads)
    is_value, is_short, head = (int(getattr(found, "value", found)) for found in columns)
    if is_value:
        return list(range(output, output + wide))
    box = descriptors[is_short]
    view = index.as_strided(box.shape, box.strides)
    many, pairs, _, _ = box.block_shape
    first = 32 if is_short else 0
    starts = range(head, head + wide // BOX * many, many)
    return torch.cat([view[i : i + many, first : first + pairs].flatten() for i in starts]).tolist()


@pytest.mark.parametrize("heads", [16, 32])
@pytest.mark.parametrize("rows", [150, 1564, 6256])
def test_tiles_bring_every_row_of_the_weight_to_its_column(rows: int, heads: int) -> None:
    outputs = 3 * heads * DIM
    tiles = num_tiles(rows, outputs, False)
    whole, columns = num_whole(tiles, PROGRAMS), parted_columns(heads, DIM)
    seen = torch.zeros(-(-rows // 128), outputs, dtype=torch.int32)
    for wide, units in ((256, whole), (128, 2 * (tiles - whole))):
        for unit in range(units):
            row, output = tile_start(unit, rows, outputs, whole, wide, QUICK)
            assert rows_of_tile(output, wide, heads) == columns[output : output + wide]
            seen[row // 128, output : output + wide] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize(("heads", "dim"), [(2, 80), (16, 80), (3, 8)])
def test_parts_have_every_column_once_and_pairs_side_by_side(heads: int, dim: int) -> None:
    columns = parted_columns(heads, dim)
    assert sorted(columns) == list(range(3 * heads * dim))
    turned = columns[: 2 * heads * dim]
    assert all(high == low + dim // 2 for low, high in zip(turned[::2], turned[1::2], strict=True))
    assert columns[2 * heads * dim :] == list(range(2 * heads * dim, 3 * heads * dim))


def rotary_for(rows: int, dim: int) -> Tensor:
    angles = random(rows, dim // 2)
    return torch.stack((angles.cos(), angles.sin()), dim=-1).flatten(1)


def test_the_reference_is_the_product_and_then_the_rotation() -> None:
    x, weight, bias, rotary = random(5, 16), random(3 * 4 * 8, 16), random(3 * 4 * 8), rotary_for(5, 8)
    expected = torch.nn.functional.linear(x, weight, bias).view(5, 3, 4, 8)
    vit_elementwise.rotate_half(expected, rotary)
    found = reference.qkv_rope(x, weight, bias, rotary, 4)
    torch.testing.assert_close(found.flatten(1), expected.flatten(1)[:, parted_columns(4, 8)], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(6256, True), (12512, True), (4784, True), (1792, True), (1664, True), (1280, False), (1152, False), (1024, True),
     (896, True), (768, False), (512, True)],
)  # fmt: skip
def test_a_tower_s_product_is_chosen_as_it_was_measured(rows: int, expected: bool) -> None:
    assert suits(rows, 1280, HEADS, DIM, PROGRAMS) is expected


@pytest.mark.parametrize(
    ("heads", "dim", "inputs", "expected"),
    [(16, 80, 1280, True), (32, 80, 1280, True), (12, 80, 960, False), (16, 72, 1152, False), (16, 80, 1288, False)],
)
def test_only_heads_that_tiles_divide_are_turned_by_the_product(
    heads: int, dim: int, inputs: int, expected: bool
) -> None:
    assert suits(6256, inputs, heads, dim, PROGRAMS) is expected


def test_without_such_a_device_there_is_no_kernel() -> None:
    x, weight, bias = (torch.zeros(*size).half() for size in ((512, 64), (3840, 64), (3840,)))
    assert qkv_rope(x, weight, bias, torch.zeros(512, 80), HEADS) is None


class Parted:
    """Attention that is given parts only."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths

    def takes_parted(self, heads: VisionHeads) -> bool:
        return True

    def __call__(self, qkv: Tensor, scale: float) -> Tensor:
        raise AssertionError("in the usual order")

    def parted(self, qkv: Tensor, scale: float) -> Tensor:
        usual = torch.empty_like(qkv)
        usual.flatten(1)[:, parted_columns(*qkv.shape[2:])] = qkv.flatten(1)
        return packed_attention(*usual.unbind(1), self.lengths, scale)


class PartedVit(TiledVit):
    def begin(self, lengths: Sequence[int], heads: VisionHeads, device: torch.device) -> Attend:
        return Parted(lengths)


def test_a_tower_gets_the_same_from_heads_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    patches = random(sum(grid.patches for grid in GRIDS), 24)
    expected = encode(model(QWEN, TorchVision(), Qwen2VL), patches, GRIDS)
    monkeypatch.setattr(vision, "qkv_rope", reference.qkv_rope)
    found = encode(model(QWEN, FusedVision([PartedVit()]), Qwen2VL), patches, GRIDS)
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), atol=1e-4, rtol=1e-4)


def test_attention_that_knows_no_parts_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    patches = random(sum(grid.patches for grid in GRIDS), 24)
    expected = encode(model(QWEN, FusedVision([TiledVit()]), Qwen2VL), patches, GRIDS)
    monkeypatch.setattr(vision, "qkv_rope", lambda *_: pytest.fail("nobody takes parts"))
    found = encode(model(QWEN, FusedVision([TiledVit()]), Qwen2VL), patches, GRIDS)
    assert torch.equal(torch.cat(found), torch.cat(expected))
