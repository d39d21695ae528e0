"""Who goes first: in the queues, to the encoder, and when requests stand in each other's way. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many

from saccade.scheduler.encoder_scheduler import EncoderScheduler
from saccade.scheduler.kv_cache import BlockPool
from saccade.scheduler.request import ScheduledRequest
from saccade.types import MediaItem, ScheduledWindow


def arrival(seq: ScheduledRequest) -> int:
    return seq.order


def spans_ahead(candidates: Iterable[ScheduledRequest], pool: BlockPool) -> Iterator[tuple[ScheduledRequest, int]]:
    """Spans that are still needed, in the order in which they should be encoded.

    In order of arrival: a later request that already runs must not keep taking the room an earlier one waits for.
    Unless the earlier one waits for just that request, which holds on to room until it has gone on.
    """
    wanting = [seq for seq in candidates if seq.next_span < len(seq.spans)]
    for seq in sorted(wanting, key=lambda seq: (not seq.blocks_cache, seq.order)):
        for index in range(seq.next_span, len(seq.spans)):
            if seq.is_running or not pool.has_prefix(seq.chain, seq.spans[index].pinned_until, seq.num_tokens):
                yield seq, index


def missing_items(
    seq: ScheduledRequest, candidates: Iterable[ScheduledRequest], pool: BlockPool, encoder_scheduler: EncoderScheduler
) -> tuple[MediaItem, ...]:
    """Pictures that a request which waits will want decoded, as things stand and as far as it is their turn soon.

    Others would be forgotten with the next step, and decoded again.
    """
    soon = encoder_scheduler.prefetch(
        (other, index) for other in candidates for index in range(other.next_span, len(other.spans))
    )
    keys = {item.key for item in soon}
    if all(span.key not in keys for span in seq.spans):
        return ()
    found = len(pool.find(seq.chain, seq.num_tokens)) * pool.block_size
    pairs = zip(seq.spans, seq.request.prompt.items, strict=True)
    return tuple(item for span, item in pairs if span.pinned_until > found and span.key in keys)


def deadlock_victim(
    running: Many[ScheduledRequest], windows: Iterable[ScheduledWindow], encoder_scheduler: EncoderScheduler
) -> ScheduledRequest | None:
    """Of running requests that hold embeddings and stand still for lack of room, the last, where there are several.

    Each may wait for what another one holds. One alone waits for requests that go on, and those end.
    """
    holding = [seq for seq in running if seq.held and seq.blocks_cache]
    if len(holding) < 2:
        return None
    served = {work.request_id for work in windows}
    stuck = [seq for seq in holding if seq.request_id not in served and encoder_scheduler.is_short_of_room(seq)]
    return stuck[-1] if len(stuck) > 1 else None
