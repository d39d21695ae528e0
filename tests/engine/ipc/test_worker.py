"""The engine in a process of its own, as long as all goes well: answers, refusals, cancelling, slow readers."""

from __future__ import annotations

import ast
import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from saccade import LLM, SamplingParams
from saccade.engine.ipc.client import EngineClient
from saccade.errors import RequestError
from saccade.options.engine import Options
from saccade.processor.input_processor import Processor
from saccade.types.request import Request
from tests.helpers.engine.scheduling import FakeImage, make_config, make_request
from tests.helpers.fakes.fake_worker import (
    BREAKS_THE_STEP,
    collect,
    endless,
    pid_of,
    run,
    run_bounded,
    started,
    submit,
    until,
)
from tests.helpers.media.images import make_photo, png
from tests.helpers.servers.hostile import resident_mb

LARGE = 16 << 20  # bytes of a picture

# --- with a model -------------------------------------------------------------------------------------------------


def asked(processor: Processor, request_id: str, prompt: dict[str, Any], params: SamplingParams) -> Request:
    made = processor.from_prompt(prompt)
    return Request(request_id, made, params, params.max_tokens or 1, processor.eos_token_ids, params.seed or 0)


def test_answers_from_the_worker_are_those_of_the_offline_engine(qwen2_vl_folder: Path) -> None:
    image, placeholder = png(make_photo()), "<|vision_start|><|image_pad|><|vision_end|>"
    prompts: list[dict[str, Any]] = [
        {"prompt": "The quick brown fox"},
        {"prompt": placeholder + "What is this?", "multi_modal_data": {"image": image}},
        {"prompt": placeholder + placeholder + "Same?", "multi_modal_data": {"image": [image, image]}},
    ]
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=8, ignore_eos=True, logprobs=2)
    opts = Options(model=str(qwen2_vl_folder), max_model_len=512, kv_cache_gb=0.05)
    llm = LLM(str(qwen2_vl_folder), max_model_len=512, kv_cache_gb=0.05, use_tqdm=False)
    expected = [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in llm.generate(prompts, params, False)]
    processor = llm.engine.processor
    wanted = [asked(processor, str(index), prompt, params) for index, prompt in enumerate(prompts)]

    async def body() -> None:
        client = EngineClient(
            opts,
            checkpoint=processor.checkpoint,
            largest=processor.largest_item(),
            progress=False,
        )
        async with started(client):
            streams = [await submit(client, request) for request in wanted]
            events = await asyncio.gather(*[collect(stream) for stream in streams])
        answers = [([event.token_id for event in answer], [event.logprobs for event in answer]) for answer in events]
        assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in expected]
        for (_, got), (_, want) in zip(answers, expected, strict=True):
            assert want is not None
            assert [lp.logprob for lp in got if lp] == pytest.approx([lp.logprob for lp in want], abs=1e-4)

    run_bounded(body())
    llm.close()


# --- requests -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_stream_ends_after_its_terminal_event(loop_factory: Any) -> None:
    async def test(client: EngineClient) -> None:
        events = await collect(await submit(client, make_request("a", 5, FakeImage("p", 4), max_tokens=6)))
        assert [event.finish_reason for event in events] == [None] * 5 + ["length"]
        assert events[-1].usage is not None

    run(test, loop_factory=loop_factory)


def test_the_client_knows_the_limits_and_their_reasons() -> None:
    async def test(client: EngineClient) -> None:
        assert client.info is not None
        assert client.info.limits == make_config()
        assert client.info.reasons == ("a fake engine",)

    run(test)


def test_a_warm_up_has_been_through_encoder_and_decoder_when_the_worker_is_ready() -> None:
    async def test(client: EngineClient) -> None:
        await until(client.stats)
        assert client.stats()["encoder"]["encoded"] == 1 and client.stats()["steps"] >= 3

    run(test, warmup=[make_request("warm-up", 5, FakeImage("p", 4), max_tokens=3)])


def test_a_warm_up_that_cannot_run_is_no_reason_not_to_start() -> None:
    async def test(client: EngineClient) -> None:
        assert client.status().state == "ready"

    run(test, warmup=[make_request("warm-up", 20_000)])


def test_many_requests_at_once_are_all_answered() -> None:
    async def test(client: EngineClient) -> None:
        async def one(index: int) -> None:
            events = await collect(await submit(client, make_request(str(index), 3 + index, max_tokens=20)))
            assert len(events) == 20 and {event.request_id for event in events} == {str(index)}

        await asyncio.gather(*[one(index) for index in range(40)])

    run(test)


def test_a_refusal_keeps_its_code_and_words() -> None:
    async def test(client: EngineClient) -> None:
        with pytest.raises(RequestError, match="--max-model-len") as caught:
            await submit(client, make_request("long", 20_000))
        assert caught.value.code == "context_length_exceeded"
        assert client.bytes_in_flight == 0

    run(test)


def test_a_full_queue_refuses_as_overloaded() -> None:
    async def test(client: EngineClient) -> None:
        await submit(client, endless("a"))
        with pytest.raises(RequestError) as caught:
            await submit(client, make_request("b", 3))
        assert caught.value.code == "overloaded"

    run(test, options=Options(max_waiting=0, max_num_seqs=1))


def test_an_id_that_is_open_is_refused() -> None:
    async def test(client: EngineClient) -> None:
        await submit(client, endless("same"))
        with pytest.raises(RequestError, match="already open"):
            await submit(client, endless("same"))

    run(test)


