"""How long the parts of a step take on a device."""

from __future__ import annotations

from dataclasses import dataclass

LatencyCurve = tuple[tuple[int, float], ...]
"""Milliseconds by size, measured at some sizes; both rise."""


@dataclass(frozen=True, slots=True)
class LatencyProfile:
    """How long the parts of a step take on this device, and how long a step with decodes may take."""

    decode_ms: LatencyCurve  # by requests that decode
    prefill_ms: LatencyCurve  # by prompt tokens
    layer_ms: LatencyCurve  # one encoder layer, by embeddings; empty without a vision tower
    ceiling_ms: float | None  # of a step with decodes, however much else waits; None: automatic
    max_prefills: int | None = None  # windows in one pass at this speed
    mixed_ms: tuple[tuple[int, LatencyCurve], ...] = ()  # for so many decodes: a mixed batch by prompt tokens
    encoder_layers: int = 0  # of a whole image


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long a step may take on a CPU, and the rates measured at start. The scheduler refines them."""

    seconds: float
    prompt_tokens_per_s: float
    layers_per_s: float  # of the encoder, over a full pass
