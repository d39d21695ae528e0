"""Inputs that must not hurt: each gets the answer that was promised, and a normal request works right after it."""

from __future__ import annotations

import base64
import io
import json
import socket
import struct
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image, PngImagePlugin

from tests.helpers.media.images import make_photo, png
from tests.helpers.servers.forbidden_urls import FORBIDDEN_URLS
from tests.helpers.servers.serving import (
    RunningServer,
    as_url,
    chat_body,
    error_of,
    image_part,
    jpeg,
    photo_part,
    refused,
    text_part,
)

pytestmark = pytest.mark.usefixtures("unharmed")
GOOD = photo_part(64, 64)
WHERE = "messages[0].content[0].image_url"


def ask(server: RunningServer, url: Any, **fields: Any) -> httpx.Response:
    return server.chat([image_part(url), text_part("What is this?")], **fields)


def png_header(width: int, height: int) -> bytes:
    """A PNG that says it is this large and has next to no data."""
    ihdr = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", ihdr), (b"IDAT", zlib.compress(b"")), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def saved(image: Image.Image, kind: str, **how: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **how)
    return stream.getvalue()


# --- rows 1-3: what is no picture ---------------------------------------------------------------------------------

B64 = base64.b64encode(png(make_photo())).decode()

NO_IMAGES: dict[str, tuple[str, str]] = {
    "empty data": ("data:image/png;base64,", "empty_image_file"),
    "no comma": ("data:image/png;base64" + B64, "invalid_base64_image"),
    "not marked base64": ("data:image/png," + B64, "invalid_base64_image"),
    "not base64": ("data:image/png;base64,%%%not base64%%%", "invalid_base64_image"),
    "url-safe base64": ("data:image/png;base64,_-_-" + B64, "invalid_base64_image"),
    "html": (as_url(b"<!doctype html><html></html>"), "unsupported_image_media_type"),
    "svg": (as_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "unsupported_image_media_type"),
    "pdf": (as_url(b"%PDF-1.7 ..."), "unsupported_image_media_type"),
    "mp4": (as_url(b"\x00\x00\x00\x18ftypmp42" + bytes(40)), "unsupported_image_media_type"),
    "eps": (as_url(b"%!PS-Adobe-3.0 EPSF-3.0\n"), "unsupported_image_media_type"),
    "psd": (as_url(b"8BPS" + bytes(40)), "unsupported_image_media_type"),
    "wmf": (as_url(b"\xd7\xcd\xc6\x9a" + bytes(40)), "unsupported_image_media_type"),
    "ico": (as_url(b"\x00\x00\x01\x00" + bytes(40)), "unsupported_image_media_type"),
    "jpeg 2000": (as_url(b"\x00\x00\x00\x0cjP  \r\n\x87\n" + bytes(40)), "unsupported_image_media_type"),
    "avif": (as_url(b"\x00\x00\x00\x1cftypavif" + bytes(40)), "unsupported_image_media_type"),
    "heic": (as_url(b"\x00\x00\x00\x1cftypheic" + bytes(40)), "unsupported_image_media_type"),
    "header of nothing": (as_url(png_header(0, 10)), "image_parse_error"),
    "negative header": (as_url(png_header(2**32 - 5, 10)), "image_parse_error"),
    "header bomb": (as_url(png_header(60000, 60000)), "image_too_large"),
    "strip": (as_url(png(Image.new("RGB", (1, 30000)))), "image_too_large"),
    "lying strip": (as_url(png(Image.new("RGB", (30000, 1)))), "image_too_large"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_IMAGES)
def test_what_is_no_image_is_refused_by_its_code(server: RunningServer, name: str) -> None:
    url, code = NO_IMAGES[name]
    refused(ask(server, url), code, WHERE)


@pytest.mark.parametrize("name", NO_IMAGES)
def test_a_stream_is_refused_with_the_same_status(server: RunningServer, name: str) -> None:
    url, code = NO_IMAGES[name]
    refused(ask(server, url, stream=True), code, WHERE)


@pytest.mark.parametrize("head", ["data:image/png;charset=utf-8;base64,", "data:;base64,", "data:IMAGE/PNG;BASE64,"])
def test_parameters_and_white_space_in_a_data_url_are_accepted(server: RunningServer, head: str) -> None:
    assert ask(server, head + B64[:40] + "\n " + B64[40:]).status_code == 200


def test_the_bytes_count_and_not_the_claimed_type(server: RunningServer) -> None:
    before = server.stats("saccade:media_mistyped_total")
    assert ask(server, as_url(jpeg(make_photo()), "image/png")).status_code == 200
    assert ask(server, as_url(jpeg(make_photo()), "image/jpg")).status_code == 200
    assert server.stats("saccade:media_mistyped_total") == before + 1


# --- rows 5-8: damage and bombs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("make", [jpeg, png])
def test_a_truncated_image_is_a_parse_error(
    server: RunningServer, make: Callable[[Image.Image], bytes], stream: bool
) -> None:
    data = make(make_photo(400, 300, seed=11))
    refused(ask(server, as_url(data[: len(data) // 2]), stream=stream), "image_parse_error", WHERE)


def damaged(seed: int) -> str:
    """With a good header, so that only the engine finds out."""
    data = jpeg(make_photo(400, 300, seed=seed))
    return as_url(data[: len(data) // 2])


def good(seed: int) -> str:
    return as_url(png(make_photo(56, 56, seed=seed)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", range(3))
def test_of_several_images_the_damaged_one_is_named(server: RunningServer, place: int, stream: bool) -> None:
    urls = [good(500 + place), good(510 + place), good(520 + place)]
    urls[place] = damaged(530 + place + 3 * stream)
    response = server.chat([text_part("What?"), *map(image_part, urls)], stream=stream)
    refused(response, "image_parse_error", f"messages[0].content[{place + 1}].image_url")


@pytest.mark.parametrize("stream", [False, True])
def test_a_damaged_image_is_named_in_the_words_of_each_api(server: RunningServer, stream: bool) -> None:
    fine, bad = good(540), damaged(541 + stream)
    parts = [{"type": "input_image", "image_url": url} for url in (fine, bad)]
    response = server.post("/v1/responses", {"input": [{"role": "user", "content": parts}], "stream": stream})
    refused(response, "image_parse_error", "input[0].content[1].image_url")
    split = [url.removeprefix("data:").partition(";base64,") for url in (fine, damaged(543 + stream))]
    sources = [{"type": "base64", "media_type": kind, "data": data} for kind, _, data in split]
    blocks = [{"type": "image", "source": source} for source in sources]
    body = {"messages": [{"role": "user", "content": blocks}], "max_tokens": 4, "stream": stream}
    response = server.post("/v1/messages", body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("messages[0].content[1].source: ")


def test_two_requests_with_one_damaged_image_each_hear_of_their_own_part(server: RunningServer) -> None:
    bad = damaged(550)
    contents = [[image_part(bad)], [text_part("What?"), photo_part(seed=551), image_part(bad)]]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(server.chat, contents))
    for response, place in zip(answers, (0, 2), strict=True):
        refused(response, "image_parse_error", f"messages[0].content[{place}].image_url")


def test_a_png_with_a_wrong_checksum_is_a_parse_error(server: RunningServer) -> None:
    data = bytearray(png(make_photo(60, 60, seed=12)))
    data[data.index(b"IDAT") + 30] ^= 0xFF
    refused(ask(server, as_url(bytes(data))), "image_parse_error")


@pytest.mark.parametrize("size", [(1, 1), (1, 3), (3, 1), (2, 2)])
def test_tiny_images_are_answered_or_refused_as_too_small(server: RunningServer, size: tuple[int, int]) -> None:
    response = ask(server, as_url(png(Image.new("RGB", size, "red"))))
    assert response.status_code == 200 or error_of(response)["code"] == "image_too_small"


def test_bombs_are_refused_before_a_raster_is_made(server: RunningServer) -> None:
    flat = saved(Image.new("1", (12000, 12000)), "PNG")
    text = PngImagePlugin.PngInfo()
    text.add_text("note", "a" * 80_000_000, zip=True)
    noted = saved(make_photo(32, 32), "PNG", pnginfo=text)
    before = memory_of(server)
    for data in (flat, noted, png_header(60000, 60000)):
        refused(ask(server, as_url(data)), "image_too_large")
    assert memory_of(server) - before < 50 << 20


def memory_of(server: RunningServer) -> int:
    processes = [psutil.Process(server.process.pid), *(psutil.Process(pid) for pid in server.children())]
    return sum(int(process.memory_info().rss) for process in processes)


# --- rows 10-14: odd but good -------------------------------------------------------------------------------------


def wide_png(width: int, height: int) -> bytes:
    """Sixteen bits a channel, which Pillow reads and does not write."""
    row = b"\0" + struct.pack(">3H", 65535, 256, 0) * width
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)), (b"IDAT", zlib.compress(row * height)))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in (*chunks, (b"IEND", b"")))


def _grey16() -> bytes:
    return saved(Image.fromarray(np.arange(64 * 64, dtype=np.uint16).reshape(64, 64) * 16), "PNG")


ODD_IMAGES: dict[str, Callable[[], bytes]] = {
    "16-bit grey": _grey16,
    "1-bit": lambda: saved(Image.new("1", (64, 64), 1), "PNG"),
    "grey": lambda: saved(make_photo(64, 64).convert("L"), "PNG"),
    "grey with alpha": lambda: saved(make_photo(64, 64).convert("LA"), "PNG"),
    "palette": lambda: saved(make_photo(64, 64).convert("P"), "GIF"),
    "alpha": lambda: saved(make_photo(64, 64).convert("RGBA"), "PNG"),
    "cmyk": lambda: saved(make_photo(64, 64).convert("CMYK"), "JPEG"),
    "lab": lambda: saved(Image.new("LAB", (64, 64)), "TIFF"),
    "webp": lambda: saved(make_photo(64, 64), "WEBP"),
    "bmp": lambda: saved(make_photo(64, 64), "BMP"),
    "sixteen bits of red": lambda: wide_png(64, 64),
    "float tiff": lambda: saved(Image.fromarray(np.linspace(0, 1, 64 * 64, dtype=np.float32).reshape(64, 64)), "TIFF"),
    "palette with a clear entry": lambda: saved(make_photo(64, 64).convert("P"), "PNG", transparency=0),
    "animated webp": lambda: saved(make_photo(64, 64), "WEBP", save_all=True, append_images=[make_photo(64, 64, 1)]),
    "animated png": lambda: saved(make_photo(64, 64), "PNG", save_all=True, append_images=[make_photo(64, 64, 1)]),
    "animated gif": lambda: saved(make_photo(64, 64), "GIF", save_all=True, append_images=[make_photo(64, 64, 1)] * 20),
    "pages of tiff": lambda: saved(
        make_photo(64, 64), "TIFF", save_all=True, append_images=[make_photo(64, 64, 1)] * 3
    ),
    "a tail behind the picture": lambda: png(make_photo(64, 64)) + b"PK\x03\x04" + bytes(1000),
}


@pytest.mark.parametrize("name", ODD_IMAGES)
def test_odd_modes_and_files_are_answered_or_refused_by_mode(server: RunningServer, name: str) -> None:
    response = ask(server, as_url(ODD_IMAGES[name]()))
    assert response.status_code == 200 or error_of(response)["code"] == "invalid_image_mode"


@pytest.mark.parametrize("orientation", [*range(1, 9), 99])
def test_orientation_is_applied_and_nonsense_ignored(server: RunningServer, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    url = as_url(saved(make_photo(120, 60), "JPEG", exif=exif))
    (item,) = server.post("/v1/bill", chat_body([image_part(url)])).json()["items"]
    assert (item["width"], item["height"]) == ((60, 120) if orientation in (5, 6, 7, 8) else (120, 60))


def test_images_with_equal_pixels_in_another_order_differ(server: RunningServer) -> None:
    square = make_photo(64, 64, seed=3)
    keys = set()
    for image in (square, square.transpose(Image.Transpose.TRANSPOSE), square.convert("P")):
        bill = server.post("/v1/bill", chat_body([image_part(as_url(png(image)))])).json()
        keys.add(bill["items"][0]["key"])
    assert len(keys) == 3


# --- row 15: bodies -----------------------------------------------------------------------------------------------


def raw(server: RunningServer, body: bytes, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
    with server.client() as client:
        return client.post(path, content=body, headers={"content-type": "application/json", **headers})


BODIES: dict[str, bytes] = {
    "no JSON": b"hello",
    "nothing": b"",
    "a list": b"[]",
    "invalid UTF-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "half a surrogate pair": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "not a number": b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
    "deep lists": b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    "levels below the parser's limit": b'{"chat_template_kwargs":' + b'{"a":' * 300 + b"1" + b"}" * 301,
    "a million parts": b'{"messages":[{"role":"user","content":[' + b'{"type":"text","text":"a"},' * 10**6 + b"{}]}]}",
    "ten thousand parts": json.dumps(chat_body([text_part("a")] * 10_000)).encode(),
    "ten thousand images": json.dumps(chat_body([image_part("data:,")] * 10_000)).encode(),
    "a huge number": b'{"messages": [{"role":"user","content":"a"}], "max_tokens": 1' + b"0" * 400 + b"}",
    "a very long text": json.dumps(chat_body("a " * 4_000_000)).encode(),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_a_bad_body_is_a_400(server: RunningServer, name: str) -> None:
    response = raw(server, BODIES[name])
    assert response.status_code == 400 and error_of(response)["type"] == "invalid_request_error"


def test_of_a_duplicate_key_the_last_one_counts(server: RunningServer) -> None:
    body = json.dumps(chat_body())[:-1] + ', "max_tokens": 2, "ignore_eos": true}'
    assert raw(server, body.encode()).json()["usage"]["completion_tokens"] == 2


def test_a_body_that_is_no_json_type_is_a_415(server: RunningServer) -> None:
    response = httpx.post(f"{server.url}/v1/chat/completions", data={"a": "b"})
    assert response.status_code == 415 and error_of(response)["code"] == "unsupported_media_type"


def test_a_body_over_the_limit_is_a_413(server: RunningServer) -> None:
    assert raw(server, b"a" * (97 << 20)).status_code == 413


@pytest.mark.parametrize("head", [b"x: " + b"a" * 200_000, b"x: a\r\n" * 30_000], ids=["one", "many"])
def test_huge_headers_are_a_431(server: RunningServer, head: bytes) -> None:
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n" + head)
        assert sock.recv(64).startswith(b"HTTP/1.1 431")


def test_what_is_no_http_gets_an_error_in_our_form(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as sock:
        sock.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        head, _, body = sock.recv(4096).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400") and json.loads(body)["error"]["code"] == "invalid_http"


# --- rows 16-20: too much, and URLs -------------------------------------------------------------------------------


def test_images_over_the_context_are_refused_with_the_bill(server: RunningServer) -> None:
    parts = [photo_part(1280, 720, seed=i) for i in range(4)]
    error = refused(server.chat([*parts, text_part("?")]), "context_length_exceeded")
    assert "1280x720 = 1196" in error["message"]


def test_more_images_than_allowed_are_refused_with_both_numbers(server: RunningServer) -> None:
    error = refused(server.chat([GOOD] * 5), None, "messages")
    assert "4" in error["message"] and "5" in error["message"]


@pytest.mark.parametrize("template", FORBIDDEN_URLS)
def test_a_url_that_is_not_allowed_is_refused_and_nobody_is_called(server: RunningServer, template: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as canary:
        canary.settimeout(0.1)
        url = template.replace("{port}", str(canary.getsockname()[1]))
        refused(ask(server, url), "invalid_image_url", WHERE)
        with pytest.raises(TimeoutError):
            canary.accept()


# --- rows 27-30 ---------------------------------------------------------------------------------------------------


def test_one_bad_image_among_good_ones_is_named(server: RunningServer) -> None:
    parts = [GOOD, photo_part(64, 64, 1), image_part(as_url(b"%PDF")), photo_part(64, 64, 2)]
    refused(server.chat(parts), "unsupported_image_media_type", "messages[0].content[2].image_url")


def test_what_is_no_video_is_refused(server: RunningServer) -> None:
    part = {"type": "video_url", "video_url": {"url": as_url(b"x", "video/mp4")}}
    refused(server.chat([part]), "unsupported_video_media_type", "messages[0].content[0].video_url")


def test_hundreds_of_images_do_not_grow_the_memory(server: RunningServer) -> None:
    def round_of(count: int, first: int) -> None:
        with server.client() as client:
            for seed in range(first, first + count):
                body = chat_body([photo_part(56, 56, seed), text_part("?")], max_tokens=1)
                assert client.post("/v1/chat/completions", json=body).status_code == 200

    round_of(60, 1000)
    before = memory_of(server)
    round_of(200, 2000)
    assert memory_of(server) - before < 32 << 20
