"""Thinking apart from answers and within its budget: in Python, over HTTP, in the terminal."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from saccade import LLM, SamplingParams
from saccade.cli.conversation import Conversation
from saccade.errors import RequestError
from saccade.processor.request_builder import RequestBuilder
from saccade.runner.batch import RequestState
from saccade.types.prompt import Prompt
from saccade.types.request import Request, Thinking
from saccade.types.step import Admission, Sample
from tests.helpers.servers.serving import RunningServer, events_of, running_server

ASK = [{"role": "user", "content": "What is this?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, thinking_token_budget=4)


@pytest.fixture(scope="module")
def folder(qwen2_vl_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template opens the thinking, with markers of one token each."""
    made = tmp_path_factory.mktemp("thinks") / "thinks"
    shutil.copytree(qwen2_vl_folder, made)
    tokenizer = made / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("tool_call>", "think>"))
    template = made / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if add_generation_prompt %}<think>\n{% endif %}")
    return made


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(model=str(folder), max_model_len=512, kv_cache_gb=0.05, use_tqdm=False) as made:
        yield made


def close_id(llm: LLM) -> int:
    found = llm.engine.processor.tokenizer.token_id("</think>")
    assert found is not None
    return found


# --- in Python ----------------------------------------------------------------------------------------------------


def test_thinking_ends_with_its_budget_and_the_answer_goes_on(llm: LLM) -> None:
    free, held = (
        llm.chat(ASK, replace(GREEDY, thinking_token_budget=budget), use_tqdm=False)[0].outputs[0]
        for budget in (None, 4)
    )
    assert close_id(llm) not in free.token_ids and free.content == "" and free.reasoning == free.text.strip()
    assert held.token_ids[:5] == [*free.token_ids[:4], close_id(llm)] and len(held.token_ids) == 12
    assert held.reasoning == held.text.partition("</think>")[0].strip()
    assert held.content == held.text.partition("</think>")[2].lstrip()


def test_a_raw_prompt_has_the_same_budget(llm: LLM) -> None:
    text = "<|im_start|>assistant\n<think>\n"
    ids = llm.engine.processor.tokenizer.encode(text)
    for prompt in (text, {"prompt_token_ids": ids}):
        (out,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert out.outputs[0].token_ids[4] == close_id(llm) and out.outputs[0].reasoning is not None


def test_a_structure_begins_after_the_budget(llm: LLM) -> None:
    prompt = llm.engine.processor.from_chat(ASK)
    params = replace(GREEDY, structured='{"enum": ["ab", "cd"]}', ignore_eos=False)
    llm.engine.add_with("r", lambda: prompt, params)
    while not (outs := llm.engine.step()) or not outs[0].finished:
        pass
    assert outs[0].outputs[0].content in ('"ab"', '"cd"') and outs[0].outputs[0].token_ids[4] == close_id(llm)


def test_the_marker_outranks_what_else_limits_tokens(llm: LLM) -> None:
    params = replace(GREEDY, allowed_token_ids=[5, 6], bad_words=["</think>"], min_tokens=9)
    (out,) = llm.chat(ASK, params, use_tqdm=False)
    assert out.outputs[0].token_ids[4] == close_id(llm)
    assert {*out.outputs[0].token_ids} <= {5, 6, close_id(llm)}


def test_a_preempted_request_goes_on_with_what_is_left() -> None:
    thinking = Thinking("<think>", "</think>", is_open=True, close_id=40)
    prompt = Prompt([1], (), (), np.zeros((1, 1), np.int32), 1, b"\0" * 40)
    request = Request("r", prompt, replace(GREEDY, thinking_token_budget=2), 8, frozenset(), 0, thinking=thinking)
    state = RequestState(Admission(request, (7,), ()))
    assert state.row().allowed is None
    state.take(Sample(8, None))
    bits = state.row().allowed
    assert bits is not None and [i for i in range(64) if bits[i // 32] >> (i % 32) & 1] == [40]
    state.take(Sample(40, None))
    assert state.row().allowed is None


def test_a_marker_of_several_tokens_cannot_be_forced() -> None:
    thinking = Thinking("<think>", "</think>", is_open=True)
    prompt = Prompt([1], (), (), np.zeros((1, 1), np.int32), 1, b"\0" * 40)
    build = RequestBuilder(frozenset(), 0, thinking_after=lambda _: thinking).build
    with pytest.raises(RequestError, match="</think>") as caught:
        build("r", prompt, GREEDY, 8)
    assert (caught.value.param, caught.value.code) == ("thinking_token_budget", "unsupported")


def test_a_model_that_does_not_think_is_not_slowed_by_a_budget() -> None:
    prompt = Prompt([1], (), (), np.zeros((1, 1), np.int32), 1, b"\0" * 40)
    (request,) = RequestBuilder(frozenset(), 0, thinking_after=lambda _: None).build("r", prompt, GREEDY, 8)
    assert request.params.samples_on_device and not GREEDY.samples_on_device


# --- in the terminal ----------------------------------------------------------------------------------------------


def test_the_terminal_shows_thinking_apart(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(llm.engine, GREEDY, [], llm.engine.processor.policy)
    conversation.ask("What is this?")
    shown = capsys.readouterr()
    answer = conversation.messages[-1]
    assert shown.out.strip("\n") == answer["content"].strip("\n") and "think>" not in shown.out + shown.err
    assert shown.err.startswith(answer["reasoning_content"])


# --- over HTTP ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thinker(folder: Path) -> Iterator[RunningServer]:
    with running_server(folder) as running:
        yield running


def test_a_budget_holds_in_each_api_streamed_and_whole(thinker: RunningServer) -> None:
    fields: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    whole = thinker.chat(thinking_token_budget=4, **fields).json()
    message = whole["choices"][0]["message"]
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5 and message["content"]
    body = {"messages": [{"role": "user", "content": "What is this?"}], **fields}
    lines = thinker.post("/v1/chat/completions", {**body, "thinking_token_budget": 4, "stream": True}).text
    deltas = [event["choices"][0]["delta"] for event in events_of(lines.splitlines()) if event != "[DONE]"]
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == message[name]
    thinking = {"type": "enabled", "budget_tokens": 4}
    blocks = thinker.post("/v1/messages", {**body, "thinking": thinking}).json()["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text"]
    assert (blocks[0]["thinking"], blocks[1]["text"]) == (message["reasoning_content"], message["content"])
