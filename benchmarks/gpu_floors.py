"""The least time each row of `benchmarks.gpu` could take: bytes over bandwidth or operations over speed, as measured.

Only the device's own work counts: no launch, no decoding of JPEGs, no text.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.gpu_work import BATCHES, MAX_PIXELS, STREAM_TOKENS, STREAMS
from saccade import costs
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.families import family_for
from saccade.runner.device_peaks import Peaks
from saccade.types.media import Geometry, Size

DTYPE = "bfloat16"


class Floors:
    """In milliseconds, but for the throughput, which is images a second."""

    def __init__(self, folder: str, peaks: Peaks) -> None:
        checkpoint = open_checkpoint(folder, weights=False)
        self.config = checkpoint.config
        self.peaks = peaks
        self._family = family_for(self.config).from_checkpoint(checkpoint)
        self._limits = self._family.policy(None, None if self.config.model_type == "llava" else MAX_PIXELS)

    def geometry(self, width: int, height: int) -> Geometry:
        return self._family.geometry(Size(width, height), *self._limits)

    def decode(self, batch: int, context: int) -> float:
        text = self.config.text
        read = self._weights() + batch * context * costs.kv_bytes_per_token(text, DTYPE)
        return max(read / self.peaks.bytes_per_s, self._flops_s(batch * costs.prefill_flops(text, 1, context))) * 1e3

    def prompt(self, tokens: int, context: int = 0) -> float:
        text = self.config.text
        read = self._weights() + context * costs.kv_bytes_per_token(text, DTYPE)
        return max(read / self.peaks.bytes_per_s, self._flops_s(costs.prefill_flops(text, tokens, context))) * 1e3

    def encode(self, width: int, height: int, count: int = 1) -> float:
        vision = self.config.vision
        assert vision is not None
        patches = self.geometry(width, height).grid.patches
        return count * self._flops_s(costs.encode_flops(vision, self.config.text, patches)) * 1e3

    def image(self, width: int, height: int, count: int = 1, context: int = 0) -> float:
        """Its encoding and its part of the prompt."""
        tokens = count * self.geometry(width, height).tokens
        return self.encode(width, height, count) + self.prompt(tokens, context)

    def rows(self) -> Mapping[str, float]:
        hd = self.geometry(1280, 720).tokens
        full = self.geometry(1920, 1080).tokens
        wave = 64 * self.image(1280, 720) + 32 * self.decode(64, hd + 32)
        stream = self.decode(STREAMS, 500 + STREAM_TOKENS // 2)
        floors = {f"decode_{batch}": self.decode(batch, 1000) for batch in BATCHES}
        for rested in ("", "_rested"):
            floors[f"encode_1288x952{rested}"] = self.encode(1288, 952)
            floors[f"encode_644x476{rested}"] = self.encode(644, 476)
            floors[f"encode_8x644x476{rested}"] = self.encode(644, 476, 8)
        floors |= {f"text_{tokens}": self.prompt(tokens) for tokens in (64, 1600)}
        for size in ((644, 476), (1280, 960), (2560, 1440)):
            name = "x".join(map(str, size))
            floors[f"new_{name}"] = self.image(*size)
            floors[f"again_{name}"] = self.prompt(16, self.geometry(*size).tokens)
        floors |= {
            "throughput_64x720p": 64e3 / wave,
            "turn2_720p": self.image(1280, 720, context=hd),
            "turn8_720p": self.image(1280, 720, context=7 * hd),
            "turn2_1080p": self.image(1920, 1080, context=full),
            "turn8_1080p": self.image(1920, 1080, context=7 * full),
            "stream_alone_p50": stream,
            "stream_alone_p99": stream,
            "stream_pictures_p50": stream,
            "stream_pictures_p99": stream,
            "stream_picture_first": self.image(1280, 960),
            "many_8x720p": self.image(1280, 720, 8),
            "many_64x2560x1440": self.image(2560, 1440, 64),
        }
        return floors

    def _weights(self) -> int:
        """Bytes that a step reads: all layers and the head, but of the embeddings only a few rows."""
        text = self.config.text
        if text.experts or text.linear:
            raise SystemExit("floors are known for dense decoders: which experts a step reads depends on its tokens")
        layers = text.num_layers * costs.decoder_layer_params(text)
        return (layers + text.vocab_size * text.hidden_size) * costs.dtype_bytes(DTYPE)

    def _flops_s(self, flops: int) -> float:
        return flops / self.peaks.flops
