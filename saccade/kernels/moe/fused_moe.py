"""A whole MoE layer in a few launches, all inside a CUDA graph: router, routing, sorting, expert GEMMs, sum.

    1 to 4 tokens    router ─► route ─────────► vector gate_up ─► vector down, summed
    more             router ─► route ─► sort ─► gate_up ────────► down ─► combine

`choose` picks the launches from the shapes alone. The reference is the layer, `models.layers.moe.MoE`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels.gemm.int4_linear import Int4Weight
from saccade.kernels.launch.device import is_hopper, shared_memory
from saccade.kernels.launch.pdl import supports_pdl
from saccade.kernels.moe.combine import combine
from saccade.kernels.moe.experts import TileConfig, moe_down, moe_gate_up
from saccade.kernels.moe.experts_gemv import MAX_TOKENS, VectorConfig, vector_down, vector_gate_up
from saccade.kernels.moe.experts_gemv_int4 import int4_vector_down, int4_vector_gate_up
from saccade.kernels.moe.experts_int4 import int4_moe_down, int4_moe_gate_up
from saccade.kernels.moe.router_gemm import router_logits
from saccade.kernels.moe.sorting import SortedPairs, sort_by_expert
from saccade.kernels.moe.topk_routing import Routed, RoutingRules, route
from saccade.kernels.ops.quantize_rows import quantize_rows
from saccade.kernels.ops.scaled_weight import BLOCK

_MIN_QUANTIZED_ROWS = 64  # of a block
_RESERVED = 8 << 10  # bytes of shared memory for what is not in the pipeline


class MoEWeights(NamedTuple):
    router: Tensor  # float32 [E, H], or its parts in bfloat16 (`split_router`); with a shared gate, one row more
    bias: Tensor | None  # float32 [E]: selects experts, does not enter their weights
    gate_up: Tensor  # [E + shared, 2 I, H], gates first; packed in INT4 [E + shared, 2 I, H / 4]
    down: Tensor  # [E + shared, H, I]
    gate_up_scales: Tensor | None = None  # of weights in float8 or INT4
    down_scales: Tensor | None = None
    gate_up_zeros: Tensor | None = None  # of weights in INT4
    down_zeros: Tensor | None = None
    gelu: bool = False  # gates, by tanh; not SiLU
    expert_scales: Tensor | None = None  # float32 [E]: of routing weights

    @property
    def int4_gate_up(self) -> Int4Weight | None:
        """If it is packed."""
        return _packed(self.gate_up, self.gate_up_scales, self.gate_up_zeros)

    @property
    def int4_down(self) -> Int4Weight | None:
        return _packed(self.down, self.down_scales, self.down_zeros)


def _packed(weight: Tensor, scales: Tensor | None, zeros: Tensor | None) -> Int4Weight | None:
    if weight.dtype != torch.int16:
        return None
    assert scales is not None
    return Int4Weight(weight, scales, zeros)


class MoELaunch(NamedTuple):
    """How the expert GEMMs of a layer run."""

    rows: int  # of a block of pairs; 0: no sorting, the GEMMs are `vector`
    gate_up: TileConfig | VectorConfig
    down: TileConfig | VectorConfig
    quantized: bool = False  # x is float8, as weights are


def fused_moe(
    x: Tensor,  # [T, H]
    weights: MoEWeights,
    rules: RoutingRules,
    *,
    launch: MoELaunch | None = None,
    addend: Tensor | None = None,  # [T, H]: the residual, or a shared expert that is not among the experts
    gate: Tensor | None = None,  # [T]: that expert's gate, before the sigmoid
    routed_by: Tensor | None = None,  # [T, H]: what the router reads, if not x
) -> Tensor:
    """[T, H] -> [T, H]"""
    logits = router_logits(x if routed_by is None else routed_by, weights.router)
    routed = route(logits, rules, weights.bias, weights.expert_scales)
    return run_experts(x, weights, routed, launch=launch, addend=addend, gate=gate)


def run_experts(
    x: Tensor, weights: MoEWeights, routed: Routed, *,
    launch: MoELaunch | None = None, addend: Tensor | None = None, gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The weighted sum of each token's experts: [T, H]."""
    count = len(weights.down)
    slots = routed.experts.shape[1]
    launch = launch or _choose_for(x, weights, slots)
    if isinstance(launch.gate_up, VectorConfig):
        return _run_vector(x, weights, routed, launch, addend, gate)
    pairs = sort_by_expert(routed.experts, count, launch.rows)
    wide = _gate_up(x, weights, pairs, launch)
    return combine(_down(wide, weights, pairs, routed.weights, launch), slots, addend, gate)


