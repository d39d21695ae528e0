"""A prompt: tokens, and the spans in which embeddings go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from saccade.types.media import Key, MediaItem

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

TO_THE_END = (1 << 63) - 1
"""As `Span.last_reader`: every later position reads the embeddings, generated tokens too."""


RECORD_BYTES = 40
"""A position in `Prompt.identity`: content key (zeros for text), 8 bytes of token id or offset in a span."""


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
    constant_rows: int = 0  # of `positions`, the last ones: after the prompt they stay as they are at its end
    wholes: tuple[tuple[int, int], ...] = ()  # positions that see each other: one window computes them
    videos: tuple[VideoRun, ...] = ()  # in prompt order, for the bill
    where: Mapping[Key, str] = field(default_factory=dict)  # parts of the request with the items, for errors

    def __len__(self) -> int:
        return len(self.token_ids)
