"""Whole engines with tiers of embeddings: restarts, fine-tunes, tenants, families."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from saccade import LLM, SamplingParams
from saccade.runner import build_embedding_tiers as embedding_tiers
from saccade.runner.embedding_tiers.rates import EmbeddingTime
from tests.helpers.engine.tiers import be_patient
from tests.helpers.families.families import FAMILIES
from tests.helpers.media.images import make_photo
from tests.helpers.servers.valkey import running_valkey

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LIMITS = {"max_model_len": 512, "kv_cache_gb": 0.02, "max_pixels": 50_000, "use_tqdm": False}
MARK = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(autouse=True)
def encoding_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine does meanwhile."""
    be_patient(monkeypatch)
    monkeypatch.setattr(embedding_tiers, "encode_seconds", lambda *_: 1e6)


def ask(llm: LLM, image: str = MARK, seeds: tuple[int, ...] = (1, 2), **more: Any) -> list[list[int]]:
    photos = [make_photo(140, 84, seed=seed) for seed in seeds]
    prompts = [{"prompt": f"{image}What is it?", "multi_modal_data": {"image": photo}, **more} for photo in photos]
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, GREEDY, use_tqdm=False)]


def run(folder: Path, image: str = MARK, **given: Any) -> tuple[list[list[int]], dict[str, Any]]:
    with LLM(model=str(folder), **{**LIMITS, **given}) as llm:
        tokens = ask(llm, image)
        llm.engine.core.scheduler.check()
        return tokens, llm.stats()


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "mllama", "deepseek_vl"])
def test_after_a_restart_the_tower_does_not_run_and_answers_are_the_same(name: str, tmp_path: Path) -> None:
    """Also with deepstack vectors, with keys and values for cross-attention, and through Transformers' code."""
    family = FAMILIES[name]
    folder = family.build(tmp_path / "model")
    kept = str(tmp_path / "embeddings")
    plain, _ = run(folder, family.image)
    first, stats = run(folder, family.image, embedding_dir=kept)
    assert stats["encoder"]["encoded"] == 2 and stats["encoder"]["restored"] == 0
    again, stats = run(folder, family.image, embedding_dir=kept)
    assert stats["encoder"]["encoded"] == stats["encoder"]["decoded"] == 0
    assert stats["encoder"]["restored"] == stats["embedding_tiers"]["folder"]["hits"] == 2
    assert again == first == plain


def test_a_restart_finds_embeddings_in_a_server(qwen2_vl_folder: Path, tmp_path: Path) -> None:
    with running_valkey(tmp_path) as server:
        first, _ = run(qwen2_vl_folder, embedding_store=server.url)
        again, stats = run(qwen2_vl_folder, embedding_store=server.url)
    assert stats["encoder"]["encoded"] == 0 and stats["embedding_tiers"]["valkey"]["hits"] == 2
    assert again == first


def test_when_the_server_dies_the_engine_goes_on(qwen2_vl_folder: Path, tmp_path: Path) -> None:
    with (
        running_valkey(tmp_path) as server,
        LLM(model=str(qwen2_vl_folder), embedding_store=server.url, **LIMITS) as llm,
    ):
        ask(llm, seeds=(1,))
        server.kill()
        ask(llm, seeds=(2, 3))
        stats = llm.stats()
    assert stats["encoder"]["encoded"] == 3 and stats["embedding_tiers"]["valkey"]["errors"]


def test_a_server_that_is_not_there_at_start_is_told_and_left_out(qwen2_vl_folder: Path, tmp_path: Path) -> None:
    url = f"unix://{tmp_path}/none.sock"
    with LLM(model=str(qwen2_vl_folder), embedding_store=url, **LIMITS) as llm:
        ask(llm)
        reasons = llm.engine.core.reasons
    assert any("not kept outside the process" in reason and "ConnectionError" in reason for reason in reasons)


def test_two_fine_tunes_of_one_shape_do_not_share(qwen2_vl_folder: Path, tmp_path: Path) -> None:
    tuned = tmp_path / "tuned"
    shutil.copytree(qwen2_vl_folder, tuned)
    (file,) = tuned.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("merger.mlp.2.weight"))
    tensors[name] = tensors[name] * 2
    save_file(tensors, file, metadata={"format": "pt"})
    assert file.stat().st_size == next(qwen2_vl_folder.glob("*.safetensors")).stat().st_size
    store = str(tmp_path / "embeddings")
    run(qwen2_vl_folder, embedding_dir=store)
    expected, _ = run(tuned)
    found, stats = run(tuned, embedding_dir=store)
    assert stats["encoder"]["encoded"] == 2 and stats["embedding_tiers"]["folder"]["hits"] == 0
    assert found == expected