def _run_vector(
    x: Tensor, weights: MoEWeights, routed: Routed, launch: MoELaunch, addend: Tensor | None, gate: Tensor | None
) -> Tensor:
    gate_up, down = weights.int4_gate_up, weights.int4_down
    assert isinstance(launch.gate_up, VectorConfig) and isinstance(launch.down, VectorConfig)
    if gate_up is not None:
        wide = int4_vector_gate_up(x, gate_up, routed, launch.gate_up, gelu=weights.gelu)
    else:
        args = (weights.gate_up, routed, launch.gate_up, weights.gate_up_scales)
        wide = vector_gate_up(x, *args, gelu=weights.gelu)
    if down is not None:
        return int4_vector_down(wide, down, routed, launch.down, addend, gate)
    return vector_down(wide, weights.down, routed, launch.down, addend, gate, weights.down_scales)


def _gate_up(x: Tensor, weights: MoEWeights, pairs: SortedPairs, launch: MoELaunch) -> Tensor:
    packed = weights.int4_gate_up
    assert isinstance(launch.gate_up, TileConfig)
    if packed is not None:
        return int4_moe_gate_up(x, packed, pairs, launch.gate_up, gelu=weights.gelu)
    rows = _rows(x, launch)
    args = (weights.gate_up, pairs, launch.gate_up, weights.gate_up_scales)
    return moe_gate_up(rows.values, *args, rows.scales, x.dtype, weights.gelu)


def _down(wide: Tensor, weights: MoEWeights, pairs: SortedPairs, shares: Tensor, launch: MoELaunch) -> Tensor:
    packed = weights.int4_down
    assert isinstance(launch.down, TileConfig)
    if packed is not None:
        return int4_moe_down(wide, packed, pairs, shares, launch.down)
    rows = _rows(wide, launch)
    args = (weights.down, pairs, shares, launch.down, weights.down_scales)
    return moe_down(rows.values, *args, rows.scales, wide.dtype)


class _Rows(NamedTuple):
    values: Tensor
    scales: Tensor | None  # of float8


def _rows(x: Tensor, launch: MoELaunch) -> _Rows:
    """What an expert GEMM reads: x, or x in float8."""
    return _Rows(*quantize_rows(x, BLOCK)[:2]) if launch.quantized else _Rows(x, None)


def _choose_for(x: Tensor, weights: MoEWeights, slots: int) -> MoELaunch:
    shared = shared_memory(x.device)
    launch = choose(len(x), slots, len(weights.down), x.dtype, shared, tma=supports_tma(weights))
    if weights.int4_gate_up or weights.int4_down:
        launch_int4 = choose_int4(launch.rows, shared, hopper=is_hopper(x.device))
        gate_up = launch_int4.gate_up if weights.int4_gate_up else launch.gate_up
        return MoELaunch(launch_int4.rows, gate_up, launch_int4.down if weights.int4_down else launch.down)
    return launch if weights.down_scales is None else _scaled(launch, shared)


