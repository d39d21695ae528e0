"""Compressed bytes to upright RGB pixels, of a picture or of a video's frame group.

Owns no threads: the encoder stage calls this from its pool.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from saccade.errors import RequestError
from saccade.media.rgb import to_rgb, upright
from saccade.media.video_reader import VideoReaders
from saccade.types import MediaItem, Size

try:
    import simplejpeg  # type: ignore[import-untyped, import-not-found, unused-ignore]
except ImportError:  # then Pillow does it, with the same library and two copies more
    simplejpeg = None

Pixels = npt.NDArray[np.uint8]
NewPixels = Callable[[tuple[int, int, int]], Pixels]
"""(height, width, 3) -> an array to decode into."""

# The readers themselves: Image.open would add a pixel limit of its own, which is a global of the process. Ours is an
# option, and the probe has already applied it.
_READERS: dict[str, type[ImageFile]] = {
    "jpeg": JpegImageFile,
    "png": PngImageFile,
    "webp": WebPImageFile,
    "gif": GifImageFile,
    "bmp": BmpImageFile,
    "tiff": TiffImageFile,
}


def _new_pixels(shape: tuple[int, int, int]) -> Pixels:
    return np.empty(shape, np.uint8)


def decode_item(item: MediaItem, clips: VideoReaders, new: NewPixels = _new_pixels) -> Pixels:
    """[height, width, 3] of a picture, in `new` memory if it is written there at once; [frames, ...] of a group."""
    if item.stills:
        return np.stack([decode(still) for still in _stills(item)])
    return _decode_group(item, clips) if item.stamps else decode(item, new)


def _stills(item: MediaItem) -> list[MediaItem]:
    """The frames of a group that came one by one, as pictures of their own."""
    ends = accumulate(still.length for still in item.stills)
    cuts = [(item.data[end - still.length : end], still.header) for end, still in zip(ends, item.stills, strict=True)]
    return [replace(item, data=data, header=header, stills=()) for data, header in cuts]


def _decode_group(item: MediaItem, clips: VideoReaders) -> Pixels:
    try:
        return np.stack(clips.frames(item))
    except RequestError:
        raise
    except Exception:  # FFmpeg's errors are as many as Pillow's
        width, height = item.header.size
        raise RequestError(
            f"the video of {width}x{height} pixels ({len(item.data)} bytes) is damaged or cut short and cannot be "
            "decoded",
            code="invalid_video",
        ) from None


def decode(item: MediaItem, new: NewPixels = _new_pixels) -> Pixels:  # [height, width, 3]
    """The picture as a viewer shows it. Any fault of the bytes becomes one RequestError without library text."""
    width, height = item.header.size
    if item.header.format == "rgb":
        return np.frombuffer(item.data, np.uint8).reshape(height, width, 3)
    try:
        pixels = _decode_plain_jpeg(item, new)
        if pixels is None:
            pixels = _decode_file(item)
    except RequestError:
        raise
    except MemoryError:
        raise RequestError(
            f"a picture of {width}x{height} pixels does not fit into memory while it is decoded", code="image_too_large"
        ) from None
    except Exception:  # Pillow raises a dozen kinds for broken files; all of them mean the same to a client
        raise RequestError(
            f"the {item.header.format.upper()} picture of {width}x{height} pixels ({len(item.data)} bytes) is damaged "
            "or cut short and cannot be decoded",
            code="image_parse_error",
        ) from None
    if pixels.shape[:2] != (height, width):
        raise RequestError(
            f"the picture's header says {width}x{height} pixels but {pixels.shape[1]}x{pixels.shape[0]} were decoded",
            code="image_parse_error",
        )
    return pixels


def _decode_plain_jpeg(item: MediaItem, new: NewPixels) -> Pixels | None:
    """What Pillow would give, to the bit, without its copies and without holding up other threads.

    None for all but upright, undamaged colour or grey pictures: Pillow reads the others, or says what is wrong.
    """
    if simplejpeg is None or item.header.format != "jpeg" or item.header.orientation != 1:
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(item.data)
        if colours not in ("YCbCr", "Gray") or Size(width, height) != item.header.size:
            return None
        pixels: Pixels = simplejpeg.decode_jpeg(item.data, "RGB", buffer=new((height, width, 3)))
    except ValueError:
        return None
    return pixels


def _decode_file(item: MediaItem) -> Pixels:
    with _READERS[item.header.format](io.BytesIO(item.data)) as image:
        _check_stored_size(Size(*image.size), item)
        image.load()
        return np.asarray(upright(to_rgb(image), item.header.orientation))


def _check_stored_size(stored: Size, item: MediaItem) -> None:
    """The raster about to be allocated is the one that was billed, so a header cannot promise little and cost much."""
    width, height = item.header.size
    if stored.width * stored.height != width * height:
        raise RequestError(
            f"the picture's header says {width}x{height} pixels but its data says {stored.width}x{stored.height}",
            code="image_parse_error",
        )
