"""A resampler: cross-attention that makes a fixed number of embeddings of an image of any size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.errors import ConfigError
from saccade.models.layers.layernorm import LayerNorm
from saccade.models.layers.linear import Linear
from saccade.models.state_dict import Parameters
from saccade.models.weights import Rule
from saccade.types.media import Grid

_EPS = 1e-6
_HEAD = 128


class Resampler(ABC):
    """One cross-attention layer from learned queries to an image's patches."""

    def __init__(self, params: Parameters, inputs: int, width: int, queries: int) -> None:
        if width % _HEAD:
            raise ConfigError(f"a resampler of width {width} does not divide into heads of {_HEAD}")
        self.heads = width // _HEAD
        self.query = params.new("query", queries, width)
        self.narrow = Linear(params.within("narrow"), inputs, width) if inputs != width else None
        self.query_norm = LayerNorm(params.within("query_norm"), width, _EPS)
        self.kv_norm = LayerNorm(params.within("kv_norm"), width, _EPS)
        self.qkv_weight = params.new("qkv.weight", 3 * width, width)
        self.qkv_bias = params.new("qkv.bias", 3 * width)
        self.out = Linear(params.within("out"), width, width, bias=True)
        self.norm = LayerNorm(params.within("norm"), width, _EPS)
        self.project = params.new("project", width, width)  # [inputs, outputs]

    def queries(self) -> Tensor:
        """[queries, width]"""
        return self.query_norm(self.query)

    @abstractmethod
    def key_positions(self, grids: Sequence[Grid], like: Tensor) -> Tensor:
        """What is added to the keys of packed images: [patches, width], of the dtype and device of `like`."""

    def __call__(self, features: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Packed features of images -> [images, queries, width]"""
        values = self.kv_norm(self.narrow(features) if self.narrow else features)
        q, k, v = self._projected(self.queries(), values + self.key_positions(grids, values), values)
        lengths = [grid.patches for grid in grids]
        by_image = zip(torch.split(k, lengths), torch.split(v, lengths), strict=True)
        mixed = [self._attend(q, own_k, own_v) for own_k, own_v in by_image]
        return self.norm(self.out(torch.stack(mixed))) @ self.project

    def _projected(self, *inputs: Tensor) -> list[Tensor]:
        """Each input through its third of the qkv projection."""
        thirds = zip(inputs, self.qkv_weight.chunk(3), self.qkv_bias.chunk(3), strict=True)
        return [F.linear(rows, weight, bias) for rows, weight, bias in thirds]

    def _attend(self, *qkv: Tensor) -> Tensor:
        """q [queries, width], k and v [patches, width] -> [queries, width]"""
        q, k, v = (rows.view(1, len(rows), self.heads, -1).transpose(1, 2) for rows in qkv)
        return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)


RESAMPLER_RULES = (
    Rule("query", "query"),
    Rule("pos_embed", "positions"),
    Rule("kv_proj.weight", "narrow.weight"),
    Rule("ln_q.*", "query_norm.*"),
    Rule("ln_kv.*", "kv_norm.*"),
    Rule("attn.in_proj_weight", "qkv.weight"),
    Rule("attn.in_proj_bias", "qkv.bias"),
    Rule("attn.out_proj.*", "out.*"),
)
RESAMPLER_END_RULES = (Rule("ln_post.*", "norm.*"), Rule("proj", "project"))
