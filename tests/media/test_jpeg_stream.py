"""JPEGs that are resized while they are decoded have the pixels of Pillow's resize of the whole image."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from saccade.errors import RequestError
from saccade.media import jpeg_stream
from saccade.media.decode import decode
from saccade.media.jpeg_stream import StreamedJpeg, is_streamed
from saccade.media.load import load_image
from saccade.models.vision.backend import TorchVision
from saccade.options.engine import MediaPolicy, Options
from saccade.types.media import Geometry, Grid, Header, MediaItem, Size
from tests.helpers.media.images import make_photo

POLICY = MediaPolicy.of(Options())


class BusyThreads(Executor):
    """None is ever free."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.waiting.append((fn, args, kwargs))
        return Future()


def jpeg(size: tuple[int, int], orientation: int = 1, mode: str = "RGB", **how: Any) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stream = io.BytesIO()
    grain = Image.effect_noise(size, 60).convert("RGB")
    image = Image.blend(make_photo(*size), grain, 0.3).convert(mode)
    image.save(stream, "JPEG", exif=exif, **how)
    return stream.getvalue()


def item_of(data: bytes, resized: Size = Size(28, 28), reduction: int = 1) -> MediaItem:  # noqa: B008 (immutable)
    loaded = load_image(data, POLICY)
    geometry = Geometry(resized, Grid(1, 2, 2), 1, 1)
    return MediaItem(b"k" * 32, "image", loaded.data, loaded.header, geometry, reduction=reduction)