def choose(tokens: int, slots: int, experts: int, dtype: torch.dtype, shared: int, *, tma: bool) -> MoELaunch:
    """By pairs of an expert on average, as measured on an H200. `shared`: bytes of shared memory of a program."""
    if tokens <= MAX_TOKENS:
        return MoELaunch(0, VectorConfig(8, 256, stages=1), VectorConfig(2, 256, warps=1, prefetch=True))
    if dtype.itemsize == 4:  # for comparisons, and GPUs without 16-bit types
        tile = TileConfig(outputs=32, inputs=32, stages=2)
        return fit(MoELaunch(16, tile, tile), dtype.itemsize, shared)
    average = tokens * slots / experts
    if average <= 12:
        launch = MoELaunch(16, TileConfig(outputs=64, inputs=128, stages=3), TileConfig(outputs=128, inputs=64))
    elif average <= 24:
        launch = MoELaunch(32, TileConfig(outputs=64, inputs=64), TileConfig(outputs=128, inputs=64))
    elif average <= 72:
        tile = TileConfig(outputs=128, inputs=64, swapped=False)
        launch = MoELaunch(64, tile, tile)
    else:
        tile = TileConfig(outputs=128, inputs=64, warps=8, group=8, swapped=False, tma=tma)
        launch = MoELaunch(128, tile, tile._replace(outputs=256))
    return fit(launch, dtype.itemsize, shared)


def _scaled(launch: MoELaunch, shared: int) -> MoELaunch:
    """For weights in float8: a program's rows are within a block of 128."""
    if isinstance(launch.gate_up, VectorConfig):
        by_slot = VectorConfig(2, 512, warps=1, stages=1, prefetch=True)
        return MoELaunch(0, VectorConfig(4, 512, warps=2, stages=1), by_slot)
    assert isinstance(launch.down, TileConfig)
    if launch.rows >= _MIN_QUANTIZED_ROWS:
        tile = TileConfig(outputs=64, inputs=BLOCK, stages=3, group=8, swapped=False)
        down = tile._replace(outputs=BLOCK, tma=launch.down.tma)
        return fit(MoELaunch(_MIN_QUANTIZED_ROWS, tile, down, quantized=True), 1, shared)
    few = launch.down._replace(outputs=min(launch.down.outputs, BLOCK))
    if launch.rows == 16:
        few = few._replace(inputs=BLOCK, stages=min(few.stages, 3))  # the bytes of a stage are the same
    return launch._replace(down=few)


def choose_int4(rows: int, shared: int, *, hopper: bool) -> MoELaunch:
    """For packed weights, where others are in blocks of so many rows. With more than 64 sums would not fit.

    Elsewhere than on Hopper GPUs, 64 gates and ups of 64 rows would not fit either.
    """
    if rows == 0:
        return MoELaunch(0, VectorConfig(4, 2048, warps=1), VectorConfig(4, 2048, warps=2, prefetch=True))
    if rows == 16:
        launch = MoELaunch(16, TileConfig(64, 256, warps=4, stages=2), TileConfig(128, 128, warps=4, stages=4))
    elif rows == 32:
        tile = TileConfig(outputs=64, inputs=128)
        launch = MoELaunch(32, tile, tile)
    else:
        tile = TileConfig(outputs=64 if hopper else 32, inputs=128, group=8)
        launch = MoELaunch(64, tile, tile._replace(outputs=128, warps=8))
    return fit(launch, 2, shared, of_weights=0.25)


def fit(launch: MoELaunch, itemsize: int, shared: int, of_weights: float = 1) -> MoELaunch:
    """With tiles and stages for which there is shared memory. `of_weights`: their bytes are this share of itemsize."""
    assert isinstance(launch.gate_up, TileConfig) and isinstance(launch.down, TileConfig)
    gate_up = _fit_tiles(launch.gate_up, launch.rows, 2 * of_weights, itemsize, shared)
    down = _fit_tiles(launch.down, launch.rows, of_weights, itemsize, shared)
    return launch._replace(gate_up=gate_up, down=down)


def _fit_tiles(config: TileConfig, rows: int, weights: float, itemsize: int, shared: int) -> TileConfig:
    while True:
        stage = int((rows + weights * config.outputs) * config.inputs * itemsize)
        stages = min(config.stages, (shared - _RESERVED) // stage)
        if stages >= 2:
            return config._replace(stages=stages)
        config = config._replace(outputs=config.outputs // 2)


def supports_tma(weights: MoEWeights) -> bool:
    """From Hopper on, for rows of multiples of 16 bytes."""
    rows = (weights.gate_up, weights.down)
    return supports_pdl(weights.down) and all(w.shape[2] * w.element_size() % 16 == 0 for w in rows)
