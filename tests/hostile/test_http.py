"""Clients that misuse HTTP itself: endless trailers, slow and stalled peers, too many connections, half-closed ones."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.helpers.servers.hostile import (
    CHAT,
    KEY,
    chat_message,
    engine_pid,
    flood,
    large_body,
    message,
    raw_connection,
    read_all,
    watching,
)
from tests.helpers.servers.serving import RunningServer, chat_body, error_of, running_server, until

OTHER_KEY = "another-secret-key"
ELSEWHERE = "127.0.0.2"  # another client's address
MAXIMUM = 16  # connections of the strict server; half of them from one address
FLAT_MB = 40


@pytest.fixture(scope="module")
def strict(qwen2_vl_folder: Path) -> Iterator[RunningServer]:
    """A server with deadlines and limits that a test can reach."""
    keys = ("--api-key", KEY, "--api-key", OTHER_KEY)
    times = ("--header-timeout", "2", "--body-timeout", "3", "--min-body-rate", "64", "--write-timeout", "2")
    limits = ("--max-body-mb", "8", "--max-inflight-mb", "16", "--max-connections", str(MAXIMUM))
    with running_server(qwen2_vl_folder, *keys, *times, *limits, key=KEY) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test does to the strict server, afterwards it holds no bytes and answers."""
    yield
    if "strict" in request.fixturenames:
        server: RunningServer = request.getfixturevalue("strict")
        assert until(lambda: is_calm(server))


def is_calm(server: RunningServer) -> bool:
    try:
        return server.answers() and server.stats("saccade:request_bytes") == 0
    except httpx.TransportError:  # connections of a test are still being closed, and ours found no place
        return False


