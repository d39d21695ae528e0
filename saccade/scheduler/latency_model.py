"""How much fits into a step beside running decodes, by measured times. Plain arithmetic.

a step     | decode                     | prefill, or encoder layers |
           |<------ alone ------------->|<--------- spare ---------->|

or, where no prompt ends in the step, a mixed batch fits and it is faster:

           | decode and prefill tokens in one pass, which reads the weights once |

The spare time grows with what waits. While prompts and images keep up it is short, and tokens come evenly.
When they queue it is long enough to serve all of them within some steps, up to a ceiling. A millisecond more
delays every request that decodes and helps every one that waits, so the more decode the gentler it is.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import pairwise
from typing import NamedTuple

from saccade.types.latency import LatencyCurve, LatencyProfile

SLOWDOWN = 2.5  # of decode steps beside other work that keeps up
CEILING_MS = 20.0  # of a step, where none is set: or `SLOWDOWN`, where that is longer
CATCH_UP_STEPS = 4  # in which all that waits should be served, where as many requests wait as decode
_MIN_SPARE = 0.25  # of what decode takes alone: whatever the ceiling, prefill and encoding move on
_MIN_TOKENS = 32


class EncoderLoad(NamedTuple):
    """Images for the encoder, together."""

    embeddings: int = 0
    images: int = 0

    def plus(self, other: EncoderLoad) -> EncoderLoad:
        return EncoderLoad(self.embeddings + other.embeddings, self.images + other.images)


class SpareTime(NamedTuple):
    """What fits into a step beside decode: one or the other."""

    prompt_tokens: int
    encode_layers: int


def spare_ms(latency: LatencyProfile, num_decoding: int, num_waiting: int = 0, backlog: float = 0.0) -> float:
    """Time for prefill and encoding in a step, while so many requests wait, for so many milliseconds."""
    alone = milliseconds(latency.decode_ms, num_decoding)
    gentle = SLOWDOWN * alone
    ceiling = max(CEILING_MS, gentle) if latency.ceiling_ms is None else latency.ceiling_ms
    catches_up = backlog * num_waiting / (num_decoding * CATCH_UP_STEPS)
    spare = max(gentle - alone, catches_up)
    return max(min(spare, ceiling - alone), _MIN_SPARE * alone)


def backlog_ms(latency: LatencyProfile, prompt_tokens: int, images: EncoderLoad) -> float:
    """Time for these prompts and images, if nothing else ran."""
    prefill = milliseconds(latency.prefill_ms, prompt_tokens) if prompt_tokens else 0.0
    return prefill + latency.encoder_layers * layer_ms(latency, images)


def layer_ms(latency: LatencyProfile, load: EncoderLoad) -> float:
    """One encoder layer over all of these images: attention stays within an image."""
    if not (load.embeddings and latency.layer_ms):
        return 0.0
    apart = load.images * milliseconds(latency.layer_ms, load.embeddings // load.images)
    return min(apart, milliseconds(latency.layer_ms, load.embeddings))


def split_spare_time(latency: LatencyProfile, spare: float, load: EncoderLoad) -> SpareTime:
    """Prefill or encoding gets all of the spare time; where both want it, they alternate."""
    one_layer = layer_ms(latency, load)
    layers = max(1, int(spare / one_layer)) if one_layer else 1
    return SpareTime(max(_MIN_TOKENS, size_within(latency.prefill_ms, spare)), layers)


def mixed_tokens(latency: LatencyProfile, num_decoding: int, spare: float) -> int:
    """Prefill tokens that fit into a step as a mixed batch; 0 if none do, or their own pass does more."""
    curve = _mixed_size(latency, num_decoding)
    mixed = size_within(curve, milliseconds(latency.decode_ms, num_decoding) + spare)
    if not mixed:
        return 0
    apart = size_within(latency.prefill_ms, spare)
    is_faster = mixed / padded_ms(curve, mixed) > apart / _apart_ms(latency, num_decoding, apart)
    return mixed if is_faster else 0


def mixed_is_faster(latency: LatencyProfile, num_decoding: int, prompt_tokens: int) -> bool:
    """Whether one mixed pass is faster than a prefill pass and a decode pass."""
    mixed_ms = padded_ms(_mixed_size(latency, num_decoding), prompt_tokens)
    return mixed_ms < _apart_ms(latency, num_decoding, prompt_tokens)


def _apart_ms(latency: LatencyProfile, num_decoding: int, prompt_tokens: int) -> float:
    return padded_ms(latency.decode_ms, num_decoding) + padded_ms(latency.prefill_ms, prompt_tokens)


def _mixed_size(latency: LatencyProfile, num_decoding: int) -> LatencyCurve:
    return next((curve for maximum, curve in latency.mixed_ms if maximum >= num_decoding), ())


def max_work(latency: LatencyProfile, spare: float) -> int:
    """Embeddings that the encoder may make at a time, such that two layers over them fit into a step.

    A layer takes longer the more images go through it together. One image alone may exceed this.
    """
    return size_at(latency.layer_ms, spare / 2)


def max_restored(spare: float, ms_per_block: float) -> int | None:
    """KV blocks that are copied from host memory within the spare time."""
    return max(1, int(spare / ms_per_block)) if ms_per_block else None


def min_restored(prefill_ms: LatencyCurve, copy_ms: LatencyCurve, block_size: int) -> int | None:
    """From how many KV blocks on copying them is faster than their prefill; None: at no measured size.

    A prompt's last token is computed in any case, so prefill costs what it takes beyond one block.
    """
    last = milliseconds(prefill_ms, block_size)
    for count in range(1, copy_ms[-1][0] + 1):
        if milliseconds(copy_ms, count) < milliseconds(prefill_ms, (count + 1) * block_size) - last:
            return count
    return None


def milliseconds(curve: LatencyCurve, size: int) -> float:
    """At any size: lines between the measured ones, in proportion beyond the last, flat before the first."""
    index = bisect_left(curve, (size, 0.0))
    if index == 0:
        return curve[0][1]
    if index == len(curve):
        return curve[-1][1] * size / curve[-1][0]
    low, low_ms = curve[index - 1]
    high, high_ms = curve[index]
    return low_ms + (high_ms - low_ms) * (size - low) / (high - low)


def padded_ms(curve: LatencyCurve, size: int) -> float:
    """Of the smallest measured size that holds it, for passes of these sizes alone; infinite if none does."""
    return next((ms for maximum, ms in curve if maximum >= size), math.inf)


def size_within(curve: LatencyCurve, limit_ms: float) -> int:
    """The largest measured size that takes no longer; 0 if none does."""
    return max((size for size, ms in curve if ms <= limit_ms), default=0)


def size_at(curve: LatencyCurve, limit_ms: float) -> int:
    """The size that takes so long, by the lines of `milliseconds`; 0 if the first takes longer."""
    if not curve or limit_ms < curve[0][1]:
        return 0
    for (low, low_ms), (high, high_ms) in pairwise(curve):
        if limit_ms < high_ms:
            return low + int((high - low) * (limit_ms - low_ms) / (high_ms - low_ms))
    return int(curve[-1][0] * limit_ms / curve[-1][1])
