"""A server with a file of tenants: limits over HTTP, caches, metrics, and a reload while a request runs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from saccade.cli.main import main
from tests.helpers.servers.later import Later
from tests.helpers.servers.serving import (
    MODEL,
    RunningServer,
    chat_body,
    error_of,
    events_of,
    photo_part,
    running_server,
    text_part,
    until,
)

if TYPE_CHECKING:
    import openai
else:
    openai = Later("openai")

TENANTS = """
[acme]
keys = ["acme-1", "acme-2"]
weight = 2
tokens_per_minute = 1_000_000

[globex]
keys = ["globex-1"]

[small]
keys = ["small-1"]
requests_per_minute = 1
tokens_per_minute = 300
pixels_per_minute = 10_000
open_requests = 2

[tight]
keys = ["tight-1"]
tokens_per_minute = 300
pixels_per_minute = 10_000
open_requests = 2

[bills]
keys = ["bills-1"]
requests_per_minute = 10
tokens_per_minute = 10

[prometheus]
keys = ["operator-1"]
operator = true
"""


ENDS = {"logit_bias": {"5": 100}, "extra_body": {"stop_token_ids": [5]}}  # with the first token


class Shop(NamedTuple):
    server: RunningServer
    file: Path

    def ask(self, key: str, **fields: object) -> openai.types.chat.ChatCompletion:
        return self.raw(key, **fields).parse()

    def raw(self, key: str, content: object = "hi", **fields: object):  # type: ignore[no-untyped-def]
        client = openai.OpenAI(base_url=f"{self.server.url}/v1", api_key=key, max_retries=0)
        messages = [{"role": "user", "content": content}]
        how = {"max_tokens": 4, "temperature": 0, **fields}
        return client.chat.completions.with_raw_response.create(model=MODEL, messages=messages, **how)  # type: ignore[call-overload]

    def hang_up(self, text: str, said: str) -> None:
        """Writes the file and waits until the log says that it was read."""
        before = len(self.server.log)
        self.file.write_text(text)
        self.server.process.send_signal(signal.SIGHUP)
        assert until(lambda: any(said in line for line in self.server.log[before:])), self.server.log


@pytest.fixture(scope="module")
def shop(qwen2_vl_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    file = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    file.write_text(TENANTS)
    with running_server(qwen2_vl_folder, "--api-keys", str(file), key="operator-1") as server:
        yield Shop(server, file)


def is_cached(shop: Shop, key: str) -> bool:
    image = [photo_part(seed=5), text_part("?")]
    answer = shop.ask(key, content=image, extra_body={"include_bill": True})
    return bool(answer.model_dump()["bill"]["items"][0]["cached"])


def test_the_keys_of_a_tenant_share_its_cache_and_other_tenants_do_not(shop: Shop) -> None:
    assert not is_cached(shop, "acme-1")
    assert is_cached(shop, "acme-2")
    assert not is_cached(shop, "globex-1")


def test_a_limit_answers_429_with_what_is_left_and_when(shop: Shop) -> None:
    headers = shop.raw("small-1").headers
    assert headers["x-ratelimit-limit-requests"] == "1" and headers["x-ratelimit-remaining-requests"] == "0"
    assert headers["x-ratelimit-limit-pixels"] == headers["x-ratelimit-remaining-pixels"] == "10000"
    with pytest.raises(openai.RateLimitError, match="1 requests a minute") as caught:
        shop.ask("small-1")
    headers = caught.value.response.headers
    assert 0 < int(headers["retry-after"]) <= 60 and headers["x-ratelimit-remaining-requests"] == "0"
    assert 0 < float(headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 60
    assert error_of(caught.value.response)["code"] == "rate_limit_exceeded"


def test_what_was_not_generated_is_given_back_before_the_answer(shop: Shop) -> None:
    answer = shop.raw("tight-1", max_tokens=200, **ENDS)
    used = answer.parse().usage.total_tokens
    assert int(answer.headers["x-ratelimit-remaining-tokens"]) >= 300 - used - 1
    assert used < 100


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 301}, "300 a minute"),
        ({"content": [photo_part(112, 112), text_part("?")]}, "10000 a minute"),
        ({"n": 3}, "2 of your requests"),
    ],
)
def test_what_can_never_pass_is_a_400(shop: Shop, fields: dict[str, object], named: str) -> None:
    with pytest.raises(openai.BadRequestError, match=named):
        shop.ask("tight-1", **fields)


def test_a_chat_without_max_tokens_does_not_reserve_the_whole_context(shop: Shop) -> None:
    """It is longer than the limit, so that such a chat could never pass."""
    assert shop.ask("tight-1", max_tokens=None, **ENDS).choices[0].finish_reason == "stop"


def test_a_bill_costs_a_request_and_no_tokens(shop: Shop) -> None:
    with shop.server.stranger(authorization="Bearer bills-1") as client:
        response = client.post("/v1/bill", json=chat_body("a long text " * 50))
    assert response.status_code == 200 and response.json()["prompt_tokens"] > 10
    assert response.headers["x-ratelimit-remaining-tokens"] == "10"
    assert response.headers["x-ratelimit-remaining-requests"] == "9"


def test_only_the_operator_sees_tenants_and_keys_are_seen_by_none(shop: Shop) -> None:
    shop.ask("globex-1")
    text = shop.server.get("/metrics").text
    assert 'saccade:tenant_requests_total{tenant="globex"}' in text
    assert 'saccade:tenant_tokens_total{kind="output",tenant="globex"}' in text
    with shop.server.stranger(authorization="Bearer globex-1") as client:
        of_tenant = client.get("/metrics").text
        assert "saccade:requests_total" in of_tenant and "saccade:tenant_" not in of_tenant
        engine = client.get("/v1/engine").text
    for key in ("acme-1", "globex-1", "small-1", "tight-1", "operator-1"):
        assert key not in text + of_tenant + engine


def test_cluster_status_is_for_the_operator(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["cluster", "status", "--url", shop.server.url]
    assert main([*ask, "--api-key", "operator-1"]) == 0
    assert "engine 0" in capsys.readouterr().out
    assert main([*ask, "--api-key", "globex-1"]) == 1
    assert "only an operator's key sees them" in capsys.readouterr().err
    assert main(ask) == 1
    assert "--api-key" in capsys.readouterr().err


def test_hanging_up_reads_the_file_again_and_drops_no_request(shop: Shop) -> None:
    server = shop.server
    body = chat_body("hi", stream=True, max_tokens=1500, ignore_eos=True)
    headers = {"authorization": "Bearer globex-1"}
    with server.stranger(**headers) as client, client.stream("POST", "/v1/chat/completions", json=body) as open_stream:
        lines = open_stream.iter_lines()
        assert next(lines).startswith("data:")
        shop.hang_up("[globex]\nkeys = ['globex-1']\nweight = -1\n", "tenant globex: weight must be")
        assert shop.ask("acme-1").choices  # as before
        shop.hang_up("[initech]\nkeys = ['initech-1']\n", "1 tenants")
        assert shop.ask("initech-1").choices
        for key in ("acme-1", "globex-1"):
            with pytest.raises(openai.AuthenticationError):
                shop.ask(key)
        assert events_of(list(lines))[-1] == "[DONE]"
    assert server.process.poll() is None
