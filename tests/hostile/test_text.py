"""Requests that bring more text than any context holds, wherever it stands: refused early, while others are served."""

from __future__ import annotations

import json
import math
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.errors import RequestError, quoted
from saccade.processor.tokenizer import Tokenizer
from saccade.server.errors import ApiError
from saccade.server.http import text_limit
from saccade.server.http.body_check import check_text
from saccade.server.http.text_limit import MAX_VALUES, TextTally
from tests.helpers.servers.hostile import raw_connection, watching
from tests.helpers.servers.serving import RunningServer, chat_body, error_of, until

CHAT = "/v1/chat/completions"
MANY = 300_000  # characters: more than the context of the tests' model holds, less than any other limit
LONG = "a" * MANY
NUMBERS = {"a": [1] * 99_000, "b": "b" * 99_000}
USER = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "look", "description": "a", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def tool_body(**fields: Any) -> dict[str, Any]:
    return chat_body(tools=[{**TOOL, "function": {**TOOL["function"], **fields}}])


def schema_body(schema: Any) -> dict[str, Any]:
    return chat_body(response_format={"type": "json_schema", "json_schema": {"schema": schema}})


def blocks_body(block: Any) -> dict[str, Any]:
    return {"max_tokens": 1, "messages": [{"role": "user", "content": [block]}]}


def with_call(**fields: Any) -> dict[str, Any]:
    call = {**CALL, "function": {**CALL["function"], **fields}}
    return chat_body(messages=[USER, {"role": "assistant", "content": "", "tool_calls": [call]}, USER])


# --- every place of a request that holds text ---------------------------------------------------------------------

BODIES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "content": (CHAT, chat_body(LONG), "messages"),
    "content that begins like a data URL": (CHAT, chat_body(f"data:{LONG}"), "messages"),
    "parts together": (CHAT, chat_body([{"type": "text", "text": "a" * 1000}] * 300), "messages"),
    "a role": (CHAT, chat_body(messages=[{"role": LONG, "content": "a"}]), "messages"),
    "a name": (CHAT, chat_body(messages=[{**USER, "name": f"data:{LONG}"}]), "messages"),
    "a picture beside the content": (CHAT, chat_body(messages=[{**USER, "image_url": f"data:{LONG}"}]), "messages"),
    "a part's type": (CHAT, chat_body([{"type": LONG}]), "messages"),
    "a picture's URL": (CHAT, chat_body([{"type": "image_url", "image_url": {"url": f"http://{LONG}"}}]), "messages"),
    "a tool's description": (CHAT, tool_body(description=LONG), "tools"),
    "a name in a tool's schema": (CHAT, tool_body(parameters={LONG: 1}), "tools"),
    "a data URL in a tool": (CHAT, chat_body(tools=[{**TOOL, "content": [{"image_url": f"data:{LONG}"}]}]), "tools"),
    "arguments": (CHAT, with_call(arguments=LONG), "messages"),
    "a called name": (CHAT, with_call(name=LONG), "messages"),
    "template arguments": (CHAT, chat_body(chat_template_kwargs={"a": LONG}), "chat_template_kwargs"),
    "numbers for the template": (CHAT, chat_body(chat_template_kwargs=NUMBERS), "chat_template_kwargs"),
    "more numbers than any context has": (CHAT, chat_body(chat_template_kwargs={"a": [1] * MANY}), None),
    "a stop string": (CHAT, chat_body(stop=[LONG]), "stop"),
    "a user": (CHAT, chat_body(user=LONG), "user"),
    "a schema": (CHAT, schema_body({"title": LONG}), "response_format"),
    "an unknown field": (CHAT, chat_body(nobody=LONG), "nobody"),
    "an unknown field's name": (CHAT, {**chat_body(), LONG: 1}, "a" * 64),
    "a prompt": ("/v1/completions", {"prompt": LONG}, "prompt"),
    "one of several prompts": ("/v1/completions", {"prompt": ["a", LONG]}, "prompt"),
    "a prompt of ids": ("/v1/completions", {"prompt": [1] * MANY}, "prompt"),
    "instructions": ("/v1/responses", {"input": "a", "instructions": LONG}, "instructions"),
    "input": ("/v1/responses", {"input": [{"role": "user", "content": LONG}]}, "input"),
    "metadata": ("/v1/responses", {"input": "a", "metadata": {"a": LONG}}, "metadata"),
    "a text to tokenize": ("/tokenize", {"prompt": LONG}, "prompt"),
    "ids to detokenize": ("/detokenize", {"tokens": [1] * MANY}, "tokens"),
    "a chat to price": ("/v1/bill", chat_body(LONG), "messages"),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_text_that_no_context_holds_is_refused_wherever_it_stands(server: RunningServer, name: str) -> None:
    path, body, param = BODIES[name]
    response = server.post(path, body)
    error = error_of(response)
    assert response.status_code == 400 and error["code"] == "context_length_exceeded" and error["param"] == param
    assert "--max-model-len" in error["message"] and len(response.content) < 1000


