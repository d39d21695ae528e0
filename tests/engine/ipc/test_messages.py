"""Everything that goes to the engine process and back survives the way; what is no message ends the connection."""

from __future__ import annotations

import io
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.checkpoint.config import model_config
from saccade.engine.ipc import messages
from saccade.errors import RequestError
from saccade.options.engine import Options, SchedulerConfig
from saccade.sampling_params import SamplingParams
from saccade.types.attention_reach import AttentionReach
from saccade.types.events import TokenEvent, Usage
from saccade.types.latency import LatencyProfile, StepTime
from saccade.types.media import Geometry, Grid, Header, MediaItem, Size
from saccade.types.prompt import TO_THE_END, Prompt, Span
from saccade.types.request import Request
from saccade.types.step import Logprobs
from tests.helpers.engine.scheduling import FakeImage, make_item, make_prompt, make_request

counts = st.integers(0, 2**31 - 1)
ids = st.integers(0, 2**20)
seconds = st.floats(0, 1e9)
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
sizes = st.builds(Size, counts, counts)
grids = st.builds(Grid, counts, counts, counts)
geometries = st.builds(Geometry, sizes, grids, counts, counts, cells=st.none() | sizes)
headers = st.builds(Header, words, sizes, st.integers(1, 8), counts, words)
keys = st.binary(min_size=32, max_size=32)
items = st.builds(MediaItem, keys, st.sampled_from(["image", "video"]), st.binary(max_size=64), headers, geometries)
spans = st.builds(
    Span,
    counts,
    counts,
    keys,
    counts,
    st.none() | st.lists(st.booleans(), max_size=4).map(tuple),
    st.none() | counts | st.just(TO_THE_END),
    st.none() | counts,
)


@st.composite
def prompts(draw: Any) -> Prompt:
    tokens = draw(st.lists(ids, max_size=8))
    shown = draw(st.lists(items, max_size=3, unique_by=lambda item: item.key))
    repeated = draw(st.lists(st.sampled_from(shown), max_size=5)) if shown else []
    axes = draw(st.sampled_from([1, 3]))
    flat = draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=axes * len(tokens), max_size=axes * len(tokens)))
    return Prompt(
        token_ids=tokens,
        spans=tuple(draw(st.lists(spans, max_size=3))),
        items=tuple(repeated),
        positions=np.array(flat, np.int32).reshape(axes, len(tokens)),
        next_position=draw(counts),
        identity=draw(st.binary(max_size=80)),
        salt=draw(st.binary(max_size=8)),
        text=draw(st.none() | words),
    )


sampling = st.builds(
    SamplingParams,
    n=st.integers(1, 64),
    temperature=st.floats(0, 10),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(-1, 100),
    presence_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.1, 5),
    seed=st.none() | st.integers(-(2**63) + 1, 2**63 - 1),
    stop=st.none() | words.filter(bool) | st.lists(words.filter(bool), max_size=3),
    stop_token_ids=st.lists(ids, max_size=4).map(tuple),
    max_tokens=st.none() | st.integers(1, 2**40),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    logit_bias=st.none() | st.dictionaries(ids, st.floats(-100, 100), max_size=3),
)
requests = st.builds(Request, words, prompts(), sampling, counts, st.frozensets(ids), st.integers(-(2**63), 2**64 - 1))
errors = st.builds(
    RequestError, words, code=st.none() | words, param=st.none() | words, key=st.none() | st.binary(max_size=32)
)
logprobs = st.builds(
    Logprobs, st.floats(-100, 0), counts, st.lists(st.tuples(ids, st.floats(-100, 0)), max_size=3).map(tuple)
)
usages = st.builds(
    Usage,
    counts,
    counts,
    seconds,
    st.none() | seconds,
    st.none() | seconds,
    seconds,
    decode_ms=seconds,
    encode_ms=seconds,
)
events = st.builds(
    TokenEvent,
    words,
    st.none() | ids,
    st.none() | logprobs,
    st.sampled_from([None, "stop", "length", "abort", "error"]),
    st.none() | ids,
    st.none() | errors,
    st.none() | usages,
)
curves = st.lists(st.tuples(counts, seconds), max_size=3).map(tuple)
riding = st.lists(st.tuples(counts, curves), max_size=2).map(tuple)
paces = st.builds(LatencyProfile, curves, curves, curves, st.none() | seconds, mixed_ms=riding)
values: dict[Any, Any] = {
    int: counts,
    bool: st.booleans(),
    int | None: st.none() | counts,
    float: seconds,
    LatencyProfile | None: st.none() | paces,
    AttentionReach | None: st.none() | st.builds(AttentionReach, counts, st.booleans()),
    StepTime | None: st.none() | st.builds(StepTime, seconds, seconds, seconds),
}
limits = st.builds(SchedulerConfig, **{name: values[kind] for name, kind in get_type_hints(SchedulerConfig).items()})
options = st.builds(
    Options,
    model=st.none() | words,
    dtype=words,
    max_model_len=st.none() | st.integers(1, 2**31),
    kv_cache_gb=st.none() | st.floats(0, 1000),
    limit_mm_per_prompt=st.dictionaries(st.sampled_from(["image", "video"]), counts),
)


