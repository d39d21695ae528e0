"""A tenant's limits: buckets under a clock of the test, open requests, headers, and what is given back."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.errors import EngineUnavailable, RequestError
from saccade.server.accounts import Account, Bucket, LimitExceeded
from saccade.server.errors import ApiError
from saccade.server.generation import BilledPrompt, Generation
from saccade.server.http.limits import AdmissionGate
from saccade.server.metrics import Metrics
from saccade.server.request_record import RequestRecord
from saccade.server.tenant_file import TenantLimits, TenantSettings
from saccade.types.bill import Bill, BillItem
from saccade.types.events import Usage
from saccade.types.media import PIXELS_PER_SECOND, Grid
from tests.helpers.fakes.fake_stream import FakeAnswer, FakeEngine, new_stream, running, token


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def account(clock: Clock, **limits: int) -> Account:
    return Account("acme", TenantSettings(limits=TenantLimits(**limits), label="acme"), clock)


def refusal(account: Account, **amounts: int) -> LimitExceeded:
    with pytest.raises(LimitExceeded) as caught:
        account.take(**amounts)
    return caught.value


# --- buckets ------------------------------------------------------------------------------------------------------


def test_a_bucket_refills_continuously(clock: Clock) -> None:
    bucket = Bucket(60, clock)
    bucket.take(60)
    assert bucket.remaining == 0 and bucket.seconds_until(1) == 1 and bucket.reset_seconds == 60
    clock.now += 1.5
    assert bucket.remaining == 1 and bucket.seconds_until(1) == 0 and bucket.seconds_until(3) == 1.5
    clock.now += 1000
    assert bucket.remaining == 60 and bucket.reset_seconds == 0


def test_a_new_limit_keeps_what_was_used(clock: Clock) -> None:
    bucket = Bucket(60, clock)
    bucket.take(50)
    bucket.resize(600)
    assert bucket.remaining == 550
    bucket.resize(20)
    assert bucket.remaining == 0 and bucket.seconds_until(1) == 3  # not until all of the old use is made up for


moves = st.lists(st.tuples(st.sampled_from(["wait", "take", "give_back", "resize"]), st.integers(0, 100)), max_size=60)


@given(moves)
def test_no_more_passes_than_a_minutes_worth_and_what_time_brings(moves: list[tuple[str, int]]) -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    allowed, passed, outstanding = 60.0, 0, 0
    for move, amount in moves:
        if move == "wait":
            clock.now += amount / 10
            allowed += amount / 10 * bucket.limit / 60
        elif move == "take" and not bucket.seconds_until(amount):
            bucket.take(amount)
            passed += amount
            outstanding += amount
        elif move == "give_back":
            bucket.give_back(min(amount, outstanding))
            passed -= min(amount, outstanding)
            outstanding -= min(amount, outstanding)
        elif move == "resize":
            allowed += max(0, amount + 1 - bucket.limit)
            bucket.resize(amount + 1)
        assert passed <= allowed + 1e-6
        assert 0 <= bucket.remaining <= bucket.limit
        assert bucket.seconds_until(0) == 0 or bucket.remaining == 0


# --- limits -------------------------------------------------------------------------------------------------------


def test_a_limit_that_is_reached_says_when_to_try_again(clock: Clock) -> None:
    acme = account(clock, requests_per_minute=60)
    for _ in range(60):
        acme.take(requests=1)
    clock.now += 0.25
    error = refusal(acme, requests=1)
    assert error.status == 429 and error.limit == "requests" and error.kind == "rate_limit_error"
    assert error.code == "rate_limit_exceeded" and error.headers() == {"retry-after": "1"}
    assert "60 requests a minute" in error.message and "try again in 1 s" in error.message
    clock.now += 1
    acme.take(requests=1)


def test_what_can_never_pass_is_a_400_that_says_so(clock: Clock) -> None:
    error = refusal(account(clock, tokens_per_minute=100), tokens=101)
    assert error.status == 400 and error.headers() == {"x-should-retry": "false"}
    for part in ("101 tokens", "100 a minute", "never", "max_tokens"):
        assert part in error.message


def test_a_request_is_charged_whole_or_not_at_all(clock: Clock) -> None:
    acme = account(clock, tokens_per_minute=100, pixels_per_minute=100)
    acme.take(tokens=10, pixels=90)
    before = acme.headers()
    assert refusal(acme, tokens=10, pixels=20).limit == "pixels"
    assert acme.headers() == before


def test_a_text_passes_where_no_pixels_are_left(clock: Clock) -> None:
    acme = account(clock, pixels_per_minute=100)
    acme.take(pixels=100)
    acme.apply(TenantSettings(limits=TenantLimits(pixels_per_minute=10)))
    acme.take(tokens=5, pixels=0)


def test_the_headers_say_what_is_left_of_each_limit(clock: Clock) -> None:
    acme = account(clock, requests_per_minute=60, tokens_per_minute=1000)
    acme.take(requests=1)
    acme.take(tokens=250)
    clock.now += 0.5
    assert acme.headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "0.5s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "758",
        "x-ratelimit-reset-tokens": "14.5s",
    }
    assert Account().headers() == {}


def test_new_settings_keep_the_counters_and_what_is_given_back_goes_where_it_was_taken(clock: Clock) -> None:
    acme = account(clock, tokens_per_minute=100)
    charge = acme.take(tokens=80, pixels=50)
    acme.apply(TenantSettings(limits=TenantLimits(tokens_per_minute=200, pixels_per_minute=100)))
    acme.take(pixels=100)
    charge.give_back(tokens=30, pixels=50)  # of the pixels nothing had been taken
    assert acme.headers()["x-ratelimit-remaining-tokens"] == "150"
    assert acme.headers()["x-ratelimit-remaining-pixels"] == "0"


# --- open requests ------------------------------------------------------------------------------------------------


def gate() -> AdmissionGate:
    return AdmissionGate(100, 100, 100, engine_bytes=lambda: 0, on_refusal=lambda _: None)


def test_open_requests_count_with_n_and_end_with_the_request(clock: Clock) -> None:
    acme, everyone = account(clock, open_requests=4), gate()
    with everyone.lease("acme", acme) as lease:
        lease.enter()
        lease.enter(3)
        assert acme.num_open == 3
        with everyone.lease("acme", acme) as second, pytest.raises(LimitExceeded, match="3 of your") as caught:
            second.enter(2)
        assert caught.value.status == 429 and caught.value.retry_after
        assert acme.num_open == everyone.num_open == 3
        with everyone.lease("other", Account("other")) as of_other:
            of_other.enter(50)
    assert acme.num_open == everyone.num_open == 0


def test_more_answers_than_may_be_open_are_a_400(clock: Clock) -> None:
    acme = account(clock, open_requests=4)
    with gate().lease("acme", acme) as lease, pytest.raises(LimitExceeded, match="never") as caught:
        lease.enter(5)
    assert caught.value.status == 400 and acme.num_open == 0


# --- the gate -----------------------------------------------------------------------------------------------------


def small_gate(max_open: int = 8) -> AdmissionGate:
    return AdmissionGate(max_open, 100, 100, engine_bytes=lambda: 0, on_refusal=lambda _: None)


def fill(leases: ExitStack, gate: AdmissionGate, client: str, answers: int = 1, weight: float = 1.0) -> int:
    """Requests of a client until one is refused: how many came in."""
    account = Account(client, TenantSettings(weight=weight))
    for number in range(1000):
        lease = leases.enter_context(gate.lease(client, account))
        try:
            lease.enter(answers)
        except ApiError as error:
            assert error.status == 429 and error.retry_after
            return number
    raise AssertionError("never refused")


def test_a_client_that_took_every_place_locks_no_other_out() -> None:
    gate = small_gate()
    with ExitStack() as leases:
        assert fill(leases, gate, "a") == 8
        assert fill(leases, gate, "b") == 4
        assert fill(leases, gate, "c", answers=2) == 1
        assert gate.is_full
    assert gate.num_open == 0 and not gate.open_by_client and not gate.weights


def test_places_beyond_the_limit_follow_the_weights() -> None:
    with ExitStack() as leases:
        gate = small_gate(100)
        fill(leases, gate, "a")
        assert fill(leases, gate, "heavy", weight=3.0) == 75
        assert fill(leases, gate, "light", weight=1.0) == 20


def test_many_clients_take_no_more_than_twice_the_places() -> None:
    gate = small_gate()
    with ExitStack() as leases:
        for number in range(100):
            fill(leases, gate, f"client {number}")
            assert gate.num_open <= 2 * 8
        with pytest.raises(ApiError, match=r"16 answers are open \(8 of them yours\), the request asks for 1 more"):
            gate.check("client 0", 1.0)


def test_a_share_is_for_clients_that_hold_less_than_it() -> None:
    gate = small_gate()
    with ExitStack() as leases:
        fill(leases, gate, "a")
        with ExitStack() as of_b:
            assert fill(of_b, gate, "b") == 4
        assert fill(leases, gate, "a") == 0, "what others left is not its own"
        assert fill(leases, gate, "b", answers=5) == 0


def test_pixels_that_wait_are_counted_by_client_and_given_back_once() -> None:
    gate = AdmissionGate(100, 100, 100, engine_bytes=int, on_refusal=str, max_client_pixels=100)
    with gate.lease("a", Account("a")) as first, gate.lease("a", Account("a")) as second:
        first.hold_pixels(1000)  # one request always fits
        with pytest.raises(ApiError, match="--max-waiting-megapixels") as caught:
            second.hold_pixels(1)
        assert caught.value.status == 429 and caught.value.retry_after
        second.hold_pixels(0)  # text waits for no pictures
        with gate.lease("b", Account("b")) as other:
            other.hold_pixels(100)
        first.release_pixels()
        first.release_pixels()
        second.hold_pixels(60)
        second.hold_pixels(40)
        assert gate.pixels_by_client == {"a": 100}
    gate.check_idle()


# --- a generation -------------------------------------------------------------------------------------------------

PICTURE = SimpleNamespace(key=b"k", price=2 * PIXELS_PER_SECOND)
IMAGE = BillItem("image", 10, 20, 28, 28, 1, 1, "abc", Grid(1, 2, 2))


def generation(metrics: Metrics) -> Generation:
    prompt: Any = type("P", (), {"token_ids": [1], "where": {}, "items": [PICTURE, PICTURE]})()
    billed = BilledPrompt(prompt, Bill(9, 1, 0, 1, (IMAGE,)))
    return Generation([billed], [FakeAnswer()], RequestRecord(), metrics)  # type: ignore[list-item]


def left(account: Account) -> tuple[int, int]:
    headers = account.headers()
    return int(headers["x-ratelimit-remaining-tokens"]), int(headers["x-ratelimit-remaining-pixels"])


def limited(clock: Clock) -> Account:
    return account(clock, tokens_per_minute=100, pixels_per_minute=1000)


@pytest.mark.parametrize("end", ["complete", "error", "left"])
def test_what_was_reserved_and_not_generated_comes_back(clock: Clock, end: str) -> None:
    acme, metrics, everyone = limited(clock), Metrics("m", dict), gate()

    async def check() -> None:
        stream = new_stream()
        request: Any = type("R", (), {"max_tokens": 50})()
        with everyone.lease("acme", acme) as lease, generation(metrics) as running:
            running.hold_pixels(lease)
            running.charge(acme, 50)
            assert left(acme) == (40, 800) and everyone.pixels_by_client == {"acme": 200}
            await running.submit(FakeEngine(stream), [request])
            stream.push(token(1))
            if end == "error":
                stream.push(token(2, "error", RequestError("bad")))
            else:
                stream.push(token(2, "stop"))
            deltas = running.deltas()
            if end == "left":
                await anext(deltas)
                assert not everyone.pixels_by_client, "the first token shows that they are encoded"
            elif end == "error":
                with pytest.raises(RequestError):
                    [delta async for delta in deltas]
            else:
                [delta async for delta in deltas]
                running.outputs[0].usage = Usage(0, 0, 1.0, 1.5, 2.0, 3.0, decode_ms=500.0, encode_ms=0.0)
                running.finish()
                assert left(acme) == (88, 800)  # a whole response can already say so

    running(check)
    everyone.check_idle()
    assert left(acme) == (88, 800)  # two were generated, though a client that leaves may read one
    text = metrics.text().decode()
    assert 'saccade:tenant_tokens_total{kind="prompt",tenant="acme"} 10.0' in text
    assert 'saccade:tenant_pixels_total{tenant="acme"} 200.0' in text
    seconds = 0.5 if end == "complete" else 2.0  # by the price where nothing else is known
    assert f'saccade:tenant_processor_seconds_total{{tenant="acme"}} {seconds}' in text


def test_what_was_generated_beyond_the_reservation_is_charged_in_the_end(clock: Clock) -> None:
    acme = account(clock, tokens_per_minute=100)
    charge = acme.take(tokens=20)
    charge.give_back(tokens=20 - 110)
    assert acme.headers()["x-ratelimit-remaining-tokens"] == "0"
    assert refusal(acme, tokens=10).retry_after == 12


class FailingEngine:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    async def submit(self, requests: Any) -> Any:
        raise self.error


def charged_then(acme: Account, metrics: Metrics, error: BaseException) -> None:
    """A request is charged, and its submission ends with an error."""

    async def check() -> None:
        request: Any = type("R", (), {"max_tokens": 50})()
        with generation(metrics) as running, pytest.raises(type(error)):
            running.charge(acme, 50)
            await running.submit(FailingEngine(error), [request])

    asyncio.run(check())


@pytest.mark.parametrize("error", [RequestError("full", code="overloaded"), EngineUnavailable("starting", 1.0)])
def test_a_request_that_finds_no_place_in_the_engine_costs_nothing(clock: Clock, error: Exception) -> None:
    acme, metrics = limited(clock), Metrics("m", dict)
    charged_then(acme, metrics, error)
    assert left(acme) == (100, 1000)
    assert "tenant_tokens_total{" not in metrics.text().decode()


@pytest.mark.parametrize("error", [RequestError("an image is too large"), asyncio.CancelledError()])
def test_a_prompt_that_was_built_is_paid_for_also_by_a_client_that_leaves_then(
    clock: Clock, error: BaseException
) -> None:
    """Otherwise clients could make the server fetch, hash and tokenize without end, for the price of a request."""
    acme, metrics = limited(clock), Metrics("m", dict)
    charged_then(acme, metrics, error)
    assert left(acme) == (90, 800)
    assert 'saccade:tenant_tokens_total{kind="prompt",tenant="acme"} 10.0' in metrics.text().decode()


def test_the_longest_wait_is_told_and_what_can_never_pass_first(clock: Clock) -> None:
    acme = account(clock, tokens_per_minute=60, pixels_per_minute=60)
    acme.take(tokens=51, pixels=60)
    told = refusal(acme, tokens=10, pixels=30)
    assert told.retry_after == 30 and "30 of your 60 pixels" in told.message
    assert refusal(acme, tokens=10, pixels=61).status == 400
