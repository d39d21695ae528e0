"""The scheduler's state of one open request: what it has computed, and the blocks and pins that it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from saccade.errors import RequestError
from saccade.scheduler.block_hashes import BlockHashes
from saccade.scheduler.encoder_cache import EncoderCache, Holder
from saccade.scheduler.kv_cache import BlockPool, CachedPrefix
from saccade.scheduler.tenant_share import TenantShare
from saccade.types.attention_reach import AttentionReach
from saccade.types.events import FinishReason, TokenEvent, Usage
from saccade.types.media import Key
from saccade.types.prompt import Span
from saccade.types.request import Request
from saccade.types.step import MediaTimes, Sample


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    request: Request
    order: int  # of arrival
    arrived: float
    block_size: int
    share: TenantShare  # of its tenant
    keeps_images_whole: bool = False  # if a window can hold them

    # Copies of what every step reads, so that decode steps follow no chain of attributes.
    request_id: str = field(init=False)
    place: tuple[int, int] = field(init=False)  # among its tenant's requests, also after a preemption
    spans: tuple[Span, ...] = field(init=False)
    images_end: int = field(init=False)  # positions from here on need no embeddings
    has_images_to_decode_first: bool = field(init=False)
    samples_on_device: bool = field(init=False)  # not by the host
    stop_ids: frozenset[int] = field(init=False)
    hashes: BlockHashes = field(init=False)
    wholes: tuple[tuple[int, int], ...] = field(init=False)  # ranges of positions that no window cuts

    output: list[int] = field(default_factory=list)
    num_tokens: int = field(init=False)  # prompt and output
    max_total_tokens: int = field(init=False)  # it ends with so many
    is_running: bool = False  # the runner knows it; a waiting one holds neither blocks nor pins

    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    unread: range = range(0)  # of `blocks`: given back, since no token to come reads them
    num_cached_blocks: int = 0  # full blocks that the prefix cache has
    next_span: int = 0  # the first span that positions still to be computed read
    pins: set[int] = field(default_factory=set)  # spans whose embeddings it holds

    first_scheduled: float | None = None
    first_token: float | None = None
    cached_tokens: int = 0
    num_preemptions: int = 0
    encoded: list[Key] = field(default_factory=list)  # images that were encoded for this request
    media: list[Callable[[], MediaTimes]] = field(default_factory=list)  # how long each took
    num_ahead: int = 0  # of them, before the first step

    def __post_init__(self) -> None:
        prompt = self.request.prompt
        self.request_id = self.request.request_id
        self.place = (self.request.priority, self.order)
        self.spans = prompt.spans
        self.has_images_to_decode_first = any(item.is_decoded_first for item in prompt.items)
        self.images_end = prompt.spans[-1].pinned_until if prompt.spans else 0
        self.samples_on_device = self.request.params.samples_on_device
        self.stop_ids = self.request.eos_token_ids.union(self.request.params.stop_token_ids)
        self.hashes = BlockHashes(
            prompt.identity,
            prompt.salt,
            self.block_size,
            self.output,
            prompt.token_ids,
            may_find=not self.request.params.needs_prompt_rows,
        )
        images = tuple((span.start, span.end) for span in prompt.spans) if self.keeps_images_whole else ()
        self.wholes = prompt.wholes or images
        self.num_tokens = len(prompt)
        self.max_total_tokens = len(prompt) + self.request.max_tokens

    @property
    def is_decoding(self) -> bool:
        return self.num_computed == self.num_tokens - 1

    @property
    def recompute_cost(self) -> int:
        """What it can cost to come as far again: not the images that it still waits for."""
        spans = enumerate(self.spans)
        encoded = [span for index, span in spans if span.start < self.num_computed or index in self.pins]
        return self.num_computed + sum([span.encode_cost for span in encoded])

    @property
    def has_images_ahead(self) -> bool:
        return self.next_span < len(self.spans)

    @property
    def waits_for_image(self) -> bool:
        """Its next token is one of an image that is not pinned for it."""
        if not self.has_images_ahead or self.next_span in self.pins:
            return False
        return self.num_computed >= self.spans[self.next_span].start

    @property
    def blocks_cache(self) -> bool:
        """It pins embeddings until later tokens are computed: requests that need their space wait for it."""
        return any(self.spans[index].is_cross_attended for index in self.pins)

    @property
    def next_end(self) -> int:
        """The end of the shortest window that it can compute next."""
        for first, last in self.request.prompt.wholes:
            if first <= self.num_computed < last:
                return last
        return self.num_computed + 1

    def uncut(self, start: int, end: int) -> int:
        """The end of a window [start, end) that cuts no range of `wholes`: before it, or where it ends.

        A range whose positions see each other is computed whatever a step's budget says. An image is cut
        where even a window of its own is too small.
        """
        for first, last in self.wholes:
            if first < end < last:
                if start < first:
                    return first
                return last if self.request.prompt.wholes else end
        return end

    def before_whole(self, start: int, end: int) -> int:
        """The end of a window that an image not yet there stops at `end`: no range may be cut for it."""
        for first, last in self.request.prompt.wholes:
            if first < end < last:
                return max(start, first)
        return end

    def holder(self, index: int) -> Holder:
        return self.request_id, index

    def count_media(self, key: Key, times: Callable[[], MediaTimes]) -> None:
        """`times` may wait for a device that still works on the image."""
        self.encoded.append(key)
        self.media.append(times)
        self.num_ahead += self.first_scheduled is None

    def last_event(
        self, reason: FinishReason, now: float, sample: Sample | None, error: RequestError | None
    ) -> TokenEvent:
        event = TokenEvent(self.request_id, None, None, reason, error=error, usage=self._usage(now))
        if sample is None:
            return event
        event = event._replace(logprobs=sample.logprobs, prompt_logprobs=sample.prompt_logprobs)
        if sample.pooled is not None:
            return event._replace(pooled=sample.pooled)
        token = sample.token_id
        is_stop = reason == "stop" and token in self.stop_ids
        return event._replace(token_id=token, stop_token_id=token if is_stop else None)

    def _usage(self, now: float) -> Usage:
        media = [times() for times in self.media]
        return Usage(
            cached_tokens=self.cached_tokens,
            num_preemptions=self.num_preemptions,
            arrived=self.arrived,
            first_scheduled=self.first_scheduled,
            first_token=self.first_token,
            finished=now,
            decode_ms=sum(times.decode_ms for times in media),
            encode_ms=sum(times.encode_ms for times in media),
            ahead_ms=sum(sum(times) for times in media[: self.num_ahead]),
            encoded=tuple(self.encoded),
        )

    def has_blocks(self, pool: BlockPool, end: int) -> bool:
        """Whether a running request has blocks up to `end` or can be given them."""
        return pool.can_allocate(pool.blocks_for(end) - len(self.blocks))

    def attach_cached_blocks(self, pool: BlockPool, prefix: CachedPrefix) -> None:
        """Cached blocks that follow a request's own become its own, computed already."""
        pool.share(prefix.blocks)
        self.blocks += prefix.blocks
        if prefix.num_restored:
            self.blocks += pool.restore(self.hashes, len(self.blocks), prefix.num_restored)
        self.num_cached_blocks = len(self.blocks)
        self.num_computed = len(self.blocks) * pool.block_size

    @property
    def held_blocks(self) -> list[int]:
        return self.blocks[: self.unread.start] + self.blocks[self.unread.stop :]

    def give_back_unread(self, pool: BlockPool, reach: AttentionReach) -> None:
        """Give back the blocks that no token to come reads. Their numbers stay in the table."""
        first = pool.blocks_for(len(self.request.prompt)) if reach.has_prompt else 0
        end = (self.num_computed - reach.tokens + 1) // pool.block_size
        begin = max(first, self.unread.stop)
        if end > begin:
            pool.release(self.blocks[begin:end])
            self.unread = range(first, end)

    def rematch_prefix(self, pool: BlockPool) -> CachedPrefix:
        """Attach blocks that another request with the same prefix has filled since this one was admitted.

        So two requests that prefill the same image side by side compute it once. A block that was filled in
        part is exchanged for the full one, and the block table must be sent anew.
        """
        first = self.num_computed // pool.block_size
        prefix = pool.find_prefix(self.hashes, self.num_tokens, first)
        if not pool.can_allocate(prefix.num_restored, shared=prefix.blocks):
            prefix = CachedPrefix(prefix.blocks)  # it computes, and may preempt others
        if not prefix.num_blocks:
            return prefix
        pool.release(self.blocks[first:])
        del self.blocks[first:]
        num_before = self.num_computed
        self.attach_cached_blocks(pool, prefix)
        pool.count_lookup(0, self.num_computed - num_before)
        if not self.num_preemptions:
            self.cached_tokens += self.num_computed - num_before
        return prefix

    def cache_blocks(self, pool: BlockPool, end: int) -> None:
        """Offer the blocks that a window up to `end` fills to requests that begin alike."""
        num_full = end // pool.block_size
        pool.cache_blocks(self.blocks[self.num_cached_blocks : num_full], self.hashes, self.num_cached_blocks)
        self.num_cached_blocks = num_full

    def unpin_computed(self, cache: EncoderCache) -> None:
        """Give back the embeddings that no position to come needs."""
        for index in range(self.next_span, len(self.spans)):
            if self.spans[index].pinned_until > self.num_computed:
                return
            if index in self.pins:
                self.pins.remove(index)
                cache.release(self.holder(index))
            self.next_span = index + 1

    def release(self, pool: BlockPool, cache: EncoderCache) -> None:
        """Give back all blocks and pins; what was computed is lost, apart from what the caches keep."""
        for index in self.pins:
            cache.release(self.holder(index))
        pool.release(self.held_blocks)
        self.pins.clear()
        self.blocks = []
        self.unread = range(0)
        self.num_computed = self.num_cached_blocks = self.next_span = 0
        self.is_running = False

    def check(self) -> None:
        """Of a running request: it has the blocks it computed, and pins nothing that it has computed past."""
        assert self.num_computed <= len(self.blocks) * self.block_size, "computed without a block"
        is_read = all(self.spans[index].pinned_until > self.num_computed for index in self.pins)
        assert is_read, "embeddings are pinned that no window will read"


OpenRequests = Mapping[str, ScheduledRequest]
