"""The nouns that cross borders between packages. Small, frozen, standard library only.

The scheduler imports this module and must run anywhere: no files, no model families, no array library.
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
"""As `Span.last_reader`: every later position reads the embeddings, generated tokens too."""

RECORD_BYTES = 40
"""A position in `Prompt.identity`: content key (zeros for text), 8 bytes of token id or offset in a span."""


class Size(NamedTuple):
    width: int
    height: int

    def inside(self, box: Size) -> Size:
        """The largest that fits the box, aspect ratio kept; rounded as Pillow rounds."""
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
    """What an image's header says, read without decoding a pixel."""

    format: str  # jpeg, png, webp, gif, bmp, tiff; pdf for a page; rgb for pixels that arrived decoded
    size: Size  # as a viewer shows it: after the EXIF orientation is applied
    orientation: int  # EXIF orientation 1-8; 1 when absent or broken
    frames: int  # 1 for a still image
    mode: str  # Pillow's mode of the stored pixels, "RGB" for "rgb"
    passes: int = 1  # how often each pixel is worked on to decode it, as scans of a JPEG do


class Tiling(NamedTuple):
    """How the embeddings of an image that was cut into tiles are joined after the vision tower."""

    columns: int  # of tiles
    rows: int
    kept: Size  # patches of all tiles side by side that show the image; padding lies evenly around them
    joined: Size  # embeddings these become: the same size, or fewer where there would be too many


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a header becomes under a model's resolution policy. A pure function of size and policy."""

    resized: Size  # after the resize, before any crop
    grid: Grid  # patches that enter the vision tower
    tokens: int  # prompt positions the item covers
    slots: int  # embeddings the encoder returns; differs from `tokens` where separators sit between rows
    tiling: Tiling | None = None  # None: the tower sees the image as one
    cells: Size | None = None  # columns and rows of tokens before pruning to `slots`; None: not pruned


class Still(NamedTuple):
    """One frame of a video that came as a list of frames."""

    length: int  # bytes
    header: Header


PIXELS_PER_SECOND = 200_000_000  # of an item's price: what a second of CPU time decodes
HEAVY_PIXELS = PIXELS_PER_SECOND // 4  # what takes longer is decoded apart from other items


@dataclass(frozen=True, slots=True, eq=False)
class MediaItem:
    """One image, or one frame group of a video, before the encoder: still compressed, its cost already known.

    A group has `stamps` when it belongs to a file, `stills` when its frames came one by one. In one of fewer
    frames than a patch the last repeats. A pruned one begins with the frame before it, which is not encoded.
    """

    key: Key
    kind: Literal["image", "video"]
    data: bytes  # as it arrived, shared by all groups of a file; for "rgb": height x width x 3 bytes
    header: Header
    geometry: Geometry
    stamps: tuple[int, ...] = ()  # its frames' times, in the unit of the file's own stream
    stills: tuple[Still, ...] = ()  # its frames, one after the other in `data`
    reduction: int = 1  # a JPEG is decoded at 1/2, 1/4 or 1/8 of its size
    gpu_jpeg: bool = False  # nvJPEG may decode it, to pixels that differ by one
    page: int | None = None  # of a PDF, from 0; it is rendered at the header's size
    owner: str = ""  # the request that brought it
    client: str = ""  # and whose that is: clients, then their requests, take turns in the decode threads

    @property
    def num_frames(self) -> int:  # decoded for it
        return len(self.stamps) or len(self.stills) or 1

    @property
    def price(self) -> int:
        """Of decoding it, in pixels of a plain JPEG: known before it begins."""
        width, height = self.header.size
        return width * height * self.header.passes * self.num_frames

    @property
    def is_heavy(self) -> bool:
        return self.price > HEAVY_PIXELS

    @property
    def is_decoded_first(self) -> bool:  # by its price it may take long, or its price says little
        return self.is_heavy or self.page is not None or bool(self.stamps)

    @property
    def leading(self) -> int:
        """How many of them precede its own and are not encoded."""
        return 0 if self.geometry.cells is None else 1


