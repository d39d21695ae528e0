"""How the tokens of one step are shared: decode first, then prompts of text, then prompts with images.

Requests are served in the order of the fair queue, so the later kinds get a smaller purse instead: each kind
leaves what the kinds before it want, and images keep a share whatever comes. A tenant's images leave tokens
for its own text only; between tenants their shares decide.

Prefill that does not end its prompt may be fused with the next decode step, and then a step holds more tokens
of it. Where one prompt ends, nothing is fused:

    fused       | 384 of 1,500 |  384  |  384  | 332 | the last 16 |
    not fused   | 128 of 1,500 |  128  |  128  | 128 | 128 | ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple

from saccade.options.engine import SchedulerConfig
from saccade.scheduler.encoder_scheduler import EncoderScheduler
from saccade.scheduler.latency_model import EncoderLoad
from saccade.scheduler.request import ScheduledRequest
from saccade.scheduler.step_policy import IMAGE_SHARE, StepDemand, StepLimits
from saccade.scheduler.tenant_share import LAST, Rank
from saccade.types.media import Key
from saccade.types.step import Admission, ScheduledWindow

_MANY_EMBEDDINGS = 1 << 16  # that are queued; more are not counted
_LAST_TOKENS = 16  # of a prompt that did not end where it might have been fused: fewer take as long


class StepBudget:
    """Tokens that are left in a step, by the kind of window that asks."""

    def __init__(self, limits: StepLimits, demand: StepDemand) -> None:
        self.total = limits.tokens
        self.num_prefills = 0  # so far
        self._max_prefills = limits.tokens if limits.max_prefills is None else limits.max_prefills
        spare = max(limits.tokens - demand.decoding, 1)
        self._ending = spare  # prefill tokens in a step in which a prompt ends
        self._going_on = spare  # where none does
        if limits.prefill_tokens is not None:
            # Every prompt that can end in this step does.
            ends_text = 0 < sum(demand.text_tokens.values()) <= limits.prefill_tokens
            self._ending = self._going_on = min(spare, limits.prefill_tokens)
            if limits.mixed_tokens and not ends_text:
                self._going_on = min(spare, limits.mixed_tokens)
        self._prefill = max(self._ending, self._going_on)
        self._all_prefill = self._prefill
        self._text = demand.text_tokens if limits.text_first else {}
        self._images: Counter[str] = Counter()  # tokens of prompts with images so far, by tenant
        if limits.prefill_tokens is not None:
            self.total = min(self.total, demand.decoding + self._prefill)

    def left_for(self, seq: ScheduledRequest, start: int) -> int:
        """Tokens of a window that begins there."""
        if seq.is_decoding:
            return self.total if self._ending >= 0 else 0  # one token is an end too: not beside fused prefill
        if self.num_prefills >= self._max_prefills:
            return 0
        length = seq.num_tokens - start  # to the end of its prompt
        tokens = min(self.total, self._prefill)
        if seq.has_images_ahead:
            tokens = min(tokens, self._left_for_images(seq.share.name))
        if length <= min(tokens, self._ending):
            return length
        tokens = min(tokens, self._going_on)
        if tokens <= self._ending:
            return tokens
        return min(tokens, max(length - _LAST_TOKENS, 0))

    def _left_for_images(self, tenant: str) -> int:
        text = self._text.get(tenant)
        if not text:
            return self._prefill
        share = max(self._all_prefill - text, self._all_prefill // IMAGE_SHARE, 1)
        return share - self._images[tenant]

    def take(self, seq: ScheduledRequest, start: int, end: int) -> None:
        self.total -= end - start
        if not seq.is_decoding:
            self.num_prefills += 1
            self._prefill -= end - start
            self._ending -= end - start
            self._going_on -= end - start
            if seq.has_images_ahead:
                self._images[seq.share.name] += end - start
        if end == seq.num_tokens:
            self._prefill = self._going_on = self._ending


def are_enough(requests: Sequence[ScheduledRequest], config: SchedulerConfig) -> bool:
    """Whether a step of these requests is full, unless much of them is found in the prefix cache."""
    max_prefills = config.latency.max_prefills if config.latency else None
    max_requests = min(filter(None, (max_prefills, config.max_num_seqs)))
    if len(requests) >= max_requests:
        return True
    return sum(seq.num_tokens for seq in requests) >= config.max_num_batched_tokens


class _Backlog:
    """What requests without a first token wait for. Those that find no seat do not make steps longer."""

    def __init__(self, encoder: EncoderScheduler, seats: int) -> None:
        self.requests = 0
        self.prompt_tokens = 0
        self.images = EncoderLoad()  # that no encoder works on, each once
        self._encoder = encoder
        self._seats = seats
        self._keys: set[Key] = set()

    def add(self, seq: ScheduledRequest) -> None:
        if not seq.is_running:
            self._seats -= 1
            if self._seats < 0:
                return
        self.requests += 1
        self.prompt_tokens += seq.num_tokens - seq.num_computed
        for span in islice(seq.spans, seq.next_span, None):
            if self.images.embeddings > _MANY_EMBEDDINGS:
                return
            if span.key not in self._keys and not self._encoder.has(span.key):
                self._keys.add(span.key)
                self.images = self.images.plus(EncoderLoad(span.encode_cost, 1))


def demand_of(
    requests: Iterable[ScheduledRequest],
    step: int,
    encoder: EncoderScheduler,
    can_fuse: bool,
    latency_bounded: bool,
    seats: int,
) -> StepDemand:
    """`seats`: requests that may still start to run."""
    decoding = text_decoding = prompts = work = 0
    backlog = _Backlog(encoder, seats)
    text_tokens: Counter[str] = Counter()
    ranks: dict[str, Rank] = {}  # of tenants with text
    first = LAST  # of tenants that wait for the encoder
    for seq in requests:
        if seq.is_decoding:
            decoding += 1
            text_decoding += not seq.spans
            continue
        backlog.add(seq)
        if not seq.has_images_ahead:
            prompts += 1
            text_tokens[seq.share.name] += seq.num_tokens - seq.num_computed
            ranks[seq.share.name] = seq.share.rank
        elif not seq.waits_for_image:
            prompts += 1
        else:
            work = work or seq.spans[seq.next_span].encode_cost
            first = min(first, seq.share.rank)
    before_images = sum([text_tokens[name] for name, rank in ranks.items() if rank <= first])
    return StepDemand(
        step=step,
        decoding=decoding,
        text_decoding=text_decoding,
        waiting=backlog.requests,
        prompts=prompts,
        text_tokens=text_tokens,
        text_before_images=before_images,
        prompt_tokens=backlog.prompt_tokens,
        waiting_work=work,
        queued=backlog.images,
        in_flight=encoder.own_load,
        can_fuse=can_fuse,
        latency_bounded=latency_bounded,
        has_workers=encoder.has_workers,
    )


class StepOutcome(NamedTuple):
    """What planning one step showed that the next plan needs to know."""

    needs_sync: bool = False  # only a preemption helps, and none may happen beside a running step
    lacks_blocks: bool = False  # the waiting request that goes next found too few


@dataclass(slots=True)
class StepBuilder:
    """What a step has so far, and what it may still take."""

    now: float
    budget: StepBudget
    lacks_blocks: bool  # the waiting request that goes next; from the step before until this one is filled
    not_ready: frozenset[str] = frozenset()  # requests that sit this step out: their grammar is being made
    async_decode: frozenset[str] = frozenset()  # requests whose decode runs already, in a step planned before
    skip_decode: bool = False  # decoding requests sit this step out
    decode: list[ScheduledWindow] = field(default_factory=list)
    prefill: list[ScheduledWindow] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    started: set[str] = field(default_factory=set)  # requests that the runner hears of in this step
    has_preempted: bool = False
    is_short: bool = False  # of blocks that only a preemption can free; none may happen beside a running step
    needs_sync: bool = False  # a request should give its seat or its cache space to another: in the next step

    @property
    def has_windows(self) -> bool:
        return any((self.decode, self.prefill))

    @property
    def windows(self) -> Iterator[ScheduledWindow]:
        return chain(self.decode, self.prefill)

    @property
    def outcome(self) -> StepOutcome:
        return StepOutcome(self.is_short or self.needs_sync, self.lacks_blocks)
