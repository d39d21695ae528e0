"""What the server refuses at once, who may come in, and what happens when clients, the engine or the server leave."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from saccade.cli import main as cli
from tests.helpers.media.images import make_photo
from tests.helpers.servers.serving import (
    RunningServer,
    chat_body,
    error_of,
    events_of,
    image_part,
    is_ready,
    photo_part,
    running_server,
    start_server,
    text_part,
    until,
)

KEY = "a-long-secret-key"
ENDLESS = {"max_tokens": 1500, "ignore_eos": True}
ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/bill"),
    ("POST", "/v1/plan"),
    ("GET", "/v1/plan/options"),
    ("GET", "/v1/plan/measured"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/input_tokens"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("GET", "/metrics"),
    ("HEAD", "/metrics"),
    ("GET", "/version"),
    ("GET", "/openapi.json"),
    ("GET", "/v1/engine"),
    ("POST", "/v1/files"),
    ("GET", "/v1/files/file-a/content"),
    ("POST", "/v1/batches/batch_a/cancel"),
    ("OPTIONS", "/v1/chat/completions"),
    ("GET", "//v1/models"),
    ("GET", "/nowhere"),
    ("GET", "//health"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where local pictures may be."""
    folder = tmp_path_factory.mktemp("pictures")
    make_photo(64, 64).save(folder / "photo.png")
    return folder


