"""Log probabilities of prompts over HTTP in the shapes of vLLM and OpenAI, and the best of several answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.servers.later import Later
from tests.helpers.servers.serving import MODEL, RunningServer, photo_part, text_part

if TYPE_CHECKING:
    import openai
else:
    openai = Later("openai")

PROMPT = "The quick brown fox"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 3}
FREE = {"ignore_eos": True}


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0)


def test_a_chat_has_them_for_every_token_of_its_prompt(client: openai.OpenAI) -> None:
    content: Any = [photo_part(64, 64, seed=9), text_part("What is it?")]
    asked = {"prompt_logprobs": 2, "return_token_ids": True, **FREE}
    messages: Any = [{"role": "user", "content": content}]
    body = client.chat.completions.create(model=MODEL, messages=messages, **GREEDY, extra_body=asked).to_dict()
    first, *others = body["prompt_logprobs"]  # type: ignore[misc]
    ids: Any = body["prompt_token_ids"]
    assert first is None and len(others) == len(ids) - 1 == body["usage"]["prompt_tokens"] - 1  # type: ignore[index]
    for token, entry in zip(ids[1:], others, strict=True):
        assert next(iter(entry)) == str(token) and len(entry) in (2, 3)
        assert {1, 2} <= {one["rank"] for one in entry.values()}
        assert all(one["logprob"] <= 0 and isinstance(one["decoded_token"], str) for one in entry.values())


def test_an_echo_has_those_of_the_prompt_first(client: openai.OpenAI) -> None:
    asked = {"prompt_logprobs": 3, "return_token_ids": True, **FREE}
    body = client.completions.create(model=MODEL, prompt=PROMPT, echo=True, logprobs=1, **GREEDY, extra_body=asked)
    (choice,) = body.choices
    found = choice.logprobs
    assert found is not None and found.tokens and found.token_logprobs and found.top_logprobs
    usage = body.usage
    assert usage is not None and len(found.tokens) == usage.prompt_tokens + usage.completion_tokens
    assert "".join(found.tokens) == choice.text and choice.text.startswith(PROMPT)
    assert found.text_offset == [len("".join(found.tokens[:end])) for end in range(len(found.tokens))]
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None  # type: ignore[comparison-overlap]
    assert all(value <= 0 for value in found.token_logprobs[1:]) and all(
        len(top) == 1 for top in found.top_logprobs[1:]
    )
    ids: Any = body.to_dict()["prompt_token_ids"]
    entries: Any = choice.to_dict()["prompt_logprobs"]
    assert [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], entries[1:], strict=True)] == pytest.approx(
        found.token_logprobs[1 : len(ids)]
    )
    assert all(len(entry) in (3, 4) for entry in entries[1:])


def test_a_streamed_echo_adds_up_to_the_whole(client: openai.OpenAI) -> None:
    prompts = [PROMPT, "Hello there"]
    whole = client.completions.create(model=MODEL, prompt=prompts, echo=True, logprobs=2, **GREEDY, extra_body=FREE)
    chunks = client.completions.create(
        model=MODEL, prompt=prompts, echo=True, logprobs=2, stream=True, **GREEDY, extra_body=FREE
    )
    streamed: list[dict[str, list[Any]]] = [{}, {}]
    for choice in (choice for chunk in chunks for choice in chunk.choices if choice.logprobs):
        for name, values in choice.logprobs.to_dict().items():  # type: ignore[union-attr]
            streamed[choice.index].setdefault(name, []).extend(values)  # type: ignore[arg-type]
    for choice, found in zip(whole.choices, streamed, strict=True):
        expected: Any = choice.logprobs.to_dict() if choice.logprobs else {}
        assert found["tokens"] == expected["tokens"] and "".join(found["tokens"]).startswith(choice.text[:9])
        assert found["token_logprobs"][1:] == pytest.approx(expected["token_logprobs"][1:], abs=1e-4)
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None


def test_a_prompt_that_shows_no_text_is_echoed_once(server: RunningServer, client: openai.OpenAI) -> None:
    said = server.post("/tokenize", {"messages": [{"role": "user", "content": "a"}]}).json()["tokens"]
    control = said[0]  # such as <|im_start|>, which answers do not show
    asked = {**FREE, "allowed_token_ids": [control]}
    chunks = client.completions.create(
        model=MODEL, prompt=[control], echo=True, logprobs=0, stream=True, **GREEDY, extra_body=asked
    )
    choices = [choice for chunk in chunks for choice in chunk.choices]
    found = [one.logprobs.token_logprobs for one in choices if one.logprobs and one.logprobs.token_logprobs]
    assert [value is None for values in found for value in values] == [True, False, False, False]
    assert "".join(choice.text for choice in choices) == ""


def test_max_tokens_0_scores_a_prompt_and_generates_nothing(client: openai.OpenAI) -> None:
    body = client.completions.create(model=MODEL, prompt=[PROMPT, "Hello there"], echo=True, logprobs=0, max_tokens=0)
    assert [choice.text for choice in body.choices] == [PROMPT, "Hello there"]
    assert body.usage is not None and body.usage.completion_tokens == 0
    counts = [len(choice.logprobs.token_logprobs or ()) for choice in body.choices if choice.logprobs]
    assert sum(counts) == body.usage.prompt_tokens == body.usage.total_tokens
    assert {choice.finish_reason for choice in body.choices} == {"length"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_best_answers_are_returned_and_all_are_counted(server: RunningServer, path: str) -> None:
    is_chat = path == "/v1/chat/completions"
    prompt = {"messages": [{"role": "user", "content": PROMPT}]} if is_chat else {"prompt": PROMPT}
    fields: dict[str, Any] = {
        **prompt,
        "max_tokens": 4,
        "seed": 5,
        "temperature": 1.5,
        "return_token_ids": True,
        **FREE,
    }
    shown = {"logprobs": True} if is_chat else {"logprobs": 0}
    every = server.post(path, {**fields, **shown, "n": 4}).json()["choices"]

    def mean(choice: dict[str, Any]) -> float:
        found = choice["logprobs"]
        values = [entry["logprob"] for entry in found["content"]] if is_chat else found["token_logprobs"]
        return float(sum(values) / len(values))

    best = sorted(every, key=mean, reverse=True)[:2]
    body = server.post(path, {**fields, "n": 2, "best_of": 4}).json()
    assert [choice["token_ids"] for choice in body["choices"]] == [choice["token_ids"] for choice in best]
    assert [choice["index"] for choice in body["choices"]] == [0, 1] and body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 16
