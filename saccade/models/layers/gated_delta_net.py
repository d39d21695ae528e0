"""Gated delta net: linear attention with a recurrent state instead of a KV cache.

    state [key, value] of a head      decays by exp(g), then token t corrects the value under its key:
    S_t = exp(g_t) S_(t-1) + k_t d_t   d_t = beta_t (v_t - k_t exp(g_t) S_(t-1))      output: o_t = q_t S_t

In the chunked form the corrections d of a chunk are the solution of one triangular system.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.checkpoint.config import LinearConfig, TextConfig
from saccade.models.layers.forward_types import States
from saccade.models.layers.layernorm import RMSNorm
from saccade.models.layers.linear import Linear
from saccade.models.layers.short_convolution import causal_convolution
from saccade.models.state_dict import Parameters

CHUNK = 64  # tokens
_TINY = 1e-6  # against division by zero


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """q, k [N, heads, T, key], v [N, heads, T, value], g, beta [N, heads, T], state [N, heads, key, value].

    Returns outputs [N, heads, T, value] and the state after the last token.
    """
    read = []
    for start in range(0, q.shape[2], CHUNK):
        here = (..., slice(start, start + CHUNK))
        rows = (*here, slice(None))
        out, state = _chunk(q[rows], k[rows], v[rows], g[here], beta[here], state)
        read.append(out)
    return torch.cat(read, dim=2), state


def _chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    total = g.cumsum(-1)  # [N, heads, T]: log decay of the state at each token
    between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()  # decay from j to i >= j
    recalled = (k * total.exp()[..., None]) @ state  # the old state's value for each key
    system = ((k @ k.transpose(-1, -2)) * between * beta[..., None]).tril(-1)  # with a diagonal of ones
    corrections = (v - recalled) * beta[..., None]
    d = torch.linalg.solve_triangular(system, corrections, upper=False, unitriangular=True)
    out = (q * total.exp()[..., None]) @ state + ((q @ k.transpose(-1, -2)) * between) @ d
    remaining = (total[..., -1:] - total).exp()  # decay of each correction until the end of the chunk
    new = state * total[..., -1].exp()[..., None, None] + (k * remaining[..., None]).transpose(-1, -2) @ d
    return out, new


class GatedDeltaNet:
    """Projections, a short causal convolution, the delta rule, a gated norm."""

    def __init__(self, params: Parameters, text: TextConfig, linear: LinearConfig) -> None:
        self.shape = linear
        hidden = text.hidden_size
        values = linear.value_heads * linear.value_dim
        self.sizes = {"qkv": linear.channels, "z": values, "b": linear.value_heads, "a": linear.value_heads}
        self.inputs, self.gates = _input_projections(params.within("inputs"), hidden, self.sizes)
        self.conv = params.new("conv.weight", linear.channels, 1, linear.kernel)
        self.decay = params.new("decay", linear.value_heads)  # A_log
        self.decay_bias = params.new("decay_bias", linear.value_heads)
        self.norm = RMSNorm(params.within("norm"), linear.value_dim, text.rms_norm_eps)
        self.out = Linear(params.within("out"), values, hidden)

    def __call__(self, x: Tensor, states: States, index: int) -> Tensor:
        """Packed tokens [T, hidden]; `index` counts linear attention layers."""
        projected = self.inputs(x)
        if self.gates is not None:
            projected = torch.cat((projected, self.gates(x)), dim=-1)
        qkv, z, b, a = torch.split(projected, list(self.sizes.values()), dim=-1)
        speed = -self.decay.float().exp() * F.softplus(a.float() + self.decay_bias)  # [T, heads]
        mixed = x.new_empty(len(x), self.shape.value_heads, self.shape.value_dim)
        conv_state = states.conv[index]
        state = states.recurrent[index]
        for group in states.groups:
            tokens = group.tokens  # [N, T]
            rows = group.rows  # [N]
            convolved, conv_state[rows] = causal_convolution(qkv[tokens], conv_state[rows], self.conv)
            beta = b[tokens].float().sigmoid()
            read, state[rows] = self._delta_rule(F.silu(convolved), speed[tokens], beta, state[rows])
            mixed[tokens] = read.to(mixed.dtype)
            if group.keep_in is not None:
                conv_state[group.keep_in] = conv_state[rows]
                state[group.keep_in] = state[rows]
        gated = self.norm(mixed).float() * F.silu(z.float().view(mixed.shape))
        return self.out(gated.to(x.dtype).flatten(1))

    def _delta_rule(self, qkv: Tensor, speed: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """qkv [N, T, channels] -> [N, T, heads, value]; adjacent value heads share a key head."""
        shape = self.shape
        keys = shape.key_heads * shape.key_dim
        q, k, v = torch.split(qkv.float(), [keys, keys, shape.value_heads * shape.value_dim], dim=-1)
        q, k = (self._heads(_l2_norm(x.reshape(*x.shape[:2], shape.key_heads, -1))) for x in (q, k))
        v = v.reshape(*v.shape[:2], shape.value_heads, -1).transpose(1, 2)
        g = speed.transpose(1, 2)  # [N, heads, T]
        read, state = delta_rule(q * shape.key_dim**-0.5, k, v, g, beta.transpose(1, 2), state)
        return read.transpose(1, 2), state

    def _heads(self, x: Tensor) -> Tensor:
        """[N, T, key_heads, d] -> [N, value_heads, T, d]"""
        return x.repeat_interleave(self.shape.value_heads // self.shape.key_heads, dim=2).transpose(1, 2)


def _input_projections(
    params: Parameters, hidden: int, sizes: Mapping[str, int]
) -> tuple[Linear, Linear | None]:
    """One GEMM over all parts; or qkv and z, and another over the gates b and a, where only those two stay in
    float8. A gate has a row for each head, which is no whole block."""
    wide = {name: sizes[name] for name in ("qkv", "z")}
    if not _stay_fp8(params, wide, hidden) or _stay_fp8(params, sizes, hidden):
        return Linear(params, hidden, sizes), None
    return Linear(params, hidden, wide), Linear(params, hidden, {name: sizes[name] for name in ("b", "a")})


def _stay_fp8(params: Parameters, sizes: Mapping[str, int], inputs: int) -> bool:
    return params.keeps_fp8({f"{name}.weight": rows for name, rows in sizes.items()}, inputs)


def _l2_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _TINY)
