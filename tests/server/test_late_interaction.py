"""Late interaction over HTTP: token vectors in both forms, MaxSim scores and rankings, and what is refused."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from saccade.errors import RequestError
from saccade.processor.late_interaction import MAX_VECTOR_BYTES, check_size
from tests.helpers.families import family_colqwen2
from tests.helpers.families.family_colqwen2 import DIM
from tests.helpers.servers.serving import RunningServer, error_of, photo_part, running_server

QUERY = "Which fox is quick?"


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = family_colqwen2.build(tmp_path_factory.mktemp("model") / "late")
    with running_server(folder, "--max-model-len", "256", "--max-num-batched-tokens", "32") as running:
        yield running


def test_vectors_scores_and_rankings_agree_and_nothing_is_cached(late: RunningServer) -> None:
    url = photo_part(112, 84, seed=5)["image_url"]["url"]
    query = late.post("/v1/embeddings", {"input": QUERY, "input_type": "query"}).json()
    body = {"input": [{"image": url}, {"text": "a dog"}]}
    pages = late.post("/v1/embeddings", body).json()
    first = np.array(query["data"][0]["embedding"])
    second, third = (np.array(row["embedding"]) for row in pages["data"])
    assert first.shape == (query["usage"]["prompt_tokens"], DIM)
    assert len(second) + len(third) == pages["usage"]["prompt_tokens"] and len(second) > 12
    np.testing.assert_allclose(np.linalg.norm(second, axis=1), 1, atol=1e-5)

    pooled = late.post("/pooling", {**body, "encoding_format": "base64"}).json()
    assert pooled["data"][0]["object"] == "pooling" and pooled["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    decoded = np.frombuffer(base64.b64decode(pooled["data"][0]["data"]), "<f4").reshape(-1, DIM)
    np.testing.assert_allclose(decoded, second, atol=1e-5)

    expected = [(first @ page.T).max(axis=1).sum() for page in (second, third)]
    scored = late.post("/score", {"queries": QUERY, "documents": body["input"]}).json()
    assert [row["score"] for row in scored["data"]] == pytest.approx(expected, abs=1e-3)
    assert scored["usage"]["prompt_tokens"] == len(first) + len(second) + len(third)  # the query is computed once
    ranked = late.post("/rerank", {"query": QUERY, "documents": body["input"], "top_n": 1}).json()
    assert [row["index"] for row in ranked["results"]] == [int(np.argmax(expected))]
    assert late.stats("saccade:kv_blocks_used") == 0


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"input": "a", "dimensions": 8}, "dimensions", f"dimensions must be {DIM}"),
        ({"input": "a", "input_type": "answer"}, "input_type", "query"),
        ({"input": [5, 6], "input_type": "query"}, "input_type", "token ids are taken as they are"),
        ({"input": "a", "input_type": "query", "add_special_tokens": False}, "add_special_tokens", "not supported"),
    ],
)
def test_wrong_requests_get_a_clear_error(late: RunningServer, body: Any, param: str, said: str) -> None:
    response = late.post("/v1/embeddings", body)
    error = error_of(response)
    assert response.status_code == 400 and error["param"] == param and said in error["message"]


@pytest.mark.parametrize(("as_numbers", "each", "said"), [(False, 4, "at once"), (True, 20, "format to base64")])
def test_the_vectors_of_a_request_are_limited_together(as_numbers: bool, each: int, said: str) -> None:
    most = MAX_VECTOR_BYTES // (each * 128)
    check_size(most, 128, as_numbers=as_numbers)
    with pytest.raises(RequestError, match=f"{most + 1} tokens give .* may have {MAX_VECTOR_BYTES}.*{said}$") as caught:
        check_size(most + 1, 128, as_numbers=as_numbers)
    assert caught.value.code == "request_too_large"
