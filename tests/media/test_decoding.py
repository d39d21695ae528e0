"""Decoding in processes gives the same pixels, and what hurts a decoder hurts only its own file."""

from __future__ import annotations

import io
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from saccade.errors import RequestError
from saccade.helpers.process import HelperProcess, thread_seconds
from saccade.media.decode import Pixels, decode
from saccade.media.decoding import MediaDecoder
from saccade.media.jpeg_stream import StreamedJpeg
from saccade.media.load import load_image
from saccade.media.media_workers import Ticket
from saccade.media.shared_pixels import SharedPixels, WrittenPixels
from saccade.media.video_probe import probe_video
from saccade.options.engine import MediaPolicy, Options
from saccade.types.media import Geometry, Grid, Header, MediaItem, Size
from tests.helpers.media.images import jpeg_of_scans, make_photo, png
from tests.helpers.media.videos import film
from tests.helpers.servers.serving import until

POLICY = MediaPolicy.of(Options(max_image_bytes=1 << 30, max_image_pixels=10**9))
GEOMETRY = Geometry(Size(28, 28), Grid(1, 2, 2), 1, 1)


@pytest.fixture(scope="module")
def decoder() -> Iterator[MediaDecoder]:
    decoder = MediaDecoder(1, 1, isolated=True, max_seconds=30)
    yield decoder
    decoder.close()


def saved(image: Image.Image, name: str, **how: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, name, **how)
    return stream.getvalue()


def item(data: bytes, **more: Any) -> MediaItem:
    loaded = load_image(data, POLICY)
    return MediaItem(b"k" * 32, "image", loaded.data, loaded.header, GEOMETRY, **more)


def pixels_of(decoder: MediaDecoder, wanted: MediaItem, ticket: Ticket | None = None) -> Pixels:
    with decoder.pixels(wanted, ticket or Ticket()) as pixels:
        return np.array(pixels)


def pid_of(decoder: MediaDecoder) -> int:
    (pid,) = decoder._workers.pids
    return pid


def working_pid(decoder: MediaDecoder) -> int:
    """Of the process for heavy images, once it decodes one."""
    assert until(lambda: any(map(is_working, decoder._heavy.pids)))
    (pid,) = decoder._heavy.pids
    return pid


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(make_photo(40, 30), "JPEG", exif=exif)


