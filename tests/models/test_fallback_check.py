"""Families that are served as far as they are the same as ours, or refused with one sentence that says why."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade import LLM, SamplingParams
from saccade.checkpoint.hf_processor import raised
from saccade.cli.main import main
from saccade.errors import ConfigError
from saccade.models.bridge import load
from saccade.models.bridge.tail import Tail, tail_of
from tests.helpers.families import family_fallback
from tests.helpers.families.zoo import ZOO, second_half
from tests.helpers.families.zoo.entry import BUDGET
from tests.helpers.media.images import make_photo

pytestmark = pytest.mark.transformers

SIZES = {"max_model_len": 256, "kv_cache_gb": 0.01, "use_tqdm": False}


def refusal_of(folder: Path, **given: Any) -> str:
    with pytest.raises(ConfigError) as error:
        LLM(str(folder), **{**SIZES, **given})
    return str(error.value)


def test_the_command_line_says_it_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = ZOO["blip"].build(tmp_path)
    capfd.readouterr()
    assert main(["chat", str(folder), "What?", "--kv-cache-gb", "0.01"]) == 1
    said = [line for line in capfd.readouterr().err.splitlines() if "saccade:" in line or "Traceback" in line]
    assert len(said) == 1 and said[0].startswith("saccade: model_type 'blip' is not in our table")


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.checkpoint.hf_processor.find_spec", lambda name: None)
    assert "it needs num2words, which is not installed (pip install num2words)" in raised(
        ImportError("Package `num2words` is required to run SmolVLM processor.")
    )
    assert raised(ValueError("tensor at 0x7f")) == "its code there raises ValueError"


def test_whatever_the_library_raises_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> None:
        raise IndexError("tuple index out of range")

    folder = family_fallback.internvl(tmp_path)
    monkeypatch.setattr(load, "check_against_own_forward", breaks)
    assert refusal_of(folder).endswith(
        "Transformers: its code there raises IndexError; docs/models.md lists what can be"
    )
    (folder / "model.safetensors").write_bytes(b"nonsense")
    assert "is damaged or half-downloaded" in refusal_of(folder)


def test_layers_that_keep_other_things_than_keys_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ZOO["lfm2_vl"].build(tmp_path)
    monkeypatch.setattr("saccade.checkpoint.hf_config._STATE_KINDS", ())
    assert "Its layers may remember more than keys and values" in refusal_of(folder)


def test_a_context_beyond_an_indexers_budget_is_refused_with_the_option(tmp_path: Path) -> None:
    said = refusal_of(ZOO["dots3_note"].build(tmp_path), max_model_len=BUDGET + 1)
    assert f"its layers select {BUDGET} tokens of a longer context" in said and f"--max-model-len {BUDGET}" in said


def test_attention_that_ours_cannot_compute_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.checkpoint.hf_config._REFUSED", {})
    with second_half.libraries("inkling2"):
        assert "its attention uses position_bias, ours does not" in refusal_of(ZOO["inkling2"].build(tmp_path))


def test_windows_matter_and_are_followed(tmp_path: Path) -> None:
    folder, image = family_fallback.aya_vision(tmp_path, window=32), make_photo(60, 50, seed=1)
    theirs = family_fallback.reference("<image>")(folder)
    asked: list[tuple[str, list[Any]]] = [("<image>What is it?", [image]), ("The quick brown fox. " * 10, [])]
    prompts = [{"prompt": text, "multi_modal_data": {"image": images or None}} for text, images in asked]
    with LLM(str(folder), kv_cache_gb=0.01, use_tqdm=False) as llm:
        assert llm.engine.limits.max_model_len > 32
        outs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    assert [out.outputs[0].token_ids for out in outs] == [theirs.greedy(*pair, 12) for pair in asked]


@pytest.mark.parametrize(("gain", "cap"), [(1.0, None), (1.0, 30.0), (0.5, None), (0.5, 30.0)])
def test_what_becomes_of_logits_is_found_where_it_changes_little(gain: float, cap: float | None) -> None:
    """A cap of 30 changes logits of 2 by less than what rounding may in 16 bits, and later ones by more."""
    made = torch.linspace(-2, 2, 60).view(3, 20)
    config = Namespace(final_logit_softcapping=30.0, output_multiplier=0.5)
    found = tail_of(config, made, Tail(gain, cap)(made), tolerance=0.05)
    assert (found.gain, found.cap, found.banned) == (gain, cap, None)