def statuses(answer: bytes) -> list[int]:
    """Of all answers on a connection; interim ones are skipped, as clients do."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", answer) if status != b"100"]


def asks(server: RunningServer, path: str, address: str = "127.0.0.1") -> httpx.Response:
    """From another address than the attacker."""
    with httpx.Client(transport=httpx.HTTPTransport(local_address=address), timeout=120) as client:
        return client.get(server.url + path, headers={"authorization": f"Bearer {KEY}"})


def bill(server: RunningServer, size: int, key: str = KEY) -> httpx.Response:
    """The answer to a body of so many bytes."""
    with server.stranger(authorization=f"Bearer {key}") as client:
        headers = {"content-type": "application/json"}
        return client.post("/v1/bill", content=large_body(size), headers=headers)


# --- headers, trailers, framing -----------------------------------------------------------------------------------

FLOODS = {
    "trailers": b"a:b\r\n",
    "a trailer without end": b"b",
    "a chunk extension": b";x",
}


@pytest.mark.parametrize("path", ["/v1/bill", "/nowhere"])
@pytest.mark.parametrize("what", FLOODS)
def test_endless_framing_takes_no_memory_and_harms_nobody(strict: RunningServer, what: str, path: str) -> None:
    begun = {"trailers": b"2\r\n{}\r\n0\r\n", "a trailer without end": b"0\r\na:", "a chunk extension": b"2"}[what]
    with watching(strict) as watch, raw_connection(strict) as sock:
        sock.sendall(message(path, begun, "transfer-encoding: chunked"))
        assert until(lambda: watch.num_answered > 0)
        answer = flood(sock, FLOODS[what])
    assert statuses(answer) in ([431], [404], [])  # nothing, where a reset overtook it
    assert watch.api_growth_mb < FLAT_MB and not watch.failures


def test_a_trailer_never_becomes_a_header(strict: RunningServer) -> None:
    chunked = b"2\r\n{}\r\n0\r\n" + f"Authorization: Bearer {KEY}\r\nX-Request-Id: from-a-trailer\r\n\r\n".encode()
    with raw_connection(strict) as sock:
        sock.sendall(message("/v1/bill", chunked, "transfer-encoding: chunked", "connection: close", key=None))
        answer = read_all(sock)
    assert statuses(answer) == [401] and b"from-a-trailer" not in answer


def test_a_trailer_does_not_spoil_a_request(strict: RunningServer) -> None:
    body = msgspec.json.encode(chat_body())
    chunked = b"%x;ext=1\r\n%s\r\n0\r\nChecksum: 1\r\n\r\n" % (len(body), body)
    with raw_connection(strict) as sock:
        sock.sendall(message("/v1/bill", chunked, "transfer-encoding: chunked"))
        sock.sendall(message("/version", method="GET") + message("/version", b"", "connection: close", method="GET"))
        assert statuses(read_all(sock)) == [200, 200, 200]


@pytest.mark.parametrize(("size", "status"), [(16_000, 200), (17_000, 400)])
def test_a_body_of_tiny_chunks_is_taken_up_to_a_number(strict: RunningServer, size: int, status: int) -> None:
    """Its frames are longer than headers may be. Each takes 0.4 us of the loop."""
    chunked = b"".join(b"1\r\n%c\r\n" % byte for byte in large_body(size)) + b"0\r\n\r\n"
    with raw_connection(strict) as sock:
        sock.sendall(message("/v1/bill", chunked, "transfer-encoding: chunked", "connection: close"))
        answer = read_all(sock)
    assert statuses(answer) == [status] and (status == 200 or b"send chunks of 64 bytes or more" in answer)


def test_many_small_headers_are_a_431(strict: RunningServer) -> None:
    with raw_connection(strict) as sock:
        sock.sendall(message("/health", b"", *["a: b"] * 300, method="GET"))
        assert statuses(read_all(sock)) == [431]


# --- bodies that nobody reads -------------------------------------------------------------------------------------

UNREAD = {
    "no key": (401, message(CHAT, b"{", "content-length: 5000000", key=None)),
    "no route": (404, message("/nowhere", b"{", "content-length: 5000000")),
    "no method": (405, message("/health", b"{", "content-length: 5000000")),
    "too large": (413, message(CHAT, b"{", "content-length: 50000000")),
    "too large in chunks": (404, message("/nowhere", b"1\r\n{\r\n", "transfer-encoding: chunked")),
    "a GET with a body": (200, message("/health", b"{", "content-length: 5000000", method="GET")),
    "an expectation": (401, message(CHAT, b"", "content-length: 5000000", "expect: 100-continue", key=None)),
}


@pytest.mark.parametrize("case", UNREAD)
def test_a_connection_ends_with_the_answer_to_a_body_that_is_not_read(strict: RunningServer, case: str) -> None:
    status, begun = UNREAD[case]
    with raw_connection(strict, timeout=120) as sock:
        sock.sendall(begun)
        answer = read_all(sock)
    assert statuses(answer) == [status] and b"connection: close" in answer.lower()


def test_an_upload_that_nobody_reads_takes_no_memory(strict: RunningServer) -> None:
    with watching(strict) as watch, raw_connection(strict) as sock:
        sock.sendall(message("/nowhere", b"{", "content-length: 500000000"))
        assert statuses(flood(sock, b"a" * 65536)) in ([404], [])
    assert watch.api_growth_mb < FLAT_MB and not watch.failures


def test_a_request_that_is_all_there_keeps_the_connection(strict: RunningServer) -> None:
    with raw_connection(strict) as sock:
        for _ in range(3):
            sock.sendall(message("/nowhere", b"{}"))
            assert b"connection: close" not in sock.recv(65536).lower()


# --- other protocols ----------------------------------------------------------------------------------------------

H2C = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAoAAAAAIAAAAA")


@pytest.mark.parametrize("pause", [0.0, 0.1])
def test_a_wish_for_another_protocol_is_ignored(strict: RunningServer, pause: float) -> None:
    """As Java's client sends its first request. The body may come with the headers or after them."""
    request = chat_message(*H2C)
    head = request.index(b"\r\n\r\n") + 4
    with raw_connection(strict) as sock:
        sock.sendall(request[:head])
        time.sleep(pause)
        sock.sendall(request[head:] + message("/version", b"", "connection: close", method="GET"))
        answer = read_all(sock)
    assert statuses(answer) == [200, 200] and b'"chat.completion"' in answer


