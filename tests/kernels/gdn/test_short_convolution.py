"""Short convolutions between gates, for tokens and for windows: the kernels against the layer."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade.checkpoint.config import LinearConfig, TextConfig
from saccade.kernels.gdn.prefill_plan import ChunkPlan, plan_chunks
from saccade.kernels.gdn.short_convolution import convolution_decode, convolution_prefill
from saccade.models.layers.forward_types import States, WindowGroup
from saccade.models.layers.short_convolution import ShortConvolution
from saccade.models.state_dict import Parameters
from tests.helpers.kernels.gdn import TOLERANCE, Piece
from tests.helpers.kernels.paged import DEVICE, HALF, ints, random

ROWS = 8
SHAPES = pytest.mark.parametrize(
    ("channels", "kernel", "dtype"), [(130, 3, torch.float32), (64, 2, torch.float32), (24, 7, HALF)]
)


class Layer:
    """Random weights and states; what runs changes `past`."""

    def __init__(self, channels: int, kernel: int, dtype: torch.dtype) -> None:
        self.weight = random(channels, 1, kernel, dtype=dtype, seed=1)
        self.past = random(ROWS, kernel - 1, channels, dtype=dtype, seed=2).transpose(1, 2)

    def projected(self, tokens: int, seed: int = 3) -> Tensor:
        return random(tokens, 3 * len(self.weight), dtype=self.weight.dtype, seed=seed)

    def expected(self, projected: Tensor, pieces: list[Piece]) -> Tensor:
        """By the layer in PyTorch; its projections pass on what they are given."""
        channels, _, kernel = self.weight.shape
        text = TextConfig(channels, 8, 1, 1, 1, 8, 8, 8, 1e-6, 1e4, None, {}, False, "lfm2")
        linear = LinearConfig((0,), 0, 1, 0, channels, kernel)
        layer: Any = ShortConvolution(Parameters(self.weight.dtype, DEVICE), text, linear)
        layer.conv = self.weight
        layer.inputs = layer.out = lambda x: x
        ends = accumulate(piece.length for piece in pieces)
        groups = []
        for piece, end in zip(pieces, ends, strict=True):
            keep = ints([piece.keep], torch.int64) if piece.keep >= 0 else None
            tokens = torch.arange(end - piece.length, end, device=DEVICE)[None]
            groups.append(WindowGroup(tokens, ints([piece.row], torch.int64), keep))
        states = States(self.past[None], torch.empty(0), groups)
        out: Tensor = layer(projected[: sum(piece.length for piece in pieces)], states, 0)
        return out


def plan_of(pieces: list[Piece], tokens: int, unused: int = 2) -> ChunkPlan:
    starts = [0, *accumulate(piece.length for piece in pieces)]
    rows = ints([piece.row for piece in pieces] + [-1] * unused)
    keep = ints([piece.keep for piece in pieces] + [-1] * unused)
    return plan_chunks(ints(starts + starts[-1:] * unused), rows, keep, tokens)


def assert_same(found: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@SHAPES
def test_a_token_of_each_request_equals_the_layer_in_outputs_and_states(
    channels: int, kernel: int, dtype: torch.dtype
) -> None:
    found, expected = Layer(channels, kernel, dtype), Layer(channels, kernel, dtype)
    for step in range(2):
        projected = found.projected(4, seed=step)
        projected[3] = float("nan")  # padding
        out = torch.full((5, channels + 6), 7.0, device=DEVICE, dtype=dtype)
        convolution_decode(projected, ints([5, 0, 3, -1]), found.weight, found.past, out[:4, :channels])
        assert_same(out[:3, :channels], expected.expected(projected, [Piece(1, row) for row in (5, 0, 3)]))
        assert not out[3, :channels].any() and (out[:, channels:] == 7).all() and (out[4] == 7).all()
    torch.testing.assert_close(found.past, expected.past, atol=0, rtol=0)


@SHAPES
def test_windows_and_their_checkpoints_equal_the_layer_and_padding_is_zero(
    channels: int, kernel: int, dtype: torch.dtype
) -> None:
    found, expected = Layer(channels, kernel, dtype), Layer(channels, kernel, dtype)
    steps = [
        [Piece(70, 4, keep=6), Piece(1, 4, keep=7), Piece(2, 4), Piece(1, 0), Piece(65, 1)],
        [Piece(3, 1), Piece(1, 4, keep=2)],
    ]
    for pieces in steps:
        tokens = sum(piece.length for piece in pieces)
        projected = found.projected(tokens + 9)
        projected[tokens:] = float("nan")
        out = convolution_prefill(projected, plan_of(pieces, len(projected)), found.weight, found.past)
        assert_same(out[:tokens], expected.expected(projected, pieces))
        assert not out[tokens:].any()
        torch.testing.assert_close(found.past, expected.past, atol=0, rtol=0)