def there(message: messages.Command) -> Any:
    """As the worker gets it."""
    return messages.command_in(body_of(message))


def back(message: messages.Report) -> Any:
    """As the client gets it."""
    return messages.report_in(body_of(message))


def body_of(message: messages.Command | messages.Report) -> bytes:
    body = messages.read_body(io.BytesIO(messages.frame(message)))
    assert body is not None
    return body


def sent(request: Request) -> Request:
    (arrived,) = all_sent([request])
    return arrived


def all_sent(requests: list[Request]) -> list[Request]:
    return messages.unpack_requests(there(messages.Submit(messages.pack_requests(requests))).requests)


def told(error: RequestError | None) -> tuple[Any, ...] | None:
    return (error.message, error.code, error.param, error.key) if error else None


def plain(request: Request) -> dict[str, Any]:
    """All of a request that the engine works with, in a form that compares."""
    values = {name: getattr(request, name) for name in ("request_id", "max_tokens", "eos_token_ids", "seed")}
    prompt = request.prompt
    for name in ("spans", "next_position", "identity", "salt"):
        values[name] = getattr(prompt, name)
    values["token_ids"] = list(prompt.token_ids)
    values["items"] = [asdict(item) for item in prompt.items]
    values["positions"] = (prompt.positions.dtype, prompt.positions.tolist(), prompt.positions.shape)
    values["params"] = replace(request.params, stop=None, stop_token_ids=tuple(request.params.stop_token_ids))
    return values


# --- round trips --------------------------------------------------------------------------------------------------


@given(requests)
@settings(max_examples=50, deadline=None)
def test_a_request_arrives_as_it_was_sent(request: Request) -> None:
    assert plain(sent(request)) == plain(request)


@given(requests)
@settings(max_examples=20, deadline=None)
def test_the_clients_text_stays_in_the_api_process(request: Request) -> None:
    arrived = sent(request)
    assert arrived.prompt.text is None and arrived.params.stop is None


@given(st.lists(events, max_size=4), st.none() | st.dictionaries(words, counts, max_size=3))
@settings(max_examples=50, deadline=None)
def test_events_arrive_as_they_were_sent(sent_events: list[TokenEvent], stats: dict[str, Any] | None) -> None:
    beat = back(messages.StepUpdate(sent_events, stats))
    assert beat.stats == stats
    assert [told(event.error) for event in beat.events] == [told(event.error) for event in sent_events]
    assert [event._replace(error=None) for event in beat.events] == [e._replace(error=None) for e in sent_events]


@given(options, st.none() | geometries, st.lists(requests, max_size=2))
@settings(max_examples=30, deadline=None)
def test_options_geometry_and_warm_up_arrive_as_they_were_sent(
    opts: Options, largest: Geometry | None, warmup: list[Request]
) -> None:
    made = messages.Start("/x", {}, [], False, {}, opts, largest, messages.pack_requests(warmup), True)
    start = there(made)
    assert (start.options, start.largest) == (opts, largest)
    assert [plain(request) for request in messages.unpack_requests(start.warmup)] == [
        plain(request) for request in warmup
    ]


@given(limits, st.lists(words).map(tuple), errors)
@settings(max_examples=30, deadline=None)
def test_limits_and_refusals_arrive_as_they_were_sent(
    chosen: SchedulerConfig, reasons: tuple[str, ...], error: RequestError
) -> None:
    ready = back(messages.Ready(chosen, reasons, messages.WorkerPlace("node", 7, "cpu")))
    assert (ready.limits, ready.reasons) == (chosen, reasons)
    assert told(back(messages.Refused("a", error)).error) == told(error)


