from __future__ import annotations

from pathlib import Path

import pytest

from saccade import costs
from saccade.apps.plan.model_cards import card_names, find_model, read_card
from saccade.errors import ConfigError
from saccade.processor.families import is_known
from tests.helpers.engine.plans import write_folder

PUBLISHED = {  # billions of parameters, as the hub counts those of the files
    "Qwen/Qwen2-VL-2B": 2.21,
    "Qwen/Qwen2-VL-7B": 8.29,
    "Qwen/Qwen2-VL-72B": 73.4,
    "Qwen/Qwen2.5-VL-3B": 3.75,
    "Qwen/Qwen2.5-VL-32B": 33.5,
    "Qwen/Qwen3-VL-2B": 2.13,
    "Qwen/Qwen3-VL-4B": 4.44,
    "Qwen/Qwen3-VL-8B": 8.77,
    "Qwen/Qwen3-VL-32B": 33.4,
    "Qwen/Qwen3-VL-30B-A3B": 31.1,
    "Qwen/Qwen3-VL-235B-A22B": 236,
    "llava-hf/llava-1.5-7b": 7.06,
    "llava-hf/llava-1.5-13b": 13.4,
    "llava-hf/llava-v1.6-mistral-7b": 7.57,
    "llava-hf/llava-v1.6-34b": 34.8,
    "llava-hf/llava-onevision-qwen2-0.5b": 0.894,
    "llava-hf/llava-onevision-qwen2-7b": 8.03,
    "mistral-community/pixtral-12b": 12.7,
    "mistralai/Mistral-Small-3.1-24B": 24.0,
    "meta-llama/Llama-3.2-11B-Vision": 10.7,
    "meta-llama/Llama-3.2-90B-Vision": 88.6,
    "Qwen/Qwen-VL": 9.66,
    "deepseek-ai/deepseek-vl2-tiny": 3.37,
    "deepseek-ai/deepseek-vl2-small": 16.1,
    "deepseek-ai/deepseek-vl2": 27.5,
    "rednote-hilab/dots.ocr": 3.04,
    "openbmb/MiniCPM-V-4_5": 8.70,
    "meta-llama/Llama-3.1-8B": 8.03,
    "Qwen/Qwen3-8B": 8.19,
    "mistralai/Mistral-7B-v0.3": 7.25,
    "Qwen/Qwen2.5-7B": 7.62,
    "Qwen/Qwen3-30B-A3B": 30.5,
    "Qwen/Qwen-7B": 7.72,
    "deepseek-ai/DeepSeek-V2-Lite": 15.7,
    "google/gemma-3-4b": 4.30,
    "google/gemma-3-12b": 12.2,
    "google/gemma-3-27b": 27.4,
    "zai-org/GLM-4.5V": 108,
    "OpenGVLab/InternVL3_5-8B": 8.53,
    "HuggingFaceTB/SmolVLM2-2.2B": 2.25,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_card_has_as_many_parameters_as_the_published_model(name: str) -> None:
    config = read_card(name).config
    billions = costs.weight_bytes(config, "bfloat16") / 2e9
    assert billions == pytest.approx(PUBLISHED[name], rel=0.02)


@pytest.mark.parametrize("name", card_names())
def test_every_card_is_of_a_known_family_with_a_dtype(name: str) -> None:
    config = read_card(name).config
    assert is_known(config) or config.is_on_paper
    assert costs.dtype_bytes(config.dtype) == 2


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-VL-8B", "qwen3-vl-8b", "Qwen/Qwen3-VL-8B-Instruct", "qwen3-vl-8b-thinking"]
)
def test_names_are_found_without_owner_case_and_suffix(name: str) -> None:
    assert str(find_model(name).path) == "Qwen/Qwen3-VL-8B"


@pytest.mark.parametrize("name", ["other/Qwen3-VL-8B", "Qwen/Qwen3-VL-8B-FP8", "Qwen/Qwen3-VL"])
def test_other_owners_and_quantised_files_are_not_taken_for_a_card(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=f"{name} is neither a folder here nor in the hub's local cache.*lists"):
        find_model(name)


def test_a_folder_wins_over_a_card_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(read_card("Qwen/Qwen2-VL-2B"), tmp_path / "qwen3-vl-8b")
    monkeypatch.chdir(tmp_path)
    assert find_model("qwen3-vl-8b").config.text.hidden_size == 1536
