"""The engine for asyncio: streams of outputs, aborts, errors, sleep. One engine process for all of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from saccade import AsyncLLM, RequestOutput, SamplingParams
from saccade.errors import EngineUnavailable, RequestError, UsageError

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


async def collect(stream: Any) -> list[RequestOutput]:
    return [output async for output in stream]


async def check_streams(llm: AsyncLLM) -> None:
    outputs, chats = await asyncio.gather(
        collect(llm.generate("How many circles?", SHORT, "a")),
        collect(llm.chat([{"role": "user", "content": "How many circles?"}], SHORT, "b")),
    )
    last = outputs[-1]
    assert last.finished and last.outputs[0].finish_reason == "length" and len(last.outputs[0].token_ids) == 6
    assert len(outputs) > 1 and not outputs[0].finished
    assert all(last.outputs[0].text.startswith(output.outputs[0].text) for output in outputs)
    assert last.request_id == "a" and last.bill is not None and last.bill.prompt_tokens == len(last.prompt_token_ids)
    assert chats[-1].finished and len(chats[-1].prompt_token_ids) > len(last.prompt_token_ids)


async def check_many_and_stops(llm: AsyncLLM) -> None:
    two = SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=4, ignore_eos=True)
    last = (await collect(llm.generate("Say", two)))[-1]
    assert last.finished and [len(output.token_ids) for output in last.outputs] == [4, 4]
    greeting = [{"role": "user", "content": "Hello"}]  # the model has words for it
    text = (await collect(llm.chat(greeting, SHORT)))[-1].outputs[0].text
    ended = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, stop=[text[1]])
    last = (await collect(llm.chat(greeting, ended)))[-1]
    assert last.finished and last.outputs[0].finish_reason == "stop" and text[1] not in last.outputs[0].text


async def check_aborts(llm: AsyncLLM) -> None:
    outputs = []
    async for output in llm.generate("Count", LONG, "long"):
        outputs.append(output)
        await llm.abort("long")
    assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "abort"
    assert len(outputs[-1].outputs[0].token_ids) < 200
    stream = llm.generate("Count", LONG, "left")
    await anext(stream)
    with pytest.raises(RequestError, match="already in use"):
        await anext(llm.generate("Count", LONG, "left"))
    await stream.aclose()
    assert (await collect(llm.generate("Count", SHORT, "left")))[-1].finished


async def check_errors(llm: AsyncLLM) -> None:
    with pytest.raises(RequestError, match="prompt is empty"):
        await collect(llm.generate("", SHORT))
    with pytest.raises(RequestError, match="max_tokens"):
        await collect(llm.generate("x", SamplingParams(max_tokens=10**6)))
    with pytest.raises(RequestError, match="lora_request=1 is not supported"):
        await collect(llm.generate("x", SHORT, lora_request=1))


async def check_sleep(llm: AsyncLLM) -> None:
    before = (await collect(llm.generate("How many?", SHORT)))[-1]
    assert await llm.reset_prefix_cache()
    await llm.sleep()
    assert await llm.is_sleeping()
    with pytest.raises(EngineUnavailable, match="the engine is sleeping"):
        await collect(llm.generate("How many?", SHORT))
    await llm.wake_up()
    await llm.check_health()
    assert (await collect(llm.generate("How many?", SHORT)))[-1].outputs == before.outputs


def test_an_engine_streams_aborts_refuses_and_sleeps() -> None:
    async def body() -> None:
        async with AsyncLLM(kv_cache_gb=0.05, max_model_len=512, trust_remote_code=True) as llm:
            for check in (check_streams, check_many_and_stops, check_aborts, check_errors, check_sleep):
                await check(llm)
        with pytest.raises(EngineUnavailable):
            await collect(llm.generate("x", SHORT))

    asyncio.run(asyncio.wait_for(body(), 120))


def test_its_arguments_are_those_of_llm() -> None:
    with pytest.raises(UsageError, match="tensor_parallel_size=2 is not supported"):
        AsyncLLM(tensor_parallel_size=2)
