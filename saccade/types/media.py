"""Images and videos before the encoder: sizes, grids, what a header says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Key = bytes
"""A content key: 32 bytes of hash over source bytes, processing policy, model fingerprint and salt."""


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


class Clip(NamedTuple):
    """A video that a model sees as one, and which of its frames."""

    total: int  # frames that it has
    rate: float | None  # of them a second; None: not known, of frames that came one by one
    indices: tuple[int, ...]  # of the frames taken
    fps: float | None = None  # frames a second that were asked for; None: the model's own processor chose


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a header becomes under a model's resolution policy. A pure function of size and policy."""

    resized: Size  # after the resize, before any crop
    grid: Grid  # patches that enter the vision tower
    tokens: int  # prompt positions the item covers
    slots: int  # embeddings the encoder returns; differs from `tokens` where separators sit between rows
    tiling: Tiling | None = None  # None: the tower sees the image as one
    cells: Size | None = None  # columns and rows of tokens before pruning to `slots`; None: not pruned
    overview: Size | None = None  # the whole image beside its tiles, where that has no fixed size
    clip: Clip | None = None  # None: an image or a frame group


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


def short_key(key: Key) -> str:
    return key.hex()[:16]
