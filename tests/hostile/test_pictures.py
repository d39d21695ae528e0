"""One key sends pictures and pages that are hard to decode. Another key's are answered before those are through."""

from __future__ import annotations

import io
import json
import select
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from tests.helpers.media import pdfs
from tests.helpers.media.images import jpeg_of_scans
from tests.helpers.media.pdfs import pdf_url
from tests.helpers.servers.hostile import CHAT, sent
from tests.helpers.servers.serving import (
    RunningServer,
    as_url,
    chat_body,
    error_of,
    image_part,
    photo_part,
    running_server,
    until,
)

TENANTS = """
[ka]
keys = ["ka-1"]
[kb]
keys = ["kb-1"]
[operator]
keys = ["operator-1"]
operator = true
"""
COUNT = 4


@pytest.fixture(scope="module")
def shop(qwen2_vl_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    file = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    file.write_text(TENANTS)
    with running_server(qwen2_vl_folder, "--api-keys", str(file), key="operator-1") as server:
        yield server


def body_of(part: dict[str, Any]) -> bytes:
    small = {"max_pixels": 56 * 56}
    return json.dumps(chat_body([part], max_tokens=1, mm_processor_kwargs=small)).encode()


def bits(number: int) -> dict[str, Any]:
    """Twenty-four megapixels in a few kilobytes."""
    stream = io.BytesIO()
    Image.new("1", (8_000, 2_999 - number)).save(stream, "PNG")
    return image_part(as_url(stream.getvalue()))


def scans(number: int) -> dict[str, Any]:
    return image_part(as_url(jpeg_of_scans(1_500, 1_500 - number, 400), "image/jpeg"))


def page(number: int) -> dict[str, Any]:
    drawn = pdfs.one_page(b"0 0 m 600 700 l 3 4 l h f\n" * (40_000 + number))
    return {"type": "file", "file": {"file_data": pdf_url(drawn)}}


def asked(server: RunningServer, part: dict[str, Any]) -> int:
    with server.stranger(authorization="Bearer kb-1", **{"content-type": "application/json"}) as client:
        return client.post("/v1/chat/completions", content=body_of(part)).status_code


def decoders(server: RunningServer) -> list[psutil.Process]:
    """Processes that decode for the engine."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in children if "saccade.media.media_worker" in " ".join(child.cmdline())]


@pytest.mark.parametrize("hard", [bits, scans, page])
def test_a_picture_of_another_key_is_answered_before_hard_ones_are_through(
    shop: RunningServer, hard: Callable[[int], dict[str, Any]]
) -> None:
    bodies = [body_of(hard(number)) for number in range(COUNT)]
    easy = (
        (lambda: {"type": "file", "file": {"file_data": pdf_url(pdfs.one_page(b""))}}) if hard is page else photo_part
    )
    assert asked(shop, easy()) == 200
    with ExitStack() as stack:
        flood = [sent(shop, stack, CHAT, body, key="ka-1") for body in bodies]
        assert until(lambda: any(process.cpu_percent(0.05) > 0 for process in decoders(shop)))
        before = len(select.select(flood, [], [], 0)[0])
        assert asked(shop, {"type": "text", "text": "hi"}) == 200 and shop.get("/health").status_code == 200
        assert asked(shop, photo_part(seed=before + COUNT)) == 200
        during = len(select.select(flood, [], [], 0)[0]) - before
        assert during <= 2, "it came last and is answered after the one that was being decoded"
        assert until(lambda: len(select.select(flood, [], [], 0)[0]) == COUNT)


def test_a_jpeg_of_thousands_of_scans_is_refused_at_once(shop: RunningServer) -> None:
    response = shop.post(
        "/v1/chat/completions", json.loads(body_of(image_part(as_url(jpeg_of_scans(900, 900, 1_500)))))
    )
    assert response.status_code == 400 and error_of(response)["code"] == "image_too_large"


def test_a_picture_whose_client_has_left_is_not_decoded_on(shop: RunningServer) -> None:
    with ExitStack() as stack:
        for number in range(3):
            part = image_part(as_url(jpeg_of_scans(2_500, 2_400 - number, 400), "image/jpeg"))
            sent(shop, stack, CHAT, body_of(part), key="ka-1")
        usual = psutil.Process(shop.process.pid).nice()
        assert until(lambda: any(process.nice() > usual for process in decoders(shop)))
        heavy = next(process for process in decoders(shop) if process.nice() > usual)
        before = heavy.cpu_times().user  # one that waited may have worked for others
        assert until(lambda: heavy.cpu_times().user > before + 0.3)
    assert until(lambda: not heavy.is_running() or heavy.status() == psutil.STATUS_ZOMBIE)
    assert until(lambda: shop.stats("saccade:running") == shop.stats("saccade:waiting") == 0)
    assert asked(shop, photo_part(seed=99)) == 200


def test_pictures_of_clients_are_decoded_outside_of_the_engine_unless_the_operator_says_so(
    shop: RunningServer, qwen2_vl_folder: Path
) -> None:
    assert asked(shop, photo_part(seed=1234)) == 200
    assert decoders(shop)
    with running_server(qwen2_vl_folder, "--isolate-decoders", "off") as server:
        assert server.chat([photo_part(seed=1234)]).status_code == 200
        assert not decoders(server)