@pytest.mark.parametrize(
    "wanted",
    [
        *(item(saved(make_photo(40, 30), name)) for name in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")),
        item(saved(make_photo(40, 30).convert("CMYK"), "JPEG")),
        item(saved(make_photo(40, 30).convert("RGBA"), "PNG")),
        item(turned(6)),
        item(turned(3)),
        item(saved(make_photo(80, 60), "JPEG"), reduction=2),
    ],
    ids=lambda wanted: f"{wanted.header.format} {wanted.header.mode} {wanted.header.orientation}",
)
def test_another_process_gives_the_same_pixels(decoder: MediaDecoder, wanted: MediaItem) -> None:
    assert np.array_equal(pixels_of(decoder, wanted), decode(wanted))


def test_a_large_jpeg_that_is_resized_while_it_is_decoded_is_the_same(decoder: MediaDecoder) -> None:
    wanted = item(saved(make_photo(1400, 1000), "JPEG"))
    isolated = decoder.streamed(wanted, lambda task: pytest.fail("here"), Ticket())
    with MediaPool() as submit:
        own = StreamedJpeg(wanted, submit)
        assert isolated.shape == own.shape
        size = Size(56, 42)
        assert np.array_equal(isolated.resized(size, 3), own.resized(size, 3))


class MediaPool:
    """Threads for parts of an image, as the decode stage has them."""

    def __enter__(self) -> Any:
        from concurrent.futures import ThreadPoolExecutor

        self._pool = ThreadPoolExecutor(2)
        return self._pool.submit

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()


def test_groups_of_a_video_are_decoded_by_the_process_that_has_the_file(decoder: MediaDecoder) -> None:
    data = film(12)
    info = probe_video(data, POLICY)
    header = Header(info.format, info.size, 1, 12, "RGB")
    groups = [MediaItem(b"g", "video", data, header, GEOMETRY, stamps=info.stamps[i : i + 2]) for i in (0, 4, 8)]
    own = MediaDecoder(1, 1, isolated=False, max_seconds=30)
    expected = [pixels_of(own, group) for group in groups]
    assert np.array_equal(pixels_of(decoder, groups[0]), expected[0])
    assert np.array_equal(pixels_of(decoder, groups[1]), expected[1])
    process = psutil.Process(pid_of(decoder))
    process.kill()
    process.wait()  # the next one is told that it has the file, and has not
    assert np.array_equal(pixels_of(decoder, groups[2]), expected[2])
    own.close()


def test_frames_that_came_one_by_one_are_decoded_together(decoder: MediaDecoder) -> None:
    frames = [png(make_photo(20, 10, seed)) for seed in (1, 2)]
    loaded = [load_image(frame, POLICY) for frame in frames]
    from saccade.types.media import Still

    stills = tuple(Still(len(one.data), one.header) for one in loaded)
    header = Header("frames", Size(20, 10), 1, 2, "RGB")
    group = MediaItem(b"g", "video", b"".join(frames), header, GEOMETRY, stills=stills)
    assert np.array_equal(pixels_of(decoder, group), np.stack([decode(item(frame)) for frame in frames]))


def test_a_damaged_file_has_the_same_error_and_the_process_goes_on(decoder: MediaDecoder) -> None:
    broken = item(png(make_photo(40, 30))[:-200])
    with pytest.raises(RequestError) as own:
        decode(broken)
    pixels_of(decoder, item(png(make_photo())))
    pid = pid_of(decoder)
    with pytest.raises(RequestError) as isolated:
        pixels_of(decoder, broken)
    assert (isolated.value.message, isolated.value.code) == (own.value.message, own.value.code)
    assert pid_of(decoder) == pid


def test_a_decoder_that_takes_too_long_is_ended_and_the_next_image_is_decoded() -> None:
    decoder = MediaDecoder(1, 1, isolated=True, max_seconds=0.2)
    endless = item(jpeg_of_scans(1600, 1600, 480))
    start = thread_seconds()
    with pytest.raises(RequestError, match=r"1600x1600 pixels .* takes more than 0\.2 s of CPU time") as caught:
        pixels_of(decoder, endless)
    assert caught.value.code == "image_parse_error" and thread_seconds() - start >= 0.2, "it is charged"
    fine = item(png(make_photo()))
    assert np.array_equal(pixels_of(decoder, fine), decode(fine))
    decoder.close()


def test_a_decoder_that_fills_the_memory_fails_its_own_image(decoder: MediaDecoder) -> None:
    bomb = item(saved(Image.new("1", (9_000, 9_000)), "PNG"))
    lie = replace(bomb, header=replace(bomb.header, size=Size(90, 90)))
    assert pixels_of(decoder, item(png(make_photo()))).any()
    with pytest.raises(RequestError, match="its data says 9000x9000"):
        pixels_of(decoder, lie)
    assert psutil.Process(pid_of(decoder)).memory_info().rss < 300 << 20


def outcome_of(decoder: MediaDecoder, wanted: MediaItem, ticket: Ticket) -> Iterator[str | None]:
    """Begins to decode; then the code of its error."""
    codes: list[str | None] = []

    def ask() -> None:
        with pytest.raises(RequestError) as caught:
            pixels_of(decoder, wanted, ticket)
        codes.append(caught.value.code)

    thread = threading.Thread(target=ask)
    thread.start()
    yield None
    thread.join(60)
    yield codes.pop()


def test_a_process_that_dies_of_an_image_fails_that_alone(decoder: MediaDecoder) -> None:
    outcome = outcome_of(decoder, item(jpeg_of_scans(2_000, 1_000, 480)), Ticket())
    next(outcome)
    os.kill(working_pid(decoder), signal.SIGSEGV)
    assert next(outcome) == "image_parse_error"
    assert pixels_of(decoder, item(png(make_photo()))).any()


def is_working(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "R"


def test_an_image_that_no_request_waits_for_is_ended_while_it_is_decoded(decoder: MediaDecoder) -> None:
    ticket = Ticket()
    outcome = outcome_of(decoder, item(jpeg_of_scans(2_000, 1_000, 480)), ticket)
    next(outcome)
    pid = working_pid(decoder)
    ticket.cancel()
    assert next(outcome) == "cancelled" and not psutil.pid_exists(pid)
    with pytest.raises(RequestError, match="no request waits"):
        pixels_of(decoder, item(png(make_photo())), ticket)
    assert pixels_of(decoder, item(png(make_photo()))).any()


def test_a_cancel_that_comes_while_the_process_is_looked_for_ends_the_work(
    decoder: MediaDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket, started = Ticket(), HelperProcess._started

    def late(process: HelperProcess, *how: Any) -> Any:
        ticket.cancel()
        return started(process, *how)

    monkeypatch.setattr(HelperProcess, "_started", late)
    with pytest.raises(RequestError, match="no request waits"):
        pixels_of(decoder, item(png(make_photo())), ticket)


def test_memory_of_a_large_image_is_given_back_and_nothing_is_left_open(decoder: MediaDecoder) -> None:
    pixels_of(decoder, item(png(make_photo())))
    own = psutil.Process()
    before = own.num_fds()
    large = item(saved(Image.new("L", (6_000, 5_000), 7), "PNG"))
    assert (pixels_of(decoder, large) == 7).all()
    assert own.num_fds() <= before
    assert sum(1 for line in own.memory_maps(grouped=False) if "saccade-pixels" in line.path) <= 1


def test_shared_memory_is_written_by_one_end_and_read_by_the_other() -> None:
    ours, theirs = SharedPixels(), WrittenPixels()
    for size in (10, 5_000_000, 20):
        ours.reserve(size)
        theirs.open(ours.fd)
        theirs.new((size,))[:] = size % 251
        assert (ours.pixels((size,)) == size % 251).all()
    with pytest.raises(ValueError, match="buffer"):
        ours.pixels((1 << 40,))
    with pytest.raises(PermissionError):
        os.ftruncate(ours.fd, 10)  # a process that was taken over cannot end its parent
    ours.close()
