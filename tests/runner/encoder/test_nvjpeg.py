"""The binding of nvJPEG and what decodes with it, over a library in Python that decodes by Pillow."""

from __future__ import annotations

import io
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from saccade.errors import ConfigError
from saccade.media.decode import decode
from saccade.models.vision.backend import TorchVision
from saccade.models.vision.preprocess import ImagePixels
from saccade.runner.encoder import gpu_jpeg
from saccade.runner.encoder import nvjpeg as nvjpeg_module
from saccade.runner.encoder.encoder_runner import LocalEncoder
from saccade.runner.encoder.gpu_jpeg import GpuJpegs, build_gpu_jpegs
from saccade.runner.encoder.nvjpeg import Jpeg, NvJpegError, load_library
from saccade.types.media import Geometry, Grid, Header, MediaItem, Size
from tests.helpers.fakes.fake_nvjpeg import BAD_JPEG, FakeNvJpeg, open_fake
from tests.helpers.fakes.fake_tower import FakeTower
from tests.helpers.media.images import make_photo

CPU = torch.device("cpu")
SIZE = Size(120, 90)


def jpeg(seed: int = 0, size: Size = SIZE, orientation: int = 1, mode: str = "RGB") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stream = io.BytesIO()
    make_photo(*size, seed=seed).convert(mode).save(stream, "JPEG", exif=exif)
    return stream.getvalue()


def item_of(data: bytes, name: str = "a", orientation: int = 1) -> MediaItem:
    size = SIZE if orientation < 5 else Size(SIZE.height, SIZE.width)
    header = Header("jpeg", size, orientation, 1, "RGB")
    geometry = Geometry(Size(28, 28), Grid(1, 2, 2), 1, 1)
    return MediaItem(name.encode(), "image", data, header, geometry, gpu_jpeg=True)


def host_pixels(data: bytes) -> Tensor:
    with Image.open(io.BytesIO(data)) as image:
        return torch.from_numpy(np.array(image.convert("RGB")))


@pytest.fixture
def fake() -> FakeNvJpeg:
    return FakeNvJpeg()


def test_pixels_are_the_librarys_and_nothing_is_left_after_the_end(fake: FakeNvJpeg) -> None:
    nvjpeg = open_fake(fake)
    sources = [jpeg(0), jpeg(1) + b"a film", jpeg(2)]
    outs = nvjpeg.decode([Jpeg.of(data, SIZE) for data in sources])
    assert nvjpeg.engines == 7 and fake.batches == [3]
    assert all(torch.equal(out, host_pixels(data)) for out, data in zip(outs, sources, strict=True))
    nvjpeg.close()
    assert not fake.live


def test_a_grey_jpeg_is_not_decoded(fake: FakeNvJpeg) -> None:
    with pytest.raises(NvJpegError, match=r"reads 120x90 with 1 components"):
        open_fake(fake).decode([Jpeg.of(jpeg(mode="L"), SIZE)])
    assert not fake.batches


def test_a_jpeg_of_another_size_than_its_header_said_is_not_decoded(fake: FakeNvJpeg) -> None:
    nvjpeg = open_fake(fake)
    with pytest.raises(NvJpegError, match=r"reads 120x90 with 3 components, the header says 120x80"):
        nvjpeg.decode([Jpeg.of(jpeg(), Size(120, 80))])
    assert not fake.batches


def test_a_failed_call_renews_the_state_and_the_next_one_works(fake: FakeNvJpeg) -> None:
    nvjpeg = open_fake(fake)
    fake.refused.add(jpeg(1))
    with pytest.raises(NvJpegError, match=f"nvjpegDecodeBatched returned status {BAD_JPEG}"):
        nvjpeg.decode([Jpeg.of(jpeg(1), SIZE)])
    assert fake.live == {"handle"}
    fake.fails_to_create = 1  # once
    with pytest.raises(NvJpegError, match="nvjpegJpegStateCreate"):
        nvjpeg.decode([Jpeg.of(jpeg(2), SIZE)])
    [out] = nvjpeg.decode([Jpeg.of(jpeg(2), SIZE)])
    assert torch.equal(out, host_pixels(jpeg(2)))
    nvjpeg.close()
    nvjpeg.close()
    assert not fake.live


def test_the_start_says_what_a_damaged_jpeg_may_show(
    fake: FakeNvJpeg, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake.error = 1
    monkeypatch.setattr(gpu_jpeg, "load_library", lambda: fake)
    with caplog.at_level(logging.WARNING):
        build_gpu_jpegs(CPU).check_idle()
    [record] = caplog.records
    assert "a damaged JPEG may show parts of an image decoded before it" in record.getMessage()


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (FakeNvJpeg(engines=0), "this GPU has no JPEG engines"),
        (FakeNvJpeg(error=9), "nvJPEG's pixels differ by 9 of 255 from Pillow's"),
    ],
)
def test_a_gpu_that_cannot_decode_as_pillow_ends_the_start(
    library: FakeNvJpeg, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_jpeg, "load_library", lambda: library)
    with pytest.raises(ConfigError, match=f"gpu_jpeg was asked for, but {reason}; leave out --gpu-jpeg"):
        build_gpu_jpegs(CPU)


