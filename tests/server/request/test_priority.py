"""What the engine orders work by: `priority` from every body that generates, and whose images they are."""

from __future__ import annotations

from typing import Any

import pytest

from saccade.errors import RequestError
from saccade.processor.request_builder import RequestBuilder
from saccade.sampling_params import SamplingParams
from saccade.server.request.chat import ResponseOptions, read_chat, read_completion
from saccade.server.request.fields import FieldReader
from saccade.server.request.messages import read_message
from saccade.server.request.responses import read_response
from saccade.types.request import Tenant
from tests.helpers.engine.scheduling import FakeImage, make_prompt

READER = FieldReader(strict=True)
MESSAGES = [{"role": "user", "content": "a"}]


def options_of(kind: str, **fields: Any) -> ResponseOptions:
    if kind == "chat":
        return read_chat({"messages": MESSAGES, **fields}, READER).response_options
    if kind == "completion":
        return read_completion({"prompt": "a", **fields}, READER, max_prompts=1).response_options
    if kind == "response":
        return read_response({"input": "a", **fields}, READER).chat.response_options
    return read_message({"messages": MESSAGES, "max_tokens": 1, **fields}, READER).chat.response_options


@pytest.mark.parametrize("kind", ["chat", "completion", "response", "message"])
def test_every_body_may_have_a_priority_and_zero_is_the_default(kind: str) -> None:
    assert options_of(kind, priority=-3).priority == -3
    assert options_of(kind).priority == 0


@pytest.mark.parametrize(("value", "reason"), [("high", "whole number"), (1.5, "whole number"), (2**63, "64 bits")])
def test_a_priority_that_is_no_bounded_whole_number_is_refused(value: object, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        options_of("chat", priority=value)
    assert caught.value.param == "priority"


def test_each_of_several_answers_has_the_tenant_and_the_priority() -> None:
    options = options_of("chat", n=2, priority=4)
    tenant = Tenant("A", 2.0)
    built = RequestBuilder(frozenset(), 0).build("r", make_prompt([3]), options.params, 5, tenant=tenant, priority=4)
    assert [(request.tenant, request.priority) for request in built] == [(tenant, 4)] * 2


def test_all_images_of_a_request_have_it_as_their_owner_and_a_repeated_one_stays_one() -> None:
    prompt = make_prompt([FakeImage("a", 2), FakeImage("b", 2), FakeImage("a", 2)])
    first, second = RequestBuilder(frozenset(), seed=0).build("r7", prompt, SamplingParams(n=2), max_tokens=1)
    assert {item.owner for item in first.prompt.items} == {"r7"} and first.prompt is second.prompt
    assert first.prompt.items[0] is first.prompt.items[2] is not first.prompt.items[1]
