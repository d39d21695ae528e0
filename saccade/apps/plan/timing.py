"""How long passes take: a roofline over FLOPs and bytes, at the calibrated share of the GPU's speed.

dense layers   sqrt(read^2 + compute^2): nearly the larger one, as loads and GEMMs overlap
experts        read + compute: each has few rows, so its weights are waited for
KV, states     read
launches       a fixed time for each layer
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from saccade import costs
from saccade.apps.plan.calibration import Calibration
from saccade.apps.plan.hardware import Hardware
from saccade.checkpoint.config import ModelConfig, TextConfig, VisionConfig
from saccade.types.media import Geometry
from saccade.vision_graph_sizes import square

_FP8_SPEED = 1.45  # of GEMMs, times that of bfloat16: 1,600 rows (docs/experiments/048)
_QUANTIZED_BANDWIDTH = 0.75  # the same of weights that are read: 1 and 32 rows of FP8; taken for INT4, too


class Precision(NamedTuple):
    """Bytes of a value; FP8 is 1."""

    layer_bytes: float  # weights of the decoder's layers
    kv_bytes: float
    fp8_params: int = 0  # weights that are in FP8
    int4: costs.Int4Bytes = costs.NO_INT4

    @property
    def speed(self) -> float:
        """The speed of GEMMs, times that of the dtype."""
        return _FP8_SPEED if self.fp8_params else 1.0

    @property
    def read_bytes(self) -> float:
        """The cost of reading a weight of the decoder's layers, in bytes at the bandwidth of the dtype."""
        if self.fp8_params or self.int4:
            return self.layer_bytes / _QUANTIZED_BANDWIDTH
        return self.layer_bytes


@dataclass(frozen=True, slots=True)
class TimeModel:
    """Seconds on one hardware. Text alone skips the layers that attend to images."""

    model: ModelConfig
    dtype: str
    hardware: Hardware
    calibration: Calibration
    precision: Precision
    has_images: bool = True

    def decode(self, batch: float, context: float) -> float:
        """A step of so many requests, each with so many tokens before it."""
        text = self.model.text
        cached = context * self._kv_bytes + 2 * costs.state_bytes_per_request(text, self.dtype)
        pairs = batch * context * self._attention_flops
        return self._pass(batch, pairs) + batch * cached / self._bandwidth

    def prefill(self, tokens: int, context: int = 0) -> float:
        """One prompt in one pass, after a cached prefix."""
        pairs = tokens * context + tokens * (tokens + 1) / 2
        return self._pass(tokens, pairs * self._attention_flops) + context * self._kv_bytes / self._bandwidth

    def prefill_among(self, tokens: int, step_tokens: int) -> float:
        """A prompt's part of steps that are filled with prompts."""
        pairs = tokens * (tokens + 1) / 2
        alone = self._pass(step_tokens, 0) * tokens / step_tokens
        return alone + pairs * self._attention_flops / self._flops

    def encode(self, geometry: Geometry) -> float:
        vision = self.model.vision
        assert vision is not None
        flops = tower_flops(vision, self.model.text, geometry.grid.patches)
        speed = self.hardware.flops(self.dtype) * self.calibration.tower
        return flops / speed + vision.num_layers * self.calibration.tower_layer_us / 1e6

    def preprocess(self, megapixels: float) -> float:
        """Seconds on one core of the host."""
        return megapixels * self.calibration.megapixel_ms / 1e3

    @property
    def request(self) -> float:
        """The host's part of a first token that nothing hides."""
        return self.calibration.request_ms / 1e3

    @property
    def _flops(self) -> float:
        return self.hardware.flops(self.dtype) * self.calibration.gemm * self.precision.speed

    @property
    def _bandwidth(self) -> float:
        return self.hardware.bandwidth_gb_s * 1e9 * self.calibration.bandwidth

    @property
    def _kv_bytes(self) -> float:
        per_value = costs.kv_bytes_per_token(self.model.text, self.dtype) / costs.dtype_bytes(self.dtype)
        return per_value * self.precision.kv_bytes

    @property
    def _attention_flops(self) -> int:
        """FLOPs of one query and one key, in all layers."""
        text = self.model.text
        return 4 * text.num_kv_layers * text.num_heads * text.head_dim

    @property
    def _layers(self) -> float:
        """Share of the decoder's layers that run."""
        text = self.model.text
        return 1.0 if self.has_images else 1 - text.num_cross_layers / text.num_layers

    def _pass(self, tokens: float, attention_flops: float) -> float:
        text = self.model.text
        head = text.vocab_size * text.hidden_size
        experts = costs.read_expert_params(text, math.ceil(tokens))
        routed_params = costs.active_layer_params(text) - costs.dense_params(text)
        dense = costs.dense_params(text) * self._layers
        read = (dense * self.precision.read_bytes + head * costs.dtype_bytes(self.dtype)) / self._bandwidth
        compute = (2 * tokens * dense + attention_flops) / self._flops
        routed = (
            experts * self.precision.read_bytes / self._bandwidth + 2 * tokens * routed_params / self._flops
        )
        return math.hypot(read, compute) + routed + self._launches(text)

    def _launches(self, text: TextConfig) -> float:
        calibration = self.calibration
        microseconds = text.num_layers * self._layers * calibration.layer_us
        if text.experts:
            microseconds += len(text.experts.layers) * calibration.expert_layer_us
        if text.mla:
            microseconds += text.num_layers * calibration.latent_layer_us
        return microseconds / 1e6


def tower_flops(vision: VisionConfig, text: TextConfig, patches: int) -> int:
    """Tiles of a tower for one size attend to themselves alone, but where the decoder cross-attends."""
    has_tiles = vision.image_size and (vision.takes_squares or vision.spatial_merge_size == 1)
    if not has_tiles or text.num_cross_layers:
        return costs.encode_flops(vision, text, patches)
    tile = square(vision).patches
    last_flops = costs.encode_flops(vision, text, patches % tile) if patches % tile else 0
    return patches // tile * costs.encode_flops(vision, text, tile) + last_flops