@pytest.fixture(scope="module")
def small(qwen2_vl_folder: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with a key, strict fields and limits that a test can reach."""
    flags = (
        "--api-key",
        KEY,
        "--api-key",
        "other-key",
        "--api-key",
        "third-key",
        "--max-num-seqs",
        "2",
        "--max-waiting",
        "2",
    )
    limits = ("--max-body-mb", "1", "--max-inflight-mb", "2", "--max-parts", "50", "--strict-params")
    limits = (*limits, "--max-request-pixels", "100000", "--allowed-origins", "https://app.example")
    local = ("--allowed-local-media-path", str(folder), "--batch-dir", str(tmp_path_factory.mktemp("batches")))
    with running_server(qwen2_vl_folder, *flags, *limits, *local, key=KEY) as server:
        yield server


def open_stream(server: RunningServer, **fields: Any) -> tuple[httpx.Client, Any]:
    """A chat that is being answered: the first event is there."""
    client = server.client()
    request = client.build_request("POST", "/v1/chat/completions", json=chat_body(stream=True, **{**ENDLESS, **fields}))
    response = client.send(request, stream=True)
    lines = response.iter_lines()
    next(lines)
    return client, lines


def is_idle(server: RunningServer) -> bool:
    return (
        server.stats("saccade:running")
        == server.stats("saccade:waiting")
        == server.stats("saccade:kv_blocks_used")
        == 0
    )


def test_images_that_are_too_large_together_are_refused_with_their_sizes(small: RunningServer) -> None:
    parts = [photo_part(256, 256, seed=seed) for seed in range(2)]
    error = error_of(small.chat([*parts, text_part("?")]))
    assert error["code"] == "context_length_exceeded" and "131072 pixels together" in error["message"]
    assert small.chat([parts[0], text_part("?")]).status_code == 200


# --- keys ---------------------------------------------------------------------------------------------------------


def test_files_of_another_key_do_not_exist(small: RunningServer) -> None:
    form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": ("a.jsonl", b"{}\n")}}
    with small.client() as owner, small.stranger(authorization="Bearer other-key") as other:
        file = owner.post("/v1/files", **form).json()
        path = f"/v1/files/{file['id']}"
        assert owner.get(f"{path}/content").content == b"{}\n"
        assert other.get("/v1/files").json()["data"] == []
        refused = [other.get(path), other.get(f"{path}/content"), other.delete(path)]
        assert [response.status_code for response in refused] == [404] * 3
        assert owner.delete(path).json() == {"id": file["id"], "object": "file", "deleted": True}


def test_an_upload_has_the_limit_of_a_body_and_leaves_nothing(small: RunningServer) -> None:
    with small.client() as client:
        form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": b"x" * (1 << 20)}}
        response = client.post("/v1/files", **form)
        assert response.status_code == 413 and "split the file" in error_of(response)["message"]
        assert client.get("/v1/files").json()["data"] == []


@pytest.mark.parametrize("authorization", [None, "Bearer wrong", "Bearer", f"Basic {KEY}", f"Bearer {KEY}x"])
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_needs_a_right_key(small: RunningServer, method: str, path: str, authorization: str | None) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    with small.stranger(**headers) as client:
        response = client.request(method, small.url + path)  # whole: a client would take //health for a host's name
    assert response.status_code == 401
    if method != "HEAD":
        assert error_of(response)["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", ["/live", "/health", "/ready", "/", "/static/main.js"])
def test_health_and_the_page_need_no_key(small: RunningServer, path: str) -> None:
    assert httpx.get(small.url + path).status_code == 200


@pytest.mark.parametrize("key", [KEY, "other-key"])
def test_each_of_several_keys_opens(small: RunningServer, key: str) -> None:
    headers = {"authorization": f"Bearer {key}"}
    assert httpx.get(f"{small.url}/v1/models", headers=headers).status_code == 200


def test_a_uuid_of_another_key_is_not_found(small: RunningServer) -> None:
    assert small.chat([{**photo_part(64, 64), "uuid": "mine"}, text_part("?")]).status_code == 200
    body = chat_body([{"type": "image_url", "uuid": "mine"}, text_part("?")])
    headers = {"authorization": "Bearer other-key"}
    response = httpx.post(f"{small.url}/v1/chat/completions", json=body, headers=headers)
    assert error_of(response)["code"] == "image_file_not_found"


# --- sizes --------------------------------------------------------------------------------------------------------


def test_a_body_over_the_limit_is_refused_by_its_announced_length(small: RunningServer) -> None:
    response = small.chat("a" * (2 << 20))
    assert response.status_code == 413 and error_of(response)["code"] == "request_too_large"
    assert response.headers["x-should-retry"] == "false"


def test_a_body_over_the_limit_is_refused_while_it_arrives(small: RunningServer) -> None:
    with small.client() as client:
        chunks = (b"a" * 65536 for _ in range(64))
        response = client.post("/v1/chat/completions", content=chunks, headers={"content-type": "application/json"})
    assert response.status_code == 413


def test_too_many_parts_are_refused(small: RunningServer) -> None:
    assert error_of(small.chat([text_part("a")] * 51))["param"] == "messages"


def test_strict_params_refuses_unknown_fields(small: RunningServer) -> None:
    response = small.chat(tempratur=1)
    assert response.status_code == 400 and error_of(response)["param"] == "tempratur"


def test_bodies_in_flight_are_bounded(small: RunningServer) -> None:
    """Two clients' uploads that stop before their last byte; a third does not fit beside them."""
    size = (1 << 20) - 100
    socks = [upload(small, size, key) for key in (KEY, "other-key")]
    try:
        assert until(lambda: small.stats("saccade:request_bytes") == 2 * (size - 1))
        with small.stranger(authorization="Bearer third-key") as client:
            response = client.post("/v1/chat/completions", json=chat_body("a" * 500_000))
        assert (
            response.status_code == 503
            and error_of(response)["code"] == "overloaded"
            and int(response.headers["retry-after"]) >= 1
        )
    finally:
        for sock in socks:
            sock.close()
    assert until(small.answers)


def upload(server: RunningServer, size: int, key: str = KEY) -> socket.socket:
    """All of a body but its last byte."""
    sock = connect(server, "/v1/chat/completions", size, key)
    sock.sendall(b" " * (size - 1))
    return sock


def connect(server: RunningServer, path: str, size: int, key: str = KEY) -> socket.socket:
    """A request whose headers are sent."""
    sock = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    first, right = f"POST {path} HTTP/1.1", f"authorization: Bearer {key}"
    headers = (first, "host: localhost", right, "content-type: application/json", f"content-length: {size}")
    sock.sendall("\r\n".join(headers).encode() + b"\r\n\r\n")
    return sock


# --- local files --------------------------------------------------------------------------------------------------


def test_a_file_below_the_allowed_folder_is_read(small: RunningServer, folder: Path) -> None:
    assert small.chat([image_part((folder / "photo.png").as_uri()), text_part("?")]).status_code == 200


def test_a_file_outside_the_allowed_folder_is_refused(small: RunningServer, folder: Path) -> None:
    url = f"file://{folder}/../{Path(__file__).name}"
    assert error_of(small.chat([image_part(url)]))["code"] == "invalid_image_url"


# --- overload -----------------------------------------------------------------------------------------------------


def test_requests_over_the_limit_get_429_and_the_others_go_on(small: RunningServer) -> None:
    opened = [open_stream(small) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(small.chat, max_tokens=2) for _ in range(2)]
        try:
            assert until(lambda: small.stats("saccade:waiting") == 2)
            response = small.chat([photo_part(200, 200, seed=321), text_part("?")])
            assert response.status_code == 429 and error_of(response)["code"] == "overloaded"
            assert int(response.headers["retry-after"]) >= 1
            assert small.get("/ready").status_code == 503
        finally:
            for client, _ in opened:
                client.close()
        assert [future.result().status_code for future in waiting] == [200, 200]


def test_answers_take_places_and_not_requests(small: RunningServer) -> None:
    client, _ = open_stream(small, n=4)
    try:
        assert small.get("/ready").status_code == 503
        response = small.chat(max_tokens=2)
        assert response.status_code == 429 and "4 answers are open" in error_of(response)["message"]
    finally:
        client.close()
    assert until(lambda: small.get("/ready").status_code == 200 and is_idle(small))
    assert len(small.chat(max_tokens=2, n=4).json()["choices"]) == 4


def test_a_client_with_all_places_locks_no_other_out(small: RunningServer) -> None:
    client, _ = open_stream(small, n=4)
    try:
        with small.stranger(authorization="Bearer other-key") as other:
            assert other.post("/v1/chat/completions", json=chat_body(max_tokens=2)).status_code == 200
        assert small.chat(max_tokens=2).status_code == 429
    finally:
        client.close()
    assert until(lambda: is_idle(small))


@pytest.mark.parametrize(("prompts", "n", "status"), [(1, 3, 200), (2, 1, 200), (1, 4, 429), (2, 2, 429)])
def test_answers_that_find_no_place_are_refused_together(
    small: RunningServer, prompts: int, n: int, status: int
) -> None:
    client, _ = open_stream(small)
    try:
        body = {"prompt": ["a"] * prompts, "n": n, "max_tokens": 2}
        assert small.post("/v1/completions", body).status_code == status
    finally:
        client.close()
    assert until(lambda: is_idle(small))


def test_more_answers_than_there_are_places_are_never_taken(small: RunningServer) -> None:
    response = small.chat(max_tokens=2, n=5)
    error = error_of(response)
    assert response.status_code == 400 and error["param"] == "n"
    assert "5 answers" in error["message"] and "at most 4 may be open at once" in error["message"]
    assert response.headers["x-should-retry"] == "false"


# --- clients that leave -------------------------------------------------------------------------------------------


def test_leaving_during_the_answer_frees_the_engine(small: RunningServer) -> None:
    client, _ = open_stream(small)
    assert until(lambda: small.stats("saccade:running") == 1)
    client.close()
    assert until(lambda: is_idle(small))


def test_leaving_a_whole_answer_frees_the_engine(small: RunningServer) -> None:
    with pytest.raises(httpx.ReadTimeout), small.client() as client:
        client.post("/v1/chat/completions", json=chat_body(**ENDLESS), timeout=0.5)
    assert until(lambda: is_idle(small))


def test_leaving_while_waiting_frees_the_place(small: RunningServer) -> None:
    opened = [open_stream(small) for _ in range(2)]
    try:
        with pytest.raises(httpx.ReadTimeout), small.client() as client:
            client.post("/v1/chat/completions", json=chat_body(), timeout=0.5)
        assert until(lambda: small.stats("saccade:waiting") == 0)
    finally:
        for client, _ in opened:
            client.close()
    assert until(lambda: is_idle(small))


def test_leaving_during_the_upload_frees_what_was_read(small: RunningServer) -> None:
    for _ in range(4):  # more than fit at once, if any of them stayed
        upload(small, (1 << 20) - 100).close()
    assert until(lambda: small.chat("a" * 1000, max_tokens=1).status_code == 200)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_leaving_at_any_moment_of_a_image_request_frees_everything(
    small: RunningServer, path: str, stream: bool
) -> None:
    """The body is whole; then the client leaves while it is read, priced, encoded, prefilled or answered."""
    for step in range(12):
        body = msgspec.json.encode(image_body(path, seed=5000 + step, stream=stream))
        sock = connect(small, path, len(body))
        sock.sendall(body)
        time.sleep(0.004 * step)
        sock.close()
    assert until(lambda: is_idle(small) and small.stats("saccade:request_bytes") == 0)
    assert small.answers()


def image_body(path: str, seed: int, **fields: Any) -> dict[str, Any]:
    """A question about a new picture with an answer that takes a while, in the words of each API."""
    fields |= {"ignore_eos": True, "model": "tiny"}
    photo, text = photo_part(300, 200, seed), text_part("What is this?")
    if path == "/v1/messages":
        data = photo["image_url"]["url"].partition(",")[2]
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
        return {"messages": [{"role": "user", "content": [image, text]}], "max_tokens": 500, **fields}
    if path == "/v1/responses":
        parts = [{"type": "input_image", "image_url": photo["image_url"]["url"]}]
        return {"input": [{"role": "user", "content": parts}], "max_output_tokens": 500, **fields}
    return chat_body([photo, text], max_tokens=500, **fields)


def test_a_slow_reader_does_not_hold_up_others(small: RunningServer) -> None:
    client, lines = open_stream(small, logprobs=True, top_logprobs=20, max_tokens=600)  # far more than the buffers hold
    try:
        assert small.answers()
        events = events_of(list(lines))
    finally:
        client.close()
    assert events[-1] == "[DONE]"
    assert sum(len(event["choices"][0]["logprobs"]["content"]) for event in events[:-1]) == 600


# --- the engine leaves, and the server ----------------------------------------------------------------------------


def test_a_killed_engine_comes_back_and_then_sigterm_lets_open_requests_finish(qwen2_vl_folder: Path) -> None:
    with running_server(qwen2_vl_folder) as server:
        _kill_engine(server)
        client, lines = open_stream(server, max_tokens=600)
        children = server.children()
        server.process.send_signal(signal.SIGTERM)
        assert until(lambda: not is_ready(server))
        refused = server.chat()
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert events_of(list(lines))[-1] == "[DONE]"
        client.close()
        assert server.process.wait(120) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def _kill_engine(server: RunningServer) -> None:
    """Its streams end with an error, and the server starts another one."""
    client, lines = open_stream(server)
    (worker,) = server.children()
    os.kill(worker, signal.SIGKILL)
    events = events_of(list(lines))
    client.close()
    assert events[-1]["error"]["code"] == "engine_unavailable" and "[DONE]" not in events
    response = server.chat()
    assert response.status_code == 503 and "retry-after" in response.headers
    assert server.get("/health").status_code == 503
    assert until(lambda: is_ready(server))
    assert server.answers() and server.children() != [worker]


def test_after_the_drain_timeout_streams_end_with_an_error(qwen2_vl_folder: Path) -> None:
    with running_server(qwen2_vl_folder, "--drain-timeout", "0.2") as server:
        client, lines = open_stream(server)
        server.process.send_signal(signal.SIGTERM)
        events = events_of(list(lines))
        client.close()
        assert "error" in events[-1]
        assert server.process.wait(120) == 0


# --- starting -----------------------------------------------------------------------------------------------------


def test_ready_tells_the_truth_while_the_model_loads_and_a_second_signal_does_not_wait(qwen2_vl_folder: Path) -> None:
    server = start_server(qwen2_vl_folder, "--drain-timeout", "600")
    try:
        seen = set()

        def look() -> bool:
            try:
                seen.add(httpx.get(f"{server.url}/ready").status_code)
                if 200 not in seen:
                    response = server.chat()
                    assert response.status_code in (503, 200)
            except httpx.TransportError:
                return False
            return 200 in seen

        assert until(look)
        assert seen == {503, 200}

        client, lines = open_stream(server)
        server.process.send_signal(signal.SIGTERM)
        assert until(lambda: not is_ready(server))
        server.process.send_signal(signal.SIGINT)
        assert "error" in events_of(list(lines))[-1]
        client.close()
        assert server.process.wait(120) == 0
    finally:
        server.process.kill()


def test_a_setting_that_cannot_work_ends_with_one_line(qwen2_vl_folder: Path) -> None:
    server = start_server(qwen2_vl_folder, "--max-model-len", "100000000")
    assert server.process.wait(120) == 1
    assert until(lambda: any("--max-model-len" in line for line in server.log))
    assert not any("Traceback" in line for line in server.log)


def test_a_taken_port_is_named(qwen2_vl_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", str(qwen2_vl_folder), "--port", str(port)]) == 1
    assert str(port) in capsys.readouterr().err


def test_origins_that_are_allowed_may_call_from_a_page(small: RunningServer) -> None:
    headers = {"origin": "https://app.example", "access-control-request-method": "POST"}
    response = httpx.options(f"{small.url}/v1/chat/completions", headers=headers)
    assert response.headers["access-control-allow-origin"] == "https://app.example"
    headers["origin"] = "https://other.example"
    response = httpx.options(f"{small.url}/v1/chat/completions", headers=headers)
    assert "access-control-allow-origin" not in response.headers