@dataclass(frozen=True, slots=True)
class Span:
    """Where one media item's embeddings go in the prompt."""

    start: int  # first prompt position
    length: int  # positions covered
    key: Key
    num_embeds: int  # embeddings the encoder returns for it
    is_embed: tuple[bool, ...] | None = None  # which positions take an embedding; None means all of them
    last_reader: int | None = None  # end of the positions that read the embeddings; None: the span's own end
    encoder_tokens: int | None = None  # embeddings before pruning to `num_embeds`; None: not pruned

    @property
    def encode_cost(self) -> int:
        """What encoding it costs, in embeddings: the tower sees a pruned frame group whole."""
        return self.num_embeds if self.encoder_tokens is None else self.encoder_tokens

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def pinned_until(self) -> int:
        """Computing a position from `start` up to here needs the embeddings. Never falls along a prompt."""
        return self.end if self.last_reader is None else self.last_reader

    @property
    def is_spliced(self) -> bool:
        """Whether any of its positions takes an embedding."""
        return self.is_embed is None or any(self.is_embed)

    @property
    def is_cross_attended(self) -> bool:
        """Positions after the span attend to the item too, so computing the span does not free it."""
        return self.last_reader is not None


class VideoRun(NamedTuple):
    """Which spans are the groups of one video."""

    first: int  # index of its first span
    groups: int
    frames: int  # taken of it
    key: Key  # of the video as a whole


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Tokens plus spans: everything the engine needs of what the client sent."""

    token_ids: Sequence[int]  # expanded: one entry per position the engine charges
    spans: tuple[Span, ...]  # in prompt order, disjoint
    items: tuple[MediaItem, ...]  # items[i] belongs to spans[i]; a repeated image is the same object
    positions: npt.NDArray[np.int32]  # [axes, tokens]: 1 for RoPE, 3 (time, height, width) for M-RoPE
    next_position: int  # rotary position of the first generated token, on every axis
    identity: bytes  # RECORD_BYTES per position: what the prefix cache hashes
    salt: bytes = b""  # separates tenants in both caches
    text: str | None = None  # the prompt as the client or the template wrote it, for showing
    videos: tuple[VideoRun, ...] = ()  # in prompt order, for the bill
    where: Mapping[Key, str] = field(default_factory=dict)  # parts of the request with the items, for errors

    def __len__(self) -> int:
        return len(self.token_ids)


class Thinking(NamedTuple):
    """How an output may think before it answers: structured output begins after it, and it may be limited."""

    open: str  # marker before the thinking
    close: str  # marker after it
    is_open: bool  # the prompt ends with the opening marker; otherwise the model may write it
    open_id: int | None = None  # the marker's token, where it is one
    close_id: int | None = None


class Tenant(NamedTuple):
    """A customer of the engine. When there is too little for all, each gets service by its weight."""

    name: str = ""
    weight: float = 1.0
    label: str = ""  # of its counters, which tenants may share; empty: its name


NO_TENANT = Tenant()
OTHER_LABEL = "other"  # of tenants without a label of their own


def family_of(request_id: str) -> str:
    """The common part of the ids of one client request's `n` completions, which are FAMILY/INDEX."""
    return request_id.rpartition("/")[0] or request_id


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    request_id: str
    prompt: Prompt
    params: SamplingParams
    max_tokens: int  # resolved: params.max_tokens or what is left of the context
    eos_token_ids: frozenset[int]  # the model's own end tokens; empty when the request ignores them
    seed: int  # of its sampling noise; set for every request, so a resumed one repeats itself
    tenant: Tenant = NO_TENANT
    priority: int = 0  # among the requests of its tenant: lower values go first
    thinking: Thinking | None = None  # before structured output or within a budget; None: neither

    @property
    def family(self) -> str:
        return family_of(self.request_id)


# --- one step -----------------------------------------------------------------------------------------------


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

LatencyCurve = tuple[tuple[int, float], ...]
"""Milliseconds by size, measured at some sizes; both rise."""


@dataclass(frozen=True, slots=True)
class LatencyProfile:
    """How long the parts of a step take on this device, and how long a step with decodes may take."""

    decode_ms: LatencyCurve  # by requests that decode
    prefill_ms: LatencyCurve  # by prompt tokens
    layer_ms: LatencyCurve  # one encoder layer, by embeddings; empty without a vision tower
    ceiling_ms: float | None  # of a step with decodes, however much else waits; None: automatic
    max_prefills: int | None = None  # windows in one pass at this speed
    mixed_ms: tuple[tuple[int, LatencyCurve], ...] = ()  # for so many decodes: a mixed batch by prompt tokens
    encoder_layers: int = 0  # of a whole image


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long a step may take on a CPU, and the rates measured at start. The scheduler refines them."""

    seconds: float
    prompt_tokens_per_s: float
    layers_per_s: float  # of the encoder, over a full pass


class TokenEvent(NamedTuple):
    """One request's news after a step. The last one has a finish reason."""

    request_id: str
    token_id: int | None  # None in a terminal event without a token
    logprobs: Logprobs | None
    finish_reason: FinishReason | None
    stop_token_id: int | None = None  # which token ended it, when one did
    error: RequestError | None = None
    usage: Usage | None = None  # with the terminal event
    pooled: bytes | None = None  # see `Sample`; then it is the only event
    prompt_logprobs: bytes | None = None  # see `Sample`


