"""Sampling values of generation_config.json: what they mean, and that requests which set none are answered by them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from saccade import LLM, SamplingParams
from saccade.errors import ConfigError
from saccade.options.engine import Options
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.generation_config import defaults_line, sampling_defaults
from tests.helpers.servers.serving import RunningServer, running_server, until

QUESTION = "Which words come to mind when you think of rain?"
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
SIZES = {"max_model_len": 256, "kv_cache_gb": 0.01, "use_tqdm": False}
OWN = {"do_sample": False, "max_new_tokens": 9, "eos_token_id": 1, "_from_model_config": True}
PROMPT = {"prompt": QUESTION, "ignore_eos": True}


def defaults(file: dict[str, Any], **given: Any) -> dict[str, Any]:
    return sampling_defaults(Options(**given), file)


# --- what the file means ------------------------------------------------------------------------------------------


def test_the_files_values_have_the_names_of_sampling_params() -> None:
    file = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}
    assert defaults({**file, "do_sample": True, "max_new_tokens": 99, "top_a": 1}) == {**file, "max_tokens": 99}


def test_not_sampling_is_greedy_whatever_the_temperature() -> None:
    assert defaults({"do_sample": False, "temperature": 0.7, "top_k": 20}) == {"temperature": 0.0, "top_k": 20}


def test_null_and_silence_leave_the_engines_own() -> None:
    assert defaults({"temperature": None, "top_p": None, "do_sample": None}) == defaults({}) == {}
    assert "temperature=1.0" in defaults_line({})


def test_none_goes_without_the_file() -> None:
    assert defaults({"temperature": -3, "top_k": 20}, generation_config="none") == {}


def test_an_override_goes_before_the_file_value_by_value() -> None:
    file = {"do_sample": False, "top_p": 0.8, "repetition_penalty": -1}
    changed = {"temperature": 0.5, "repetition_penalty": 1.1}
    assert defaults(file, override_generation_config=changed) == {**changed, "top_p": 0.8}
    assert defaults({"top_k": 5}, override_generation_config={"top_k": None, "do_sample": False}) == {"temperature": 0}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "0.7"),
        ("temperature", -1),
        ("temperature", True),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", [0.9]),
        ("top_k", 20.5),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
        ("do_sample", "false"),
    ],
)
def test_nonsense_is_refused_with_file_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"^generation_config.json: {name} must be .*--generation-config none"
    ) as error:
        defaults({name: value})
    assert repr(value) in str(error.value)
    with pytest.raises(ConfigError, match=rf"^override_generation_config: {name} must be .* given$"):
        defaults({}, override_generation_config={name: value})


@pytest.mark.parametrize("name", ["temperature", "top_k", "max_new_tokens"])
def test_endless_values_give_a_short_sentence(name: str) -> None:
    for value in (10**4000, ["a" * 10_000]):
        with pytest.raises(ConfigError, match=f"^generation_config.json: {name} must be") as error:
            defaults({name: value})
        assert len(str(error.value)) < 400


def test_an_override_with_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"takes temperature, .* not eos_token_id, temprature"):
        defaults({}, override_generation_config={"temprature": 1, "eos_token_id": 2})
    with pytest.raises(ConfigError, match="must be an object"):
        defaults({}, override_generation_config=[1])


# --- in Python ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(qwen2_vl_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without end tokens that its random weights could meet, and greedy."""
    copy = Path(shutil.copytree(qwen2_vl_folder, tmp_path_factory.mktemp("greedy") / "copy"))
    (copy / "generation_config.json").write_text(json.dumps(OWN))
    return copy


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SIZES) as made:
        yield made


def answer(llm: LLM, params: SamplingParams | None) -> list[int]:
    return llm.generate(QUESTION, params, use_tqdm=False)[0].outputs[0].token_ids


def test_without_parameters_the_checkpoints_hold(llm: LLM) -> None:
    greedy = answer(llm, GREEDY)
    assert answer(llm, None) == answer(llm, llm.get_default_sampling_params()) == greedy and len(greedy) == 9
    asked = [{"role": "user", "content": QUESTION}]
    assert llm.chat(asked, use_tqdm=False)[0].outputs == llm.chat(asked, GREEDY, use_tqdm=False)[0].outputs


