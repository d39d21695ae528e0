"""What fits into a step on a CPU: measured at start, and learned again from every step. Has no clock.

A machine is often busy when an engine starts, or becomes so later. One measure would bound steps for life:

    first 98 tokens/s, really 2,814   step of   39 ─► 78 ─► 156 ─► 313 ─► 627 ─► 1,125 tokens, in 400 ms
"""

from __future__ import annotations

from saccade.types.latency import StepTime
from saccade.types.step import Slice

MIN_PREFILL_TOKENS = 16  # in a step: fewer would be all overhead, and show nothing
_FASTER = 2.0  # at most, from one step to the next: how long larger ones take is not known yet
_SLOWER = 4.0
_MIN_SHARE = 0.25  # of a step's time is for prefill, however long decode takes


class LearnedRate:
    """Something a second."""

    def __init__(self, first: float, minimum: float) -> None:
        self._minimum = minimum
        self.value = max(first, minimum)

    def learn(self, amount: float, seconds: float, limit: float) -> None:
        """Faster counts always; slower only where it took too long: little at a time is always slow."""
        latest = amount / max(seconds, 1e-9)
        if latest > self.value:
            self.value = min(latest, _FASTER * self.value)
        elif seconds > limit:
            self.value = max(latest, self.value / _SLOWER, self._minimum)


class CpuStepTime:
    def __init__(self, time: StepTime, max_tokens: int, layers: int | None) -> None:
        """`layers`: of the encoder in a step, where that is the operator's choice."""
        self._seconds = time.seconds
        self._max_tokens = max_tokens
        self._layers = layers
        self._prefill_rate = LearnedRate(time.prompt_tokens_per_s, MIN_PREFILL_TOKENS / time.seconds)
        self._layer_rate = LearnedRate(time.layers_per_s, 1 / time.seconds)
        self._decodes: dict[int, float] = {}  # seconds of a step that only decodes, by the bits of how many

    @property
    def layers(self) -> int:
        return self._layers or max(1, int(self._layer_rate.value * self._seconds))

    def tokens(self, num_decoding: int) -> int:
        """Of decode and prefill together."""
        prompts = max(MIN_PREFILL_TOKENS, int(self._prefill_rate.value * self._left(num_decoding)))
        return min(num_decoding + prompts, self._max_tokens)

    def observe(self, decoding: int, prompt_tokens: int, encoded: Slice, seconds: float) -> None:
        """A step that did this took so long."""
        decoder_seconds = max(seconds - encoded.seconds, 0.0)
        if encoded.layers:
            self._layer_rate.learn(encoded.layers, encoded.seconds, self._seconds)
        if prompt_tokens >= MIN_PREFILL_TOKENS:
            prefill_seconds = max(decoder_seconds - self._alone(decoding), _MIN_SHARE * decoder_seconds)
            self._prefill_rate.learn(prompt_tokens, prefill_seconds, self._left(decoding))
        elif decoding and not prompt_tokens:
            bits = decoding.bit_length()
            self._decodes[bits] = (self._decodes.get(bits, decoder_seconds) + decoder_seconds) / 2

    def _left(self, num_decoding: int) -> float:
        """Seconds of a step for prefill, beside so many decodes."""
        return max(self._seconds - self._alone(num_decoding), _MIN_SHARE * self._seconds)

    def _alone(self, num_decoding: int) -> float:
        """Seconds of a decode step. Until one was seen, as long as so many prefill tokens take."""
        return self._decodes.get(num_decoding.bit_length(), num_decoding / self._prefill_rate.value)
