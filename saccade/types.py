"""The nouns that cross borders between packages. Small, frozen, standard library only.

Nothing here reads files, knows a model family or imports an array library: the scheduler imports this module and must
run anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from saccade.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from saccade.sampling_params import SamplingParams

Key = bytes
"""A content key: 32 bytes of hash over source bytes, processing policy, model fingerprint and salt."""

FinishReason = Literal["stop", "length", "abort", "error"]

TO_THE_END = (1 << 63) - 1
"""As `Span.last_reader`: every later position reads the embeddings, those of the answer too."""

RECORD_BYTES = 40
"""Width of one position's record in `Prompt.identity`: 32 bytes of content key (zeros for text), 8 bytes of token id
(text) or of offset inside the span (media)."""


class Size(NamedTuple):
    width: int
    height: int

    def inside(self, box: Size) -> Size:
        """As large as fits the box, aspect ratio kept: one side is the box's, the other rounded as Pillow rounds it."""
        ratio, limit = self.width / self.height, box.width / box.height
        if ratio > limit:
            return Size(box.width, max(1, round(self.height / self.width * box.width)))
        return Size(max(1, round(ratio * box.height)) if ratio < limit else box.width, box.height)


class Grid(NamedTuple):
    """Patches the encoder sees: time x height x width, before any merging."""

    t: int
    h: int
    w: int

    @property
    def patches(self) -> int:
        return self.t * self.h * self.w


@dataclass(frozen=True, slots=True)
class Header:
    """What a picture's header says, read without decoding a pixel."""

    format: str  # "jpeg", "png", "webp", "gif", "bmp", "tiff", or "rgb" for pixels that arrived decoded
    size: Size  # as a viewer shows it: after the EXIF orientation is applied
    orientation: int  # EXIF orientation 1-8; 1 when absent or broken
    frames: int  # 1 for a still picture
    mode: str  # Pillow's mode of the stored pixels, "RGB" for "rgb"


class Tiling(NamedTuple):
    """How a picture that was cut into tiles comes together again behind the tower."""

    columns: int  # of tiles
    rows: int
    kept: Size  # patches of all tiles side by side that show the picture; padding lies evenly around them
    joined: Size  # embeddings these become: the same size, or fewer where there would be too many


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a header becomes under a model's resolution policy. A pure function of size and policy."""

    resized: Size  # after the resize, before any crop
    grid: Grid  # patches that enter the vision tower
    tokens: int  # prompt positions the item covers
    slots: int  # embeddings the encoder returns; differs from `tokens` where separators sit between rows
    tiling: Tiling | None = None  # None: the tower sees the picture as one
    cells: Size | None = None  # columns and rows of tokens, of which only `slots` stay; None: all of them


class Still(NamedTuple):
    """One frame of a video that came as a list of frames."""

    length: int  # bytes
    header: Header


@dataclass(frozen=True, slots=True, eq=False)
class MediaItem:
    """One picture, or one frame group of a video, on its way to the encoder: still compressed, its cost already known.

    A group has `stamps` when it belongs to a file, `stills` when its frames came one by one. Where it has fewer frames
    than a patch has, the last one repeats. A pruned group begins with the frame before it, which is not encoded.
    """

    key: Key
    kind: Literal["image", "video"]
    data: bytes  # the bytes as they arrived, all groups of a file share them; for "rgb": height x width x 3 bytes
    header: Header
    geometry: Geometry
    stamps: tuple[int, ...] = ()  # its frames' times, in the unit of the file's own stream
    stills: tuple[Still, ...] = ()  # its frames, one after the other in `data`

    @property
    def num_frames(self) -> int:
        """Decoded for it."""
        return len(self.stamps) or len(self.stills) or 1

    @property
    def leading(self) -> int:
        """How many of them are not its own."""
        return 0 if self.geometry.cells is None else 1


@dataclass(frozen=True, slots=True)
class Span:
    """Where one media item's embeddings go in the prompt."""

    start: int  # first prompt position
    length: int  # positions covered
    key: Key
    slots: int  # embeddings the encoder returns for it
    is_embed: tuple[bool, ...] | None = None  # which positions take an embedding; None means all of them
    last_reader: int | None = None  # first position behind all that read the embeddings; None: the span's own end
    made: int | None = None  # embeddings the tower makes for it, of which only `slots` stay; None: all of them stay

    @property
    def work(self) -> int:
        """What encoding it costs, in embeddings: the tower sees a pruned frame group whole."""
        return self.slots if self.made is None else self.made

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def pinned_until(self) -> int:
        """Whoever computes a position from `start` up to here needs the embeddings. It never falls along a prompt."""
        return self.end if self.last_reader is None else self.last_reader

    @property
    def is_cross_attended(self) -> bool:
        """Positions behind the span look at the item too, so that having computed the span does not free it."""
        return self.last_reader is not None


