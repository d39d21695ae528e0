"""From the vectors of pooling requests to embeddings and scores, and the prompts that rerankers read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from saccade.checkpoint.settings import setting
from saccade.errors import ConfigError, RequestError, quoted
from saccade.processor.input_processor import Processor
from saccade.processor.late_interaction import EVERY_TOKEN, max_sim, token_vectors
from saccade.sampling_params import Pooling, SamplingParams

Vector = npt.NDArray[np.float32]
Side = str | Mapping[str, Any]
"""A query or a document: a text, or {"content": [parts of a message]}."""

_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)


class RerankForm(NamedTuple):
    """What stands around the parts of a pair, as the model was trained."""

    instruction: str  # where a request has none
    instruct: str
    query: str
    document: str


_IMAGES = RerankForm(  # Qwen3-VL-Reranker
    "Given a search query, retrieve relevant candidates that answer the query.",
    "<Instruct>: ",
    "<Query>:",
    "\n<Document>:",
)
_TEXT = RerankForm(  # Qwen3-Reranker
    "Given a web search query, retrieve relevant passages that answer the query",
    "<Instruct>: ",
    "\n<Query>: ",
    "\n<Document>: ",
)


def pooling_params(pooling: Pooling, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=1, temperature=0, pooling=pooling, **more)


def token_dim(processor: Processor) -> int | None:
    """The width of a token's vector in late interaction; None: a model with one vector for an input."""
    return processor.checkpoint.config.text.token_dim


def embedding_pooling(processor: Processor) -> Pooling:
    return Pooling() if token_dim(processor) is None else EVERY_TOKEN


def embedding(pooled: bytes, dimensions: int | None = None, dim: int | None = None) -> Vector:
    """A vector of length 1, cut to `dimensions` (Matryoshka). With `dim` one for each token."""
    if dim is not None:
        return token_vectors(pooled, dim)
    vector = np.frombuffer(pooled, np.float32)[:dimensions]
    norm = float(np.linalg.norm(vector.astype(np.float64)))
    return (vector / max(norm, 1e-12)).astype(np.float32)


def check_dimensions(dimensions: int | None, processor: Processor) -> None:
    if dimensions is None:
        return
    dim = token_dim(processor)
    if dim not in (None, dimensions):
        message = f"dimensions must be {dim}, the size of this model's token vectors"
        raise RequestError(f"{message}, but {quoted(dimensions)} was given", param="dimensions")
    size = processor.checkpoint.config.text.hidden_size
    if not 1 <= dimensions <= size:
        message = f"dimensions must be from 1 to {size}, the size of this model's embeddings"
        raise RequestError(f"{message}, but {quoted(dimensions)} was given", param="dimensions")


def similarity(first: bytes, second: bytes, dim: int | None = None) -> float:
    """The cosine of the angle between two embeddings; with `dim` MaxSim of their token vectors."""
    if dim is not None:
        return max_sim(token_vectors(first, dim), token_vectors(second, dim))
    return float(embedding(first).astype(np.float64) @ embedding(second).astype(np.float64))


def relevance(pooled: bytes) -> float:
    """The probability of yes among the logits of the tokens for no and yes."""
    no, yes = np.frombuffer(pooled, np.float32).astype(np.float64)
    return 1 / (1 + math.exp(min(no - yes, 700.0)))


def no_and_yes(processor: Processor) -> Pooling:
    """The logits that a reranker is asked for. vLLM's `classifier_from_token` names others."""
    words = setting(processor.checkpoint.config.raw, "classifier_from_token", ("no", "yes"))
    ids = [processor.tokenizer.token_id(word) for word in words]
    if len(ids) != 2 or None in ids:
        reason = f"the tokenizer has no token for {' or '.join(map(repr, words))}, which a score is made from"
        raise ConfigError(f"{reason}; --hf-overrides can set classifier_from_token to two others")
    return Pooling(tuple(i for i in ids if i is not None))


def pair_messages(processor: Processor, query: Side, document: Side, instruction: str | None) -> list[Any]:
    """The chat that asks a reranker whether a document fits a query."""
    form = _IMAGES if processor.takes_images else _TEXT
    parts = [
        _text(form.instruct + (instruction or form.instruction)),
        _text(form.query),
        *content_of(query),
        _text(form.document),
        *content_of(document),
    ]
    content: Any = parts
    if all(part.get("type") == "text" for part in parts):
        content = "".join(part["text"] for part in parts)
    return [{"role": "system", "content": _JUDGE}, {"role": "user", "content": content}]


PAIR_KWARGS = {"enable_thinking": False}
"""Arguments of the chat template: a score is read where the answer begins."""


def content_of(side: Side) -> list[Mapping[str, Any]]:
    """The parts of a message."""
    content: Any = side.get("content") if isinstance(side, Mapping) else side
    match content:
        case str(text) if text:
            return [_text(text)]
        case [_, *_] if all(map(_is_part, content)):
            return list(content)
    expected = 'a text that is not empty or {"content": [parts of a message]}'
    raise RequestError(f"a query or a document must be {expected}, not {quoted(side)}")


def _is_part(part: Any) -> bool:
    match part:
        case {"type": "text"}:
            return isinstance(part.get("text"), str)
    return isinstance(part, Mapping)


def sides_of(content: Any) -> list[Side]:
    """One or several: a text, an object, a list of them, or vLLM's {"content": [...]}, each part a side."""
    match content:
        case {"content": list() | tuple() as parts}:
            return [{"content": [part]} for part in parts]
        case list() | tuple():
            return [_side(one) for one in content]
    return [_side(content)]


def _side(side: Any) -> Side:
    """Also {"text": ...} and {"image": ...}, as Jina, Cohere and SGLang write them."""
    if not isinstance(side, Mapping) or "content" in side:
        return side
    parts: list[Any] = []
    if side.get("image") is not None:
        parts.append({"type": "image_url", "image_url": {"url": side["image"]}})
    if side.get("text") is not None:
        parts.append({"type": "text", "text": side["text"]})
    return side["text"] if parts == [_text(str(side.get("text")))] else {"content": parts}


def paired(first: Sequence[Side], second: Sequence[Side]) -> list[tuple[Side, Side]]:
    """One with each of many, or as many with as many."""
    if len(first) == 1:
        first = list(first) * len(second)
    if not first or len(first) != len(second):
        counts = f"{len(first)} and {len(second)} texts were given"
        raise RequestError(f"{counts}; give one and some others, or as many on both sides")
    return list(zip(first, second, strict=True))


def columns(pairs: Sequence[tuple[Side, Side]]) -> tuple[Sequence[Side], Sequence[Side]]:
    """Both sides; of the first one alone where it is the same in all pairs."""
    first, second = zip(*pairs, strict=True)
    if all(side is first[0] for side in first):
        return first[:1], second
    return first, second


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
