"""A layer's MoE with fused kernels: same weights and result as `layers.moe.MoE`."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels.launch.kernel_choice import KernelChoice, assert_agree
from saccade.kernels.moe.fused_moe import MoEWeights, fused_moe, run_experts
from saccade.kernels.moe.router_gemm import split_router
from saccade.kernels.moe.topk_routing import Routed, RoutingRules
from saccade.kernels.ops.unpack_int4 import unpack_without_kernel
from saccade.models.layers.moe import MoE, scales_and_zeros

_prepared: WeakKeyDictionary[MoE, MoEWeights] = WeakKeyDictionary()


def runs_in_one(experts: MoE) -> bool:
    """Whether kernels take all its experts, also the shared one."""
    return experts.shared is None


def run_moe(
    x: Tensor, experts: MoE, residual: Tensor | None = None, routed_by: Tensor | None = None
) -> Tensor:
    """[T, H] -> [T, H], plus `residual`. A shared expert that is not stacked with them runs by itself."""
    weights = prepare_moe(experts)
    if runs_in_one(experts):
        return fused_moe(x, weights, routing_rules(experts), addend=residual, routed_by=routed_by)
    assert residual is None, "the shared expert takes its place"
    assert experts.shared is not None
    gate = x.float() @ experts.routers[-1] if experts.rules.shared_gate else None
    return fused_moe(x, weights, routing_rules(experts), addend=experts.shared(x), gate=gate)


def prepare_moe(experts: MoE) -> MoEWeights:
    """Once per layer, and before a CUDA graph is captured."""
    if experts not in _prepared:
        _prepared[experts] = _weights_of(experts)
    return _prepared[experts]


def _weights_of(experts: MoE) -> MoEWeights:
    """The router in bfloat16 parts for models of that dtype: their sum is the float32 weight."""
    rows = experts.routers if experts.shared is None else experts.routers[: experts.rules.count]
    router = split_router(rows) if experts.dtype == torch.bfloat16 else rows
    gate_up_scales, gate_up_zeros = scales_and_zeros(experts.gate_up_scales)
    down_scales, down_zeros = scales_and_zeros(experts.down_scales)
    return MoEWeights(
        router,
        experts.router_bias,
        experts.gate_up,
        experts.down,
        gate_up_scales,
        down_scales,
        gate_up_zeros,
        down_zeros,
        experts.gelu,
        experts.expert_scales,
    )


def routing_rules(experts: MoE) -> RoutingRules:
    rules = experts.rules
    return RoutingRules(
        top_k=rules.per_token,
        sigmoid=rules.scoring == "sigmoid",
        normalise=rules.normalise,
        scale=rules.scale,
        groups=rules.groups,
        groups_kept=rules.groups_kept,
        shared=rules.stacked_shared,
        shared_gate=rules.stacked_shared > 0 and rules.shared_gate,
    )


def _random_int4(rows: int, inputs: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Packed weights of four experts with scales and zero points, and what they stand for."""
    packed = torch.randint(-(2**15), 2**15, (4, rows, inputs // 4), device=device, dtype=torch.int16)
    scales = torch.full((4, rows, inputs // 64), 0.015, device=device, dtype=torch.float16)
    zeros = torch.randint(6, 11, scales.shape, device=device, dtype=torch.uint8)
    meant = torch.empty(4 * rows, inputs, device=device)
    unpack_without_kernel(packed.flatten(0, 1), scales.flatten(0, 1), zeros.flatten(0, 1), meant)
    return packed, scales, zeros, meant.view(4, rows, inputs)


def _test_int4(device: torch.device, dtype: torch.dtype) -> None:
    """Few tokens, and blocks of 16, 32 and 64 rows."""
    gate_up, down = _random_int4(256, 256, device), _random_int4(256, 128, device)
    no_router = torch.empty(0, device=device)
    weights = MoEWeights(no_router, None, gate_up[0], down[0], gate_up[1], down[1], gate_up[2], down[2])
    for tokens in (1, 20, 40, 100):
        x = torch.randn(tokens, 256, device=device, dtype=dtype)
        experts = torch.rand(tokens, 4, device=device).argsort(1)[:, :2].int().contiguous()
        shares = torch.rand(tokens, 2, device=device)
        rows = run_experts(x, weights, Routed(shares, experts))
        gates, ups = torch.einsum("th,enh->ten", x.float(), gate_up[3]).chunk(2, dim=-1)
        outputs = torch.einsum("tei,ehi->teh", F.silu(gates) * ups, down[3])
        of_all = torch.zeros(tokens, 4, device=device).scatter_(1, experts.long(), shares)
        assert_agree(rows.float(), torch.einsum("te,teh->th", of_all, outputs), 0.05)


can_read_int4 = KernelChoice(
    "the kernels of experts in INT4",
    lambda device, dtype: dtype in (torch.bfloat16, torch.float16),
    _test_int4,
    "experts are dequantised as they load",
)
"""(device, dtype of the model)"""