@pytest.mark.parametrize("generation", [{}, {"eos_token_id": [7, 9]}])
def test_the_worker_reads_the_same_model_config(generation: dict[str, Any]) -> None:
    text = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    raw = {"model_type": "x", "vocab_size": 9, "max_position_embeddings": 64, "eos_token_id": 3, **text}
    config = model_config(raw, generation)
    start = there(messages.start_message(Path("/x"), config, {"size": 1}, Options(), None, [], progress=False))
    assert messages.config_of(start) == config


def test_the_same_image_twice_in_a_prompt_travels_once() -> None:
    image = replace(make_item(FakeImage("a", 4)), data=bytes(100_000))
    prompt = make_prompt([FakeImage("a", 4), 3, FakeImage("a", 4)])
    request = make_request("r", 1)
    twice = replace(request, prompt=replace(prompt, items=(image, image)))
    assert len(messages.frame(messages.Submit(messages.pack_requests([twice])))) < 110_000
    first, second = sent(twice).prompt.items
    assert first is second


def test_answers_to_one_prompt_share_it_on_the_way_and_at_its_end() -> None:
    image = replace(make_item(FakeImage("a", 4)), data=bytes(100_000))
    first = make_request("r/0", 1)
    first = replace(first, prompt=replace(make_prompt([FakeImage("a", 4)]), items=(image,)))
    answers = [replace(first, request_id=f"r/{index}", seed=index) for index in range(64)]
    other = make_request("s", 3, max_tokens=7)
    assert len(messages.frame(messages.Submit(messages.pack_requests([*answers, other])))) < 110_000
    *arrived, last = all_sent([*answers, other])
    assert [(request.request_id, request.seed) for request in arrived] == [(f"r/{i}", i) for i in range(64)]
    assert len({id(request.prompt) for request in arrived}) == 1
    assert len({id(request.params) for request in arrived}) == 1
    assert plain(last) == plain(other)


def test_answers_that_ask_for_different_things_keep_them() -> None:
    first = make_request("a", 3, max_tokens=3)
    requests = [first, replace(first, request_id="b", max_tokens=4), replace(first, request_id="c")]
    assert {request.request_id: request.max_tokens for request in all_sent(requests)} == {"a": 3, "b": 4, "c": 3}


# --- what cannot travel -------------------------------------------------------------------------------------------


def test_a_number_beyond_64_bits_is_the_clients_mistake() -> None:
    request = make_request("r", 3, max_tokens=2**70)
    with pytest.raises(RequestError, match="64 bits"):
        messages.frame(messages.Submit(messages.pack_requests([request])))


def test_half_a_character_is_the_clients_mistake() -> None:
    with pytest.raises(RequestError, match="surrogate"):
        messages.frame(messages.Abort("\ud800"))


def test_a_message_larger_than_a_frame_may_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_FRAME_BYTES", 100)
    with pytest.raises(RequestError, match="100 may be sent"):
        messages.frame(messages.Abort("x" * 200))


def test_a_frame_that_claims_too_many_bytes_is_no_frame() -> None:
    header = (messages.MAX_FRAME_BYTES + 1).to_bytes(4, "big")
    with pytest.raises(messages.WireError, match="claims"):
        messages.read_body(io.BytesIO(header))


def test_a_frame_cut_anywhere_is_an_error_and_a_clean_end_is_not() -> None:
    whole = bytes(messages.frame(messages.Abort("request")))
    assert messages.read_body(io.BytesIO(b"")) is None
    for cut in range(1, len(whole)):
        with pytest.raises(messages.WireError, match="ended inside"):
            messages.read_body(io.BytesIO(whole[:cut]))


@given(st.binary(max_size=64))
@settings(max_examples=50, deadline=None)
def test_garbage_is_never_more_than_a_wire_error(garbage: bytes) -> None:
    for read in (messages.command_in, messages.report_in):
        try:
            message = read(garbage)
        except messages.WireError:
            continue
        assert isinstance(message, messages.Message)


def test_a_prompt_whose_parts_do_not_fit_together_is_a_wire_error() -> None:
    (body,) = messages.pack_requests([make_request("r", FakeImage("a", 2))])
    broken = msgspec.structs.replace(body, prompt=msgspec.structs.replace(body.prompt, item_of_span=(5,)))
    with pytest.raises(messages.WireError, match="fit together"):
        messages.unpack_requests([broken])
