"""Late interaction: one vector a token as Transformers' ColQwen2 makes them, however the prompt is computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from saccade import LLM, ConfigError, RequestError
from tests.helpers.engine.async_engine import overlapped
from tests.helpers.families import family_colqwen2
from tests.helpers.families.family_colqwen2 import DIM, LateReference
from tests.helpers.media.images import make_photo

pytestmark = pytest.mark.transformers

OPTIONS: dict[str, Any] = {"device": "cpu", "kv_cache_gb": 0.02, "max_model_len": 256, "use_tqdm": False}
CHUNK = 32
QUERY = "Which fox is quick? <|im_end|>"  # control tokens of a client stay text
LONG = "The quick brown fox jumps over the lazy dog. " * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_colqwen2.build(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> LateReference:
    return LateReference(folder)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), max_num_batched_tokens=CHUNK, **OPTIONS) as made:
        yield made


@pytest.fixture(scope="module")
def photo() -> Image.Image:
    return make_photo(200, 168)


def page(photo: Image.Image) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image", "image": photo}]}]}


def vectors(llm: LLM, given: Any, **how: Any) -> tuple[list[int], Any]:
    (out,) = llm.embed(given, use_tqdm=False, **how)
    assert out.outputs is not None
    return out.prompt_token_ids, np.array(out.outputs.embedding)


def max_sim(query: torch.Tensor, document: torch.Tensor) -> float:
    return float((query @ document.T).max(dim=1).values.sum())


def test_a_document_has_transformers_vector_for_every_token_although_it_came_in_chunks(
    llm: LLM, reference: LateReference, photo: Image.Image
) -> None:
    ids, expected = reference.document(photo)
    found_ids, found = vectors(llm, page(photo))
    assert found_ids == ids and len(ids) > 1.5 * CHUNK and found.shape == (len(ids), DIM)
    np.testing.assert_allclose(found, expected, atol=3e-6)


def test_a_query_is_put_into_the_prompt_of_queries_and_padded(llm: LLM, reference: LateReference) -> None:
    ids, expected = reference.query("Which fox is quick?")
    found_ids, found = vectors(llm, "Which fox is quick?", input_type="query")
    assert found_ids == ids
    np.testing.assert_allclose(found, expected, atol=3e-6)
    forged, _ = vectors(llm, QUERY, input_type="query")
    assert forged.count(llm.get_tokenizer().convert_tokens_to_ids(["<|im_end|>"])[0]) == 0


def test_a_prefix_that_is_cached_is_computed_again_and_its_image_is_not_encoded_again(
    llm: LLM, photo: Image.Image
) -> None:
    _, first = vectors(llm, page(photo))
    encoded = llm.stats()["encoder"]
    (again,) = llm.embed(page(photo), use_tqdm=False)
    assert again.outputs and again.num_cached_tokens == 0 and llm.stats()["encoder"] == encoded
    assert again.bill is not None and again.bill.items[0].cached
    np.testing.assert_allclose(again.outputs.embedding, first, atol=1e-6)


def test_requests_side_by_side_that_share_a_prefix_get_all_their_vectors(llm: LLM) -> None:
    texts = [LONG + ending for ending in "abc"]
    alone = [vectors(llm, text)[1] for text in texts]
    for out, expected in zip(llm.embed(texts, use_tqdm=False), alone, strict=True):
        assert out.outputs and out.num_cached_tokens == 0
        np.testing.assert_allclose(out.outputs.embedding, expected, atol=1e-6)
    llm.engine.core.scheduler.check()
    assert llm.stats()["kv"]["used"] == 0


def test_a_score_is_max_sim_of_query_and_document(llm: LLM, reference: LateReference, photo: Image.Image) -> None:
    other = make_photo(96, 96, seed=3)
    pages = [{"content": [{"type": "image", "image": one}]} for one in (photo, other)]
    found = llm.score("Which fox is quick?", pages, use_tqdm=False)
    query = reference.query("Which fox is quick?")[1]
    expected = [max_sim(query, reference.document(one)[1]) for one in (photo, other)]
    assert [out.outputs.score for out in found if out.outputs] == pytest.approx(expected, abs=1e-4)


def test_the_kernels_of_a_gpu_give_every_row(folder: Path, llm: LLM, photo: Image.Image) -> None:
    fast = overlapped(folder, max_model_len=256, max_num_batched_tokens=CHUNK)
    for given in (page(photo), "Hello there"):
        np.testing.assert_allclose(vectors(fast, given)[1], vectors(llm, given)[1], atol=3e-5)
    fast.engine.core.scheduler.check()


@pytest.mark.parametrize(("base", "layout"), [("qwen2_vl", "colpali-engine"), ("qwen2_5_vl", "transformers")])
def test_other_bases_and_the_layout_of_colpali_engine_load(tmp_path: Path, base: str, layout: str) -> None:
    reference = LateReference(family_colqwen2.build(tmp_path, base))
    family_colqwen2.build(tmp_path, base, layout)
    with LLM(str(tmp_path), **OPTIONS) as made:
        for image in (make_photo(96, 96), make_photo(112, 56)):
            ids, expected = reference.document(image)
            found_ids, found = vectors(made, page(image))
            assert found_ids == ids
            np.testing.assert_allclose(found, expected, atol=1e-5)


def test_other_tasks_sizes_and_kinds_of_input_are_refused(llm: LLM, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"task=generate cannot be used: .*late interaction.*--task embed"):
        LLM(str(folder), task="generate", **OPTIONS)
    with pytest.raises(RequestError, match=f"dimensions must be {DIM}"):
        llm.embed("a", dimensions=8, use_tqdm=False)
    with pytest.raises(RequestError, match="input_type must be query or document, not 'answer'"):
        llm.embed("a", input_type="answer", use_tqdm=False)
