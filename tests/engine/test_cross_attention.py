"""Pictures that answers look at to their end, through the whole engine: what stays where, and what the bill says."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from saccade import LLM, SamplingParams, costs
from saccade.checkpoint.config import model_config
from saccade.cli import main as cli
from saccade.cli.conversation import bill_line
from saccade.errors import RequestError
from saccade.options.engine import Options
from saccade.runner import build as runner_build
from saccade.runner.device_memory import plan_memory
from saccade.types.media import Geometry, Grid, Size
from tests.helpers.families import family_mllama
from tests.helpers.families.family_mllama import HUB, IMAGE
from tests.helpers.media.images import make_photo
from tests.helpers.media.prompts import data_url
from tests.helpers.servers.serving import MODEL, running_server

pytestmark = pytest.mark.transformers

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = "The quick brown fox jumps over the lazy dog. " * 4
FOUR_TILES = make_photo(112, 112, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_mllama.build(tmp_path_factory.mktemp("mllama"))


def make(folder: Path, **given: Any) -> LLM:
    return LLM(str(folder), use_tqdm=False, **{"max_model_len": 512, "kv_cache_gb": 0.02, **given})


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    made = make(folder)
    yield made
    made.close()


def ask(llm: LLM, text: str, *images: Any, params: SamplingParams = GREEDY) -> Any:
    return llm.generate({"prompt": text, "multi_modal_data": {"image": list(images)}}, params, use_tqdm=False)[0]


def encoded(llm: LLM) -> int:
    return int(llm.engine.core.runner.encoder.counters.encoded)


# --- caches -------------------------------------------------------------------------------------------------------


def test_a_prefix_hit_whose_image_was_evicted_gives_the_same_tokens(folder: Path) -> None:
    room = 136 * 64 * 4 / costs.GIB  # for one picture of four tiles
    llm = make(folder, encoder_cache_gb=room * 1.5)
    first = ask(llm, f"{IMAGE}{LONG}", FOUR_TILES)
    ask(llm, f"{IMAGE}{LONG}", make_photo(112, 112, 2))
    again = ask(llm, f"{IMAGE}{LONG}", FOUR_TILES)
    assert again.num_cached_tokens > 16 and encoded(llm) == 3
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    llm.engine.core.scheduler.check()
    llm.close()


def test_a_image_that_is_resident_is_not_encoded_again_for_the_same_or_another_text(llm: LLM) -> None:
    for text in (f"{IMAGE}{LONG}", f"{IMAGE}{LONG}", f"{IMAGE}What is it?"):
        ask(llm, text, FOUR_TILES)
    assert encoded(llm) == 1


def test_the_image_stays_pinned_while_its_answer_is_decoded(llm: LLM) -> None:
    engine = llm.engine
    for name in "ab":
        engine.add_request(name, {"prompt": f"{IMAGE}{name}", "multi_modal_data": {"image": FOUR_TILES}}, GREEDY)
    pinned = []
    while engine.has_unfinished_requests():
        pinned.append(llm.stats()["encoder_cache"]["slots_pinned"])
        engine.step()
    assert set(pinned[1:]) == {136}, "one entry for both"
    assert llm.stats()["encoder_cache"]["slots_pinned"] == 0


def test_text_before_the_image_is_shared_between_different_images(llm: LLM) -> None:
    ask(llm, f"{LONG}{IMAGE}What is it?", FOUR_TILES)
    other = ask(llm, f"{LONG}{IMAGE}What is it?", make_photo(112, 112, 2))
    assert other.num_cached_tokens > 16


def test_a_prompt_with_more_images_side_by_side_than_the_cache_holds_is_refused(folder: Path) -> None:
    llm = make(folder, encoder_cache_gb=200 * 64 * 4 / costs.GIB)
    photos = [make_photo(112, 112, seed) for seed in range(2)]
    with pytest.raises(RequestError, match="2 pictures of the prompt stand together and have 272 embeddings"):
        ask(llm, f"{IMAGE}{IMAGE}Compare", *photos)
    assert ask(llm, f"{IMAGE}One, {IMAGE} two", *photos).error is None
    llm.close()


def test_penalties_pass_over_the_placeholder_behind_the_vocabulary(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, repetition_penalty=1.3)
    assert len(ask(llm, f"{IMAGE}What is it?", FOUR_TILES, params=params).outputs[0].token_ids) == 8


# --- the bill -----------------------------------------------------------------------------------------------------


def test_the_bill_names_one_token_and_the_bytes_of_the_encoder_cache(llm: LLM) -> None:
    out = ask(llm, f"{IMAGE}{IMAGE} and {IMAGE}", FOUR_TILES, make_photo(40, 40, 3), FOUR_TILES)
    held = {key.hex()[:16]: tensor.nbytes for key, tensor in llm.engine.core.runner.embeddings.items()}
    assert out.bill.image_tokens == 3 and out.bill.kv_blocks == 1
    assert [(item.tokens, item.kv_blocks) for item in out.bill.items] == [(1, 1)] * 3
    assert [item.encoder_cache_bytes for item in out.bill.items] == [held[item.key] for item in out.bill.items]
    assert out.bill.encoder_cache_bytes == sum(held.values()) == (136 + 34) * 64 * 4
    assert "0.0 MB of the encoder cache" in bill_line(out.bill, 8)


def test_images_that_lie_in_the_kv_cache_cost_no_encoder_cache(qwen2_vl_folder: Path) -> None:
    llm = make(qwen2_vl_folder)
    out = ask(llm, "<|vision_start|><|image_pad|><|vision_end|>What?", FOUR_TILES)
    assert out.bill.encoder_cache_bytes == 0 == out.bill.items[0].encoder_cache_bytes
    assert "encoder cache" not in bill_line(out.bill, 8)
    llm.close()


def test_a_server_counts_the_bytes_before_and_after_it_answers(folder: Path) -> None:
    with running_server(folder, "--max-model-len", "512") as server, server.client() as client:
        parts = [
            {"type": "image_url", "image_url": {"url": data_url(FOUR_TILES)}},
            {"type": "text", "text": "What is it?"},
        ]
        body = {"model": MODEL, "messages": [{"role": "user", "content": parts}], "max_tokens": 4, "temperature": 0}
        before = client.post("/v1/bill", json=body).json()
        answer = client.post("/v1/chat/completions", json={**body, "include_bill": True}).json()
        log = "\n".join(server.log)
    assert before["encoder_cache_bytes"] == before["items"][0]["encoder_cache_bytes"] == 136 * 64 * 4
    assert answer["bill"]["encoder_cache_bytes"] == 136 * 64 * 4 and answer["bill"]["image_tokens"] == 1
    assert answer["usage"]["completion_tokens"] == 4
    assert "MB of the encoder cache" in log, "the start-up log says what limits the number of requests"


def test_count_has_a_column_for_the_encoder_cache_where_it_is_used(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FOUR_TILES.save(tmp_path / "a.png")
    assert cli.main(["count", "--model", str(folder), str(tmp_path / "a.png")]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.endswith("encoder cache") and row.split()[-4:] == ["1", "1", "0.0", "MB"]
    assert cli.main(["count", str(tmp_path / "a.png")]) == 0
    assert "encoder cache" not in capsys.readouterr().out


# --- start-up -----------------------------------------------------------------------------------------------------

LARGEST = Geometry(Size(1120, 1120), Grid(1, 80, 80), 1, 25_616)


def plan(**given: Any) -> Any:
    options = Options(device="cpu", dtype="bfloat16", **given)
    return plan_memory(options, model_config(HUB), LARGEST, free_bytes=64 * costs.GIB)


def test_the_automatic_cache_holds_images_for_several_answers() -> None:
    made = plan()
    assert made.scheduler.encoder_cache_slots == 8 * 25_616
    assert any("8 of the largest pictures" in reason for reason in made.reasons)
    assert made.scheduler.slot_bytes == 8192


def test_a_short_context_does_not_shrink_the_largest_image() -> None:
    assert plan(max_model_len=512).scheduler.encoder_budget == 25_616


def test_without_a_cache_there_is_room_for_all_images_of_a_prompt() -> None:
    made = plan(encoder_cache_gb=0.0, limit_mm_per_prompt={"image": 3})
    assert made.scheduler.encoder_cache_slots == 3 * 25_616 and not made.scheduler.keep_idle_embeddings


def test_the_reason_is_in_the_start_up_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    select = runner_build.select_forward
    monkeypatch.setattr(runner_build, "select_forward", lambda *given: (select(*given)[0], "plain: for a reason"))
    with caplog.at_level(logging.INFO, logger="saccade.engine"):
        llm = make(folder)
    assert "plain: for a reason" in caplog.messages
    assert any(reason.startswith("plain: ") for reason in llm.engine.core.reasons)
    llm.close()