def test_parameters_that_are_given_keep_what_they_leave_out(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0, max_tokens=9)
    answers = {tuple(answer(llm, SamplingParams(seed=seed, ignore_eos=True))) for seed in range(3)}
    assert len(answers) == 3 and all(len(tokens) == 16 for tokens in answers)


def test_a_length_that_nobody_asked_for_is_cut_to_the_context(folder: Path) -> None:
    with LLM(str(folder), override_generation_config={"max_new_tokens": 5000}, **SIZES) as llm:
        out = llm.generate(QUESTION, use_tqdm=False)[0]
        assert len(out.prompt_token_ids) + len(out.outputs[0].token_ids) == 256
        assert llm.get_default_sampling_params().max_tokens == 5000


def test_the_file_of_another_folder_takes_its_place(qwen2_vl_folder: Path, folder: Path, tmp_path: Path) -> None:
    opened = open_checkpoint(str(qwen2_vl_folder), options=Options(generation_config=str(folder)))
    assert opened.generation == OWN and opened.config.eos_token_ids == {1}
    with pytest.raises(ConfigError, match=r"auto, none or a folder .* not '.*nowhere'; change --generation-config"):
        open_checkpoint(str(qwen2_vl_folder), options=Options(generation_config=str(tmp_path / "nowhere")))


def test_none_keeps_the_end_tokens(folder: Path) -> None:
    assert open_checkpoint(str(folder), options=Options(generation_config="none")).config.eos_token_ids == {1}


# --- over HTTP ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def greedy_server(folder: Path) -> Iterator[RunningServer]:
    with running_server(folder) as server:
        yield server


def chat(server: RunningServer, **fields: Any) -> str:
    body = {"messages": [{"role": "user", "content": QUESTION}], "ignore_eos": True, **fields}
    return str(server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"])


def test_all_apis_answer_by_the_checkpoints_values(greedy_server: RunningServer) -> None:
    server, exact = greedy_server, {"temperature": 0, "max_tokens": 9}
    wanted = chat(server, **exact)
    assert chat(server) == chat(server, temperature=None, max_tokens=None) == wanted
    answers = {chat(server, temperature=1, max_tokens=9, seed=seed) for seed in range(3)}
    assert len(answers) == 3, "this model's answers at a temperature are not the greedy one"

    plain = [server.post("/v1/completions", {**PROMPT, **given}).json() for given in ({}, exact)]
    assert plain[0]["choices"] == plain[1]["choices"] and plain[0]["usage"]["completion_tokens"] == 9

    response = server.post("/v1/responses", {"input": QUESTION, "ignore_eos": True}).json()
    assert response["output"][0]["content"][0]["text"] == wanted
    assert response["temperature"] == 0 and response["usage"]["output_tokens"] == 9

    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 9, "ignore_eos": True}
    assert server.post("/v1/messages", body).json()["content"][0]["text"] == wanted


def test_the_model_card_and_the_log_show_them(greedy_server: RunningServer) -> None:
    shown = greedy_server.get("/v1/models").json()["data"][0]["default_sampling_params"]
    assert shown == {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 9,
    }
    assert until(lambda: any("sampling defaults" in line and "temperature=0.0" in line for line in greedy_server.log))


def test_flags_change_them(folder: Path) -> None:
    flags = ("--generation-config", "none", "--override-generation-config", '{"top_p": 0.5, "max_new_tokens": 900000}')
    with running_server(folder, *flags) as server:
        shown = server.get("/v1/models").json()["data"][0]["default_sampling_params"]
        assert (shown["temperature"], shown["top_p"], shown["max_tokens"]) == (1.0, 0.5, 900000)
        whole = server.post("/v1/completions", {**PROMPT, "max_tokens": None, "stop": ["e"]})
        assert whole.status_code == 200, whole.text  # cut to the context, for nobody asked for that length