@dataclass(frozen=True, slots=True)
class Usage:
    """What a finished request consumed. Times are seconds on the engine's clock."""

    cached_tokens: int  # prompt tokens that came from the prefix cache when it first ran
    num_preemptions: int
    arrived: float
    first_scheduled: float | None
    first_token: float | None
    finished: float
    decode_ms: float  # image decoding done for this request (0 when its images were resident)
    encode_ms: float
    ahead_ms: float = 0.0  # the part of both that was done before its first step, while it waited
    encoded: tuple[Key, ...] = ()  # images decoded and encoded for it; the others were cached

    def times_ms(self) -> dict[str, float]:
        """Time to first token in parts that add up to it: queue, decode, encode, prefill.

        A moment counts once: image decoding and encoding are taken out of the queue or prefill time in which
        they happened. Images decoded in parallel make the sum a little larger than the elapsed time.
        """
        times = {"decode": self.decode_ms, "encode": self.encode_ms}
        if self.first_scheduled is not None:
            times["queue"] = max(0.0, (self.first_scheduled - self.arrived) * 1e3 - self.ahead_ms)
            if self.first_token is not None:
                computed = (self.first_token - self.first_scheduled) * 1e3
                times["prefill"] = max(0.0, computed - (self.decode_ms + self.encode_ms - self.ahead_ms))
                times["first_token"] = (self.first_token - self.arrived) * 1e3
        return {**times, "total": (self.finished - self.arrived) * 1e3}


# --- the bill -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BillItem:
    """The cost of one image or video."""

    kind: str
    width: int
    height: int
    resized_width: int
    resized_height: int
    tokens: int
    kv_blocks: int
    key: str  # hex, shortened: enough to recognise a repeated image
    grid: Grid  # patches the encoder sees; a token covers one or a square of them
    cached: bool | None = None  # neither decoded nor encoded for this request; None before it has run
    encoder_cache_bytes: int = 0  # pinned for cross-attention; 0: its own tokens hold it, in KV blocks
    frames: int = 1  # taken of a video
    groups: tuple[str, ...] = ()  # short keys of a video's frame groups
    pruned: int = 0  # tokens of a video that were left out, where least changes


@dataclass(frozen=True, slots=True)
class Bill:
    """What a request costs. Known before a pixel is decoded; times and cached tokens are added afterwards."""

    text_tokens: int
    image_tokens: int
    video_tokens: int
    kv_blocks: int  # for the prompt
    items: tuple[BillItem, ...]
    cached_tokens: int = 0
    encoder_cache_bytes: int = 0  # of all cross-attended images; the same one twice counts once
    times_ms: Mapping[str, float] = field(default_factory=dict)  # prepare, fetch, those of `Usage.times_ms`

    @property
    def prompt_tokens(self) -> int:
        return self.text_tokens + self.image_tokens + self.video_tokens

    @property
    def pixels(self) -> int:
        """Of images and of the frames taken from videos, as they were sent."""
        return sum(item.width * item.height * item.frames for item in self.items)

    def settled(self, usage: Usage | None, before_ms: Mapping[str, float]) -> Bill:
        """The bill after the request, with cache hits and times; `before_ms` are those before the engine."""
        times = {**before_ms, **(usage.times_ms() if usage else {})}
        bill = replace(self, times_ms={name: round(value, 3) for name, value in times.items()})
        if usage is None:
            return bill
        bill = replace(bill, cached_tokens=usage.cached_tokens)
        if usage.first_token is None:
            return bill  # an image may not have been reached at all
        encoded = {short_key(key) for key in usage.encoded}
        items = (replace(item, cached=encoded.isdisjoint(item.groups or (item.key,))) for item in self.items)
        return replace(bill, items=tuple(items))


def short_key(key: Key) -> str:
    return key.hex()[:16]
