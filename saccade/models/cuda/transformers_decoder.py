"""A Transformers text model in place of `FusedDecoder`: its own layers around our attention and KV cache."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels.gemm.skinny import MAX_ROWS, SplitWorkspace, skinny_linear
from saccade.kernels.launch.device import Heads
from saccade.models.bridge.text_model import TextModel
from saccade.models.cuda.decoder import FusedDecoder, Mixers, T
from saccade.models.cuda.residual import Gemms, Residual
from saccade.models.cuda.transformers_fusion import Fusion
from saccade.models.layers.attention_rules import AttentionRule, RuledAttention
from saccade.models.layers.decoder import Decoder, SelfAttention
from saccade.models.layers.torch_attention import PagedKV

logger = logging.getLogger("saccade.models")

_TRIED_TOKENS = 5
_MAX_ROUNDING = 1.0  # of the largest value
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # of the largest value


class TransformersDecoder(FusedDecoder):
    def __init__(self, text: TextModel, kv: PagedKV) -> None:
        self.text = text
        self.kv = kv
        self.decoder: Any = text
        self.is_table = text.is_table
        config = text.config
        self.heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        own = (config.num_kv_heads, config.head_dim)
        self._shapes = ((config.num_heads, config.head_dim), own, own)
        out = SimpleNamespace(inputs=config.num_heads * config.head_dim)  # of the output projection
        self.norm_eps = None  # its layers have applied their norms
        self._own = SimpleNamespace(heads=config.num_heads, head_dim=config.head_dim, out=out, qk_norms=None)
        self._workspace = SplitWorkspace.allocate(MAX_ROWS, text.table.device)
        self._fusion = self._fused()

    @torch.no_grad()
    def _fused(self) -> AbstractContextManager[None]:
        """Nothing, if a short pass with kernels inside the layers is not the same as without."""
        try:
            fusion = Fusion(self.text.layers, self._workspace)
            expected = self._try()
            rounding = _difference(self._try(is_rounded=True), expected)
            with fusion:
                self._try()  # RoPE shows whether it is ours
                rows = self._try()
        except Exception as error:  # anything: layers may be of any kind
            reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        else:
            difference = _difference(rows, expected)
            if difference <= max(_TOLERANCE[self.text.table.dtype], min(_MAX_ROUNDING, 2 * rounding)):
                logger.info("our kernels inside Transformers' layers: %s", fusion)
                return fusion
            reason = f"its output would differ by {difference:.1e}"
        logger.warning("Transformers' layers run as they are, without kernels of ours inside: %s", reason)
        return nullcontext()

    def _try(self, *, is_rounded: bool = False) -> Tensor:
        """`is_rounded`: embeddings differ in the last of 16 bits, which layers with experts may magnify."""
        positions = torch.arange(_TRIED_TOKENS, device=self.text.table.device)[None]
        ids = torch.linspace(0, len(self.text.table) - 1, _TRIED_TOKENS).long()
        embeds = self.text.embed(ids.to(positions.device))
        if is_rounded and embeds.dtype != torch.float32:
            signs = torch.randn(embeds.shape, generator=torch.Generator().manual_seed(0)).sign()
            embeds = embeds * (1 + torch.finfo(embeds.dtype).eps * signs).to(embeds)

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule | None = None) -> Tensor:
            q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return mixed[0].transpose(0, 1)

        return self.text.forward(embeds, positions, attend).float()

    @property
    def block_row(self) -> int | None:
        return self.text.block_row

    def first(self, kind: type[T]) -> T | None:
        return None  # its layers are of no kind of ours

    def gemms(self, rows: int, *, in_parts: bool = False) -> Gemms:
        return _Head(self._workspace)  # type: ignore[return-value]

    def finish(self, logits: Tensor) -> None:
        self.text.finish(logits)

    def forward(self, embeds: Tensor, mixers: Mixers, gemms: Gemms) -> Residual:
        assert mixers.positions is not None
        mix = mixers.by_kind[SelfAttention].mix
        mix_ruled = mixers.by_kind[RuledAttention].mix

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule | None = None) -> Tensor:
            """Transformers' layers have applied RoPE; our kernels rotate by nothing."""
            if rule is None and (q.shape[1:], k.shape[1:], v.shape[1:]) == self._shapes:
                return mix(_whole(q, k, v), self._own, layer).view(q.shape)
            dim = max(q.shape[2], v.shape[2])
            whole = _whole(*(_as_wide(part, dim) for part in (q, k, v)))
            module = RuledAttention(q.shape[1], k.shape[1], dim, rule or AttentionRule())
            return mix_ruled(whole, module, layer).view(len(q), -1, dim)[..., : v.shape[2]]

        with self._fusion:
            return Residual(self.text.forward(embeds, mixers.positions.long(), attend))


def _whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[T, heads + 2 kv_heads, d]: a view, where they are slices of one GEMM's output."""
    parts = (q, k, v)
    rows, heads, dim = q.shape
    width = heads + 2 * k.shape[1]
    row = q.stride(0) if rows > 1 else width * dim  # the stride of a single row says nothing
    starts = [part.storage_offset() - q.storage_offset() for part in parts]
    is_slice = starts == [0, heads * dim, (width - v.shape[1]) * dim]
    is_strided = all(part.stride()[rows == 1 :] == (row, dim, 1)[rows == 1 :] for part in parts)
    if is_slice and is_strided and len({part.untyped_storage().data_ptr() for part in parts}) == 1:
        return q.as_strided((rows, width, dim), (row, dim, 1))
    return torch.cat(parts, dim=1)


def _as_wide(heads: Tensor, dim: int) -> Tensor:
    return heads if heads.shape[2] == dim else F.pad(heads, (0, dim - heads.shape[2]))


def _difference(rows: Tensor, expected: Tensor) -> float:
    return float((rows - expected).abs().max() / expected.abs().max())


class _Head:
    """What `Gemms` has for the end of a pass. Transformers' model ends with the norm."""

    def __init__(self, workspace: SplitWorkspace) -> None:
        self.workspace = workspace

    def normed(self, x: Residual, decoder: Decoder, only: Tensor | None = None) -> Tensor:
        return x.rows_at(only)

    def logits(self, x: Residual, decoder: Decoder, out: Tensor) -> Tensor:
        return skinny_linear(x.rows, decoder.head, workspace=self.workspace, out=out)
