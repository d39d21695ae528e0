"""/v1/embeddings, /score and /rerank: prompts run to their end, and what is pooled there is sent."""

from __future__ import annotations

import base64
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from saccade.processor.late_interaction import check_size
from saccade.processor.pooling import Side, embedding, relevance, similarity
from saccade.server.api.chunks import bill_body, one_or_all, prompt_usage
from saccade.server.generation import BilledPrompt, Generation
from saccade.server.http.body_check import check_text
from saccade.server.http.request_context import Exchange
from saccade.server.pipeline import prepare_chat, prepare_prompts, read_request, running
from saccade.server.request.chat import ChatRequest, CompletionRequest, renaming
from saccade.server.request.pooling import (
    EmbeddingRequest,
    PoolingRequest,
    ScoreRequest,
    Source,
    read_embedding,
    read_rerank,
    read_score,
)
from saccade.server.service import Service
from saccade.types.bill import Bill


@dataclass(slots=True)
class PooledInputs:
    vectors: list[bytes] = field(default_factory=list)  # of each source, in order
    bills: list[Bill] = field(default_factory=list)
    cached_tokens: int = 0

    def take(self, generation: Generation) -> None:
        self.vectors += [output.pooled or b"" for output in generation.outputs]
        self.bills += [generation.bill(index) for index in range(len(generation.bills))]
        self.cached_tokens += generation.cached_tokens

    def envelope(
        self, request: PoolingRequest, prefix: str, service: Service, exchange: Exchange
    ) -> dict[str, Any]:
        """Id, model, usage and bill of a response."""
        envelope = {
            "id": f"{prefix}-{request.options.reply_id(exchange.caller.request_id)}",
            "created": int(time.time()),
            "model": service.names[0],
            "usage": prompt_usage(self.bills, self.cached_tokens),
        }
        if request.options.include_bill:
            envelope["bill"] = one_or_all([bill_body(bill) for bill in self.bills])
        return envelope


async def create_embedding(service: Service, exchange: Exchange) -> dict[str, Any]:
    return await _embed(service, exchange, "embd", {"object": "embedding"}, "embedding")


async def create_pooling(service: Service, exchange: Exchange) -> dict[str, Any]:
    """The same in vLLM's form."""
    return await _embed(service, exchange, "pool", {"object": "pooling"}, "data")


async def _embed(
    service: Service, exchange: Exchange, prefix: str, row: dict[str, Any], name: str
) -> dict[str, Any]:
    request = await read_request(service, read_embedding, exchange, service.processor)
    pooled = await _pool(service, exchange, request.pooling, as_numbers=not request.is_base64)
    vectors = await service.turns.in_thread(exchange.caller, _embeddings, pooled, request)
    data = [{**row, "index": index, name: values} for index, values in enumerate(vectors)]
    return {"object": "list", "data": data, **pooled.envelope(request.pooling, prefix, service, exchange)}


def _embeddings(pooled: PooledInputs, request: EmbeddingRequest) -> list[Any]:
    """Numbers as JSON: those of many tokens take seconds to write, and this runs in a thread."""
    arrays = (embedding(vector, request.dimensions, request.pooling.token_dim) for vector in pooled.vectors)
    if request.is_base64:
        return [base64.b64encode(values.astype("<f4").tobytes()).decode() for values in arrays]
    return [msgspec.Raw(msgspec.json.encode(values.tolist())) for values in arrays]


async def create_score(service: Service, exchange: Exchange) -> dict[str, Any]:
    request = await read_request(service, read_score, exchange, service.processor)
    pooled = await _pool(service, exchange, request.pooling)
    scores = enumerate(await service.turns.in_thread(exchange.caller, _scores, request, pooled))
    data = [{"object": "score", "index": index, "score": score} for index, score in scores]
    return {"object": "list", "data": data, **pooled.envelope(request.pooling, "score", service, exchange)}


async def rerank(service: Service, exchange: Exchange) -> dict[str, Any]:
    """A ranking in the form of Jina and Cohere: the best first."""
    request = await read_request(service, read_rerank, exchange, service.processor)
    pooled = await _pool(service, exchange, request.score.pooling)
    scores = await service.turns.in_thread(exchange.caller, _scores, request.score, pooled)
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n]
    results = []
    for index in best:
        row: dict[str, Any] = {"index": index}
        if request.returns_documents:
            row["document"] = _shown(request.documents[index])
        results.append({**row, "relevance_score": scores[index]})
    return {"results": results, **pooled.envelope(request.score.pooling, "rerank", service, exchange)}


def _shown(document: Side) -> dict[str, Any]:
    """Images are not sent back."""
    return {"text": document if isinstance(document, str) else None}


def _scores(request: ScoreRequest, pooled: PooledInputs) -> list[float]:
    first = pooled.vectors[: -request.num_pairs]
    second = pooled.vectors[-request.num_pairs :]
    if not first:
        return [relevance(vector) for vector in second]
    if len(first) == 1:
        first *= len(second)
    pairs = zip(first, second, strict=True)
    return [similarity(*pair, request.pooling.token_dim) for pair in pairs]


async def _pool(
    service: Service, exchange: Exchange, request: PoolingRequest, *, as_numbers: bool = False
) -> PooledInputs:
    """Runs as many inputs at a time as may run at once."""
    service.check_model(request.options.model)
    size = service.options.max_num_seqs
    sources = request.sources
    exchange.lease.enter(min(len(sources), size))
    pooled = PooledInputs()
    num_tokens = 0
    for start in range(0, len(sources), size):
        chunk = sources[start : start + size]
        prompts = [await _prepare(service, exchange, request, source) for source in chunk]
        num_tokens += sum(len(prompt) for prompt, _ in prompts)
        if request.token_dim is not None:
            check_size(num_tokens, request.token_dim, as_numbers=as_numbers)
        async with running(service, prompts, request.options, exchange) as generation:
            if start + size >= len(sources):
                exchange.lease.release()
            async for _ in generation.deltas():
                pass
            generation.finish()
            pooled.take(generation)
    return pooled


async def _prepare(
    service: Service, exchange: Exchange, request: PoolingRequest, source: Source
) -> BilledPrompt:
    if isinstance(source, ChatRequest):
        texts = {"messages": source.messages}
        await service.turns.in_thread(exchange.caller, check_text, texts, service.max_chars)
        return await prepare_chat(service, source, exchange)
    one = CompletionRequest(request.options, [source], add_special_tokens=request.add_special_tokens)
    with renaming({"prompt": "input"}.get):
        prompts = await prepare_prompts(service, one, exchange.caller)
    return prompts[0]