def test_text_of_anthropics_messages_is_counted_too(server: RunningServer) -> None:
    for body in ({"system": LONG}, {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]}):
        response = server.post("/v1/messages", {"max_tokens": 1, "messages": [USER], **body})
        assert response.status_code == 400 and "--max-model-len" in response.text


def test_a_text_just_below_the_limit_is_judged_by_its_tokens(server: RunningServer) -> None:
    context = server.get("/v1/models").json()["data"][0]["max_model_len"]
    response = server.chat("a " * (context * 16 - 200))
    assert "tokens" in error_of(response)["message"]


# --- media is no text ---------------------------------------------------------------------------------------------

URL = "data:image/png;base64," + "A" * 1000
SOURCE = {"type": "base64", "media_type": "image/png", "data": "A" * 1000}
IMAGES: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": URL.replace("data", "DATA")}]}]},
    {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": URL}}]}]},
    blocks_body({"type": "image", "source": SOURCE}),
    blocks_body({"type": "tool_result", "content": [{"type": "image", "source": SOURCE}]}),
    {"system": [{"type": "image", "source": SOURCE}]},
    {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]},
    {"input": [{"type": "function_call_output", "output": [{"type": "input_image", "image_url": URL}]}]},
]  # fmt: skip


@pytest.mark.parametrize("body", IMAGES, ids=range(len(IMAGES)))
def test_a_image_is_no_text(body: dict[str, Any]) -> None:
    check_text(body, 200)


