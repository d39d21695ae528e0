"""/v1/embeddings, /score and /rerank of a server that embeds: shapes, clients, images and what is refused."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.helpers.servers.later import Later
from tests.helpers.servers.serving import MODEL, RunningServer, error_of, photo_part, running_server, text_part

if TYPE_CHECKING:
    import openai
else:
    openai = Later("openai")

TEXTS = ["Hello there", "The quick brown fox jumps over the lazy dog."]
LENGTH = 256


@pytest.fixture(scope="module")
def embedder(qwen2_vl_folder: Path) -> Iterator[RunningServer]:
    flags = ("--task", "embed", "--max-num-seqs", "4", "--max-model-len", str(LENGTH), "--max-pixels", "50176")
    with running_server(qwen2_vl_folder, *flags) as running:
        yield running


def embed(server: RunningServer, **body: Any) -> Any:
    response = server.post("/v1/embeddings", {"model": MODEL, **body})
    assert response.status_code == 200, response.text
    return response.json()


def vectors(body: Any) -> Any:
    assert [row["index"] for row in body["data"]] == list(range(len(body["data"])))
    return np.array([row["embedding"] for row in body["data"]])


@pytest.fixture(scope="module")
def known(embedder: RunningServer) -> Any:
    return vectors(embed(embedder, input=TEXTS))


def test_openais_client_gets_vectors_of_length_one_in_order(embedder: RunningServer, known: Any) -> None:
    client = openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="EMPTY")
    made = client.embeddings.create(model=MODEL, input=TEXTS)  # asks for base64
    np.testing.assert_allclose([row.embedding for row in made.data], known, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(known, axis=1), 1, atol=1e-5)
    assert made.usage.prompt_tokens == made.usage.total_tokens > len(TEXTS)
    short = client.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=8, encoding_format="float")
    cut = known[0][:8] / np.linalg.norm(known[0][:8])
    np.testing.assert_allclose(short.data[0].embedding, cut, atol=1e-6)


def test_token_ids_are_their_text_and_base64_is_float32(embedder: RunningServer, known: Any) -> None:
    ids = [embedder.post("/tokenize", {"prompt": text}).json()["tokens"] for text in TEXTS]
    body = embed(embedder, input=ids, encoding_format="base64")
    found = [np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in body["data"]]
    np.testing.assert_allclose(found, known, atol=1e-6)
    np.testing.assert_allclose(vectors(embed(embedder, input=ids[0]))[0], known[0], atol=1e-6)


def test_more_inputs_than_run_at_once_are_all_answered(embedder: RunningServer, known: Any) -> None:
    many = [*TEXTS, *(f"number {index}" for index in range(9))]
    found = vectors(embed(embedder, input=many))
    assert len(found) == len(many)
    np.testing.assert_allclose(found[:2], known, atol=1e-5)


def test_messages_with_an_image_have_a_bill_and_are_cached(embedder: RunningServer) -> None:
    messages = [{"role": "user", "content": [photo_part(112, 84, seed=5), text_part("Represent it.")]}]
    first = embed(embedder, messages=messages, include_bill=True)
    again = embed(embedder, messages=messages, include_bill=True)
    assert first["usage"]["prompt_tokens_details"]["image_tokens"] == 12 == first["bill"]["image_tokens"]
    assert first["usage"]["completion_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 12 and again["bill"]["items"][0]["cached"]
    np.testing.assert_allclose(vectors(again), vectors(first), atol=1e-5)
    items = embed(embedder, input=[{"text": "Represent it.", "image": messages[0]["content"][0]["image_url"]["url"]}])
    np.testing.assert_allclose(vectors(items), vectors(first), atol=1e-5)


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "input", "give either input or messages"),
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "may not be empty"),
        ({"input": 5}, "input", "must be a string or a list"),
        ({"input": ["a", 5]}, "input", "must be a string"),
        ({"input": ["a"] * 2049}, "input", "2049 inputs were given and at most 2048"),
        ({"input": [7] * (LENGTH + 1)}, "input", f"{LENGTH + 1} token ids"),
        ({"input": "fox " * LENGTH}, None, f"it may have {LENGTH}"),
        ({"input": [10**6]}, "input", "1000000"),
        ({"input": "a", "dimensions": 0}, "dimensions", "from 1 to 64"),
        ({"input": "a", "dimensions": 65}, "dimensions", "from 1 to 64"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "float or base64"),
        ({"messages": []}, "messages", "at least one message"),
        ({"input": "a", "input_type": "query"}, "input_type", "does not tell queries from documents"),
    ],
)
def test_wrong_inputs_get_a_clear_error(
    embedder: RunningServer, body: dict[str, Any], param: str | None, said: str
) -> None:
    response = embedder.post("/v1/embeddings", body)
    error = error_of(response)
    assert response.status_code == 400 and error["param"] == param and said in error["message"], error


def test_scores_and_rankings_of_an_embedding_model_are_cosines(embedder: RunningServer, known: Any) -> None:
    cosine = float(known[0] @ known[1])
    scored = embedder.post("/score", {"text_1": TEXTS[0], "text_2": TEXTS}).json()
    assert [row["score"] for row in scored["data"]] == pytest.approx([1, cosine], abs=1e-5)
    body = {"query": TEXTS[0], "documents": [TEXTS[1], {"text": TEXTS[0]}]}
    ranked = embedder.post("/v1/rerank", body).json()["results"]
    assert [row["index"] for row in ranked] == [1, 0] and ranked[0]["document"] == {"text": TEXTS[0]}
    assert [row["relevance_score"] for row in ranked] == pytest.approx([1, cosine], abs=1e-5)
    (best,) = embedder.post("/rerank", {**body, "top_n": 1, "return_documents": False}).json()["results"]
    assert best["index"] == 1 and "document" not in best


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/score", {"text_1": "a"}, "text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, None),
        ("/score", {"text_1": "a", "text_2": [5]}, "text_2"),
        ("/rerank", {"query": "a"}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": [{"content": [5]}]}, "documents"),
    ],
)
def test_wrong_pairs_get_a_clear_error(
    embedder: RunningServer, route: str, body: dict[str, Any], param: str | None
) -> None:
    response = embedder.post(route, body)
    assert response.status_code == 400 and error_of(response)["param"] == param


def test_a_server_that_embeds_refuses_chats_and_names_the_flag(embedder: RunningServer) -> None:
    error = error_of(embedder.chat())
    assert "--task embed" in error["message"] and "--task generate" in error["message"]
    assert embedder.stats("saccade:kv_blocks_used") == 0


@pytest.mark.parametrize("route", ["/v1/embeddings", "/v1/score", "/v2/rerank"])
def test_a_server_that_generates_names_the_flag(server: RunningServer, route: str) -> None:
    body = {"input": "a"} if route == "/v1/embeddings" else {"queries": "a", "query": "a", "documents": ["b"]}
    response = server.post(route, body)
    assert response.status_code == 400 and "(--task generate)" in error_of(response)["message"]