def test_a_step_that_breaks_ends_its_requests_and_the_worker_lives() -> None:
    async def test(client: EngineClient) -> None:
        events = await collect(await submit(client, make_request("bad", [BREAKS_THE_STEP])))
        assert events[-1].error is not None and events[-1].error.code == "engine_error"
        assert len(await collect(await submit(client, make_request("good", 3)))) == 3
        assert client.status().restarts == 0

    run(test)


def test_open_requests_count_as_bytes_in_flight_until_they_end() -> None:
    async def test(client: EngineClient) -> None:
        stream = await submit(client, endless())
        assert client.bytes_in_flight > 5 * 40  # at least what the prefix cache hashes
        stream.cancel()
        await collect(stream)
        assert client.bytes_in_flight == 0

    run(test)


# --- several answers to one prompt ----------------------------------------------------------------------------------


def answers_to(request: Request, count: int) -> list[Request]:
    return [replace(request, request_id=f"{request.request_id}/{index}", seed=index) for index in range(count)]


def with_large_image(request_id: str, max_tokens: int) -> Request:
    request = make_request(request_id, FakeImage("p", 4), 3, max_tokens=max_tokens)
    items = tuple(replace(item, data=bytes(LARGE)) for item in request.prompt.items)
    return replace(request, prompt=replace(request.prompt, items=items))


def test_a_image_counts_once_as_bytes_in_flight_until_its_last_answer_ends() -> None:
    async def test(client: EngineClient) -> None:
        streams = await client.submit(answers_to(with_large_image("a", 9_000), 64))
        sent = client.bytes_in_flight
        assert LARGE < sent < LARGE + 100_000
        for stream in streams[1:]:
            stream.cancel()
            await collect(stream)
        assert client.bytes_in_flight == sent
        streams[0].cancel()
        await collect(streams[0])
        assert client.bytes_in_flight == 0

    run(test)


def test_a_image_is_in_the_engine_once_however_many_answers_it_has() -> None:
    async def test(client: EngineClient) -> None:
        before = resident_mb(pid_of(client))
        streams = await client.submit(answers_to(with_large_image("a", 9_000), 64))
        for stream in streams[:8]:  # more do not run at once
            await anext(stream)
        grown = resident_mb(pid_of(client)) - before
        assert grown < 4 * LARGE / 2**20  # the frame it came in, and itself; 64 would be 16 times this

    run(test)


def test_answers_to_one_prompt_are_let_in_together_or_not_at_all() -> None:
    async def test(client: EngineClient) -> None:
        await submit(client, endless("other"))
        before = client.bytes_in_flight
        with pytest.raises(RequestError) as caught:
            await client.submit(answers_to(make_request("a", 5), 4))  # two run and two wait, but one is there already
        assert caught.value.code == "overloaded"
        assert client.bytes_in_flight == before
        streams = await client.submit(answers_to(make_request("a", 5), 3))  # the same ids: nothing stayed of them
        assert [len(await collect(stream)) for stream in streams] == [3, 3, 3]

    run(test, options=Options(max_waiting=2, max_num_seqs=2))


# --- cancelling ---------------------------------------------------------------------------------------------------


def test_cancelling_frees_the_requests_blocks() -> None:
    async def test(client: EngineClient) -> None:
        stream = await submit(client, endless())
        await anext(stream)
        stream.cancel()
        stream.cancel()
        await collect(stream)
        assert client.stats()["kv"]["used"] == 0 and client.stats()["running"] == 0

    run(test)


def test_whoever_reads_on_after_cancelling_gets_the_usage() -> None:
    async def test(client: EngineClient) -> None:
        stream = await submit(client, endless())
        await anext(stream)
        stream.cancel()
        last = (await collect(stream))[-1]
        assert last.finish_reason == "abort" and last.usage is not None

    run(test)


def test_giving_up_while_the_scheduler_decides_leaves_nothing_behind() -> None:
    async def test(client: EngineClient) -> None:
        other = await submit(client, endless("other"))
        await anext(other)  # a step is running from now on, so the answer takes its time
        waiting = asyncio.create_task(submit(client, endless("given up")))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        other.cancel()
        await until(lambda: client.bytes_in_flight == 0)
        assert client.stats()["running"] == client.stats()["waiting"] == 0

    run(test, step_seconds=0.1)


def test_giving_up_while_the_scheduler_decides_gives_up_every_answer() -> None:
    async def test(client: EngineClient) -> None:
        other = await submit(client, endless("other"))
        await anext(other)
        waiting = asyncio.create_task(client.submit(answers_to(endless("given up"), 3)))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        other.cancel()
        await until(lambda: client.bytes_in_flight == 0)
        assert client.stats()["running"] == client.stats()["waiting"] == 0

    run(test, step_seconds=0.1)


def test_a_slow_reader_holds_up_nobody_and_misses_nothing() -> None:
    async def test(client: EngineClient) -> None:
        slow = await submit(client, make_request("slow", 5, max_tokens=2_000))
        fast = await collect(await submit(client, make_request("fast", 5, max_tokens=2_000)))
        await until(lambda: client.stats()["running"] == 0)
        assert len(fast) == 2_000
        first = await anext(slow)
        assert len(first) == 2_000  # all that came meanwhile, in one list

    run(test)


# --- the border ---------------------------------------------------------------------------------------------------


def test_nothing_between_the_processes_is_pickled() -> None:
    for path in (Path(__file__).parents[3] / "saccade" / "engine").rglob("*.py"):
        names = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, (ast.Import, ast.ImportFrom))
        ]
        assert "pickle" not in " ".join(ast.dump(node) for node in names), path
