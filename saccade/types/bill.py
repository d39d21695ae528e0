"""What a request costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from saccade.types.events import Usage
from saccade.types.media import Grid, short_key


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
        times = {**before_ms}
        if usage is not None:
            times |= usage.times_ms()
        bill = replace(self, times_ms={name: round(value, 3) for name, value in times.items()})
        if usage is None:
            return bill
        bill = replace(bill, cached_tokens=usage.cached_tokens)
        if usage.first_token is None:
            return bill  # an image may not have been reached at all
        encoded = {short_key(key) for key in usage.encoded}
        items = (replace(item, cached=encoded.isdisjoint(item.groups or (item.key,))) for item in self.items)
        return replace(bill, items=tuple(items))
