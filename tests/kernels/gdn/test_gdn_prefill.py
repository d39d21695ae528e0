"""Gated delta net over packed windows: the kernels against the layer."""

from __future__ import annotations

import pytest
import torch

from saccade.kernels.gdn.layout import GDNShape
from saccade.kernels.gdn.prefill import PrefillConfig
from saccade.kernels.gdn.prefill_plan import max_chunks, plan_chunks
from tests.helpers.kernels.gdn import Net, Piece, assert_near, assert_same
from tests.helpers.kernels.paged import HALF, ints

SMALL = GDNShape(1, 2, 16, 32, 4)
SHAPES = {
    "grouped": GDNShape(2, 4, 16, 32, 4),
    "one to one": GDNShape(2, 2, 32, 16, 2),
    "odd sizes": GDNShape(1, 3, 24, 40, 3),
}


def test_the_plan_cuts_pieces_and_padding_into_chunks() -> None:
    plan = plan_chunks(ints([0, 70, 100, 101, 101]), ints([5, 5, 2, -1]), ints([9, -1, -1, -1]), 170)
    assert len(plan.chunks) == max_chunks(170, 4) == 7
    assert plan.first_chunks.tolist() == [0, 2, 3, 4, 4]
    assert plan.chunks[:6].tolist() == [
        [0, 64, 0, 5], [64, 6, 0, 5], [70, 30, 0, 5], [100, 1, 100, 2], [101, 64, 101, -1], [165, 5, 101, -1]
    ]  # fmt: skip
    assert plan.chunks[6, 1] == 0


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_prefill_equals_the_layer_in_outputs_and_states(shape: GDNShape, dtype: torch.dtype) -> None:
    found = Net(shape, dtype)
    expected = found.copy()
    projected = found.projected(70)
    pieces = [Piece(68, 3), Piece(2, 1)]
    result = found.prefill(projected, pieces, config=PrefillConfig(block=16))
    assert_near(result, expected.expected(projected, pieces))
    assert_same(found, expected)


@pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 200])
def test_a_window_may_have_any_length(length: int) -> None:
    found = Net(SMALL)
    expected = found.copy()
    projected = found.projected(length)
    assert_near(found.prefill(projected, [Piece(length, 2)]), expected.expected(projected, [Piece(length, 2)]))
    assert_same(found, expected)


def test_windows_of_one_launch_do_not_touch_each_other_and_padding_is_zero() -> None:
    found = Net(SMALL)
    expected = found.copy()
    pieces = [Piece(65, 4), Piece(1, 0), Piece(3, 6), Piece(64, 1)]
    projected = found.projected(133 + 20)
    projected[133:] = float("nan")
    result = found.prefill(projected, pieces, unused=3)
    assert_near(result[:133], expected.expected(projected, pieces))
    assert not result[133:].any()
    assert_same(found, expected)


def test_a_window_goes_on_in_the_next_step_and_in_decode() -> None:
    found = Net(SMALL)
    expected = found.copy()
    projected = found.projected(75)
    parts = [found.prefill(projected[:70], [Piece(70, 2)]), found.prefill(projected[70:74], [Piece(4, 2)])]
    parts.append(found.decode(projected[74:], [2]))
    assert_near(torch.cat(parts), expected.expected(projected, [Piece(75, 2)]))
    assert_same(found, expected)


@pytest.mark.parametrize("cuts", [[64, 66], [1, 2, 70], [3, 129]], ids=str)
def test_checkpoints_equal_the_states_of_a_run_that_ends_there(cuts: list[int]) -> None:
    found = Net(SMALL)
    ends = [*cuts, 130]
    begins = [0, *cuts]
    keeps = [5, 6, 7][: len(cuts)]
    pieces = [Piece(e - b, 2, k) for b, e, k in zip(begins, ends, [*keeps, -1], strict=True)]
    projected = found.projected(131)
    whole = found.copy()
    result = found.prefill(projected, [*pieces, Piece(1, 4)], unused=2)
    assert_near(result, whole.expected(projected, [Piece(130, 2), Piece(1, 4)]))
    for row in (2, 4):
        torch.testing.assert_close(found.states.conv[row], whole.states.conv[row], atol=0, rtol=0)
        assert_near(found.states.recurrent[row], whole.states.recurrent[row])
    for end, keep in zip(cuts, keeps, strict=True):
        until = Net(SMALL)
        until.expected(projected, [Piece(end, 2)])
        torch.testing.assert_close(found.states.conv[keep], until.states.conv[2], atol=0, rtol=0)
        assert_near(found.states.recurrent[keep], until.states.recurrent[2])


def test_a_checkpoint_at_the_end_of_a_window_is_its_state() -> None:
    found = Net(SMALL)
    found.prefill(found.projected(5), [Piece(5, 0, keep=3)])
    for states in found.states:
        assert torch.equal(states[0], states[3])


@pytest.mark.parametrize("gate", [-1e4, 30.0, 1e4])
def test_extreme_gates_stay_finite_and_equal_the_layer(gate: float) -> None:
    found = Net(SMALL)
    expected = found.copy()
    projected = found.projected(80)
    heads = SMALL.value_heads
    projected[10:20, -heads:] = gate  # a: the decay
    projected[15:40, -2 * heads : -heads] = gate  # b: beta
    result = found.prefill(projected, [Piece(80, 1)])
    assert result.isfinite().all()
    assert_near(result, expected.expected(projected, [Piece(1, 1)] * 80))  # token by token, which cumulates no decay
    assert_same(found, expected)


def test_equal_keys_with_beta_one_and_no_decay_are_solved_exactly() -> None:
    """The hardest system: every entry below the diagonal is one."""
    found = Net(SMALL)
    expected = found.copy()
    heads = SMALL.value_heads
    projected = found.projected(140)
    projected[:, :32] = projected[0, :32]
    projected[:, -heads:] = -1e4
    projected[:, -2 * heads : -heads] = 1e4
    assert_near(found.prefill(projected, [Piece(140, 1)]), expected.expected(projected, [Piece(140, 1)]))
    assert_same(found, expected)
