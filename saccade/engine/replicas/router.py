"""Which replica a submission goes to: cached prefixes and embeddings against queued work. No clock, no I/O.

Everything is counted in prompt tokens of work. For each replica that is alive:

    own work    tokens after the longest known prefix + embeddings to encode + tokens to generate
    queued      the own work of its open submissions; prefill and encoding until their first token
    score       own work + `QUEUE_WEIGHT` * queued; the lowest wins

Own work delays this submission and all later ones, queued work only this one, so it counts half. A replica
whose queue exceeds `LOAD_FACTOR` times the mean, plus `LOAD_SLACK`, is not chosen whatever it has cached.

What a replica has cached is known from its reports. What it was just sent is expected to be cached soon: a
burst of requests with one image goes to one replica.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from saccade.options.engine import SchedulerConfig
from saccade.scheduler.block_hashes import BlockHashes
from saccade.scheduler.cache_log import CacheChanges, entry_of
from saccade.scheduler.tenant_share import EMBEDDING_COST
from saccade.types.prompt import Span
from saccade.types.request import Request

QUEUE_WEIGHT = 0.5
LOAD_FACTOR = 1.25
LOAD_SLACK = 8192  # tokens of work: with less than this queued, a cache hit is worth the wait
MAX_ENTRIES = 1 << 16  # known of one replica; beyond that the oldest are forgotten
_MAX_BLOCKS = 512  # of a prompt, from its beginning: more are not hashed here, which takes about 1 us each
_USUAL_OUTPUT = 128  # tokens that a request generates, where max_tokens does not say fewer


class ImageDemand(NamedTuple):
    entry: bytes
    end: int  # a known prefix up to here needs no embeddings
    work: int


class PromptDemand(NamedTuple):
    num_tokens: int
    block_size: int
    blocks: tuple[bytes, ...]  # entries of its full blocks
    images: tuple[ImageDemand, ...]  # each once

    def work_on(self, replica: ReplicaState) -> int:
        prefix = 0  # tokens
        for entry in self.blocks:
            if not replica.knows(entry):
                break
            prefix += self.block_size
        work = self.num_tokens - prefix
        for image in self.images:
            if image.end > prefix and not replica.knows(image.entry):
                work += image.work
        return work

    @property
    def entries(self) -> tuple[bytes, ...]:
        return self.blocks + tuple([image.entry for image in self.images])


class CallDemand(NamedTuple):
    """What a submission asks for."""

    prompts: tuple[PromptDemand, ...]
    num_requests: int
    num_outputs: int  # tokens, as far as can be guessed


def demand_of(requests: Sequence[Request], limits: SchedulerConfig) -> CallDemand:
    """Blocks are hashed as the scheduler hashes them."""
    prompts = {id(request.prompt): request for request in requests}
    outputs = sum(min(request.max_tokens, _USUAL_OUTPUT) for request in requests)
    return CallDemand(
        tuple(_prompt_demand(request, limits) for request in prompts.values()), len(requests), outputs
    )


def _prompt_demand(request: Request, limits: SchedulerConfig) -> PromptDemand:
    prompt = request.prompt
    finds = limits.enable_prefix_caching and not request.params.needs_prompt_rows
    # The last token is always computed, as in `BlockPool.find`.
    num_blocks = min((len(prompt) - 1) // limits.block_size, _MAX_BLOCKS)
    hashes = BlockHashes(prompt.identity, prompt.salt, limits.block_size, ())
    digests = hashes.all_digests(num_blocks) if finds else []
    spans = {span.key: span for span in prompt.spans}  # of an image that comes twice, the last
    return PromptDemand(
        num_tokens=len(prompt),
        block_size=limits.block_size,
        blocks=tuple([entry_of(digest) for digest in digests]),
        images=tuple(_image_demand(span) for span in spans.values()),
    )


def _image_demand(span: Span) -> ImageDemand:
    return ImageDemand(entry_of(span.key), span.pinned_until, int(EMBEDDING_COST * span.encode_cost))


@dataclass(slots=True, eq=False)
class RoutedCall:
    """A submission on a replica, from its routing to its end."""

    replica: int
    num_requests: int
    prefill: int  # work until its first token
    decode: int
    entries: tuple[bytes, ...]  # that its prefill will cache
    is_prefilling: bool = True


@dataclass(slots=True, eq=False)
class ReplicaState:
    """What is known of one replica."""

    queued_work: int = 0
    num_requests: int = 0  # open
    _held: dict[bytes, None] = field(default_factory=dict)  # as reported; the oldest first
    _expected: Counter[bytes] = field(default_factory=Counter)  # by submissions without a first token

    def knows(self, entry: bytes) -> bool:
        return entry in self._held or entry in self._expected

    def apply(self, changes: CacheChanges) -> None:
        if changes.is_reset:
            self._held.clear()
        for entry in changes.removed:
            self._held.pop(entry, None)
        self._held.update(dict.fromkeys(changes.added))
        while len(self._held) > MAX_ENTRIES:
            del self._held[next(iter(self._held))]

    def forget(self) -> None:
        self._held.clear()

    def add(self, placement: RoutedCall) -> None:
        self.num_requests += placement.num_requests
        self.queued_work += placement.prefill + placement.decode
        self._expected.update(placement.entries)

    def end_prefill(self, placement: RoutedCall) -> None:
        self.queued_work -= placement.prefill
        for entry in placement.entries:
            self._expected[entry] -= 1
            if not self._expected[entry]:
                del self._expected[entry]

    def remove(self, placement: RoutedCall) -> None:
        self.num_requests -= placement.num_requests
        self.queued_work -= placement.decode

    def check(self, placements: Sequence[RoutedCall]) -> None:
        """The conservation laws: all that is counted belongs to an open submission."""
        prefills = [placement for placement in placements if placement.is_prefilling]
        work = sum(p.decode for p in placements) + sum(p.prefill for p in prefills)
        expected = Counter(entry for placement in prefills for entry in placement.entries)
        assert self.queued_work == work, "queued work miscounted"
        assert self.num_requests == sum(p.num_requests for p in placements), "open requests miscounted"
        assert self._expected == expected, "expected entries miscounted"
        assert len(self._held) <= MAX_ENTRIES, "too many entries are known"


class Router:
    def __init__(self, num_replicas: int) -> None:
        self.replicas = tuple(ReplicaState() for _ in range(num_replicas))
        self._next = 0  # goes first where all else is equal

    def place(self, demand: CallDemand, live: Sequence[int], max_requests: float = math.inf) -> RoutedCall:
        """On one of the `live` replicas, of which there must be one.

        `max_requests` may be open in a replica; one that is full is taken only where all are.
        """
        fits = [index for index in live if self._fits(index, demand, max_requests)] or live
        loads = {index: self.replicas[index].queued_work for index in fits}
        bound = LOAD_FACTOR * sum(loads.values()) / len(loads) + LOAD_SLACK
        works = {index: self._work_on(index, demand) for index in fits if loads[index] <= bound}

        def rank(index: int) -> tuple[float, int, int]:
            turn = (index - self._next) % len(self.replicas)
            return works[index] + QUEUE_WEIGHT * loads[index], loads[index], turn

        best = min(works, key=rank)
        self._next = best + 1
        entries = tuple(entry for prompt in demand.prompts for entry in prompt.entries)
        placement = RoutedCall(best, demand.num_requests, works[best], demand.num_outputs, entries)
        self.replicas[best].add(placement)
        return placement

    def _fits(self, index: int, demand: CallDemand, max_requests: float) -> bool:
        return self.replicas[index].num_requests + demand.num_requests <= max_requests

    def _work_on(self, index: int, demand: CallDemand) -> int:
        return sum(prompt.work_on(self.replicas[index]) for prompt in demand.prompts)

    def end_prefill(self, placement: RoutedCall) -> None:
        if placement.is_prefilling:
            placement.is_prefilling = False
            self.replicas[placement.replica].end_prefill(placement)

    def remove(self, placement: RoutedCall) -> None:
        self.end_prefill(placement)
        self.replicas[placement.replica].remove(placement)

    def check(self, placements: Iterable[RoutedCall]) -> None:
        placements = list(placements)
        for index, replica in enumerate(self.replicas):
            replica.check([placement for placement in placements if placement.replica == index])