class VideoRun(NamedTuple):
    """Which spans are the groups of one video."""

    first: int  # index of its first span
    groups: int
    frames: int  # taken of it
    key: Key  # of the video as a whole


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Tokens plus spans: everything the engine needs to know about what the client sent."""

    token_ids: Sequence[int]  # expanded: one entry per position the engine charges
    spans: tuple[Span, ...]  # in prompt order, disjoint
    items: tuple[MediaItem, ...]  # items[i] belongs to spans[i]; the same picture twice is the same object twice
    positions: npt.NDArray[np.int32]  # [axes, tokens]: 1 for RoPE, 3 (time, height, width) for M-RoPE
    next_position: int  # rotary position of the first generated token, on every axis
    identity: bytes  # RECORD_BYTES per position: what the prefix cache hashes
    salt: bytes = b""  # separates tenants in both caches
    text: str | None = None  # the prompt as the client or the template wrote it, for showing
    videos: tuple[VideoRun, ...] = ()  # in prompt order, for the bill
    where: Mapping[Key, str] = field(default_factory=dict)  # the request's parts that hold the items, for errors

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    request_id: str
    prompt: Prompt
    params: SamplingParams
    max_tokens: int  # resolved: params.max_tokens or what is left of the context
    eos_token_ids: frozenset[int]  # the model's own end tokens; empty when the request ignores them
    seed: int  # of its sampling noise; set for every request, so a resumed one repeats itself

    @property
    def family(self) -> str:
        """What the answers that a client asked for at once have in common: their ids are this, a slash, a number."""
        return self.request_id.rpartition("/")[0] or self.request_id


# --- one step -----------------------------------------------------------------------------------------------------


class StateCheckpoint(NamedTuple):
    """What a model's recurrent layers remember behind some tokens of a prompt."""

    place: int  # tokens that it has seen
    row: int  # of the states that are kept


class ScheduledWindow(NamedTuple):
    """A window [start, end) of one request's tokens to compute in this step. Decode is a window of one."""

    request_id: str
    start: int
    end: int
    new_blocks: tuple[int, ...]  # KV blocks added to the request's table for this window, in order
    samples: bool  # the window reaches the last known token, so the step yields the next one
    checkpoints: tuple[StateCheckpoint, ...] = ()  # states to keep on the way, in order


@dataclass(frozen=True, slots=True, eq=False)
class Admission:
    """A request that enters the runner: newly, again after preemption, or with another table of blocks."""

    request: Request
    output_token_ids: tuple[int, ...]  # tokens generated before a preemption
    block_ids: tuple[int, ...]  # KV blocks it has so far: computed, by itself or by others with the same beginning
    state: StateCheckpoint | None = (
        None  # what its recurrent layers go on with, behind these blocks; None: with nothing
    )


PlanKind = Literal["sync", "async_decode", "async_prefill"]
"""How a step was planned.

sync           with the tokens of all earlier steps known
async_decode   before the previous step's tokens were known: one more token for every request that samples in it
async_prefill  while such a decode step runs: everything else, of which nothing may wait for the host
"""


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """What the scheduler decided. The runner does just this, in this order: free, evict, admit, encode, compute."""

    step: int
    decode: tuple[ScheduledWindow, ...] = ()  # the latest token of a request, after its prompt
    prefill: tuple[ScheduledWindow, ...] = ()  # all other windows
    admitted: tuple[Admission, ...] = ()
    freed_requests: tuple[str, ...] = ()  # requests finished, aborted or preempted since the last plan
    evicted: tuple[Key, ...] = ()  # embeddings to drop; each key is told once
    encode: tuple[MediaItem, ...] = ()  # newly given to the encoder; slots are reserved
    encode_layers: int | None = None  # encoder layers to advance in this step; None: until all is encoded
    prefetch: tuple[MediaItem, ...] = ()  # likely next: image decoding may begin
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
    is_last: bool = False  # nothing may follow: the answer has the structure that was asked for


class MediaTimes(NamedTuple):
    decode_ms: float
    encode_ms: float  # this picture's share, by patches, of the pass it was encoded in


class Slice(NamedTuple):
    """What the encoder did in a step."""

    layers: float = 0.0  # over as many patches as go through the tower together; over fewer, a part of that
    seconds: float = 0.0  # on the host's clock


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    samples: Mapping[str, Sample]  # by request id
    encoded: Mapping[Key, MediaTimes] = field(default_factory=dict)  # embeddings that became resident
    failed: Mapping[Key, RequestError] = field(default_factory=dict)  # pictures that cannot be had, with the reason
    unsampled: Mapping[str, RequestError] = field(default_factory=dict)  # requests no token can be had for, by id
    slice: Slice = Slice()  # noqa: RUF009 (immutable)


Collect = Callable[[], StepResult]
"""Waits until a step that was launched is done."""

LatencyCurve = tuple[tuple[int, float], ...]
"""Milliseconds by size, measured at some sizes; both rise."""


