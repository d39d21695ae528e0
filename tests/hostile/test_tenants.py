"""One API key against another: what it can find out of the other's requests, and how much of the server it can take."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from saccade.errors import RequestError
from saccade.server.request.fields import FieldReader
from saccade.server.request.responses import read_response
from tests.helpers.media.images import png
from tests.helpers.servers.hostile import ALICE, KEYS, MALLORY, resident_mb, watching
from tests.helpers.servers.serving import (
    RunningServer,
    as_url,
    chat_body,
    error_of,
    image_part,
    image_url,
    photo_part,
    running_server,
    text_part,
)

SECRET = "The password of the vault is written on the back of the third photograph from the left. " * 4
SALT_BYTES = 24 << 20
LARGE = (1536, 1536)  # of noise: 7 MB as PNG


@pytest.fixture(scope="module")
def together(qwen2_vl_folder: Path) -> Iterator[RunningServer]:
    with running_server(qwen2_vl_folder, *KEYS, "--share-caches", key=ALICE) as server:
        yield server


def asked(server: RunningServer, key: str, path: str, body: Any) -> httpx.Response:
    with server.stranger(authorization=f"Bearer {key}") as client:
        return client.post(path, json=body)


def answered(server: RunningServer, key: str, path: str, body: Any) -> dict[str, Any]:
    response = asked(server, key, path, body)
    assert response.status_code == 200, response.text
    return dict(response.json())


# --- what was sent before -----------------------------------------------------------------------------------------

Route = tuple[str, Callable[[str], dict[str, Any]], Callable[[dict[str, Any]], int]]
ROUTES: list[Route] = [
    ("/v1/chat/completions", chat_body, lambda a: a["usage"]["prompt_tokens_details"]["cached_tokens"]),
    (
        "/v1/completions",
        lambda text: {"prompt": text, "max_tokens": 2},
        lambda a: a["usage"]["prompt_tokens_details"]["cached_tokens"],
    ),
    (
        "/v1/responses",
        lambda text: {"input": text, "max_output_tokens": 2},
        lambda a: a["usage"]["input_tokens_details"]["cached_tokens"],
    ),
    (
        "/v1/messages",
        lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 2},
        lambda a: a["usage"]["cache_read_input_tokens"],
    ),
]


@pytest.mark.parametrize(("path", "body", "cached"), ROUTES, ids=[path for path, _, _ in ROUTES])
def test_a_key_that_guesses_anothers_text_finds_nothing(
    apart: RunningServer, path: str, body: Callable[[str], Any], cached: Callable[[Any], int]
) -> None:
    guess = {**body(SECRET), "cache_salt": path}  # or the template's own words would be found
    assert cached(answered(apart, ALICE, path, guess)) == 0
    assert cached(answered(apart, MALLORY, path, guess)) == 0
    assert cached(answered(apart, ALICE, path, guess)) > 0


def with_image(seed: int, **fields: Any) -> dict[str, Any]:
    return chat_body([photo_part(seed=seed), text_part("?")], include_bill=True, **fields)


def is_cached(answer: dict[str, Any]) -> bool:
    (item,) = answer["bill"]["items"]
    return bool(item["cached"])


def test_a_key_that_has_anothers_image_does_not_learn_of_it(apart: RunningServer) -> None:
    path, body = "/v1/chat/completions", with_image(seed=1)
    assert not is_cached(answered(apart, ALICE, path, body))
    encoded = apart.stats("saccade:pictures_encoded_total")
    assert not is_cached(answered(apart, MALLORY, path, body))
    assert apart.stats("saccade:pictures_encoded_total") == encoded + 1
    assert is_cached(answered(apart, ALICE, path, body))


def test_the_salt_of_another_key_opens_nothing(apart: RunningServer) -> None:
    path, body = "/v1/chat/completions", with_image(seed=2, cache_salt="shared secret")
    assert not is_cached(answered(apart, ALICE, path, body))
    assert not is_cached(answered(apart, MALLORY, path, body))
    assert is_cached(answered(apart, ALICE, path, body))


def test_keys_find_each_others_text_and_images_where_the_operator_shares_caches(together: RunningServer) -> None:
    path, body, cached = ROUTES[0]
    answered(together, ALICE, path, body(SECRET))
    assert cached(answered(together, MALLORY, path, body(SECRET))) > 0
    answered(together, ALICE, path, with_image(seed=1))
    assert is_cached(answered(together, MALLORY, path, with_image(seed=1)))
    assert not is_cached(answered(together, MALLORY, path, with_image(seed=1, cache_salt="mine")))


def test_names_of_images_are_not_shared_with_the_caches(together: RunningServer) -> None:
    """A name gives the picture itself away, not only whether somebody has sent it."""
    path, named = "/v1/chat/completions", {**photo_part(seed=3), "uuid": "holiday"}
    answered(together, ALICE, path, chat_body([named, text_part("?")]))
    by_name = chat_body([{"type": "image_url", "uuid": "holiday"}, text_part("?")])
    answered(together, ALICE, path, by_name)
    assert error_of(asked(together, MALLORY, path, by_name))["code"] == "image_file_not_found"


# --- what stays of a request --------------------------------------------------------------------------------------


def test_long_salts_are_refused_and_leave_nothing_behind(apart: RunningServer) -> None:
    part = {**image_part(image_url(28, 28)), "uuid": "tiny"}
    head, tail = httpx.Request("POST", "http://x", json=chat_body([part], cache_salt="|")).content.split(b"|")
    statuses = []

    def send(first: bytes) -> None:
        content = b"".join((head, first, b"s" * SALT_BYTES, tail))
        with apart.client() as client:
            response = client.post("/v1/bill", content=content, headers={"content-type": "application/json"})
        statuses.append(response.status_code)

    send(b"0")  # what reading one such body takes may stay with the allocator
    before = resident_mb(apart.process.pid)
    for number in b"12345678":
        send(bytes([number]))
    assert statuses == [400] * 9
    assert resident_mb(apart.process.pid) - before < 4 * SALT_BYTES / 2**20


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "cache_salt"),
        ("/v1/completions", "cache_salt"),
        ("/v1/responses", "cache_salt"),
        ("/v1/messages", "cache_salt"),
        ("/tokenize", "cache_salt"),
        ("/v1/chat/completions", "user"),
        ("/v1/responses", "user"),
    ],
)
def test_labels_are_refused_when_they_are_long(apart: RunningServer, path: str, field: str) -> None:
    response = asked(apart, ALICE, path, {"messages": [], "input": "x", field: "s" * 1025})
    message = response.json()["error"]["message"]
    assert response.status_code == 400 and f"{field} has 1025 characters and may have 1024" in message


@pytest.mark.parametrize("field", ["metadata", "text", "tools"])
def test_what_a_response_repeats_is_bounded(field: str) -> None:
    """Even where the context has room for more text than that."""
    tool = {"type": "function", "name": "f", "description": "d" * (1 << 20)}
    large: dict[str, Any] = {"metadata": {"a": "b" * (1 << 20)}, "text": {"x": "b" * (1 << 20)}, "tools": [tool]}
    with pytest.raises(RequestError, match="1048576") as caught:
        read_response({"input": "x", field: large[field], "user": "me"}, FieldReader(strict=False))
    assert caught.value.param == field


# --- many answers -------------------------------------------------------------------------------------------------


def test_a_large_image_with_many_answers_costs_one_image(apart: RunningServer) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (*LARGE, 3), np.uint8)
    image = png(Image.fromarray(noise))
    part, small = image_part(as_url(image)), {"max_pixels": 56 * 56}
    many = chat_body([part, text_part("?")], n=64, max_tokens=40, ignore_eos=True, mm_processor_kwargs=small)
    held, is_over = [0.0], threading.Event()

    def look() -> None:
        while not is_over.is_set():
            held.append(apart.stats("saccade:request_bytes"))
            is_over.wait(0.02)

    looking = threading.Thread(target=look)
    looking.start()
    with watching(apart, lambda: asked(apart, MALLORY, "/v1/chat/completions", chat_body("hi", max_tokens=1))) as watch:
        answer = answered(apart, ALICE, "/v1/chat/completions", many)
    is_over.set()
    looking.join()
    assert len(answer["choices"]) == 64
    assert not watch.failures and watch.num_answered
    assert watch.engine_growth_mb < 10 * len(image) / 2**20  # as it came, decoded, and on its way to that
    assert len(image) < max(held) < 4 * len(image)  # the body in base64, then what went to the engine


def test_more_answers_than_may_ever_be_open_are_refused_before_any_work(apart: RunningServer) -> None:
    response = asked(apart, ALICE, "/v1/completions", {"prompt": ["a"] * 128, "n": 64, "max_tokens": 64})
    error = error_of(response)
    assert response.status_code == 400 and error["param"] == "n"
    for part in ("8192 answers", "at most 384", "--max-num-seqs", "--max-waiting"):
        assert part in error["message"]
