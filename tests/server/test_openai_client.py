"""The client of OpenAI against a running server: answers, streams, schemas, errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from tests.helpers.servers.later import Later
from tests.helpers.servers.serving import (
    MODEL,
    RunningServer,
    photo_part,
    text_part,
)

if TYPE_CHECKING:
    import openai
else:
    openai = Later("openai")


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0)


def messages(text: str = "What is this?") -> Any:
    return [{"role": "user", "content": text}]


def vision(text: str = "What is this?") -> Any:
    return [{"role": "user", "content": [text_part(text), photo_part(128, 96)]}]


class Invoice(BaseModel):
    number: int
    paid: bool


def test_the_openai_client_reads_a_vision_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=vision(), max_tokens=4)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.choices[0].message.content is not None


def test_the_openai_client_reads_a_stream(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=messages(), max_tokens=8, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason


def test_the_openai_client_parses_an_answer_to_a_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=vision("Read the invoice."), response_format=Invoice, max_tokens=200, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Invoice)


def test_the_openai_client_lists_models_with_our_fields(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL and model.max_model_len == 4096  # type: ignore[attr-defined]


def test_the_openai_client_raises_our_errors_without_retrying(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.with_options(max_retries=2).chat.completions.create(model=MODEL, messages=messages(), temperature=-1)
    assert caught.value.param == "temperature"


def test_the_openai_client_counts_input_tokens(client: openai.OpenAI) -> None:
    count = client.responses.input_tokens.count(model=MODEL, input="What is this?")
    assert count.input_tokens > 0