def test_what_the_device_evicts_comes_back_from_host_memory(qwen2_vl_folder: Path) -> None:
    """A prefix cache would hide it; the encoder cache holds what is in use."""
    given = {**LIMITS, "encoder_cache_gb": 0, "enable_prefix_caching": False, "embedding_host_gb": 0.01}
    with LLM(model=str(qwen2_vl_folder), **given) as llm:
        first, again = ask(llm), ask(llm)
        stats = llm.stats()
        bills = llm.generate({"prompt": f"{MARK}?", "multi_modal_data": {"image": make_photo(140, 84, seed=1)}}, GREEDY)
        assert bills[0].bill.items[0].cached
        llm.engine.core.runner.encoder.tiers.host.check()
    assert first == again
    assert stats["encoder"]["encoded"] == stats["encoder"]["restored"] == 2
    host = stats["embedding_tiers"]["host"]
    assert host["hits"] == 2 and 0 < host["used_bytes"] <= 0.01 * 2**30


def test_no_tenant_reads_the_embeddings_of_another(qwen2_vl_folder: Path, tmp_path: Path) -> None:
    photo = make_photo(140, 84, seed=1)
    for salt, restored in ((b"a" * 32, 0), (b"b" * 32, 0), (b"a" * 32, 1)):
        with LLM(model=str(qwen2_vl_folder), embedding_dir=str(tmp_path), **LIMITS) as llm:
            given = {"prompt": f"{MARK}?", "multi_modal_data": {"image": photo}}
            llm.engine.add_with("r", lambda: llm.engine.processor.from_prompt(given, salt=salt), GREEDY)  # noqa: B023
            while llm.engine.has_unfinished_requests():
                llm.engine.step()
            assert llm.stats()["encoder"]["restored"] == restored


def test_pruned_frame_groups_keep_their_tokens(qwen2_vl_folder: Path, tmp_path: Path) -> None:
    frames = np.stack([np.asarray(make_photo(112, 112, seed=seed)) for seed in range(6)])
    given = {"video_pruning": 0.5, "max_video_pixels": 50_000, "enable_prefix_caching": False}
    prompt = {"prompt": "<|vision_start|><|video_pad|><|vision_end|>?", "multi_modal_data": {"video": frames}}
    tokens = []
    for more in ({}, {"embedding_dir": str(tmp_path)}, {"embedding_dir": str(tmp_path)}):
        with LLM(model=str(qwen2_vl_folder), **LIMITS, **given, **more) as llm:
            tokens.append(llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids)
            stats = llm.stats()
    assert stats["encoder"]["encoded"] == 0 and stats["encoder"]["restored"] == 3
    assert tokens[0] == tokens[1] == tokens[2]
    headers = [json.loads(path.read_bytes()[8:].split(b"}}")[0] + b"}}") for path in tmp_path.rglob("*.safetensors")]
    assert sum("coordinates" in header for header in headers) == 2  # the first group stays whole


def test_a_tier_that_does_not_pay_is_not_used_and_the_reason_says_so(
    qwen2_vl_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_tiers, "encode_seconds", lambda *_: 0.0)
    with LLM(model=str(qwen2_vl_folder), embedding_dir=str(tmp_path), **LIMITS) as llm:
        ask(llm)
        reasons = [reason for reason in llm.engine.core.reasons if "embeddings come back" in reason]
    assert len(reasons) == 2 and all("not used" in reason for reason in reasons)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_text_alone_asks_no_tier(qwen2_vl_folder: Path, tmp_path: Path) -> None:
    with LLM(model=str(qwen2_vl_folder), embedding_dir=str(tmp_path), **LIMITS) as llm:
        llm.generate("only text", GREEDY, use_tqdm=False)
        stats = llm.stats()["embedding_tiers"]
    assert not any(tier["hits"] + tier["misses"] for tier in stats.values())


def test_probes_of_the_measurement_are_gone(qwen2_vl_folder: Path, tmp_path: Path) -> None:
    with LLM(model=str(qwen2_vl_folder), embedding_dir=str(tmp_path), **LIMITS) as llm:
        tiers = llm.engine.core.runner.encoder.tiers
        assert not len(tiers.host) and tiers.store.used_bytes == 0
        assert tiers._store_rate.seconds(1) < EmbeddingTime(1e5, 0).seconds(1)
    assert not list(tmp_path.rglob("*.safetensors"))
