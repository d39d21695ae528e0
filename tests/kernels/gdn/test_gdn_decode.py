"""Gated delta net, one token per request: the kernel against the layer."""

from __future__ import annotations

import pytest
import torch

from saccade.kernels.gdn.decode import DecodeConfig
from saccade.kernels.gdn.layout import GDNShape
from tests.helpers.kernels.gdn import Net, Piece, assert_near, assert_same

SHAPES = {
    "grouped": GDNShape(2, 4, 16, 32, 4),
    "three to one": GDNShape(2, 6, 32, 16, 4),
    "one to one": GDNShape(3, 3, 16, 16, 2),
    "odd sizes": GDNShape(1, 2, 24, 40, 3),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_decode_equals_the_layer_in_outputs_and_states(shape: GDNShape, dtype: torch.dtype) -> None:
    found = Net(shape, dtype)
    expected = found.copy()
    rows = [5, 0, 3]
    for step in range(2):
        projected = found.projected(3, seed=step)
        assert_near(found.decode(projected, rows), expected.expected(projected, [Piece(1, row) for row in rows]))
    assert_same(found, expected)


def test_a_real_head_size_decodes() -> None:
    found = Net(GDNShape(1, 2, 128, 128, 4), rows=2)
    expected = found.copy()
    projected = found.projected(1)
    assert_near(found.decode(projected, [1], config=DecodeConfig(warps=4)), expected.expected(projected, [Piece(1, 1)]))
    assert_same(found, expected)


def test_padding_decodes_to_zeros_and_touches_no_state() -> None:
    found = Net(SHAPES["grouped"])
    expected = found.copy()
    projected = found.projected(4)
    projected[2:] = float("nan")
    result = found.decode(projected, [1, 6, -1, -1])
    assert_near(result[:2], expected.expected(projected, [Piece(1, 1), Piece(1, 6)]))
    assert not result[2:].any()
    assert_same(found, expected)


def test_padding_that_shares_a_spare_row_leaves_other_rows_alone() -> None:
    found = Net(SHAPES["grouped"])
    expected = found.copy()
    projected = found.projected(4)
    result = found.decode(projected, [1, 7, 7, 7])
    assert_near(result[:1], expected.expected(projected, [Piece(1, 1)]))
    for states in (*found.states, *expected.states):
        assert states.isfinite().all()
        states[7] = 0
    assert_same(found, expected)


def test_decode_writes_into_rows_of_a_larger_tensor() -> None:
    found = Net(SHAPES["grouped"])
    expected = found.copy()
    projected = found.projected(5)
    out = torch.full((5, 130), 7.0, device=projected.device)
    found.decode(projected[1:3], [2, 4], out=out[1:3, :128])
    assert_near(out[1:3, :128], expected.expected(projected[1:3], [Piece(1, 2), Piece(1, 4)]))
    assert (out[:, 128:] == 7).all() and (out[0] == 7).all() and (out[3:] == 7).all()


@pytest.mark.parametrize("gate", [-1e4, -30.0, 30.0, 1e4])
def test_extreme_gates_stay_finite_and_equal_the_layer(gate: float) -> None:
    found = Net(SHAPES["grouped"])
    expected = found.copy()
    projected = found.projected(2)
    heads = found.shape.value_heads
    projected[0, -heads:] = gate  # a: the decay
    projected[1, -2 * heads : -heads] = gate  # b: beta
    result = found.decode(projected, [1, 6])
    assert result.isfinite().all()
    assert_near(result, expected.expected(projected, [Piece(1, 1), Piece(1, 6)]))
    assert_same(found, expected)
