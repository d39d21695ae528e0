"""Bodies: what is legal is read as it is, what is not is refused, and heavy ones are checked in a process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from saccade.errors import RequestError
from saccade.options.server import ServerOptions
from saccade.server import bodies
from saccade.server.bodies import BodyReader
from saccade.server.errors import ApiError
from saccade.server.http.body_check import MAX_DEPTH, MAX_FIELDS, MAX_MEMBERS
from saccade.server.http.limits import HttpBody
from saccade.server.http.request_context import Exchange
from saccade.server.http.text_limit import TextTally
from saccade.server.metrics import Metrics
from saccade.server.turns import Turns
from tests.helpers.fakes.fake_stream import Wire, running

CHARS = 4_000_000  # of a context of 128,000 tokens


@pytest.fixture(scope="module")
def turns() -> Iterator[Turns]:
    turns = Turns(ServerOptions(), 100, Metrics("m", dict))
    yield turns
    turns.check_idle()
    turns.close()


@pytest.fixture(scope="module")
def reader(turns: Turns) -> Iterator[BodyReader]:
    reader = BodyReader(turns, 96)
    yield reader
    reader.close()


def tally_of(data: bytes, inputs: tuple[str, ...] = (), max_chars: int = CHARS) -> TextTally:
    tally = TextTally(max_chars, inputs)
    for start in range(0, len(data), 1 << 16):
        tally.take(data[start : start + (1 << 16)])
    return tally


def read(reader: BodyReader, data: bytes, inputs: tuple[str, ...] = (), max_chars: int = CHARS) -> dict[str, Any]:
    upload = HttpBody(data, tally_of(data, inputs, max_chars))
    wire = Wire()
    caller = wire.writer()._scope["caller"]
    answer: list[dict[str, Any]] = []

    async def reading() -> None:
        lease: Any = None
        answer.append(await reader.read(Exchange(caller, upload, lease, wire.writer())))

    running(reading)
    return answer[0]


def refusal(reader: BodyReader, data: bytes, inputs: tuple[str, ...] = ()) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(reader, data, inputs)
    return caught.value


def chat(content: Any, **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}], **fields}, ensure_ascii=False).encode()


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A[{,:" * 12_000_000}}
TOOL = {"type": "object", "properties": {f"p{i}": {"type": "string", "enum": ["a", "b"]} for i in range(200)}}
LEGAL: dict[str, tuple[Callable[[], bytes], tuple[str, ...]]] = {
    "a table as text": (lambda: chat('1,"a",[2]\n' * 90_000), ()),
    "a text of other letters": (lambda: chat("\u4e2d\u6587,\U0001f600" * 600_000), ()),
    "a picture of 60 MB": (lambda: chat([PICTURE, {"type": "text", "text": "?"}]), ()),
    "the ids of a context": (lambda: json.dumps({"prompt": list(range(128_000))}).encode(), ("prompt",)),
    "a batch of prompts": (lambda: json.dumps({"prompt": [["1"] * 9 + [1] * 40_000] * 40}).encode(), ("prompt",)),
    "ids to detokenize": (lambda: json.dumps({"tokens": [7] * 1_900_000}).encode(), ("tokens",)),
    "many tools": (lambda: chat("hi", tools=[{"type": "function", "function": {"parameters": TOOL}}] * 60), ()),
    "many turns": (lambda: json.dumps({"messages": [{"role": "user", "content": "a"}] * 30_000}).encode(), ()),
}  # fmt: skip


@pytest.mark.parametrize("name", LEGAL)
def test_large_bodies_that_are_legal_are_read_as_they_are(reader: BodyReader, name: str) -> None:
    make, inputs = LEGAL[name]
    data = make()
    assert read(reader, data, inputs) == json.loads(data)


ODD = "data:\u00e9" + "A" * 5_000_000
ILLEGAL: dict[str, tuple[Callable[[], bytes], str | None]] = {
    "numbers": (lambda: b'{"messages":[' + b"0," * (MAX_MEMBERS + 1) + b"0]}", "request_too_large"),
    "names": (lambda: b"{" + b",".join(b'"k%d":1' % i for i in range(200_000)) + b"}", "request_too_large"),
    "depth": (lambda: b'{"a":[' + b"1," * 110_000 + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"]}", "invalid_json"),
    "no end": (lambda: b'{"a":[' + b"1," * 300_000, "invalid_json"),
    "a list": (lambda: b"[" + b"1," * 300_000 + b"1]", "invalid_json"),
    "a picture that is text": (lambda: chat([{**PICTURE, "image_url": ODD}]), "context_length_exceeded"),
    "much text": (lambda: chat("a" * 3_900_000, user="b" * 3_900_000), "context_length_exceeded"),
}  # fmt: skip


@pytest.mark.parametrize("name", ILLEGAL)
def test_a_heavy_body_that_is_refused_is_not_decoded_in_the_server(
    reader: BodyReader, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, code = ILLEGAL[name]
    monkeypatch.setattr(bodies, "decoded", lambda data: pytest.fail("it holds the GIL"))
    error = refusal(reader, make())
    assert error.code == code and len(error.message) < 300


def test_a_small_body_is_walked_by_nothing(reader: BodyReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "check", lambda body, limits: pytest.fail("its bytes were counted"))
    assert read(reader, b'{"a":[1,{"b":"' + b"x" * 100_000 + b'"}]}')["a"][0] == 1


def nested(depth: int) -> bytes:
    """With the body itself."""
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def test_what_is_decoded_in_milliseconds_is_not_sent_to_a_process() -> None:
    """So the ids of many prompts do not wait for the two processes, and a client's pictures neither."""
    ids = json.dumps({"prompt": [151_643] * 25_000}).encode()
    picture = chat([{"type": "image_url", "image_url": {"url": "data:,A" + "\\u002B" * 500_000}}])
    assert not tally_of(ids, ("prompt",)).is_heavy
    assert not tally_of(picture.replace(b"\\\\", b"\\")).is_heavy


