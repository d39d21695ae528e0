"""Media decoding: an image or a frame group to upright RGB pixels. Runs in the encoder stage's threads."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

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
from saccade.media.image_headers import rotated_size
from saccade.media.png_rows import has_all_rows
from saccade.media.rgb import BAND, MIRRORED, to_rgb, upright, upright_band
from saccade.media.video_reader import VideoReaders
from saccade.types.media import MediaItem, Size

try:
    import simplejpeg  # type: ignore[import-untyped, import-not-found, unused-ignore]
except ImportError:  # Pillow uses the same library with two more copies
    simplejpeg = None

Pixels = npt.NDArray[np.uint8]
NewPixels = Callable[[tuple[int, int, int]], Pixels]
"""Allocates an array of (height, width, 3) to decode into."""

# Not Image.open, which has a process-wide pixel limit of its own; the probe has applied ours.
_READERS: dict[str, type[ImageFile]] = {
    "jpeg": JpegImageFile,
    "png": PngImageFile,
    "webp": WebPImageFile,
    "gif": GifImageFile,
    "bmp": BmpImageFile,
    "tiff": TiffImageFile,
}


def new_pixels(shape: tuple[int, int, int]) -> Pixels:
    return np.empty(shape, np.uint8)


def decode_item(item: MediaItem, readers: VideoReaders, new: NewPixels = new_pixels) -> Pixels:
    """[height, width, 3] of an image, decoded into `new` memory where possible; [frames, ...] of a group."""
    if item.stills:
        return np.stack([decode(still) for still in _stills(item)])
    return _decode_group(item, readers) if item.stamps else decode(item, new)


def _stills(item: MediaItem) -> Iterator[MediaItem]:
    """The frames of a group from a list of frames, as images."""
    start = 0
    for still in item.stills:
        data = item.data[start : start + still.length]
        yield replace(item, data=data, header=still.header, stills=())
        start += still.length


def _decode_group(item: MediaItem, readers: VideoReaders) -> Pixels:
    try:
        return np.stack(readers.frames(item))
    except RequestError:
        raise
    except Exception:  # FFmpeg has many error types
        width, height = item.header.size
        what = f"the video of {width}x{height} pixels ({len(item.data)} bytes)"
        message = f"{what} is damaged or cut short and cannot be decoded"
        raise RequestError(message, code="invalid_video") from None


def decode(item: MediaItem, new: NewPixels = new_pixels) -> Pixels:  # [height, width, 3]
    """An upright image, at 1/`item.reduction` of its size."""
    width, height = item.header.size
    if item.header.format == "rgb":
        return np.frombuffer(item.data, np.uint8).reshape(height, width, 3)
    assert item.page is None, "a media_worker renders pages"
    with refuse_faults(item):
        pixels = _decode_jpeg(item, new)
        if pixels is None:
            pixels = _decode_file(item)
    if Size(pixels.shape[1], pixels.shape[0]) != reduce_size(item.header.size, item.reduction):
        raster = f"{pixels.shape[1]}x{pixels.shape[0]} were decoded"
        message = f"the picture's header says {width}x{height} pixels but {raster}"
        raise RequestError(message, code="image_parse_error")
    return pixels


@contextmanager
def refuse_faults(item: MediaItem) -> Iterator[None]:
    """Any fault of the bytes becomes a RequestError without library text."""
    width, height = item.header.size
    try:
        yield
    except RequestError:
        raise
    except MemoryError:
        message = f"a picture of {width}x{height} pixels does not fit into memory while it is decoded"
        raise RequestError(message, code="image_too_large") from None
    except Exception:  # Pillow has a dozen error types for broken files
        what = f"the {item.header.format.upper()} picture of {width}x{height} pixels ({len(item.data)} bytes)"
        message = f"{what} is damaged or cut short and cannot be decoded"
        raise RequestError(message, code="image_parse_error") from None


def reduce_size(size: Size, reduction: int) -> Size:
    """What libjpeg makes of it: parts of a pixel count."""
    return Size(-(-size.width // reduction), -(-size.height // reduction))


def draft(image: ImageFile, reduction: int) -> None:
    """Have a JPEG decoded at a lower scale, by its own DCT."""
    if reduction > 1:
        image.draft(image.mode, (image.width // reduction, image.height // reduction))


def _decode_jpeg(item: MediaItem, new: NewPixels) -> Pixels | None:
    """Pillow's pixels, without its copies and the GIL; None unless intact and of the header's size."""
    if simplejpeg is None or item.header.format != "jpeg":
        return None
    orientation = item.header.orientation
    raw_size = rotated_size(item.header.size, orientation)
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(item.data)
        if colours not in ("YCbCr", "Gray") or Size(width, height) != raw_size:
            return None
        width, height = reduce_size(raw_size, item.reduction)
        smallest = {"min_height": height, "min_width": width}
        if orientation == 1:
            into = {"buffer": new((height, width, 3)), **smallest}
            pixels: Pixels = simplejpeg.decode_jpeg(item.data, "RGB", **into)
        else:
            pixels = _rotated(simplejpeg.decode_jpeg(item.data, "RGBX", **smallest), orientation, new)
    except ValueError:
        return None
    return pixels


def _rotated(raw_pixels: Pixels, orientation: int, new: NewPixels) -> Pixels:
    """[height, width, 4] as stored, upright in `new` memory. Bands fit a cache, which the whole does not."""
    height, width = raw_pixels.shape[:2] if orientation < 5 else raw_pixels.shape[1::-1]
    pixels = new((height, width, 3))
    for start in range(0, height, BAND):
        end = min(start + BAND, height)
        band = upright_band(raw_pixels, start, end, orientation).tobytes("raw", "RGB")
        top = height - end if orientation in MIRRORED else start
        pixels[top : top + end - start] = np.frombuffer(band, np.uint8).reshape(-1, width, 3)
    return pixels


def _decode_file(item: MediaItem) -> Pixels:
    with _READERS[item.header.format](io.BytesIO(item.data)) as image:
        check_stored_size(Size(*image.size), item)
        draft(image, item.reduction)
        image.load()
        if item.header.format == "png":
            _check_rows(image, item.data)
        return np.asarray(upright(to_rgb(image), item.header.orientation))


def _check_rows(image: ImageFile, data: bytes) -> None:
    """OSError if a PNG has fewer rows than its header says, which Pillow leaves black."""
    last = image.im.crop((0, image.height - 1, *image.size))  # not by Image.crop, which has a limit of pixels
    is_last_black = last.getbbox() is None
    if (is_last_black or image.info.get("interlace")) and not has_all_rows(data):
        raise OSError("rows are missing")


def check_stored_size(size: Size, item: MediaItem) -> None:
    """The raster about to be allocated must have the billed size."""
    width, height = item.header.size
    if size.width * size.height != width * height:
        raster = f"its data says {size.width}x{size.height}"
        message = f"the picture's header says {width}x{height} pixels but {raster}"
        raise RequestError(message, code="image_parse_error")
