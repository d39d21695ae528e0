"""What the gated delta net kernels of a layer share: shapes, weights, states, and steps of a token or a chunk.

projected [T, row stride]   | q: key_heads * key | k: the same | v: value_heads * value | z: as v | b | a |
                            |<------------------- channels ---------------------------->|         value_heads each

past [rows, kernel - 1, channels] in memory: the last inputs of the convolution, oldest first, as rows of the
projection are, so that a kernel reads one or the other with the same loads.

Adjacent value heads share a key head. Weights may have any float type; a state row belongs to a request.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.launch.varlen_tiles import power_of_two

MIN_SIDE = 16  # of a matrix that tensor cores multiply
LOG2_E = tl.constexpr(1.4426950408889634)


class GDNShape(NamedTuple):
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # width of the causal convolution

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def width(self) -> int:
        """Of a row of the projection."""
        return self.channels + self.value_heads * (self.value_dim + 2)

    @property
    def padded(self) -> tuple[int, int]:
        """Key and value dimensions as tensors in a kernel have them."""
        return power_of_two(self.key_dim, minimum=MIN_SIDE), power_of_two(self.value_dim, minimum=MIN_SIDE)


class GDNWeights(NamedTuple):
    conv: Tensor  # [channels, 1, kernel]
    decay: Tensor  # [value_heads]: A_log
    decay_bias: Tensor  # [value_heads]: dt_bias
    norm: Tensor  # [value_dim]
    eps: float  # of the norm


class GDNStates(NamedTuple):
    """Of one layer, updated in place."""

    conv: Tensor  # [rows, channels, kernel - 1] in the model's type; channels are dense: a transposed view
    recurrent: Tensor  # float32 [rows, value_heads, key, value]


def check(shape: GDNShape, projected: Tensor, weights: GDNWeights, states: GDNStates) -> None:
    heads = shape.value_heads
    assert shape.kernel > 1 and heads % shape.key_heads == 0
    assert projected.shape[1] == shape.width and projected.stride(1) == 1, "rows are q, k, v, z, b, a"
    assert weights.conv.shape == (shape.channels, 1, shape.kernel) and weights.conv.is_contiguous()
    assert states.conv.shape[1:] == (shape.channels, shape.kernel - 1) and states.conv.dtype == projected.dtype
    assert states.conv.transpose(1, 2).is_contiguous(), "channels must be dense: allocate [rows, kernel - 1, channels]"
    assert states.recurrent.shape[1:] == (heads, shape.key_dim, shape.value_dim) and states.recurrent.is_contiguous()


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    """Half the instructions of `tl.sigmoid`, whose exponential and division handle numbers that cannot occur."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2_E))
    return root * root


@triton.jit
def silu(x: tl.tensor) -> tl.tensor:
    return x * sigmoid(x)


@triton.jit
def log2_decay(a: tl.tensor, decay: tl.tensor, bias: tl.tensor) -> tl.tensor:
    """g / log(2) for g = -exp(A_log) * softplus(a + dt_bias): exponentials are powers of two here."""
    x = a.to(tl.float32) + bias.to(tl.float32)
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    return -tl.exp(decay.to(tl.float32)) * softplus * LOG2_E


@triton.jit
def load_tile(places: tl.tensor, inside: tl.tensor, EXACT: tl.constexpr) -> tl.tensor:
    """EXACT: every element is known, which saves the registers of the mask."""
    return tl.load(places) if EXACT else tl.load(places, mask=inside, other=0.0)


@triton.jit
def store_tile(places: tl.tensor, tile: tl.tensor, inside: tl.tensor, EXACT: tl.constexpr) -> None:
    if EXACT:
        tl.store(places, tile)
    else:
        tl.store(places, tile, mask=inside)


@triton.jit
def last_piece(rows: tl.tensor, piece: tl.tensor, row: tl.tensor, pieces: tl.tensor, PIECES: tl.constexpr) -> tl.tensor:
    """End of the run of pieces that have this state row: they are one window."""
    each = tl.arange(0, PIECES)
    other = tl.load(rows + each, mask=each < pieces, other=-1) != row
    return tl.min(tl.where(other & (each > piece), each, pieces), 0)
