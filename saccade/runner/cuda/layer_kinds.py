"""The kinds of layers that a decoder has on a CUDA device: graphs of all passes go through them.

A kind is a file beside this one and an entry of `_KINDS`; `models/cuda/decoder.py` has the GEMMs around it.
"""

from __future__ import annotations

from collections.abc import Sequence

from saccade.models.cuda.decoder import Mixer
from saccade.runner.cuda.cross_attention import CrossAttentions
from saccade.runner.cuda.gated_delta_net import DeltaNets
from saccade.runner.cuda.layer_pass import (
    DecodePass,
    DecoderParts,
    LayerKind,
    PrefillPass,
    RequestKind,
    TiledKind,
)
from saccade.runner.cuda.mla import LatentAttentions
from saccade.runner.cuda.prefill_metadata import PrefillSizes, Window
from saccade.runner.cuda.ruled_attention import RuledAttentions, RuledSelfAttentions
from saccade.runner.cuda.self_attention import SelfAttentions
from saccade.runner.cuda.short_convolution import ShortConvolutions

_KINDS = (
    DeltaNets,
    ShortConvolutions,
    CrossAttentions,
    RuledAttentions,
    RuledSelfAttentions,
)  # beside attention over the KV cache


class LayerKinds:
    def __init__(self, parts: DecoderParts) -> None:
        self.attention: TiledKind = LatentAttentions.of(parts) or SelfAttentions.of(parts)
        beside: Sequence[LayerKind | None] = [kind.of(parts) for kind in _KINDS]
        self._all: list[LayerKind] = [self.attention, *filter(None, beside)]
        self.of_requests = [kind for kind in self._all if isinstance(kind, RequestKind)]
        self.is_optional = any(kind.is_optional for kind in self._all)

    def sized(
        self, sizes: PrefillSizes, windows: Sequence[Window] | None = None, *, optional: bool = False
    ) -> PrefillSizes:
        """With the metadata that all kinds need. `optional`: a graph's, with kinds that passes may skip."""
        for kind in self._all:
            if optional or windows is not None or not kind.is_optional:
                sizes = kind.sized(sizes, windows)
        return sizes

    def decode(self, step: DecodePass) -> dict[type, Mixer]:
        mixers = {kind.layer: kind.decode(step) for kind in self._all}
        return {layer: mixer for layer, mixer in mixers.items() if mixer is not None}

    def prefill(self, step: PrefillPass) -> dict[type, Mixer]:
        mixers = {kind.layer: kind.prefill(step) for kind in self._all}
        return {layer: mixer for layer, mixer in mixers.items() if mixer is not None}

    def begin_pass(self, windows: Sequence[Window]) -> None:
        for kind in self.of_requests:
            kind.begin_pass(windows)