@pytest.mark.parametrize("inputs", [(), ("a",)])
@pytest.mark.parametrize("beside", [b"", b',"b":[' + b"1," * 110_000 + b"1]"])
def test_the_limit_of_nesting_is_exact_for_small_bodies_and_heavy_ones(
    reader: BodyReader, inputs: tuple[str, ...], beside: bytes
) -> None:
    assert "a" in read(reader, nested(MAX_DEPTH)[:-1] + beside + b"}", inputs)
    error = refusal(reader, nested(MAX_DEPTH + 1)[:-1] + beside + b"}", inputs)
    assert error.code == "invalid_json" and "128 levels" in error.message


def test_brackets_in_text_are_no_nesting(reader: BodyReader) -> None:
    assert len(read(reader, chat("[{" * 5000))) == 1


def test_a_body_has_so_many_fields_and_no_more(reader: BodyReader) -> None:
    def body(count: int) -> bytes:
        return json.dumps(dict.fromkeys(map(str, range(count)))).encode()

    assert len(read(reader, body(MAX_FIELDS))) == MAX_FIELDS
    assert "1001 fields and may have 1000" in refusal(reader, body(MAX_FIELDS + 1)).message


def test_numbers_count_by_the_context_where_no_field_has_token_ids() -> None:
    numbers = b'{"a":[' + b"1," * 150_000 + b"1]}"
    tally_of(numbers, ("a",), 4096)
    with pytest.raises(ApiError, match=r"more than 100000 values, .* --max-model-len"):
        tally_of(numbers, (), 4096)


@pytest.mark.parametrize(("deed", "status"), [("SLOW", None), ("MEMORY", None), ("DIED", 503)])
def test_a_body_that_ends_its_process_is_refused_and_the_next_is_read(
    turns: Turns, deed: str, status: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    heavy = json.dumps({"prompt": [12_345] * 1_900_000}).encode()
    with monkeypatch.context() as patch:
        patch.setattr(bodies, "SECONDS", 0.01 if deed == "SLOW" else 5.0)
        patch.setattr(bodies, "_SPARE_MB", 100 if deed == "MEMORY" else 512)
        patch.setattr(bodies, "_COPIES", 0 if deed == "MEMORY" else 4)
        reader = BodyReader(turns, 96)
        if deed == "DIED":
            patch.setattr(bodies, "packed", lambda limits: b"\xff" * 4)  # it raises, as a bug would
        with pytest.raises(ApiError if status else RequestError) as caught:
            read(reader, heavy, ("prompt",))
        assert getattr(caught.value, "status", None) == status
    if deed != "MEMORY":
        assert len(read(reader, heavy, ("prompt",))["prompt"]) == 1_900_000
    reader.close()
