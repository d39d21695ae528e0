"""Checked requests for embeddings, scores and rankings. Runs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from saccade.errors import RequestError, is_list_of, quoted
from saccade.processor.input_processor import Processor
from saccade.processor.late_interaction import QUERY_KWARGS, template_kwargs
from saccade.processor.pooling import (
    PAIR_KWARGS,
    Side,
    check_dimensions,
    columns,
    content_of,
    embedding_pooling,
    no_and_yes,
    pair_messages,
    paired,
    sides_of,
    token_dim,
)
from saccade.processor.tasks import check_task
from saccade.server.request import fields
from saccade.server.request.chat import ChatRequest, ResponseOptions, pooling_options, prompts_of, read_chat
from saccade.server.request.fields import FieldReader

MAX_INPUTS = 2048
"""Inputs of a request, or pairs, as OpenAI has it."""

Source = str | Sequence[int] | ChatRequest
"""What becomes one prompt."""

_SCORE_FIELDS = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))


@dataclass(frozen=True, slots=True)
class PoolingRequest:
    options: ResponseOptions
    sources: Sequence[Source]
    add_special_tokens: bool = True  # the tokenizer's own, around a text
    token_dim: int | None = None  # of late interaction, where all tokens of a request are limited


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    pooling: PoolingRequest
    is_base64: bool
    dimensions: int | None


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Pairs, one source each for a reranker; for a model that embeds the first ones, or one for all, and then
    the second ones."""

    pooling: PoolingRequest
    num_pairs: int


@dataclass(frozen=True, slots=True)
class RerankRequest:
    score: ScoreRequest
    documents: Sequence[Side]
    top_n: int
    returns_documents: bool


def read_embedding(body: Mapping[str, Any], reader: FieldReader, processor: Processor) -> EmbeddingRequest:
    check_task(processor.checkpoint.task, "embed")
    values = reader.read(body, fields.EMBEDDING)
    check_dimensions(values.get("dimensions"), processor)
    encoding = values.get("encoding_format", "float")
    if encoding not in ("float", "base64"):
        message = f"encoding_format must be float or base64, not {quoted(encoding)}"
        raise RequestError(message, param="encoding_format")
    dim = token_dim(processor)
    kwargs = template_kwargs(values.get("input_type"), dim)
    options = pooling_options(values, embedding_pooling(processor))
    adds = values.get("add_special_tokens", True)
    pooling = PoolingRequest(options, _sources(values, reader, options, kwargs), adds, dim)
    return EmbeddingRequest(pooling, encoding == "base64", values.get("dimensions"))


def _sources(
    values: Mapping[str, Any], reader: FieldReader, options: ResponseOptions, kwargs: Mapping[str, Any]
) -> list[Source]:
    if ("input" in values) == ("messages" in values):
        raise RequestError("give either input or messages", param="input")
    if ("messages" in values or kwargs) and not values.get("add_special_tokens", True):
        raise fields.unsupported("add_special_tokens")
    if "messages" in values:
        chat_kwargs = {**kwargs, **values.get("chat_template_kwargs", {})}
        chat = {name: values[name] for name in values if name in fields.CHAT}
        return [_chat({**chat, "chat_template_kwargs": chat_kwargs}, reader, options)]
    inputs = values["input"]
    if is_list_of(inputs, dict, 1):
        _check_count(len(inputs), "input")
        return [_side_source(side, values, reader, options, kwargs) for side in sides_of(inputs)]
    texts = prompts_of(inputs, "input")
    _check_count(len(texts), "input")
    if not kwargs:
        return list(texts)
    if not all(isinstance(text, str) for text in texts):
        raise RequestError("token ids are taken as they are; leave input_type out", param="input_type")
    return [_side_source(str(text), values, reader, options, kwargs) for text in texts]


def read_score(body: Mapping[str, Any], reader: FieldReader, processor: Processor) -> ScoreRequest:
    values = reader.read(body, fields.SCORE)
    names = next((pair for pair in _SCORE_FIELDS if values.keys() >= {*pair}), None)
    if names is None:
        raise RequestError("give text_1 and text_2, or queries and documents", param="text_1")
    pairs = paired(sides_of(values[names[0]]), sides_of(values[names[1]]))
    return _score_request(pairs, values, reader, processor, names[1])


def read_rerank(body: Mapping[str, Any], reader: FieldReader, processor: Processor) -> RerankRequest:
    values = reader.read(body, fields.RERANK)
    for name in ("query", "documents"):
        if not values.get(name):
            raise RequestError(f"{name} is missing or empty", param=name)
    query = values["query"]
    whole = query if isinstance(query, dict) and "content" in query else sides_of(query)[0]
    documents = sides_of(values["documents"])
    pairs = [(whole, document) for document in documents]
    score = _score_request(pairs, values, reader, processor, "documents")
    top_n = values.get("top_n", 0)
    if top_n < 0:
        raise RequestError(f"top_n must be 0 (all) or more, but {top_n} was given", param="top_n")
    return RerankRequest(score, documents, top_n or len(documents), values.get("return_documents", True))


def _score_request(
    pairs: Sequence[tuple[Side, Side]],
    values: Mapping[str, Any],
    reader: FieldReader,
    processor: Processor,
    param: str,
) -> ScoreRequest:
    task = processor.checkpoint.task
    check_task(task, "score", "embed")
    _check_count(len(pairs), param)
    try:
        if task == "embed":
            options = pooling_options(values, embedding_pooling(processor))
            first, second = columns(pairs)
            query_kwargs = {} if token_dim(processor) is None else QUERY_KWARGS
            sources = [_side_source(side, values, reader, options, query_kwargs) for side in first]
            sources += [_side_source(side, values, reader, options, {}) for side in second]
        else:
            options = pooling_options(values, no_and_yes(processor))
            sources = [_pair_source(pair, values, reader, options, processor) for pair in pairs]
    except RequestError as error:
        raise error.about(param) from None
    pooling = PoolingRequest(options, sources, token_dim=token_dim(processor))
    return ScoreRequest(pooling, len(pairs))


def _pair_source(
    pair: tuple[Side, Side],
    values: Mapping[str, Any],
    reader: FieldReader,
    options: ResponseOptions,
    processor: Processor,
) -> ChatRequest:
    messages = pair_messages(processor, *pair, values.get("instruction"))
    kwargs = {"mm_processor_kwargs": values.get("mm_processor_kwargs"), "chat_template_kwargs": PAIR_KWARGS}
    return _chat({"messages": messages, **kwargs}, reader, options)


def _side_source(
    side: Side,
    values: Mapping[str, Any],
    reader: FieldReader,
    options: ResponseOptions,
    kwargs: Mapping[str, Any],
) -> Source:
    """A text as it is, unless the chat template has a use for `kwargs`; parts as a user's message."""
    parts = content_of(side)
    if isinstance(side, str) and not kwargs:
        return side
    how = {"mm_processor_kwargs": values.get("mm_processor_kwargs"), "chat_template_kwargs": kwargs}
    return _chat({"messages": [{"role": "user", "content": parts}], **how}, reader, options)


def _chat(body: Mapping[str, Any], reader: FieldReader, options: ResponseOptions) -> ChatRequest:
    return replace(read_chat(body, reader), response_options=options)


def _check_count(count: int, param: str) -> None:
    if count > MAX_INPUTS:
        message = f"{count} inputs were given and at most {MAX_INPUTS} may be in one request; send several"
        raise RequestError(message, code="request_too_large", param=param)
