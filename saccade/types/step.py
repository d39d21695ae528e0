"""A step: what the scheduler decided, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from saccade.errors import RequestError
from saccade.types.media import Key, MediaItem
from saccade.types.request import Request


class StateCheckpoint(NamedTuple):
    """The state of a model's recurrent layers after some tokens of a prompt."""

    num_tokens: int  # that it has seen
    row: int  # of the checkpoints


class ScheduledWindow(NamedTuple):
    """A window [start, end) of one request's tokens to compute in this step. Decode is a window of one."""

    request_id: str
    start: int
    end: int
    new_blocks: tuple[int, ...]  # KV blocks added to the request's table for this window, in order
    samples: bool  # the window reaches the last known token, so the step yields the next one
    checkpoints: tuple[StateCheckpoint, ...] = ()  # recurrent states to save on the way, in order


@dataclass(frozen=True, slots=True, eq=False)
class Admission:
    """A request that enters the runner: newly, again after preemption, or with another table of blocks."""

    request: Request
    output_token_ids: tuple[int, ...]  # tokens generated before a preemption
    block_ids: tuple[int, ...]  # KV blocks computed so far, by itself or from the prefix cache
    state: StateCheckpoint | None = None  # of its recurrent layers after these blocks; None: start empty


class KVCopy(NamedTuple):
    """A KV block to copy between the device and host memory."""

    block: int  # on the device
    host_block: int


PlanKind = Literal["sync", "async_decode", "async_prefill"]
"""How a step was planned.

sync           with the tokens of all earlier steps known
async_decode   before the previous step's tokens were known: one more token for each that samples in it
async_prefill  while such a decode step runs: everything else; nothing in it may wait for the host
"""


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """What the scheduler decided. In the runner's order: copy, free, evict, admit, encode, compute."""

    step: int
    offloaded: tuple[KVCopy, ...] = ()  # to host memory, before anything below overwrites the blocks
    restored: tuple[KVCopy, ...] = ()  # from host memory, after all of those
    decode: tuple[ScheduledWindow, ...] = ()  # the latest token of a request, after its prompt
    prefill: tuple[ScheduledWindow, ...] = ()  # all other windows
    admitted: tuple[Admission, ...] = ()
    freed_requests: tuple[str, ...] = ()  # requests finished, aborted or preempted since the last plan
    evicted: tuple[Key, ...] = ()  # embeddings to drop; each key is named once
    encode: tuple[MediaItem, ...] = ()  # newly given to the encoder; slots are reserved
    encode_layers: int | None = None  # encoder layers to advance in this step; None: until all is encoded
    prefetch: tuple[MediaItem, ...] = ()  # likely next: image decoding may begin
    decode_first: tuple[MediaItem, ...] = ()  # before they are given to the encoder, those needed first first
    unwanted: tuple[Key, ...] = ()  # media of no open request any more: their decoding ends
    kind: PlanKind = "sync"
    fuse_with_next: bool = False  # run the prefill and the next async decode as one mixed batch

    @property
    def windows(self) -> tuple[ScheduledWindow, ...]:
        return self.decode + self.prefill


class Logprobs(NamedTuple):
    """Log probabilities at one position, from the model's own distribution before temperature and filters."""

    logprob: float  # of the sampled token
    rank: int  # 1 is the most likely token
    top: tuple[tuple[int, float], ...]  # (token id, log probability), most likely first


class Sample(NamedTuple):
    token_id: int
    logprobs: Logprobs | None
    is_last: bool = False  # the grammar is complete, or the request pools: no token may follow
    pooled: bytes | None = None  # float32, in place of the token (`SamplingParams.pooling`)
    prompt_logprobs: bytes | None = None  # with the first token, see `outputs.unpack_prompt_logprobs`


class MediaTimes(NamedTuple):
    decode_ms: float
    encode_ms: float  # this image's share, by patches, of its encoder pass


class Slice(NamedTuple):
    """What the encoder did in a step."""

    layers: float = 0.0  # over a full pass; fewer patches count as a fraction of that
    seconds: float = 0.0  # on the host's clock


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    samples: Mapping[str, Sample]  # by request id
    encoded: Mapping[Key, MediaTimes] = field(default_factory=dict)  # embeddings that became resident
    failed: Mapping[Key, RequestError] = field(default_factory=dict)  # images that could not be encoded
    unsampled: Mapping[str, RequestError] = field(default_factory=dict)  # requests that cannot go on, by id
    slice: Slice = Slice()  # noqa: RUF009 (immutable)
    restored: frozenset[Key] = frozenset()  # those of `encoded` that a tier of embeddings had
    local_work: int | None = None  # embeddings in flight that the engine itself encodes; None: all
    decoded: frozenset[Key] = frozenset()  # of `decode_first`: these may be given to the encoder


Collect = Callable[[], StepResult]
"""Waits until a step that was launched is done."""
