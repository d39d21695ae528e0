from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade import SamplingParams
from saccade.runner.sampler import Row, sample, uniform
from tests.helpers.engine.reference_sampler import reference_sample

VOCABULARY = 23


def row(params: SamplingParams, prompt: list[int] = [], output: list[int] = [], seed: int = 0) -> Row:  # noqa: B006
    return Row(params, np.array(prompt, np.int64), np.array(output, np.int64), frozenset({0, 1}), seed)


def logits(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    top_k=st.sampled_from([-1, 0, 1, 5, 100]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    min_tokens=st.sampled_from([0, 4]),
    logit_bias=st.sampled_from([None, {3: 50.0}, {5: -100.0, 2: 1.0}]),
)
row_strategy = st.builds(
    row,
    params_strategy,
    st.lists(st.integers(0, VOCABULARY - 1), max_size=6),
    st.lists(st.integers(0, VOCABULARY - 1), max_size=6),
    st.integers(0, 2**62),
)


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(row_strategy, min_size=1, max_size=5), seed=st.integers(0, 10**6))
def test_a_batch_samples_what_the_reference_samples_row_by_row(rows: list[Row], seed: int) -> None:
    values = logits(seed, len(rows))
    expected = [reference_sample(v.tolist(), r) for v, r in zip(values, rows, strict=True)]
    assert [s.token_id for s in sample(values.clone(), rows)] == expected


def test_a_seeded_row_draws_the_same_token_alone_and_in_a_batch() -> None:
    seeded = row(SamplingParams(temperature=1.0), seed=7)
    others = [row(SamplingParams(temperature=1.5, top_k=3), seed=i) for i in range(4)]
    values = logits(1, 5)
    alone = sample(values[2:3].clone(), [seeded])[0]
    together = sample(values.clone(), [*others[:2], seeded, *others[2:]])[2]
    assert alone == together


@pytest.mark.parametrize("height", [0.0, 12.0], ids=["all of it", "a few"])
def test_of_a_large_vocabulary_top_p_keeps_what_the_reference_keeps(height: float) -> None:
    """Where few tokens have nearly all probability only those are ordered, otherwise everything is."""
    values = torch.randn(3, 4500, generator=torch.Generator().manual_seed(5))
    values[:, 100:140] += height
    kinds = ({"top_p": 0.9}, {"top_p": 0.95, "top_k": 30}, {"top_k": 4200, "top_p": 0.99})
    rows = [row(SamplingParams(temperature=1.0, **kind), seed=i) for i, kind in enumerate(kinds)]
    expected = [reference_sample(v.tolist(), r) for v, r in zip(values, rows, strict=True)]
    assert [s.token_id for s in sample(values.clone(), rows)] == expected


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 0.2}])
def test_tokens_that_are_equally_likely_stay_or_go_together(cut: dict[str, Any]) -> None:
    values = torch.tensor([[0.4, 0.2, 0.4]]).log().repeat(200, 1)
    rows = [row(SamplingParams(temperature=1.0, **cut), seed=i) for i in range(200)]
    assert {s.token_id for s in sample(values.clone(), rows)} == {0, 2}
    assert {reference_sample(values[0].tolist(), r) for r in rows} == {0, 2}


def test_draws_follow_the_distribution() -> None:
    values = torch.tensor([[0.5, 0.3, 0.2]]).log().repeat(4000, 1)
    rows = [row(SamplingParams(temperature=1.0), seed=i) for i in range(4000)]
    counts = np.bincount([s.token_id for s in sample(values, rows)], minlength=3) / 4000
    assert np.allclose(counts, [0.5, 0.3, 0.2], atol=0.03)


def test_uniform_numbers_differ_by_seed_and_position_and_lie_in_the_unit_interval() -> None:
    numbers = {uniform(seed, position) for seed in range(50) for position in range(50)}
    assert len(numbers) == 2500
    assert all(0 <= u < 1 for u in numbers)


def test_logprobs_come_from_the_models_distribution_before_temperature_and_bias() -> None:
    values = logits(3)
    expected = values.log_softmax(-1)[0]
    asked = row(SamplingParams(temperature=0, logprobs=2, logit_bias={4: 100.0}))
    chosen = sample(values.clone(), [asked])[0]
    assert chosen.token_id == 4
    assert chosen.logprobs is not None
    assert chosen.logprobs.logprob == pytest.approx(float(expected[4]), abs=1e-5)
    assert [t for t, _ in chosen.logprobs.top] == expected.topk(2).indices.tolist()
    assert chosen.logprobs.rank == int((expected > expected[4]).sum()) + 1


def test_rows_of_one_step_get_as_many_logprobs_as_each_asked_for() -> None:
    values = logits(4, 4)
    asked = [None, 0, 3, 20]
    told = [s.logprobs for s in sample(values.clone(), [row(SamplingParams(temperature=0, logprobs=n)) for n in asked])]
    assert told[0] is None
    for count, value, found in zip(asked[1:], values[1:], told[1:], strict=True):
        assert found is not None and found.rank == 1
        assert found.logprob == pytest.approx(float(value.log_softmax(-1).max()), abs=1e-5)
        assert [token for token, _ in found.top] == value.topk(count or 0).indices.tolist()


def test_penalties_cost_by_the_tokens_that_came_not_by_the_vocabulary() -> None:
    """With counts for a whole vocabulary, 64 answers of one request took half a second of every step."""
    rows, vocabulary = 32, 150_000
    penalised = row(SamplingParams(temperature=0, repetition_penalty=1.2, frequency_penalty=0.5), [1, 2, 2], [7] * 40)
    values = torch.zeros(rows, vocabulary)
    tracemalloc.start()
    sample(values, [penalised] * rows)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 << 20
    assert values[5, 7] == pytest.approx(-20.0)


class _Counted(dict[int, float]):
    num_read = 0

    def __iter__(self) -> Iterator[int]:
        self.num_read += 1
        return super().__iter__()

    def items(self) -> Any:
        self.num_read += 1
        return super().items()


def test_a_bias_that_answers_share_is_read_once_a_step() -> None:
    bias = _Counted(dict.fromkeys(range(VOCABULARY + 4), 0.5))
    params = SamplingParams(temperature=0, logit_bias=bias)
    bias.num_read = 0
    values = logits(5, 16)
    expected = values.argmax(-1).tolist()
    assert [s.token_id for s in sample(values, [row(params)] * 16)] == expected
    assert bias.num_read == 1


def test_rows_that_ask_for_no_logprobs_get_none() -> None:
    rows = [row(SamplingParams(temperature=0)), row(SamplingParams(temperature=0, logprobs=0))]
    first, second = sample(logits(1, 2), rows)
    assert first.logprobs is None
    assert second.logprobs is not None and second.logprobs.top == ()


def test_end_tokens_cannot_be_drawn_before_min_tokens() -> None:
    values = torch.zeros(1, VOCABULARY)
    values[0, 0] = 50.0  # the end token would win by far
    assert sample(values.clone(), [row(SamplingParams(temperature=0, min_tokens=1))])[0].token_id != 0
    assert sample(values.clone(), [row(SamplingParams(temperature=0, min_tokens=1), output=[5])])[0].token_id == 0