def test_a_library_that_is_not_installed_is_an_error_that_names_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvjpeg_module, "_candidates", lambda: ["libnvjpeg.so.0", "/nowhere/libnvjpeg.so.13"])
    with pytest.raises(ConfigError, match=r"nvidia-nvjpeg \(CUDA 13\) or nvidia-nvjpeg-cu12 \(CUDA 12\)"):
        load_library()


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_pixels_are_upright(fake: FakeNvJpeg, orientation: int) -> None:
    jpegs = GpuJpegs(open_fake(fake))
    item = item_of(jpeg(orientation=orientation), orientation=orientation)
    with jpegs.pixels(item) as pixels:
        assert pixels is not None and np.array_equal(pixels.numpy(), decode(item)) and pixels.is_contiguous()
    jpegs.check_idle()


def test_jpegs_that_wait_together_are_one_batch_and_a_bad_one_fails_alone(
    fake: FakeNvJpeg, monkeypatch: pytest.MonkeyPatch
) -> None:
    jpegs = GpuJpegs(open_fake(fake))
    sources = [jpeg(seed) for seed in range(5)]
    fake.refused.add(sources[2])

    def decoded(data: bytes) -> Tensor | None:
        with jpegs.pixels(item_of(data)) as pixels:
            return None if pixels is None else pixels.clone()

    with ThreadPoolExecutor(5) as threads:
        with jpegs._turn:
            futures = [threads.submit(decoded, data) for data in sources]
            while len(jpegs._waiting) < 5:
                threading.Event().wait(0.001)
        found = [future.result() for future in futures]
    assert fake.batches == [5, 1, 1, 1, 1, 1]
    assert found[2] is None
    for data, pixels in zip(sources, found, strict=True):
        assert pixels is None or torch.equal(pixels, host_pixels(data))
    jpegs.check_idle()


def test_pixels_held_at_once_are_bounded_and_given_back(fake: FakeNvJpeg) -> None:
    area = SIZE.width * SIZE.height
    jpegs = GpuJpegs(open_fake(fake), max_pixels=2 * area)
    peak = 0
    lock = threading.Lock()

    def hold(seed: int) -> bool:
        nonlocal peak
        with jpegs.pixels(item_of(jpeg(seed))) as pixels:
            with lock:
                peak = max(peak, jpegs._held_pixels)
            return pixels is not None

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(hold, range(12)))
    assert area <= peak <= 2 * area
    jpegs.check_idle()
    with pytest.raises(ValueError, match="a resize that fails"), jpegs.pixels(item_of(jpeg())):
        raise ValueError("a resize that fails")
    jpegs.check_idle()
    with GpuJpegs(open_fake(fake), max_pixels=area - 1).pixels(item_of(jpeg())) as pixels:
        assert pixels is None


class Tower(FakeTower):
    """Keeps what the tower would see."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def prepare(self, image: ImagePixels, geometry: Geometry) -> Tensor:  # type: ignore[override]
        self.seen.append(TorchVision().resize(image, geometry.resized, 3).clone())
        return torch.zeros(geometry.grid.patches, 1)


def encode(items: list[MediaItem], jpegs: GpuJpegs | None) -> tuple[list[Tensor], LocalEncoder, Any]:
    tower = Tower()
    encoder = LocalEncoder(tower, 64, threads=1, jpegs=jpegs)  # type: ignore[arg-type]
    encoder.submit(items)
    encoder.advance(None)
    return tower.seen, encoder, encoder.poll()


def test_an_image_decoded_by_nvjpeg_reaches_the_tower_as_one_decoded_on_the_host(fake: FakeNvJpeg) -> None:
    turned = item_of(jpeg(1, orientation=6), "b", orientation=6)
    items = [item_of(jpeg()), turned, replace(item_of(jpeg(2), "c"), gpu_jpeg=False)]
    jpegs = GpuJpegs(open_fake(fake))
    expected, _, _ = encode(items, None)
    found, encoder, done = encode(items, jpegs)
    assert len(found) == 3 and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(done.embeddings) == 3
    assert (encoder.counters.gpu_jpegs, encoder.counters.gpu_jpeg_fallbacks) == (2, 0)
    jpegs.check_idle()
    encoder.close()
    assert not fake.live


def test_an_image_that_nvjpeg_refuses_is_decoded_on_the_host(fake: FakeNvJpeg) -> None:
    items = [item_of(jpeg()), item_of(jpeg(1), "b")]
    fake.refused.add(jpeg())
    expected, _, _ = encode(items, None)
    found, encoder, done = encode(items, GpuJpegs(open_fake(fake)))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)) and not done.errors
    assert (encoder.counters.gpu_jpegs, encoder.counters.gpu_jpeg_fallbacks) == (1, 1)


def test_a_damaged_image_ends_its_own_request_with_the_hosts_error(fake: FakeNvJpeg) -> None:
    cut = item_of(jpeg()[: len(jpeg()) // 2])
    _, encoder, done = encode([cut, item_of(jpeg(1), "b")], GpuJpegs(open_fake(fake)))
    assert list(done.embeddings) == [b"b"] and "damaged or cut short" in str(done.errors[b"a"])
    assert encoder.counters.failed == 1