def pillows(data: bytes, size: Size, resampling: int, reduction: int = 1) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        if reduction > 1:
            image.draft(image.mode, (image.width // reduction, image.height // reduction))
        upright = ImageOps.exif_transpose(image.convert("RGB"))
        return np.asarray(upright.resize(size, Image.Resampling(resampling)))


@pytest.fixture(scope="module")
def threads() -> Any:
    with ThreadPoolExecutor(3) as pool:
        yield pool


SIDES = st.integers(1, 500)


@settings(max_examples=60, deadline=None)
@given(
    size=st.tuples(SIDES, SIDES),
    target=st.tuples(SIDES, SIDES),
    orientation=st.integers(1, 8),
    resampling=st.sampled_from([1, 2, 3, 4, 5]),
    how=st.fixed_dictionaries(
        {
            "quality": st.sampled_from([10, 90]),
            "subsampling": st.sampled_from(["4:4:4", "4:2:2", "4:2:0"]),
            "progressive": st.booleans(),
        }
    ),
    reduction=st.sampled_from([1, 1, 2, 4, 8]),
)
def test_every_size_orientation_and_filter_gives_pillows_pixels(
    threads: Executor,
    size: tuple[int, int],
    target: tuple[int, int],
    orientation: int,
    resampling: int,
    how: dict[str, Any],
    reduction: int,
) -> None:
    reduction = reduction if min(size) >= reduction else 1
    data = jpeg(size, orientation, **how)
    found = StreamedJpeg(item_of(data, reduction=reduction), threads.submit).resized(Size(*target), resampling)
    assert np.array_equal(found, pillows(data, Size(*target), resampling, reduction))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_without_a_free_thread_its_own_gives_the_same(orientation: int, threads: Executor) -> None:
    data = jpeg((700, 433), orientation)
    size = Size(300, 211)
    alone = StreamedJpeg(item_of(data), BusyThreads().submit).resized(size, 3)
    assert np.array_equal(alone, StreamedJpeg(item_of(data), threads.submit).resized(size, 3))
    assert np.array_equal(alone, pillows(data, size, 3))


def test_a_model_may_resize_it_twice(threads: Executor) -> None:
    data = jpeg((700, 433))
    image = StreamedJpeg(item_of(data), threads.submit)
    ops = TorchVision()
    for size in (Size(336, 336), Size(560, 400), Size(700, 100)):
        assert np.array_equal(ops.resize(image, size, 3).numpy(), pillows(data, size, 3))


def test_tasks_that_no_thread_took_hold_no_pixels() -> None:
    busy = BusyThreads()
    image = StreamedJpeg(item_of(jpeg((700, 433))), busy.submit)
    image.resized(Size(300, 211), 3)
    assert image._stored is not None
    pixels = weakref.ref(image._stored.pixels)
    del image
    gc.collect()
    assert len(busy.waiting) > 4
    assert pixels() is None


@pytest.mark.parametrize("share", [0.02, 0.5, 0.9])
def test_a_file_cut_short_is_one_sentence_with_its_size(share: float, threads: Executor) -> None:
    data = jpeg((700, 433))
    whole = item_of(data)
    cut = replace(whole, data=data[: int(len(data) * share)])
    with pytest.raises(RequestError, match="700x433") as caught:
        StreamedJpeg(cut, threads.submit).resized(Size(300, 211), 3)
    with pytest.raises(RequestError) as expected:
        decode(cut)
    assert (caught.value.message, caught.value.code) == (expected.value.message, expected.value.code)


def test_what_pillow_reads_in_spite_of_damage_has_the_same_pixels(threads: Executor) -> None:
    data = bytearray(jpeg((700, 433)))
    data[len(data) // 2 : len(data) // 2 + 40] = bytes(range(40))
    item = item_of(bytes(data))
    found = StreamedJpeg(item, threads.submit).resized(Size(300, 211), 3)
    assert np.array_equal(found, pillows(bytes(data), Size(300, 211), 3))


def test_a_raster_larger_than_the_bill_is_never_allocated(threads: Executor) -> None:
    whole = item_of(jpeg((700, 433)))
    lie = replace(whole, header=Header("jpeg", Size(10, 10), 1, 1, "RGB"))
    with pytest.raises(RequestError, match="10x10"):
        StreamedJpeg(lie, threads.submit).resized(Size(5, 5), 3)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_a_file_that_is_not_what_its_header_was_read_as_is_refused(mode: str, threads: Executor) -> None:
    size = Size(433, 700) if mode == "RGB" else Size(700, 433)
    lie = replace(item_of(jpeg((700, 433), mode=mode)), header=Header("jpeg", size, 1, 1, "RGB"))
    with pytest.raises(RequestError, match="damaged"):
        StreamedJpeg(lie, threads.submit).resized(Size(300, 211), 3)


def test_a_fault_in_another_thread_reaches_the_caller(threads: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    image = StreamedJpeg(item_of(jpeg((700, 433))), threads.submit)
    monkeypatch.setattr(Image.Image, "resize", fail)
    with pytest.raises(RequestError, match="memory") as caught:
        image.resized(Size(300, 211), 3)
    assert caught.value.code == "image_too_large"


def test_only_large_colour_jpegs_that_become_narrower_are_streamed() -> None:
    large = item_of(jpeg((1400, 1000)))
    assert is_streamed(large)
    assert not is_streamed(item_of(jpeg((140, 100))))
    assert not is_streamed(item_of(jpeg((1400, 1000), mode="L")))
    assert not is_streamed(item_of(jpeg((1400, 1000), mode="CMYK")))
    assert not is_streamed(item_of(jpeg((1400, 1000)), Size(1400, 28)))
    png = io.BytesIO()
    make_photo(1400, 1000).save(png, "PNG")
    assert not is_streamed(item_of(png.getvalue()))


def test_where_pillow_does_not_show_its_progress_the_image_is_decoded_plainly(
    threads: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jpeg_stream._StoredJpeg, "_count_rows", lambda self: None)
    data = jpeg((700, 433))
    found = StreamedJpeg(item_of(data), threads.submit).resized(Size(300, 211), 3)
    assert np.array_equal(found, np.asarray(Image.fromarray(decode(item_of(data))).resize((300, 211), 3)))
