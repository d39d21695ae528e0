"""A Transformers text model in place of `FusedDecoder`: its own layers around our attention and KV cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from saccade.kernels.launch.device import Heads
from saccade.models.cuda.decoder import FusedDecoder, Mixers
from saccade.models.cuda.gemms import Gemms, Residual
from saccade.models.layers.decoder import Decoder
from saccade.models.layers.torch_attention import PagedKV
from saccade.models.layers.transformers_text import TextModel


class TransformersDecoder(FusedDecoder):
    def __init__(self, text: TextModel, kv: PagedKV) -> None:
        self.text = text
        self.kv = kv
        self.decoder: Any = text
        self.net = self.latent = None
        config = text.config
        self.heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        shape = torch.empty(text.table.shape[1], config.num_heads * config.head_dim, device="meta")
        out = SimpleNamespace(weight=shape)  # of the output projection
        self.norm_eps = None  # its layers have applied their norms
        self._own = SimpleNamespace(heads=config.num_heads, head_dim=config.head_dim, out=out, qk_norms=None)

    def gemms(self, rows: int, *, in_parts: bool = False) -> Gemms:
        return _Head()  # type: ignore[return-value]

    def forward(self, embeds: Tensor, mixers: Mixers, gemms: Gemms) -> Residual:
        assert mixers.positions is not None

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """Transformers' layers have applied RoPE; our kernels rotate by nothing."""
            return mixers.attend(torch.cat((q, k, v), dim=1), self._own, layer).view(q.shape)

        return Residual(self.text.forward(embeds, mixers.positions[None].long(), attend))


class _Head:
    """What `Gemms` has for the end of a pass. Transformers' model ends with the norm."""

    def normed(self, x: Residual, decoder: Decoder, only: Tensor | None = None) -> Tensor:
        return x.rows if only is None else x.rows.index_select(0, only)

    def logits(self, x: Residual, decoder: Decoder, out: Tensor) -> Tensor:
        return torch.mm(x.rows, decoder.head.T, out=out)
