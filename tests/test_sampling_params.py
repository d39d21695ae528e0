from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from saccade import SamplingParams
from saccade.errors import RequestError


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"n": 0}, "n must be from 1"),
        ({"n": 10**9}, "1000000000"),
        ({"n": True}, "n must be a whole number"),
        ({"temperature": -0.1}, "temperature must be 0 or more"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"temperature": float("inf")}, "temperature must be a finite number"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"top_p": 1.5}, "1.5"),
        ({"top_k": -2}, "top_k must be -1 or more"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"min_p": 2}, "min_p must be from 0 to 1"),
        ({"presence_penalty": 3}, "from -2 to 2"),
        ({"frequency_penalty": "high"}, "frequency_penalty must be a finite number"),
        ({"repetition_penalty": 0}, "from 0.01 to 100"),
        ({"max_tokens": 0}, "max_tokens must be 1 or more"),
        ({"max_tokens": -1}, "-1"),
        ({"min_tokens": 20, "max_tokens": 10}, "at most max_tokens=10"),
        ({"seed": 2**70}, "64-bit"),
        ({"logprobs": 1000}, "from 0 to 20"),
        ({"stop": ""}, "not empty"),
        ({"stop": ["a"] * 1000}, "1000 strings"),
        ({"stop": ["a", "b" * 5000]}, "at most 1024 characters, but 'one of 5000'"),
        ({"stop_token_ids": ["x"]}, "whole numbers"),
        ({"stop_token_ids": [-1]}, "-1"),
        ({"stop_token_ids": [10**30]}, "token ids"),
        ({"stop": 5}, "a string or a list of strings"),
        ({"logit_bias": [1]}, "a map from token ids"),
        ({"repetition_penalty": 1e-300}, "from 0.01 to 100"),
        ({"logit_bias": dict.fromkeys(range(2000), 1.0)}, "2000 tokens"),
        ({"logit_bias": {1: 1e9}}, "from -100 to 100"),
    ],
)
def test_a_bad_parameter_is_refused_with_its_value(given: dict[str, Any], part: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given)
    assert part in str(caught.value)
    assert caught.value.param in given


def test_defaults_are_valid_and_sample_at_temperature_one() -> None:
    params = SamplingParams()
    assert params.temperature == 1.0
    assert not params.is_greedy


def test_no_stop_token_ids_may_be_said_as_none() -> None:
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [np.array([4, 5]), [np.int64(4), 5], (np.int32(4), np.uint8(5))], ids=repr)
def test_token_ids_may_be_numpys(ids: Any) -> None:
    params = SamplingParams(allowed_token_ids=ids, stop_token_ids=ids)
    for found in (params.allowed_token_ids, params.stop_token_ids):
        assert found == [4, 5] and {type(token) for token in found} == {int}


@pytest.mark.parametrize("ids", [np.array([4.5]), np.array([[4]]), [True], [np.bool_(True)], {4: 5}], ids=repr)
def test_what_is_no_list_of_token_ids_is_refused(ids: Any) -> None:
    for name in ("allowed_token_ids", "stop_token_ids"):
        with pytest.raises(RequestError, match=f"{name} must be a list of"):
            SamplingParams(**{name: ids})


def test_one_stop_string_and_a_list_of_one_mean_the_same() -> None:
    assert SamplingParams(stop="END").stop_strings == SamplingParams(stop=["END"]).stop_strings == ("END",)


def test_a_clone_is_equal_and_another() -> None:
    params = SamplingParams(temperature=0.5, stop=["a"], skip_special_tokens=False)
    assert params.clone() == params and params.clone() is not params


@pytest.mark.parametrize(
    ("name", "hint"),
    [("max_token", "do you mean 'max_tokens'?"), ("temprature", "do you mean 'temperature'?"), ("zzz", "it has n, ")],
)
def test_an_unknown_keyword_is_named_with_the_nearest_one(name: str, hint: str) -> None:
    with pytest.raises(TypeError, match="SamplingParams has no") as caught:
        SamplingParams(**{name: 1})
    assert repr(name) in str(caught.value) and hint in str(caught.value)


def test_switches_are_true_or_false() -> None:
    with pytest.raises(RequestError, match="include_stop_str_in_output must be true or false, but 'yes' was given"):
        SamplingParams(include_stop_str_in_output="yes")  # type: ignore[arg-type]
