"""A gated delta net over packed windows of several tokens, in four launches with fixed grids. Knows no requests.

    plan_chunks (once per step)
    chunk_kernel    parallel     q, k, v, (I + L)^-1 of each chunk
    scan_kernel     sequential   the state before each chunk, corrections d; states and checkpoints
    output_kernel   parallel     outputs, gated norm
    past_kernel     parallel     the next inputs of the convolution, and their checkpoints

The grids are those of the most chunks that the tokens and pieces can have. Programs without a chunk end at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from saccade.kernels.gdn.layout import GDNShape, GDNStates, GDNWeights, check
from saccade.kernels.gdn.prefill_intra_chunk import chunk_kernel
from saccade.kernels.gdn.prefill_output import output_kernel, past_kernel
from saccade.kernels.gdn.prefill_plan import CHUNK, ChunkPlan
from saccade.kernels.gdn.prefill_scan import scan_kernel
from saccade.kernels.launch.device import has_async_mma, precision_of
from saccade.kernels.launch.pdl import pdl_options, supports_pdl
from saccade.kernels.launch.varlen_tiles import power_of_two

_PAST_CHANNELS = 256  # of a program of `past_kernel`


class PrefillConfig(NamedTuple):
    chunk_warps: int = 4
    chunk_registers: int | None = None  # per thread at most
    block: int = 16  # values of a program of the scan
    scan_warps: int = 4
    scan_stages: int = 3
    output_warps: int = 4
    output_registers: int | None = 168  # where operands are in shared memory; others would spill


class PrefillWorkspace(NamedTuple):
    """What the launches of a layer leave each other, in the model's type. Layers share it."""

    q: Tensor  # [chunks, key_heads, 64, key]
    k: Tensor  # the same
    v: Tensor  # [chunks, value_heads, value, 64]: beta v
    d: Tensor  # the same: corrections
    inverse: Tensor  # [chunks, value_heads, 64, 64]: ((I + L)^-1)^T
    gates: Tensor  # float32 [chunks, value_heads, 3, 64]: total, beta 2^total, 2^(end - total)
    states: Tensor  # [chunks, value_heads, value, key]: before each chunk

    @classmethod
    def allocate(cls, chunks: int, shape: GDNShape, dtype: torch.dtype, device: torch.device) -> PrefillWorkspace:
        def empty(*size: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(chunks, *size, dtype=dtype, device=device)

        heads = shape.value_heads
        return cls(
            empty(shape.key_heads, CHUNK, shape.key_dim),
            empty(shape.key_heads, CHUNK, shape.key_dim),
            empty(heads, shape.value_dim, CHUNK),
            empty(heads, shape.value_dim, CHUNK),
            empty(heads, CHUNK, CHUNK),
            empty(heads, 3, CHUNK, dtype=torch.float32),
            empty(heads, shape.value_dim, shape.key_dim),
        )


class GDNPrefill(NamedTuple):
    """A layer's work on the packed windows of a step."""

    projected: Tensor  # [T, width]: rows of q, k, v, z, b, a, the last dimension dense
    plan: ChunkPlan  # of these tokens
    shape: GDNShape
    weights: GDNWeights
    states: GDNStates
    workspace: PrefillWorkspace  # for at least as many chunks as the plan has
    config: PrefillConfig = PrefillConfig()

    def __call__(self, out: Tensor | None = None) -> Tensor:
        """[T, value_heads * value], zeros for padding; updates the states and copies checkpoints.

        The last dimension of `out` is dense.
        """
        check(self.shape, self.projected, self.weights, self.states)
        assert len(self.workspace.q) >= len(self.plan.chunks) and self.workspace.q.dtype == self.projected.dtype
        if out is None:
            out = self.projected.new_empty(len(self.projected), self.shape.value_heads * self.shape.value_dim)
        self.prepare_chunks()
        self.scan_states()
        self.write_outputs(out)
        self.store_past()
        return out

    def prepare_chunks(self) -> None:
        projected, plan, shape, weights, states, workspace, config = self
        chunk_kernel[(shape.value_heads, len(plan.chunks))](
            projected, *weights[:3], states.conv, plan.chunks, workspace.q, workspace.k, workspace.v, workspace.inverse,
            workspace.gates, projected.stride(0), *shape, *shape.padded, CHUNK, precision_of(projected),
            **self._options(config.chunk_warps, config.chunk_registers),
        )  # fmt: skip

    def scan_states(self) -> None:
        plan, shape, workspace, config = self.plan, self.shape, self.workspace, self.config
        pieces = len(plan.rows)
        keys, values = shape.padded
        block = min(config.block, values)
        scan_kernel[(triton.cdiv(shape.value_dim, block), shape.value_heads, pieces)](
            workspace.k, workspace.v, workspace.inverse, workspace.gates, workspace.d, workspace.states,
            self.states.recurrent, plan.rows, plan.keep, plan.first_chunks, pieces,
            *shape[:4], keys, block, CHUNK, power_of_two(pieces), precision_of(self.projected),
            num_stages=config.scan_stages, **self._options(config.scan_warps),
        )  # fmt: skip

    def write_outputs(self, out: Tensor) -> None:
        projected, plan, shape, weights, _, workspace, config = self
        registers = config.output_registers if has_async_mma(projected.device) else None
        output_kernel[(shape.value_heads, len(plan.chunks))](
            projected, weights.norm, plan.chunks, workspace.q, workspace.k, workspace.d, workspace.gates,
            workspace.states, out, projected.stride(0), out.stride(0), weights.eps,
            *shape[:4], *shape.padded, CHUNK, precision_of(projected),
            **self._options(config.output_warps, registers),
        )  # fmt: skip

    def store_past(self) -> None:
        store_past(self.projected, self.states.conv, self.plan)

    def _options(self, warps: int, registers: int | None = None) -> dict[str, Any]:
        pdl = supports_pdl(self.projected)
        return {"PDL": pdl, "num_warps": warps, "maxnreg": registers, **pdl_options(pdl)}


def store_past(projected: Tensor, past: Tensor, plan: ChunkPlan, gate: int = 0) -> None:
    """Inputs of a convolution, for the next window: [rows, channels, kernel - 1]. `gate`: see `gated_input`."""
    _, channels, taps = past.shape
    pieces = len(plan.rows)
    pdl = supports_pdl(projected)
    past_kernel[(triton.cdiv(channels, _PAST_CHANNELS), pieces)](
        projected, past, plan.starts, plan.rows, plan.keep, projected.stride(0), pieces, channels, taps + 1,
        power_of_two(taps), _PAST_CHANNELS, power_of_two(pieces), gate, PDL=pdl, num_warps=4, **pdl_options(pdl),
    )  # fmt: skip