@pytest.mark.parametrize("behind", [b"\x81\x05hello", message("/version", b"", method="GET")])
def test_a_wish_for_a_websocket_gets_an_answer_and_the_end(strict: RunningServer, behind: bytes) -> None:
    """A proxy may take what follows for frames: a request hidden there is not answered."""
    wish = ("connection: keep-alive, upgrade", "upgrade: WebSocket", "sec-websocket-key: x")
    with raw_connection(strict) as sock:
        sock.sendall(message("/health", b"", *wish, method="GET") + behind)
        answer = read_all(sock)
    assert statuses(answer) == [200] and b"connection: close" in answer.lower()


def test_proxying_is_refused(strict: RunningServer) -> None:
    with raw_connection(strict) as sock:
        sock.sendall(b"CONNECT example.com:443 HTTP/1.1\r\nhost: example.com\r\n\r\n" + message("/version", b""))
        assert statuses(read_all(sock)) == [405]


def test_expectations_that_nobody_may_meet_are_not_met(strict: RunningServer) -> None:
    """HTTP/1.0 knows no `100 Continue`, and on a connection that was refused none can be written."""
    expecting = chat_message("expect: 100-continue")
    with raw_connection(strict) as sock:
        sock.sendall(expecting.replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        assert statuses(read_all(sock)) == [200]
    with raw_connection(strict) as sock:
        sock.sendall(expecting * 20)
        assert statuses(read_all(sock))[-1] == 400
    assert not any("Traceback" in line for line in strict.log)


# --- what two parsers could read differently ----------------------------------------------------------------------

CHUNKS = b"2\r\n{}\r\n0\r\n\r\n"
CHUNKED = "transfer-encoding: chunked"
AMBIGUOUS = {  # headers and body
    "a length and chunks": (["content-length: 4", CHUNKED], CHUNKS),
    "chunks and a length": ([CHUNKED, "content-length: 4"], CHUNKS),
    "two lengths": (["content-length: 2", "content-length: 3"], b"{}"),
    "a list of lengths": (["content-length: 2, 2"], b"{}"),
    "a length with a sign": (["content-length: +2"], b"{}"),
    "a length beyond 64 bits": (["content-length: 18446744073709551618"], b"{}"),
    "a space before the colon": (["content-length : 2"], b"{}"),
    "chunks twice": ([CHUNKED, CHUNKED], CHUNKS),
    "chunks not at last": (["transfer-encoding: chunked, identity"], CHUNKS),
    "chunks that are none": (["transfer-encoding: xchunked"], CHUNKS),
    "a folded line": (["transfer-encoding:\r\n chunked"], CHUNKS),
    "a bare line feed": (["a: b\ncontent-length: 2"], b"{}"),
    "a bare carriage return": (["a: b\rcontent-length: 2"], b"{}"),
    "a zero byte": (["a: b\0", "content-length: 2"], b"{}"),
    "a line feed in an extension": ([CHUNKED], b"2;a\n{}\r\n0\r\n\r\n"),
    "a line feed after a chunk": ([CHUNKED], b"2\r\n{}\n0\r\n\r\n"),
    "a chunk's size beyond 64 bits": ([CHUNKED], b"10000000000000002\r\n{}\r\n0\r\n\r\n"),
    "a chunk's size with a prefix": ([CHUNKED], b"0x2\r\n{}\r\n0\r\n\r\n"),
    "a length in a trailer": ([CHUNKED], b"2\r\n{}\r\n0\r\ncontent-length: 4\r\n\r\n"),
    "an upgrade with both": (["connection: upgrade", "upgrade: websocket", "content-length: 4", CHUNKED], CHUNKS),
}


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_what_two_parsers_could_read_differently_is_a_400_and_the_end(strict: RunningServer, case: str) -> None:
    """A request hidden behind it, which a proxy takes for a part of its body, is not answered."""
    headers, body = AMBIGUOUS[case]
    with raw_connection(strict) as sock:
        sock.sendall(message("/nowhere", body, *headers) + message("/version", method="GET"))
        assert statuses(read_all(sock)) == [400]


# --- half-closed, pipelined, gone -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_only_stops_sending_gets_its_answer(strict: RunningServer, stream: bool) -> None:
    with raw_connection(strict) as sock:
        sock.sendall(chat_message(stream=stream, max_tokens=200, ignore_eos=True))
        sock.shutdown(socket.SHUT_WR)
        answer = read_all(sock)
    assert statuses(answer) == [200] and (b"[DONE]" if stream else b'"length"') in answer


def test_requests_sent_together_are_answered_in_order_to_a_client_that_stops_sending(strict: RunningServer) -> None:
    with raw_connection(strict) as sock:
        sock.sendall(chat_message() + message("/nowhere") + message("/version", method="GET"))
        sock.shutdown(socket.SHUT_WR)
        assert statuses(read_all(sock)) == [200, 404, 200]


def test_a_client_that_leaves_with_requests_waiting_frees_the_engine(strict: RunningServer) -> None:
    before = strict.stats("saccade:request_failures_total")
    with raw_connection(strict) as sock:
        sock.sendall(chat_message(stream=True, max_tokens=1500, ignore_eos=True) + message("/version", method="GET"))
        assert sock.recv(1)
    assert until(lambda: strict.stats("saccade:request_failures_total") == before + 1)
    assert until(lambda: strict.stats("saccade:running") == 0)
    assert not any("Traceback" in line for line in strict.log)  # it was told, and did not find out by failing


def test_only_a_few_requests_may_wait_on_a_connection(strict: RunningServer) -> None:
    with raw_connection(strict) as sock:
        endless = chat_message(stream=True, max_tokens=1500, ignore_eos=True)
        sock.sendall(endless + message("/health", method="GET") * 1000)
        assert statuses(read_all(sock)) == [400]
    assert until(lambda: strict.stats("saccade:running") == 0)


# --- slow headers -------------------------------------------------------------------------------------------------


HEADERS = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx: "
SLOW_HEADERS = {  # what comes at first, and then now and then
    "nothing": (b"", b""), "empty lines": (b"", b"\r\n"), "stalled": (HEADERS, b""), "dripping": (HEADERS, b"x")
}  # fmt: skip


def test_a_connection_ends_without_headers_in_time_with_a_408_if_they_had_begun(strict: RunningServer) -> None:
    answers = answers_to(strict, SLOW_HEADERS)
    assert answers["nothing"] == answers["empty lines"] == b""
    for name in ("stalled", "dripping"):
        assert statuses(answers[name]) == [408] and b"--header-timeout" in answers[name], name


def answers_to(server: RunningServer, cases: Mapping[str, tuple[bytes, bytes]]) -> dict[str, bytes]:
    """What the server says to each, all at the same time, since each waits for a deadline of the server."""

    def answer(begun: bytes, drop: bytes) -> bytes:
        with raw_connection(server, timeout=120) as sock:
            sock.sendall(begun)
            if b"100-continue" in begun:
                assert sock.recv(65536).startswith(b"HTTP/1.1 100")
            said = drip(sock, drop)
            sock.settimeout(20)
            return said and said + read_all(sock)

    with ThreadPoolExecutor(len(cases)) as pool:
        return dict(zip(cases, pool.map(answer, *zip(*cases.values(), strict=True)), strict=True))


def drip(sock: socket.socket, drop: bytes, pause: float = 0.2) -> bytes:
    """Send a little now and then until the server says something, or closes."""
    sock.settimeout(pause)
    for _ in range(100):
        try:
            if not drop or sock.send(drop):
                return sock.recv(65536)
        except TimeoutError:
            continue
        except OSError:
            return b""
    raise AssertionError("the server waited on")


# --- slow bodies --------------------------------------------------------------------------------------------------


SLOW_BODIES = {
    "stalled": (message(CHAT, b"{", "content-length: 5000"), b""),
    "dripping": (message(CHAT, b"{", "content-length: 5000"), b" "),
    "fast, then dripping": (message(CHAT, b"{" + b" " * 2_000_000, "content-length: 5000000"), b" "),
    "stalled chunks": (message(CHAT, b"1\r\n{\r\n", "transfer-encoding: chunked"), b""),
    "dripping trailers": (message(CHAT, b"1\r\n{\r\n0\r\n", "transfer-encoding: chunked"), b"a:b\r\n"),
    "expectation": (message(CHAT, b"", "content-length: 5000", "expect: 100-continue"), b""),
}


def test_a_body_that_stalls_is_a_408(strict: RunningServer) -> None:
    for name, answer in answers_to(strict, SLOW_BODIES).items():
        assert statuses(answer) == [408] and b"--min-body-rate" in answer, name


def test_a_body_that_is_slow_and_steady_is_taken(strict: RunningServer) -> None:
    """It takes longer than the deadline of its first part."""
    body = large_body(2_000_000)
    with raw_connection(strict) as sock:
        sock.sendall(message("/v1/bill", b"", f"content-length: {len(body)}", "connection: close"))
        for start in range(0, len(body), 100_000):
            sock.sendall(body[start : start + 100_000])
            time.sleep(0.2)
        assert statuses(read_all(sock)) == [200]


@contextmanager
def stalled(server: RunningServer, count: int, size: int, key: str = KEY) -> Iterator[list[socket.socket]]:
    """Connections that send most of a body and stop."""
    with ExitStack() as stack:
        socks = [stack.enter_context(raw_connection(server, timeout=120)) for _ in range(count)]
        for sock in socks:
            sock.sendall(message(CHAT, b" " * (size - 1000), f"content-length: {size}", key=key))
        yield socks


def test_stalled_uploads_of_one_client_leave_room_for_others(strict: RunningServer) -> None:
    """Three times six MiB of sixteen; half of those are for one client."""
    with watching(strict, lambda: bill(strict, 6 << 20, OTHER_KEY)) as watch:
        with stalled(strict, 3, 6 << 20) as socks:
            answers = [read_all(sock) for sock in socks]  # while the neighbour goes on
        assert watch.num_answered > 0
    assert not watch.failures
    assert sorted(statuses(answer)[0] for answer in answers) == [408, 429, 429]
    assert sum(b"--max-client-share" in answer for answer in answers) == 2
    assert strict.stats("saccade:request_bytes") == 0


def test_ready_is_503_while_the_bytes_in_flight_are_full(strict: RunningServer) -> None:
    with stalled(strict, 1, 8 << 20), stalled(strict, 1, 8 << 20, OTHER_KEY):
        assert until(lambda: strict.get("/ready").status_code == 503)
        assert strict.get("/health").status_code == 200
    assert until(lambda: strict.get("/ready").status_code == 200)


def test_what_the_engine_has_of_a_client_counts_for_its_share(strict: RunningServer) -> None:
    """The first request is being answered; its body was handed on long ago."""
    with raw_connection(strict) as sock:
        sock.sendall(chat_message(size=5 << 20, stream=True, max_tokens=1500, ignore_eos=True))
        assert sock.recv(1)
        refused = bill(strict, 5 << 20)
        assert refused.status_code == 429 and "--max-client-share" in error_of(refused)["message"]
        assert bill(strict, 5 << 20, OTHER_KEY).status_code == 200
    assert until(lambda: bill(strict, 5 << 20).status_code == 200)


# --- slow readers -------------------------------------------------------------------------------------------------


def test_an_answer_that_nobody_reads_is_given_up(strict: RunningServer) -> None:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", int(strict.url.rsplit(":", 1)[1])))
        before = strict.stats("saccade:request_failures_total")
        long = {"n": 16, "max_tokens": 400, "logprobs": True, "top_logprobs": 20}  # far more than the buffers hold
        sock.sendall(chat_message(stream=True, ignore_eos=True, **long))
        assert until(lambda: strict.stats("saccade:request_failures_total") == before + 1)
        assert strict.get("/v1/engine").json()["open_requests"] == 0


# --- an engine that hangs -----------------------------------------------------------------------------------------


def test_ready_is_503_while_the_engine_hangs(strict: RunningServer) -> None:
    pid = engine_pid(strict)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert until(lambda: strict.get("/ready").status_code == 503)
        assert strict.get("/ready").json() == {"status": "silent"}
    finally:
        os.kill(pid, signal.SIGCONT)
    assert until(lambda: strict.get("/ready").status_code == 200)


# --- too many connections -----------------------------------------------------------------------------------------


def test_idle_connections_make_room_for_new_ones_of_the_same_client(strict: RunningServer) -> None:
    with ExitStack() as stack:
        socks = [stack.enter_context(raw_connection(strict, timeout=120)) for _ in range(MAXIMUM // 2)]
        time.sleep(1.2)  # so long they are taken for about to ask
        assert strict.get("/version").status_code == 200
        assert socks[0].recv(1) == b""


def test_one_client_cannot_have_all_connections(strict: RunningServer) -> None:
    """Its own are all at work, so that further ones of it are turned away; health is told, and others are answered."""
    before = strict.stats("saccade:admission_rejected_total")
    with stalled(strict, MAXIMUM // 2, 5000):
        assert until(lambda: strict.get("/version").status_code == 503)
        refused = asks(strict, "/version")
        assert refused.status_code == 503 and "--max-connections" in error_of(refused)["message"]
        assert strict.get("/health").status_code == 200
        assert asks(strict, "/version", ELSEWHERE).status_code == 200
        assert strict.get("/ready").status_code == 200  # for others
    assert until(lambda: strict.get("/version").status_code == 200)
    assert strict.stats("saccade:admission_rejected_total") > before
    lines = [line for line in strict.log if "turned away" in line]
    assert lines and "--max-connections" in lines[0] and len(lines) <= 2


def test_a_flood_of_connections_is_refused(strict: RunningServer) -> None:
    """More than there are places in reserve. Who comes from elsewhere notices nothing."""
    with watching(strict, lambda: asks(strict, "/health", ELSEWHERE)) as watch, ExitStack() as stack:
        socks = [stack.enter_context(raw_connection(strict, timeout=120)) for _ in range(200)]
        answers = [read_quietly(sock) for sock in socks]
        assert until(lambda: watch.num_answered > 0)
    assert not watch.failures
    assert sum(statuses(answer) == [503] for answer in answers) > 100


def read_quietly(sock: socket.socket) -> bytes:
    try:
        return read_all(sock)
    except ConnectionResetError:
        return b""


def test_without_descriptors_connections_wait_and_the_log_says_so(strict: RunningServer) -> None:
    pid = strict.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    with strict.client() as early, raw_connection(strict) as sock:
        assert early.get("/version").status_code == 200
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))  # of numbers: all below it are taken
        try:
            with raw_connection(strict) as late:
                late.sendall(message("/version", b"", "connection: close", method="GET"))
                assert until(lambda: any("new connections wait" in line for line in strict.log))
                assert early.get("/version").status_code == 200
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
                assert statuses(read_all(late)) == [200]
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        assert sock.fileno() >= 0