@dataclass(frozen=True, slots=True)
class LatencyProfile:
    """How long the parts of a step take on this device, and how long a step may take beside running answers."""

    decode_ms: LatencyCurve  # one token for so many requests
    prefill_ms: LatencyCurve  # so many prompt tokens
    layer_ms: LatencyCurve  # one encoder layer over pictures of so many embeddings; empty without a vision tower
    target_ms: float | None  # None: a multiple of what the running answers take alone
    max_prefills: int | None = None  # that are computed together at this speed
    mixed_ms: tuple[
        tuple[int, LatencyCurve], ...
    ] = ()  # by requests that decode: as many prompt tokens in the same pass


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long a step may take on a CPU, and what it was measured to do at start. The scheduler learns from there."""

    seconds: float
    prompt_tokens_per_s: float
    layers_per_s: float  # of the encoder, over as many patches as go through it together


class TokenEvent(NamedTuple):
    """What the engine tells about one request after a step. The last one has a finish reason."""

    request_id: str
    token_id: int | None  # None in a terminal event that brings no token
    logprobs: Logprobs | None
    finish_reason: FinishReason | None
    stop_token_id: int | None = None  # which token ended it, when one did
    error: RequestError | None = None
    usage: Usage | None = None  # with the terminal event


@dataclass(frozen=True, slots=True)
class Usage:
    """What a finished request consumed, as the scheduler counted it. Times are seconds on the engine's clock."""

    cached_tokens: int  # prompt tokens that came from the prefix cache when it first ran
    num_preemptions: int
    arrived: float
    first_scheduled: float | None
    first_token: float | None
    finished: float
    decode_ms: float  # picture decoding done for this request (0 when its pictures were resident)
    encode_ms: float
    ahead_ms: float = 0.0  # the part of both that was done before its first step, while it waited
    encoded: tuple[Key, ...] = ()  # pictures that were decoded and encoded for it; the others were at hand

    def times_ms(self) -> dict[str, float]:
        """The way to the first token in parts that add up to it: queue, decode, encode, prefill.

        A moment counts once: work on its pictures is taken out of the waiting or the prefill it happened in. Pictures
        decoded side by side make the sum a little larger than the time that passed.
        """
        times = {"decode": self.decode_ms, "encode": self.encode_ms}
        media = self.decode_ms + self.encode_ms
        if self.first_scheduled is not None:
            times["queue"] = max(0.0, (self.first_scheduled - self.arrived) * 1e3 - self.ahead_ms)
            if self.first_token is not None:
                computed = (self.first_token - self.first_scheduled) * 1e3
                times["prefill"] = max(0.0, computed - (media - self.ahead_ms))
                times["first_token"] = (self.first_token - self.arrived) * 1e3
        return {**times, "total": (self.finished - self.arrived) * 1e3}


# --- the bill -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BillItem:
    """The cost of one picture or video."""

    kind: str
    width: int
    height: int
    resized_width: int
    resized_height: int
    tokens: int
    kv_blocks: int
    key: str  # hex, shortened: enough to recognise a repeated picture
    grid: Grid  # patches the encoder sees; a token covers one or a square of them
    cached: bool | None = None  # neither decoded nor encoded for this request; None before it has run
    encoder_cache_bytes: int = 0  # kept there as long as tokens look at it; 0: its own tokens hold it, in KV blocks
    frames: int = 1  # taken of a video
    groups: tuple[str, ...] = ()  # short keys of a video's frame groups
    pruned: int = 0  # tokens of a video that were left out, because least changes there


@dataclass(frozen=True, slots=True)
class Bill:
    """What a request costs. Known before a pixel is decoded; the times and cached tokens are filled in afterwards."""

    text_tokens: int
    image_tokens: int
    video_tokens: int
    kv_blocks: int  # for the prompt
    items: tuple[BillItem, ...]
    cached_tokens: int = 0
    encoder_cache_bytes: int = 0  # of all pictures that answers look at; the same one twice counts once
    times_ms: Mapping[str, float] = field(default_factory=dict)  # prepare, fetch, and those of `Usage.times_ms`

    @property
    def prompt_tokens(self) -> int:
        return self.text_tokens + self.image_tokens + self.video_tokens

    def settled(self, usage: Usage | None, before_ms: Mapping[str, float]) -> Bill:
        """The bill after the request: what was at hand, and the times; `before_ms` are those before the engine."""
        times = {**before_ms, **(usage.times_ms() if usage else {})}
        bill = replace(self, times_ms={name: round(value, 3) for name, value in times.items()})
        if usage is None:
            return bill
        encoded = {short_key(key) for key in usage.encoded}
        items = self.items
        if usage.first_token is not None:  # before that a picture may not have been reached at all
            items = tuple(replace(item, cached=encoded.isdisjoint(item.groups or (item.key,))) for item in items)
        return replace(bill, items=items, cached_tokens=usage.cached_tokens)


def short_key(key: Key) -> str:
    return key.hex()[:16]
