"""Which images to encode or decode ahead, and which request gives way when the encoder cache deadlocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice, takewhile
from typing import NamedTuple

from saccade.scheduler.encoder_scheduler import EncoderScheduler, KeptImages
from saccade.scheduler.kv_cache import BlockPool
from saccade.scheduler.request import ScheduledRequest
from saccade.scheduler.step_policy import StepLimits
from saccade.types.media import MediaItem
from saccade.types.step import ScheduledWindow

SpansAhead = Iterator[tuple[ScheduledRequest, int]]  # requests, and indices of their spans


def spans_ahead(candidates: Iterable[ScheduledRequest], pool: BlockPool) -> SpansAhead:
    """Spans that are still needed, in the order in which they should be encoded.

    By rank, not running ones first: a later request that runs must not keep taking the cache space that an
    earlier one waits for. Unless that waits for just this one, which holds its space until it has gone on.
    """
    for seq in _in_order(candidates):
        for index in range(seq.next_span, len(seq.spans)):
            end = seq.spans[index].pinned_until
            if seq.is_running or not pool.has_prefix(seq.hashes, end, seq.num_tokens):
                yield seq, index


def _in_order(candidates: Iterable[ScheduledRequest]) -> list[ScheduledRequest]:
    wanting = [seq for seq in candidates if seq.has_images_ahead]
    return sorted(wanting, key=lambda seq: (not seq.blocks_cache, seq.share.rank, seq.place))


def _next_of_running(candidates: Iterable[ScheduledRequest], encoder: EncoderScheduler) -> SpansAhead:
    """The next image of each running request that is to be encoded: it may not go on without."""
    for seq in _in_order(seq for seq in candidates if seq.is_running):
        ahead = range(seq.next_span, len(seq.spans))
        first = next((index for index in ahead if not encoder.has(seq.spans[index].key)), None)
        if first is not None:
            yield seq, first


class NextUp(NamedTuple):
    """What a plan has decoded before the encoder needs it."""

    prefetch: tuple[MediaItem, ...]
    decode_first: tuple[MediaItem, ...]  # see `StepPlan`

    @property
    def is_new(self) -> bool:
        return any((self.prefetch, self.decode_first))


def next_up(
    candidates: Callable[[], Iterable[ScheduledRequest]],
    pool: BlockPool,
    encoder: EncoderScheduler,
    limits: StepLimits,
) -> NextUp:
    slow = [seq for seq in candidates() if seq.has_images_to_decode_first]
    first = encoder.decode_first(chain(_next_of_running(slow, encoder), spans_ahead(slow, pool)))
    if encoder.is_sliced and limits.max_encode_in_flight is None:
        return NextUp((), first)
    return NextUp(encoder.prefetch(spans_ahead(candidates(), pool)), first)


def encoded_ahead(candidates: Iterable[ScheduledRequest], encoder: EncoderScheduler) -> KeptImages:
    """Images of requests that come next, up to the first that is missing.

    Ranks of tenants change from step to step. If each evicted what the other has not used yet, both would
    encode for ever.
    """
    images = KeptImages(set(), set())
    for seq in candidates:
        ahead = islice(seq.spans, seq.next_span, None)
        keys = images.of_running if seq.is_running else images.of_waiting
        keys.update(takewhile(encoder.has, (span.key for span in ahead)))
    return images


def missing_items(
    seq: ScheduledRequest, candidates: Iterable[ScheduledRequest], pool: BlockPool, encoder: EncoderScheduler
) -> tuple[MediaItem, ...]:
    """Images of a waiting request that will be encoded soon. Others, decoded now, would be dropped again."""
    ahead = ((other, index) for other in candidates for index in range(other.next_span, len(other.spans)))
    keys = {item.key for item in encoder.prefetch(ahead)}
    if all(span.key not in keys for span in seq.spans):
        return ()
    num_blocks = len(pool.find(seq.hashes, seq.num_tokens))
    num_blocks += pool.count_offloaded(seq.hashes, seq.num_tokens, num_blocks)
    cached_end = num_blocks * pool.block_size
    pairs = zip(seq.spans, seq.request.prompt.items, strict=True)
    return tuple(item for span, item in pairs if span.pinned_until > cached_end and span.key in keys)


def deadlocked(
    running: Sequence[ScheduledRequest], windows: Iterable[ScheduledWindow], encoder: EncoderScheduler
) -> list[ScheduledRequest]:
    """Running requests that pin embeddings and lack cache space, by arrival; empty if fewer than two do.

    Each may wait for what another one pins. One alone waits for requests that go on, and those end.
    """
    holding = [seq for seq in running if seq.pins and seq.blocks_cache]
    if len(holding) < 2:
        return []
    moving = {window.request_id for window in windows}
    stuck = [seq for seq in holding if seq.request_id not in moving and encoder.lacks_cache_space(seq)]
    return stuck if len(stuck) > 1 else []
