"""One key floods the API process with work. Another key's requests are answered before that work is through."""

from __future__ import annotations

import json
import select
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.helpers.servers.hostile import raw_connection, sent
from tests.helpers.servers.serving import (
    RunningServer,
    chat_body,
    error_of,
    image_part,
    image_url,
    running_server,
    until,
)

TENANTS = """
[ka]
keys = ["ka-1"]
[kb]
keys = ["kb-1"]
[small]
keys = ["small-1"]
processor_seconds_per_minute = 1
[prometheus]
keys = ["operator-1"]
operator = true
"""
IDS, MANY_IDS = (b'{"prompt":[' + b"7," * count + b"7]}" for count in (1_900_000, 475_000))
NAMES = b'{"a":1,' + b",".join(b'"k%d":{}' % number for number in range(60_000)) + b"}"
LETTERS = json.dumps({"prompt": "a" * 64_000}).encode()
STARTS = b'{"a":"' + b'\\"data:' * 499_000 + b'"}'  # of media, which the loop itself looks for
FLOODS = {
    "starts of media": ("/v1/chat/completions", STARTS, 16),
    "many token ids": ("/v1/completions", MANY_IDS, 16),
    "many names": ("/v1/chat/completions", NAMES, 128),
    "long words": ("/tokenize", LETTERS, 128),
}


@pytest.fixture(scope="module")
def shop(qwen2_vl_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    file = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    file.write_text(TENANTS)
    flags = ("--api-keys", str(file), "--max-waiting-megapixels", "1", "--max-num-seqs", "4")
    flags += ("--batch-dir", str(tmp_path_factory.mktemp("batches")))
    with running_server(qwen2_vl_folder, *flags, key="operator-1") as server:
        yield server


def asked(server: RunningServer, key: str, path: str, body: Any) -> httpx.Response:
    with server.stranger(authorization=f"Bearer {key}") as client:
        return client.post(path, json=body)


@pytest.mark.parametrize("name", FLOODS)
def test_another_key_is_answered_before_a_flood_is_through(shop: RunningServer, name: str) -> None:
    path, body, count = FLOODS[name]
    assert asked(shop, "kb-1", "/v1/chat/completions", chat_body(max_tokens=1)).status_code == 200
    with ExitStack() as stack:
        flood = [sent(shop, stack, path, body, key="ka-1") for _ in range(count)]
        assert until(lambda: select.select(flood, [], [], 0)[0])
        before = len(select.select(flood, [], [], 0)[0])
        assert asked(shop, "kb-1", "/v1/chat/completions", chat_body(max_tokens=1)).status_code == 200
        during = len(select.select(flood, [], [], 0)[0]) - before
        assert shop.get("/health").status_code == 200
        assert during < 0.75 * (count - before), "it came last, waits five times and is through before most of them"
        assert until(lambda: len(select.select(flood, [], [], 0)[0]) == count)
        answers = {sock.recv(12) for sock in flood}
        assert answers <= {b"HTTP/1.1 200", b"HTTP/1.1 400", b"HTTP/1.1 429"}


def test_another_key_is_answered_beside_a_batch_of_heavy_lines(shop: RunningServer) -> None:
    """Its lines are read in another process: each took a second and more of the server's own."""
    api = psutil.Process(shop.process.pid)

    def used() -> float:
        times = api.cpu_times()
        return times.user + times.system

    entry = b'{"custom_id":"%d","method":"POST","url":"/v1/chat/completions","body":%b}'
    lines = b"\n".join(entry % (number, (NAMES, IDS, STARTS)[number % 3]) for number in range(12))
    with shop.stranger(authorization="Bearer ka-1") as ka:
        file = ka.post("/v1/files", files={"file": ("in.jsonl", lines)}, data={"purpose": "batch"}).json()
        order = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = ka.post("/v1/batches", json=order).json()["id"]
        before = used()
        assert asked(shop, "kb-1", "/v1/chat/completions", chat_body(max_tokens=1)).status_code == 200
        assert shop.get("/health").status_code == 200
        assert until(lambda: ka.get(f"/v1/batches/{batch}").json()["status"] == "completed")
        assert used() - before < 2
        assert ka.get(f"/v1/batches/{batch}").json()["request_counts"] == {"total": 12, "completed": 0, "failed": 12}


def test_processor_seconds_are_counted_and_limited(shop: RunningServer) -> None:
    name = 'saccade:tenant_processor_seconds_total{tenant="small"}'

    def used() -> float:
        lines = [line for line in shop.get("/metrics").text.splitlines() if line.startswith(name)]
        return float(lines[0].rsplit(" ", 1)[1]) if lines else 0.0

    answers = []
    while not answers or answers[-1].status_code != 429:
        answers.append(asked(shop, "small-1", "/detokenize", {"tokens": [7] * 4000}))
        assert len(answers) < 5000
    error = error_of(answers[-1])
    assert "your limit is 1 a minute" in error["message"] and int(answers[-1].headers["retry-after"]) > 0
    assert used() >= 1 and answers[-1].headers["x-ratelimit-remaining-processor-seconds"] == "0"
    assert 'saccade:tenant_refused_total{limit="processor_seconds",tenant="small"}' in shop.get("/metrics").text
    assert asked(shop, "kb-1", "/detokenize", {"tokens": [7]}).status_code == 200


def test_pictures_that_wait_are_bounded_and_come_back(shop: RunningServer) -> None:
    """Each has 0.9 megapixels: one may wait, whatever its size, and no second one beside it."""
    small = {"max_pixels": 56 * 56}
    body = chat_body([image_part(image_url(1000, 900))], max_tokens=400, ignore_eos=True, mm_processor_kwargs=small)
    ask = partial(asked, shop, "ka-1", "/v1/chat/completions")
    with ExitStack() as stack:
        full = json.dumps(chat_body("hi", max_tokens=1500, ignore_eos=True, stream=True)).encode()
        for _ in range(4):  # so that nothing else begins
            assert sent(shop, stack, "/v1/chat/completions", full, key="ka-1").recv(12) == b"HTTP/1.1 200"
        sent(shop, stack, "/v1/chat/completions", json.dumps(body).encode(), key="ka-1")
        assert until(lambda: shop.stats("saccade:waiting") == 1)
        refused = ask(body)
        assert refused.status_code == 429 and "--max-waiting-megapixels" in error_of(refused)["message"]
        other = asked(shop, "kb-1", "/v1/chat/completions", {**body, "max_tokens": 1})
        assert other.status_code == 200, "it has a limit of its own"
    assert until(lambda: shop.stats("saccade:waiting") == shop.stats("saccade:running") == 0)
    assert [ask({**body, "max_tokens": 1}).status_code for _ in range(2)] == [200, 200]


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("content-encoding: gzip", 415),
        ("content-encoding: identity", 200),
        ("transfer-encoding: gzip, chunked", 501),
        ("transfer-encoding: chunked", 200),
    ],
)
def test_codings_that_are_not_undone_are_refused(shop: RunningServer, header: str, status: int) -> None:
    body = b'{"prompt": "a"}'
    is_chunked = header.startswith("transfer")
    head = ("host: localhost", "authorization: Bearer kb-1", "content-type: application/json", header)
    length = () if is_chunked else (f"content-length: {len(body)}",)
    with raw_connection(shop) as sock:
        sock.sendall("\r\n".join(("POST /tokenize HTTP/1.1", *head, *length, "", "")).encode())
        sock.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if is_chunked else body)
        assert sock.recv(12) == b"HTTP/1.1 %d" % status
