"""Embeddings and scores of the engine: Transformers' last hidden state, however the prompt was computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from saccade import LLM, RequestError, SamplingParams
from saccade.sampling_params import Pooling
from tests.helpers.engine.async_engine import overlapped
from tests.helpers.engine.reference import Reference
from tests.helpers.families import family_qwen3_vl
from tests.helpers.media.images import make_photo

pytestmark = pytest.mark.transformers

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
TEXT = "The quick brown fox jumps over the lazy dog, and over another one after it."
OPTIONS: dict[str, Any] = {"device": "cpu", "kv_cache_gb": 0.02, "max_model_len": 256, "use_tqdm": False}
CHUNK = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_qwen3_vl.build(tmp_path_factory.mktemp("model") / "Tiny-VL-Embedding", text={"num_hidden_layers": 2})


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return family_qwen3_vl.reference(folder)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), max_num_batched_tokens=CHUNK, **OPTIONS) as made:
        yield made


@pytest.fixture(scope="module")
def photo() -> Image.Image:
    return make_photo(160, 128)


@torch.inference_mode()
def expected(reference: Reference, text: str, images: list[Image.Image]) -> torch.Tensor:
    """The hidden state of the last token, after the final norm."""
    made = reference.model.model(**reference.inputs(text, images))
    return torch.as_tensor(made.last_hidden_state[0, -1])


def vector(llm: LLM, prompt: Any, **how: Any) -> Any:
    (out,) = llm.embed(prompt, use_tqdm=False, **how)
    assert out.outputs is not None and out.error is None
    return np.array(out.outputs.embedding)


def with_image(text: str, photo: Image.Image) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": photo}}


@pytest.mark.parametrize("has_image", [False, True])
def test_an_embedding_is_transformers_last_hidden_state_of_length_one(
    llm: LLM, reference: Reference, photo: Image.Image, has_image: bool
) -> None:
    text = f"{IMAGE} {TEXT}" if has_image else TEXT
    hidden = expected(reference, text, [photo] if has_image else [])
    found = vector(llm, with_image(text, photo) if has_image else text)
    np.testing.assert_allclose(found, hidden / hidden.norm(), atol=2e-6)


def test_chunks_and_cached_prefixes_change_nothing_and_all_blocks_come_back(llm: LLM, photo: Image.Image) -> None:
    prompt = with_image(f"{IMAGE}{IMAGE} Again: {TEXT}", [photo, make_photo(96, 96, seed=3)])  # type: ignore[arg-type]
    llm.reset_prefix_cache()
    (new,) = llm.embed(prompt, use_tqdm=False)
    steps = llm.stats()["steps"]
    (seen,) = llm.embed(prompt, use_tqdm=False)
    assert len(new.prompt_token_ids) > 2 * CHUNK and new.num_cached_tokens == 0
    assert seen.num_cached_tokens >= len(new.prompt_token_ids) - 16 and llm.stats()["steps"] == steps + 1
    assert new.outputs and seen.outputs
    np.testing.assert_allclose(seen.outputs.embedding, new.outputs.embedding, atol=1e-6)
    assert seen.bill is not None and seen.bill.image_tokens == 20 + 9 and all(item.cached for item in seen.bill.items)
    llm.engine.core.scheduler.check()
    assert llm.stats()["kv"]["used"] == 0 and not llm.engine.has_unfinished_requests()


def test_many_inputs_at_once_are_those_one_by_one(llm: LLM) -> None:
    texts = ["a", TEXT, "Hello there", TEXT + TEXT]
    together = [out.outputs.embedding for out in llm.embed(texts, use_tqdm=False) if out.outputs]
    np.testing.assert_allclose(together, [vector(llm, text) for text in texts], atol=1e-6)


def test_dimensions_cut_and_normalise_again(llm: LLM) -> None:
    whole, cut = vector(llm, TEXT), vector(llm, TEXT, dimensions=16)
    np.testing.assert_allclose(cut, whole[:16] / np.linalg.norm(whole[:16]), atol=1e-6)


def test_an_input_may_be_as_long_as_the_context_and_no_longer(llm: LLM) -> None:
    ids = [5] * OPTIONS["max_model_len"]
    assert np.linalg.norm(vector(llm, {"prompt_token_ids": ids})) == pytest.approx(1, abs=1e-5)
    with pytest.raises(RequestError, match="the input has 257 tokens and may have 256") as caught:
        llm.embed({"prompt_token_ids": [*ids, 5]}, use_tqdm=False)
    assert caught.value.code == "context_length_exceeded"


def test_a_bad_input_of_several_fails_alone(llm: LLM) -> None:
    good, bad = llm.embed([TEXT, {"prompt_token_ids": []}], use_tqdm=False)
    assert good.outputs and bad.outputs is None and bad.error is not None


def test_an_embedding_model_scores_by_the_cosine(llm: LLM) -> None:
    first, second = vector(llm, "Hello"), vector(llm, TEXT)
    same, other = llm.score("Hello", ["Hello", TEXT], use_tqdm=False)
    assert same.outputs and same.outputs.score == pytest.approx(1, abs=1e-6)
    assert other.outputs and other.outputs.score == pytest.approx(float(first @ second), abs=1e-6)


def test_a_model_served_to_embed_generates_nothing(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"served to make embeddings \(--task embed\).*--task generate"):
        llm.generate("Hello", use_tqdm=False)


def test_the_kernels_of_a_gpu_pool_the_same_beside_requests_that_generate(folder: Path, llm: LLM) -> None:
    fast = overlapped(folder, task="generate", max_model_len=256)
    greedy = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    alone = fast.generate("Count.", greedy, use_tqdm=False)[0].outputs[0].token_ids
    fast.engine.add_request("text", {"prompt": "Count."}, greedy)
    fast.engine.step()
    pooling = SamplingParams(max_tokens=1, temperature=0, pooling=Pooling())
    fast.engine.add_request("pooled", {"prompt": "Hello there"}, pooling)
    done = {}
    while fast.engine.has_unfinished_requests():
        done |= {out.request_id: out.outputs[0] for out in fast.engine.step() if out.finished}
    assert done["text"].token_ids == alone
    found = np.frombuffer(done["pooled"].pooled or b"", np.float32)
    np.testing.assert_allclose(found / np.linalg.norm(found), vector(llm, "Hello there"), atol=2e-5)
    fast.engine.core.scheduler.check()


@pytest.fixture(scope="module")
def reranker(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), task="score", hf_overrides={"classifier_from_token": ["n", "y"]}, **OPTIONS) as made:
        yield made


def test_a_score_is_the_probability_of_yes_where_the_answer_begins(
    reranker: LLM, reference: Reference, photo: Image.Image
) -> None:
    document = {"content": [{"type": "image", "image": photo}]}
    (out,) = reranker.score("a photo", [document], use_tqdm=False)
    asked = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a '
        f"search query, retrieve relevant candidates that answer the query.<Query>:a photo\n<Document>:{IMAGE}"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    assert out.prompt_token_ids == reference.inputs(asked, [photo])["input_ids"][0].tolist()
    logits = reference.logits(asked, [photo])[-1]
    no, yes = (reference.tokenizer.convert_tokens_to_ids(word) for word in ("n", "y"))
    assert out.outputs and out.outputs.score == pytest.approx(torch.sigmoid(logits[yes] - logits[no]).item(), abs=1e-5)


def test_pairs_are_one_with_many_or_as_many_with_as_many(reranker: LLM) -> None:
    one, two = reranker.score(["a", "b"], ["c", "d"], use_tqdm=False)
    again = reranker.score("a", ["c", "e"], use_tqdm=False)[0]
    assert one.outputs and two.outputs and again.outputs and one.outputs != two.outputs
    assert again.outputs.score == pytest.approx(one.outputs.score, abs=1e-6)
    with pytest.raises(RequestError, match="2 and 3 texts were given"):
        reranker.score(["a", "b"], ["c", "d", "e"], use_tqdm=False)


def test_a_reranker_gives_no_embeddings(reranker: LLM) -> None:
    with pytest.raises(RequestError, match="--task embed"):
        reranker.embed("Hello", use_tqdm=False)
