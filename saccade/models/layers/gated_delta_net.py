"""Gated delta nets: attention with a memory of fixed size instead of keys and values. Knows tensors, not requests.

    memory [key, value] of a head      decays by exp(g), then token t corrects what is stored under its key:
    S_t = exp(g_t) S_(t-1) + k_t d_t   d_t = beta_t (v_t - k_t exp(g_t) S_(t-1))      read: o_t = q_t S_t

Tokens of a chunk are computed together: the corrections d are the solution of one triangular system.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.checkpoint.config import LinearConfig, TextConfig
from saccade.models.layers.basic import Linear, RMSNorm
from saccade.models.layers.types import States
from saccade.models.parameters import Parameters

CHUNK = 64  # tokens whose corrections are solved for together
_TINY = 1e-6  # keeps the length of a zero vector from dividing


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """q, k [N, heads, T, key], v [N, heads, T, value], g, beta [N, heads, T], memory [N, heads, key, value], float32.

    Returns what each token reads [N, heads, T, value], and the memory behind the last one.
    """
    read = []
    for start in range(0, q.shape[2], CHUNK):
        here = slice(start, start + CHUNK)
        out, memory = _chunk(q[:, :, here], k[:, :, here], v[:, :, here], g[:, :, here], beta[:, :, here], memory)
        read.append(out)
    return torch.cat(read, dim=2), memory


def _chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    total = g.cumsum(-1)  # [N, heads, T]: how much the memory has decayed at each token, as a logarithm
    between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()  # from token j to token i >= j
    known = (k * total.exp()[..., None]) @ memory  # what the old memory says to each key
    system = ((k @ k.transpose(-1, -2)) * between * beta[..., None]).tril(-1)  # a diagonal of ones is meant
    wanted = (v - known) * beta[..., None]
    d = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = (q * total.exp()[..., None]) @ memory + ((q @ k.transpose(-1, -2)) * between) @ d
    left = (total[..., -1:] - total).exp()  # of each token's correction at the end
    new = memory * total[..., -1].exp()[..., None, None] + (k * left[..., None]).transpose(-1, -2) @ d
    return out, new


class GatedDeltaNet:
    """A mixer of tokens: projections, a short causal convolution, the delta rule, a gated norm."""

    def __init__(self, params: Parameters, text: TextConfig, linear: LinearConfig) -> None:
        self.shape = linear
        hidden, values = text.hidden_size, linear.value_heads * linear.value_dim
        self.sizes = {"qkv": linear.channels, "z": values, "b": linear.value_heads, "a": linear.value_heads}
        self.inputs = Linear(params.within("inputs"), hidden, self.sizes)
        self.conv = params.new("conv.weight", linear.channels, 1, linear.kernel)
        self.decay = params.new("decay", linear.value_heads)  # logarithm of the speed at which a head forgets
        self.decay_bias = params.new("decay_bias", linear.value_heads)
        self.norm = RMSNorm(params.within("norm"), linear.value_dim, text.rms_norm_eps)
        self.out = Linear(params.within("out"), values, hidden)

    def __call__(self, x: Tensor, states: States, index: int) -> Tensor:
        """Packed tokens [T, hidden]; `index` counts the layers that have states."""
        qkv, z, b, a = torch.split(self.inputs(x), list(self.sizes.values()), dim=-1)
        speed = -self.decay.float().exp() * F.softplus(a.float() + self.decay_bias)  # [T, heads]
        mixed = x.new_empty(len(x), self.shape.value_heads, self.shape.value_dim)
        past, memory = states.past[index], states.memory[index]
        for tokens, rows, keep_in in states.groups:  # equally long windows: tokens [N, T], rows [N]
            turned, past[rows] = self._convolve(qkv[tokens], past[rows])
            read, memory[rows] = self._remember(turned, speed[tokens], b[tokens].float().sigmoid(), memory[rows])
            mixed[tokens] = read.to(mixed.dtype)
            if keep_in is not None:
                past[keep_in], memory[keep_in] = past[rows], memory[rows]
        gated = self.norm(mixed).float() * F.silu(z.float().view(mixed.shape))
        return self.out(gated.to(x.dtype).flatten(1))

    def _convolve(self, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, T, channels] behind the inputs before it [N, channels, kernel - 1], and what is then past."""
        line = torch.cat((past, x.transpose(1, 2)), dim=-1)
        turned = F.conv1d(line, self.conv, groups=line.shape[1])
        return F.silu(turned).transpose(1, 2), line[..., line.shape[-1] - past.shape[-1] :]

    def _remember(self, qkv: Tensor, speed: Tensor, beta: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """qkv [N, T, channels] -> [N, T, heads, value]; key heads are shared by neighbouring value heads."""
        shape, keys = self.shape, self.shape.key_heads * self.shape.key_dim
        q, k, v = torch.split(qkv.float(), [keys, keys, shape.value_heads * shape.value_dim], dim=-1)
        q, k = (self._heads(_of_length_one(x.reshape(*x.shape[:2], shape.key_heads, -1))) for x in (q, k))
        v = v.reshape(*v.shape[:2], shape.value_heads, -1).transpose(1, 2)
        g, beta = speed.transpose(1, 2), beta.transpose(1, 2)  # [N, heads, T]
        read, memory = delta_rule(q * shape.key_dim**-0.5, k, v, g, beta, memory)
        return read.transpose(1, 2), memory

    def _heads(self, x: Tensor) -> Tensor:
        """[N, T, key_heads, d] -> [N, value_heads, T, d]"""
        return x.repeat_interleave(self.shape.value_heads // self.shape.key_heads, dim=2).transpose(1, 2)


def _of_length_one(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _TINY)
