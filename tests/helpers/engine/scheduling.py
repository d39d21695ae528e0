"""Builders and a fake runner for the scheduler's tests: prompts made of lengths and picture names, KV of records."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from saccade.errors import RequestError
from saccade.options.engine import SchedulerConfig
from saccade.processor.families.base import cross_attended
from saccade.sampling_params import SamplingParams
from saccade.scheduler import Scheduler
from saccade.scheduler.block_hashes import text_records
from saccade.types.events import TokenEvent
from saccade.types.latency import StepTime
from saccade.types.media import Geometry, Grid, Header, Key, MediaItem, Size
from saccade.types.prompt import Prompt, Span
from saccade.types.request import NO_TENANT, Request, Tenant
from saccade.types.step import MediaTimes, Sample, ScheduledWindow, StepPlan, StepResult

BLOCK = 4  # tokens per block in these tests, unless they say otherwise
EOS = 2
PLACEHOLDER = 9


class FakeImage(NamedTuple):
    name: str
    tokens: int
    slots: int | None = None  # None: one per token
    is_cross_attended: bool = False  # tokens behind it read it too, up to the next such picture; neighbours go together
    made: int | None = None  # embeddings the tower makes of it, where fewer stay


Part = int | list[int] | FakeImage  # so many tokens of text, these tokens, or a picture


def key_of(name: str, salt: bytes = b"") -> Key:
    return hashlib.sha256(salt + name.encode()).digest()


def make_item(image: FakeImage, salt: bytes = b"") -> MediaItem:
    size = Size(image.tokens, 1)
    geometry = Geometry(size, Grid(1, 1, image.tokens), image.tokens, image.slots or image.tokens)
    return MediaItem(key_of(image.name, salt), "image", b"", Header("png", size, 1, 1, "RGB"), geometry)


def make_prompt(parts: Iterable[Part], salt: bytes = b"", first_token: int = 100) -> Prompt:
    """Text written as a length gets increasing token ids, so two prompts of the same parts begin alike."""
    tokens: list[int] = []
    records: list[bytes] = []
    spans: list[Span] = []
    items: dict[Key, MediaItem] = {}
    for part in parts:
        start = len(tokens)
        if isinstance(part, FakeImage):
            item = make_item(part, salt)
            items.setdefault(item.key, item)
            is_embed = (False,) * part.tokens if part.is_cross_attended else None
            spans.append(Span(start, part.tokens, item.key, item.geometry.slots, is_embed, encoder_tokens=part.made))
            tokens += [PLACEHOLDER] * part.tokens
            records += [item.key + offset.to_bytes(8, "little") for offset in range(part.tokens)]
        else:
            text = part if isinstance(part, list) else [first_token + start + i for i in range(part)]
            tokens += text
            records += [text_records([token]) for token in text]
    return Prompt(
        token_ids=tokens,
        spans=cross_attended(spans)
        if any(isinstance(p, FakeImage) and p.is_cross_attended for p in parts)
        else tuple(spans),
        items=tuple(items[span.key] for span in spans),
        positions=np.zeros((1, len(tokens)), np.int32),
        next_position=len(tokens),
        identity=b"".join(records),
        salt=salt,
    )


def make_request(
    request_id: str,
    *parts: Part,
    max_tokens: int = 3,
    salt: bytes = b"",
    first_token: int = 100,
    tenant: Tenant = NO_TENANT,
    priority: int = 0,
    **params: Any,
) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    prompt = make_prompt(parts, salt, first_token)
    eos = frozenset() if sampling.ignore_eos else frozenset({EOS})
    return Request(request_id, prompt, sampling, max_tokens, eos, seed=0, tenant=tenant, priority=priority)


def make_config(**changes: Any) -> SchedulerConfig:
    values: dict[str, Any] = {
        "max_model_len": 10_000,
        "max_num_batched_tokens": 1_000,
        "max_num_seqs": 8,
        "block_size": BLOCK,
        "num_blocks": 4_000,
        "encoder_budget": 1_000,
        "encoder_cache_slots": 1_000,
    }
    is_bounded = changes.pop("is_bounded", False)  # every step keeps to a time, which is never reached here
    if is_bounded:
        changes.setdefault("step_time", StepTime(1e9, 1e9, 1e9))
    return SchedulerConfig(**{**values, **changes})


class FakeRunner:
    """Does what a plan says and checks that it makes sense.

    KV is one record per slot. Whatever a window reads must be the record of its own request at that position: a stale,
    shared or aliased block shows as a difference. Encoding takes `layers` layers; names in `broken` cannot be had.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        broken: Iterable[str] = (),
        layers: int = 4,
        next_token: Callable[[str, int], int] = lambda request_id, position: 1_000 + position,
    ) -> None:
        self.block_size = config.block_size
        self.reach = config.reach
        self.kv: dict[int, bytes] = {}
        self.host: dict[int, list[bytes]] = {}  # records of a block, by host block
        self.requests: dict[str, Request] = {}
        self.records: dict[str, list[bytes]] = {}
        self.blocks: dict[str, list[int]] = {}
        self.embeddings: set[Key] = set()
        self.flying: dict[Key, int] = {}  # layers still to run
        self.broken = {key_of(name) for name in broken}
        self.layers = layers
        self.next_token = next_token
        self.encoded: list[Key] = []  # in order, repeats included
        self.dropped: list[Key] = []
        self.spoiled: set[str] = set()  # read something wrong in the last step because a picture failed
        self.has_broken = False  # a step broke: the next plan may name what is not here any more

    def reset(self) -> None:
        """A step broke: requests and flights are gone, KV holds rubbish, embeddings wait for the scheduler's word."""
        for table in (self.requests, self.records, self.blocks, self.flying):
            table.clear()
        self.kv = dict.fromkeys(self.kv, b"")
        self.host.clear()
        self.has_broken = True

    def release(self) -> None:
        """Nothing is decoded here before its turn."""

    def execute(self, plan: StepPlan) -> StepResult:
        self._update_state(plan)
        encoded, failed = self._encode(plan)
        cut = [(work, self._valid_end(work, failed)) for work in plan.windows]
        for work, end in cut:
            for position in range(work.start, end):
                self.kv[self._slot(work.request_id, position)] = self.records[work.request_id][position]
        self.spoiled = {work.request_id for work, end in cut if end < work.end or not self._reads_right(work)}
        assert failed or not self.spoiled, f"{self.spoiled} read KV that is not theirs"
        samples = {work.request_id: self._sample(work) for work, end in cut if work.samples and end == work.end}
        return StepResult(samples, encoded, failed)

    def _copy(self, plan: StepPlan) -> None:
        """As on a device: all copies out read what was there before, and two copies never meet."""
        for copies in (plan.offloaded, plan.restored):
            assert len({copy.block for copy in copies}) == len(copies), "a block is copied twice"
        assert len({copy.host_block for copy in plan.offloaded}) == len(plan.offloaded), "two copies to one host block"
        for block, host_block in plan.offloaded:
            self.host[host_block] = [self.kv.get(slot, b"") for slot in self._slots(block)]
        for block, host_block in plan.restored:
            self.kv.update(zip(self._slots(block), self.host[host_block], strict=True))

    def _slots(self, block: int) -> range:
        return range(block * self.block_size, (block + 1) * self.block_size)

    def _update_state(self, plan: StepPlan) -> None:
        self._copy(plan)
        for request_id in plan.freed_requests:
            assert request_id in self.requests or self.has_broken, "told to forget a request it does not know"
            for table in (self.requests, self.records, self.blocks):
                table.pop(request_id, None)
        for key in plan.evicted:
            is_known = key in self.embeddings or key in self.broken or self.has_broken
            assert is_known, "told to drop what is not there"
            self.embeddings.discard(key)
            self.dropped.append(key)
        self.has_broken = False
        for admission in plan.admitted:
            request = admission.request
            again = self.requests.get(request.request_id, request)
            assert again is request, "another request under the same id"
            self.requests[request.request_id] = request
            identity = request.prompt.identity
            records = [identity[i : i + 40] for i in range(0, len(identity), 40)]
            self.records[request.request_id] = records + [text_records([token]) for token in admission.output_token_ids]
            self.blocks[request.request_id] = list(admission.block_ids)
        for work in plan.windows:
            self.blocks[work.request_id] += work.new_blocks

    def _encode(self, plan: StepPlan) -> tuple[Mapping[Key, MediaTimes], Mapping[Key, RequestError]]:
        for item in plan.encode:
            assert item.key not in self.flying, "given to the encoder twice"
            self.embeddings.discard(item.key)  # evicted and wanted again within a step: nobody may use the old one
            self.flying[item.key] = self.layers
        for key in self.flying:
            self.flying[key] -= self.layers if plan.encode_layers is None else plan.encode_layers
        landed = [key for key, layers in self.flying.items() if layers <= 0]
        for key in landed:
            del self.flying[key]
        good = [key for key in landed if key not in self.broken]
        self.embeddings.update(good)
        self.encoded += good
        failed = {key: RequestError("this picture cannot be decoded") for key in landed if key in self.broken}
        return {key: MediaTimes(2.0, 3.0) for key in good}, failed

    def _valid_end(self, work: ScheduledWindow, failed: Mapping[Key, RequestError]) -> int:
        end = work.end
        for span in self.requests[work.request_id].prompt.spans:
            if span.start < work.end and span.pinned_until > work.start:
                assert span.key in self.embeddings or span.key in failed, "a window entered a span without embeddings"
                if span.key in failed:
                    end = min(end, max(work.start, span.start))
        return end

    def _reads_right(self, work: ScheduledWindow) -> bool:
        records = self.records[work.request_id]
        return all(self.kv.get(self._slot(work.request_id, i)) == records[i] for i in self._read(work))

    def _read(self, work: ScheduledWindow) -> Iterable[int]:
        if self.reach is None:
            return range(work.end)
        first = max(0, work.start - self.reach.tokens + 1)
        prompt = len(self.requests[work.request_id].prompt) if self.reach.has_prompt else 0
        return chain(range(min(first, prompt)), range(first, work.end))

    def _sample(self, work: ScheduledWindow) -> Sample:
        assert work.end == len(self.records[work.request_id]), "sampled before the last known token"
        token = self.next_token(work.request_id, work.end)
        self.records[work.request_id].append(text_records([token]))
        return Sample(token, None)

    def _slot(self, request_id: str, position: int) -> int:
        block = self.blocks[request_id][position // self.block_size]
        return block * self.block_size + position % self.block_size


class Rig:
    """A scheduler, a fake runner and a clock that counts steps."""

    def __init__(self, broken: Iterable[str] = (), layers: int = 4, **changes: Any) -> None:
        self.config = make_config(**changes)
        self.scheduler = Scheduler(self.config)
        self.runner = FakeRunner(self.config, broken, layers)
        self.now = 0.0
        self.latency_bounded = True
        self.not_ready: frozenset[str] = frozenset()  # requests whose grammar is being made
        self.events: dict[str, list[TokenEvent]] = {}
        self.plans: list[StepPlan] = []

    def add(self, request_id: str, *parts: Part, **how: Any) -> None:
        self.scheduler.add(make_request(request_id, *parts, **how), self.now)

    def step(self) -> StepPlan:
        self.now += 1
        how: dict[str, Any] = {"latency_bounded": self.latency_bounded, "not_ready": self.not_ready}
        plan = self.scheduler.schedule(self.now, **how)
        self.scheduler.check()
        result = self.runner.execute(plan)
        events = self.scheduler.commit(plan, result, self.now + 0.5, 0.5)
        self.scheduler.check()
        ended = {event.request_id for event in events if event.finish_reason == "error"}
        assert self.runner.spoiled <= ended, "a request went on with KV that was never written"
        for event in events:
            self.take(event)
        self.plans.append(plan)
        return plan

    def take(self, event: TokenEvent | None) -> None:
        if event is not None:
            self.events.setdefault(event.request_id, []).append(event)

    def drain(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished():
                return
            self.step()
        raise AssertionError(f"still open after {max_steps} steps: {self.scheduler.stats()}")

    def windows(self, plan: StepPlan) -> dict[str, tuple[int, int]]:
        return {work.request_id: (work.start, work.end) for work in plan.windows}

    def finish_of(self, request_id: str) -> str | None:
        return self.events[request_id][-1].finish_reason

    def tokens_of(self, request_id: str) -> list[int]:
        return [event.token_id for event in self.events[request_id] if event.token_id is not None]


def names(items: Iterable[MediaItem], *known: str) -> list[str]:
    """The names of media items, out of those that a test uses."""
    by_key = {key_of(name): name for name in known}
    return [by_key[item.key] for item in items]


def seen(name: str, slots: int = 8) -> FakeImage:
    return FakeImage(name, 1, slots, is_cross_attended=True)


def unchecked(kind: type[Rig] = Rig, **changes: Any) -> Rig:
    """For long simulations: what is checked after each step elsewhere is not checked here."""
    rig = kind(**{"num_blocks": 600, **changes})
    rig.scheduler.check = lambda: None
    return rig


def steps_to_first_token(rig: Rig, request_id: str, max_steps: int = 2_000) -> int:
    for step in range(1, max_steps):
        rig.step()
        if request_id in rig.events:
            return step
    raise AssertionError(f"{request_id} has no token after {max_steps} steps")