@pytest.mark.parametrize("body", IMAGES, ids=range(len(IMAGES)))
def test_a_image_where_none_can_be_is_text(body: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        check_text({"tools": [body]}, 900)
    assert caught.value.param == "tools"


# --- while a body arrives -----------------------------------------------------------------------------------------


def tallied(body: bytes, max_chars: int = 1000, chunk: int = 1 << 16) -> TextTally:
    text_tally = TextTally(max_chars)
    for start in range(0, len(body), chunk):
        text_tally.take(body[start : start + chunk])
    return text_tally


MUCH = 20 << 20
LARGE_BODIES: dict[str, Callable[[], bytes]] = {
    "a string": lambda: b'{"a":"' + b"a" * MUCH + b'"}',
    "white space": lambda: b'{"a":' + b" " * MUCH + b"1}",
    "digits": lambda: b'{"a":1' + b"0" * MUCH + b"}",
    "text after a picture": lambda: b'{"u":"data:,","a":"' + b"a" * MUCH + b'"}',
    "numbers": lambda: b'{"a":[' + b"1," * (MAX_VALUES + 100) + b"1]}",
    "lists": lambda: b'{"a":[' + b"[]," * 200_000 + b"1]}",
    "objects": lambda: b'{"a":[' + b"{}," * 200_000 + b"1]}",
    "strings": lambda: b'{"a":[' + b'"",' * 400_000 + b"1]}",
    "strings that end in a backslash": lambda: b'{"a":[' + b'"\\\\",' * 600_000 + b"1]}",
    "names": lambda: b"{" + b",".join(b'"%d":1' % i for i in range(400_000)) + b"}",
}


@pytest.mark.parametrize("name", LARGE_BODIES)
def test_what_takes_long_to_parse_is_refused_while_it_arrives(name: str) -> None:
    with pytest.raises(ApiError) as caught:
        tallied(LARGE_BODIES[name]())
    assert caught.value.status == 400


@pytest.mark.parametrize("start", ['"url": "data:', '"url":"DATA:', '"data": "', '"data":"', '"data"  :\n "'])
def test_a_image_of_any_size_is_not_counted(start: str) -> None:
    tallied(b'{"a": {' + start.encode() + b"A{[,/+=\\/\\u002B" * (MUCH // 12) + b'"}, "b": 1}')


START = b'\\"data:'
SHAPES: dict[str, bytes] = {
    "escaped starts": START,
    "plain starts": b'"data:',
    "members of a list": b'"data:",',
    "fields": b'"data":"',
    "other letters": b'"DaTa:"',
    "no start": b'"data",',
    "half a start": b'"file_data" ',
    "words": b"data",
    "quotes": b'"',
    "escapes": b'\\"',
    "text": '"data:\u00e9",'.encode(),
    "escaped text": b'"data:\\u4e2d",',
    "a picture": b'"data:' + b"A" * 50_000,
}  # fmt: skip


class CountedPattern:
    """Counts the places where the expression was tried or matched."""

    def __init__(self, pattern: re.Pattern[bytes]) -> None:
        self._pattern = pattern
        self.num_tries = 0

    def split(self, data: bytes) -> list[bytes]:
        self.num_tries += data.count(b"data")
        return self._pattern.split(data)


@pytest.mark.parametrize("chunk", [1, 100, 1 << 16])
@pytest.mark.parametrize("name", SHAPES)
def test_the_work_of_a_chunk_grows_with_its_bytes_and_nothing_else(
    name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = min(1 << 20, 4000 * chunk)
    body = (SHAPES[name] * (length // len(SHAPES[name]) + 1))[:length]
    pattern = CountedPattern(text_limit._MEDIA)
    monkeypatch.setattr(text_limit, "_MEDIA", pattern)
    num_calls = 0

    def count(frame: FrameType, event: str, value: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    tally = TextTally(10**7)
    sys.setprofile(count)
    try:
        for start in range(0, length, chunk):
            tally.take(body[start : start + chunk])
    except ApiError:
        pass  # the less work
    finally:
        sys.setprofile(None)
    num_chunks = math.ceil(length / chunk)
    assert num_calls <= 40 * num_chunks + 40
    assert pattern.num_tries <= 5000 + 2 * length // 64 + 8 * num_chunks  # where chunks overlap


EMOJI = "\U0001f600"


@pytest.mark.parametrize("odd", [EMOJI.encode(), json.dumps(EMOJI).encode()[1:-1]], ids=["UTF-8", "escaped"])
@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("chunk", [1 << 16, 65_537, 16])
def test_media_that_are_not_ascii_are_text(odd: bytes, place: str, chunk: int) -> None:
    """To decode 58 MB with one such character takes a second and four times the memory."""
    length = MUCH if chunk > 16 else 1 << 16
    media = odd + b"A" * length if place == "first" else b"A" * length + odd
    body = b'{"u":"data:,A\\/\\u002B","url":"data:' + media + b'","a":"data:' + b"A" * MUCH + b'"}'
    if chunk > 16:
        with pytest.raises(ApiError, match="beside its pictures"):
            tallied(body, chunk=chunk)
    else:
        assert tallied(body[: length + 80], chunk=chunk)._bytes >= length


PIECES = st.lists(
    st.sampled_from(['"url":"data:A,A"', '"data" : "AAAA"', '"a":"b"', '"a": [1, 2]', '"da', "ta:", "\\\\"])
)


@given(PIECES, st.integers(1, 40))
def test_how_a_body_is_cut_into_chunks_does_not_matter(pieces: list[str], chunk: int) -> None:
    body = ", ".join(pieces).encode() + b" " * 64  # what is held back at the end is not counted yet

    def counts(text_tally: TextTally) -> tuple[int, ...]:
        return text_tally._bytes, text_tally._values, text_tally._quotes, text_tally._containers

    assert counts(tallied(body, chunk=chunk)) == counts(tallied(body))


def test_a_body_of_text_is_refused_before_all_of_it_is_there(server: RunningServer) -> None:
    """The rest is never sent, so the answer cannot have waited for it."""
    with raw_connection(server) as sock:
        head = ("host: localhost", "content-type: application/json", f"content-length: {90 << 20}")
        sock.sendall("\r\n".join((f"POST {CHAT} HTTP/1.1", *head, "", "")).encode())
        sock.sendall(b'{"messages":[{"role":"' + b"a" * MUCH)
        assert sock.recv(64).startswith(b"HTTP/1.1 400")


# --- neighbours ---------------------------------------------------------------------------------------------------


def turns_during(work: Callable[[], Any]) -> int:
    """How often another thread got its turn while the work was done."""
    turns, is_over = 0, threading.Event()

    def take_turns() -> None:
        nonlocal turns
        while not is_over.wait(0.001):
            turns += 1

    thread = threading.Thread(target=take_turns)
    thread.start()
    while not turns:
        time.sleep(0.001)
    turns = 0
    work()
    seen = turns
    is_over.set()
    thread.join()
    return seen


def test_other_threads_run_while_a_long_text_is_tokenized(qwen2_vl_folder: Path) -> None:
    tokenizer = Tokenizer(qwen2_vl_folder)
    text = "one two three " * 30_000
    assert turns_during(lambda: tokenizer.encode(text)) > 10
    ids = tokenizer.encode(text)
    assert turns_during(lambda: tokenizer.decode(ids * 4)) > 10
    assert tokenizer.decode(ids) == text


def test_neighbours_are_answered_while_large_texts_are_refused(server: RunningServer) -> None:
    attack = httpx.Request("POST", server.url + CHAT, json=chat_body(user="a" * (80 << 20)))
    with watching(server, lambda: server.chat(max_tokens=1)) as watch, server.client() as client:
        assert client.send(attack).status_code == 400
        assert until(lambda: watch.num_answered)
    assert not watch.failures and watch.api_growth_mb < 80


# --- errors -------------------------------------------------------------------------------------------------------

BIG = "a" * 50_000  # what the context's limit lets through
ECHOES: dict[str, tuple[str, dict[str, Any]]] = {
    "a role": (CHAT, chat_body(messages=[{"role": BIG, "content": "a"}])),
    "a list as role": (CHAT, chat_body(messages=[{"role": [[BIG] * 2], "content": "a"}])),
    "a part's type": (CHAT, chat_body([{"type": BIG}])),
    "a model": (CHAT, chat_body(model=BIG)),
    "a detail": (CHAT, chat_body([{"type": "image_url", "image_url": {"url": "data:,", "detail": BIG}}])),
    "a number": (CHAT, chat_body(temperature=BIG)),
    "a bias": (CHAT, chat_body(logit_bias={"1": BIG})),
    "a bias's token": (CHAT, chat_body(logit_bias={BIG: 1})),
    "a stream option": (CHAT, chat_body(stream=True, stream_options={BIG: 1})),
    "a processor setting": (CHAT, chat_body(mm_processor_kwargs={BIG: 1})),
    "a processor setting's value": (CHAT, chat_body(mm_processor_kwargs={"max_pixels": BIG})),
    "a response format": (CHAT, chat_body(response_format={"type": BIG})),
    "a schema's format": (CHAT, schema_body({"type": "string", "format": BIG})),
    "a tool's name": (CHAT, tool_body(name=BIG)),
    "a tool's type": (CHAT, chat_body(tools=[{"type": BIG, "function": {}}])),
    "a chosen tool": (CHAT, chat_body(tools=[TOOL], tool_choice={"type": "function", "function": {"name": BIG}})),
    "a choice": (CHAT, chat_body(tools=[TOOL], tool_choice=BIG)),
    "a URL": (CHAT, chat_body([{"type": "image_url", "image_url": {"url": f"http://{BIG}"}}])),
    "a scheme": (CHAT, chat_body([{"type": "image_url", "image_url": {"url": f"{BIG}:a"}}])),
    "a uuid": (CHAT, chat_body([{"type": "image_url", "uuid": BIG}])),
    "template arguments": (CHAT, chat_body(chat_template_kwargs={"messages": BIG, BIG: 1})),
    "an item's type": ("/v1/responses", {"input": [{"type": BIG}]}),
    "an item's role": ("/v1/responses", {"input": [{"role": BIG, "content": "a"}]}),
    "a kind of input": ("/v1/responses", {"input": [{"role": "user", "content": [{"type": BIG}]}]}),
    "a block": ("/v1/messages", blocks_body({"type": BIG})),
    "Anthropic's role": ("/v1/messages", {"max_tokens": 1, "messages": [{"role": BIG, "content": "a"}]}),
    "a source": ("/v1/messages", blocks_body({"type": "image", "source": {"type": BIG}})),
    "a model to tokenize for": ("/tokenize", {"model": BIG, "prompt": "a"}),
}  # fmt: skip


@pytest.mark.parametrize("name", ECHOES)
def test_no_error_repeats_more_than_a_little_of_a_request(server: RunningServer, name: str) -> None:
    path, body = ECHOES[name]
    response = server.post(path, body)
    assert 400 <= response.status_code < 500 and len(response.content) < 1000, response.text[:500]


def test_a_model_is_named_briefly_in_the_path_too(server: RunningServer) -> None:
    assert len(server.get(f"/v1/models/{BIG}").content) < 1000


VALUES = (BIG, BIG.encode(), [BIG] * 9, {BIG: {BIG: BIG}}, "é" * 200, "\0" * 100, 10**300)


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_a_quoted_value_is_short(value: Any) -> None:
    assert len(quoted(value)) <= 80


def test_a_short_value_is_quoted_whole() -> None:
    assert quoted("robot") == "'robot'" and quoted(-1) == "-1" and quoted([1, "a"]) == "[1, 'a']"
