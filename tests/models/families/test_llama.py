"""Families that take no pictures: Transformers' tokens however the work is cut, and pictures refused in words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import expect

from saccade import LLM, SamplingParams, costs
from saccade.checkpoint.config import model_config
from saccade.cli import main as cli
from saccade.errors import ConfigError, RequestError
from saccade.models import load_model
from saccade.models.layers.torch_attention import PagedAttention, PagedKV
from saccade.options.engine import Options
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.runner.device_memory import plan_memory
from tests.helpers.engine.async_engine import OPTIONS, answers, overlapped
from tests.helpers.engine.engine_runs import Subject, run
from tests.helpers.engine.reference import Reference
from tests.helpers.families.family_text import KINDS, build, reference
from tests.helpers.families.parity import BLOCK, one_request
from tests.helpers.media.images import make_photo
from tests.helpers.servers.browser import PATIENCE_MS, open_page, running_browser
from tests.helpers.servers.serving import RunningServer, error_of, photo_part, running_server, text_part, until

pytestmark = pytest.mark.transformers

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
FOX = "The quick brown fox jumps over the lazy dog. "
PROMPTS = [FOX * 8, "Five.", FOX * 2 + "Compare these two.", "你好, naïve café 🙂"]
CPU = torch.device("cpu")


class Pair:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reference: Reference = reference(folder)
        self.llm = LLM(model=str(folder), max_model_len=512, kv_cache_gb=0.02, use_tqdm=False)


@pytest.fixture(scope="module", params=[f"{name}-{layout}" for name in KINDS for layout in ("saved", "published")])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    name, layout = request.param.split("-")
    made = Pair(build(tmp_path_factory.mktemp(request.param), name, layout=layout))
    yield made
    made.llm.close()


@pytest.fixture(scope="module", params=["llama", "qwen3"])  # biases and llama3; norms of heads and their own width
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp(request.param), request.param)


# --- the whole engine against Transformers ------------------------------------------------------------------------


def test_prompt_ids_and_24_greedy_tokens_equal_transformers(pair: Pair) -> None:
    outs = pair.llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [o.prompt_token_ids for o in outs] == [
        pair.reference.inputs(p, [])["input_ids"][0].tolist() for p in PROMPTS
    ]
    answers = [o.outputs[0].token_ids for o in outs]
    assert {len(answer) for answer in answers} == {GREEDY.max_tokens}
    assert answers == [pair.reference.chosen(p, [], answer) for p, answer in zip(PROMPTS, answers, strict=True)]


def test_logits_equal_transformers_in_one_window_and_in_chunks(pair: Pair) -> None:
    text, model = PROMPTS[0], pair.llm.engine.core.runner.model
    expected = pair.reference.logits(text, [])
    ids = pair.reference.inputs(text, [])["input_ids"][0]
    for chunk in (len(ids), 7):
        kv = PagedKV.allocate(model.config.text, 64, BLOCK, torch.float32, CPU)
        found = []
        for start in range(0, len(ids), chunk):
            end = min(start + chunk, len(ids))
            attention = PagedAttention(kv, one_request(end, end - start), model.decoder.scale)
            with torch.inference_mode():
                hidden = model.forward(model.embed(ids[start:end]), torch.arange(start, end)[None], attention)
                found.append(model.logits(hidden))
        scale = float(expected.abs().max())
        torch.testing.assert_close(torch.cat(found), expected, rtol=0, atol=1e-4 * scale)


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        ("llama", {"rope_type": "linear", "factor": 4.0}),
        ("llama", {"rope_type": "default"}),
        ("qwen3", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0}),
        ("qwen3", {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.3,
                   "original_max_position_embeddings": 48, "truncate": False}),
    ],
)  # fmt: skip
def test_published_ways_to_stretch_positions_equal_transformers(
    tmp_path: Path, name: str, rope: dict[str, Any]
) -> None:
    made = Pair(build(tmp_path, name, changes={"rope_parameters": {"rope_theta": 10000.0, **rope}}))
    out = made.llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0]
    assert out.outputs[0].token_ids == made.reference.greedy(PROMPTS[0], [])


def test_a_chat_goes_through_a_template_that_takes_strings(pair: Pair) -> None:
    parts = [{"type": "text", "text": "Five"}, {"type": "text", "text": " circles"}]
    chats = [[{"role": "user", "content": content}] for content in ("Five circles", parts)]
    texts = [pair.llm.engine.processor.from_chat(chat).token_ids for chat in chats]
    assert texts[0] == texts[1]


# --- however the work is done -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def subject(folder: Path) -> Subject:
    return Subject(folder, [{"prompt": prompt} for prompt in PROMPTS])


@pytest.fixture(scope="module")
def alone(subject: Subject) -> list[list[int]]:
    return run(subject, together=False, enable_prefix_caching=False)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({}, id="batched"),
        pytest.param({"max_num_batched_tokens": 16}, id="chunks of 16"),
        pytest.param({"enable_prefix_caching": False}, id="no prefix cache"),
        pytest.param({"max_num_seqs": 2}, id="two at a time"),
        pytest.param({"max_step_ms": 0.001}, id="bounded steps"),
        pytest.param({"encoder_cache_gb": 0.0}, id="no encoder cache"),
    ],
)
def test_tokens_do_not_depend_on(given: dict[str, Any], subject: Subject, alone: list[list[int]]) -> None:
    assert run(subject, **given) == alone


def test_tokens_do_not_depend_on_a_warm_prefix_cache_or_preemption(subject: Subject) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = run(subject, params, together=False, enable_prefix_caching=False)
    text = open_checkpoint(str(subject.folder)).config.text
    gib = 16.5 * costs.kv_bytes_per_block(text, "float32") / costs.GIB
    llm = LLM(model=str(subject.folder), use_tqdm=False, kv_cache_gb=gib)
    for _ in range(2):
        outs = llm.generate(subject.prompts, params, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outs] == expected
        llm.engine.core.scheduler.check()
    assert llm.stats()["preemptions"] > 0 and any(o.num_cached_tokens for o in outs)
    llm.close()


def test_kernels_and_launching_ahead_give_the_tokens_of_the_plain_engine(folder: Path) -> None:
    given = [{"prompt": prompt} for prompt in (PROMPTS[1], FOX * 2)]
    assert answers(overlapped(folder), given) == answers(LLM(str(folder), **OPTIONS), given)


# --- pictures -----------------------------------------------------------------------------------------------------


def test_a_image_is_refused_and_says_that_the_model_reads_text(pair: Pair) -> None:
    processor = pair.llm.engine.processor
    with pytest.raises(RequestError, match=r"reads text only and takes no pictures, but a picture was given"):
        processor.from_prompt({"prompt": "Five.", "multi_modal_data": {"image": make_photo()}})
    chat = [{"role": "user", "content": [{"type": "image", "image": make_photo()}] * 2}]
    with pytest.raises(RequestError, match="2 pictures were given") as refused:
        processor.from_chat(chat)
    assert refused.value.param == "messages[0].content[0].image" and refused.value.code == "unsupported"


def test_no_encoder_is_built_and_no_memory_kept_for_embeddings(pair: Pair) -> None:
    core = pair.llm.engine.core
    assert core.runner.encoder is None and core.limits.encoder_cache_slots == 0
    assert any("takes no pictures" in reason for reason in core.reasons)


def test_count_says_that_the_model_takes_no_images(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "photo.png"
    make_photo().save(file)
    assert cli.main(["count", "--model", str(folder), str(file)]) != 0
    assert "takes no pictures" in capsys.readouterr().err


# --- what published configs say -----------------------------------------------------------------------------------

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 99,
    "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({"model_type": "mistral", "sliding_window": None}, 4096),
        ({"model_type": "mistral", "sliding_window": 1024}, 1024),
        ({"model_type": "mistral", "sliding_window": 8192}, 4096),
        ({"model_type": "qwen2", "sliding_window": 1024}, 4096),
        ({"model_type": "qwen2", "sliding_window": 1024, "use_sliding_window": True}, 1024),
        ({"model_type": "qwen3", "sliding_window": 1024, "use_sliding_window": True,
          "layer_types": ["full_attention"]}, 4096),
        ({"model_type": "llama"}, 4096),
    ],
)  # fmt: skip
def test_the_context_ends_where_attention_would_stop_looking_back(changes: dict[str, Any], context: int) -> None:
    config = model_config({**SMALL, **changes})
    plan = plan_memory(Options(device="cpu", kv_cache_gb=0.01), config, None)
    assert plan.scheduler.max_model_len == context
    assert any("attention window" in reason for reason in plan.reasons) == (context == 1024)


def test_within_its_window_a_model_answers_as_transformers(tmp_path: Path) -> None:
    made = Pair(build(tmp_path, "mistral", changes={"sliding_window": 512}))
    out = made.llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0]
    assert out.outputs[0].token_ids == made.reference.greedy(PROMPTS[0], [])


def test_a_context_beyond_the_window_is_refused_with_the_numbers() -> None:
    config = model_config({**SMALL, "model_type": "mistral", "sliding_window": 1024})
    with pytest.raises(ConfigError, match=r"max_model_len=2048 is beyond the 1024 .* attention window"):
        plan_memory(Options(device="cpu", kv_cache_gb=0.01, max_model_len=2048), config, None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "gelu"}, "'gelu'.*silu"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'.*known are"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
    ],
)
def test_a_config_that_cannot_work_is_refused_with_its_values(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config = model_config({**SMALL, "model_type": "llama", **changes})
        load_model(None, config, dtype=torch.float32, device=CPU, load_format="dummy")


# --- the server ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(build(tmp_path_factory.mktemp("served"), "qwen3")) as running:
        yield running


def test_a_server_answers_text_and_refuses_images_with_400(text_server: RunningServer) -> None:
    assert text_server.chat([text_part("How many?")]).json()["usage"]["completion_tokens"] > 0
    refused = text_server.chat([text_part("What is this?"), photo_part()])
    assert refused.status_code == 400
    assert "takes no pictures" in error_of(refused)["message"] and error_of(refused)["code"] == "unsupported"
    assert text_server.answers()


def test_the_model_card_offers_no_images(text_server: RunningServer) -> None:
    card = text_server.get("/v1/models").json()["data"][0]["multimodal"]
    assert card["limit_per_prompt"]["image"] == 0 and card["formats"] == [] and card["tokens_per_picture"] == {}
    assert until(lambda: any("the model takes no pictures" in line for line in text_server.log))


@pytest.mark.browser
def test_the_page_offers_no_images_and_answers(text_server: RunningServer) -> None:
    with running_browser() as browser, open_page(browser, text_server.url) as page:
        expect(page.locator("#model")).not_to_be_empty(timeout=PATIENCE_MS)
        for place in ("#drop", "#pick", "#sample", "#pixels"):
            expect(page.locator(place)).to_be_hidden()
        page.get_by_label("Your question").fill("How many?")
        page.keyboard.press("Enter")
        page.locator(".cost").first.wait_for()
