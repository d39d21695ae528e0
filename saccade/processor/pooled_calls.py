"""`LLM.embed` and `LLM.score`: inputs become prompts, and what the engine pools becomes outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from saccade.outputs import EmbeddingOutput, PoolingRequestOutput, RequestOutput, ScoringOutput
from saccade.processor.input_processor import Processor
from saccade.processor.pooling import (
    PAIR_KWARGS,
    Side,
    check_dimensions,
    embedding,
    no_and_yes,
    pair_messages,
    paired,
    pooling_params,
    relevance,
    sides_of,
    similarity,
)
from saccade.processor.tasks import check_task
from saccade.sampling_params import Pooling, SamplingParams
from saccade.types import Prompt

Run = Callable[[Sequence[Callable[[], Prompt]], SamplingParams], list[RequestOutput]]
Input = str | Mapping[str, Any]
Embeddings = list[PoolingRequestOutput[EmbeddingOutput]]
Scores = list[PoolingRequestOutput[ScoringOutput]]


def embeddings(
    processor: Processor,
    run: Run,
    inputs: Input | Sequence[Input],
    *,
    dimensions: int | None = None,
    truncate_prompt_tokens: int | None = None,
) -> Embeddings:
    """An input is what `LLM.generate` takes, or {"messages": [...]} for the chat template."""
    check_task(processor.checkpoint.task, "embed")
    check_dimensions(dimensions, processor)
    many: Sequence[Input] = [inputs] if isinstance(inputs, (str, Mapping)) else inputs
    params = pooling_params(Pooling(), truncate_prompt_tokens=truncate_prompt_tokens)
    outs = run([partial(_prompt, processor, one) for one in many], params)
    return [PoolingRequestOutput.of(out, _embedding(out, dimensions)) for out in outs]


def _embedding(out: RequestOutput, dimensions: int | None) -> EmbeddingOutput | None:
    pooled = _pooled(out)
    return None if pooled is None else EmbeddingOutput(embedding(pooled, dimensions).tolist())


def _prompt(processor: Processor, given: Input) -> Prompt:
    if isinstance(given, Mapping) and "messages" in given:
        return processor.from_chat(given["messages"], allow_paths=True)
    return processor.from_prompt(given)


def scores(
    processor: Processor,
    run: Run,
    first: Side | Sequence[Side],
    second: Side | Sequence[Side],
    *,
    instruction: str | None = None,
    truncate_prompt_tokens: int | None = None,
) -> Scores:
    """A model that embeds gives the cosine similarity, a reranker the probability of yes."""
    check_task(processor.checkpoint.task, "score", "embed")
    pairs = paired(sides_of(first), sides_of(second))
    more = {"truncate_prompt_tokens": truncate_prompt_tokens}
    if processor.checkpoint.task == "embed":
        return _similarities(processor, partial(_run_embed, run, more), pairs)
    makers = [partial(pair_prompt, processor, *pair, instruction) for pair in pairs]
    outs = run(makers, pooling_params(no_and_yes(processor), **more))
    return [PoolingRequestOutput.of(out, _relevance(out)) for out in outs]


def pair_prompt(processor: Processor, query: Side, document: Side, instruction: str | None) -> Prompt:
    messages = pair_messages(processor, query, document, instruction)
    return processor.from_chat(messages, chat_template_kwargs=PAIR_KWARGS, allow_paths=True)


def _run_embed(
    run: Run, more: Mapping[str, Any], makers: Sequence[Callable[[], Prompt]]
) -> list[RequestOutput]:
    return run(makers, pooling_params(Pooling(), **more))


def _similarities(
    processor: Processor,
    embed: Callable[[Sequence[Callable[[], Prompt]]], list[RequestOutput]],
    pairs: Sequence[tuple[Side, Side]],
) -> Scores:
    outs = embed([partial(side_prompt, processor, side) for pair in pairs for side in pair])
    found = []
    for left, right in zip(outs[::2], outs[1::2], strict=True):
        first, second = _pooled(left), _pooled(right)
        score = ScoringOutput(similarity(first, second)) if first and second else None
        found.append(PoolingRequestOutput.of(left if left.error else right, score))
    return found


def side_prompt(processor: Processor, side: Side) -> Prompt:
    """Text as it is; parts as a user's message."""
    if isinstance(side, str):
        return processor.from_prompt(side)
    return processor.from_chat([{"role": "user", "content": side.get("content")}], allow_paths=True)


def _relevance(out: RequestOutput) -> ScoringOutput | None:
    pooled = _pooled(out)
    return None if pooled is None else ScoringOutput(relevance(pooled))


def _pooled(out: RequestOutput) -> bytes | None:
    return out.outputs[0].pooled if out.outputs else None
