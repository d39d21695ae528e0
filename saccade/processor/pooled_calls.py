"""`LLM.embed` and `LLM.score`: inputs become prompts, and what the engine pools becomes outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from saccade.outputs import EmbeddingOutput, PoolingRequestOutput, RequestOutput, ScoringOutput
from saccade.processor.call_arguments import as_many
from saccade.processor.input_processor import Processor
from saccade.processor.late_interaction import QUERY_KWARGS, template_kwargs
from saccade.processor.pooling import (
    PAIR_KWARGS,
    Side,
    check_dimensions,
    columns,
    embedding,
    embedding_pooling,
    no_and_yes,
    pair_messages,
    paired,
    pooling_params,
    relevance,
    sides_of,
    similarity,
    token_dim,
)
from saccade.processor.tasks import check_task
from saccade.sampling_params import SamplingParams
from saccade.types.prompt import Prompt

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
    input_type: str | None = None,
    truncate_prompt_tokens: int | None = None,
) -> Embeddings:
    """An input is what `LLM.generate` takes, or {"messages": [...]} for the chat template.

    `input_type`, of late interaction: "query" puts a text into the prompt that queries were trained with.
    """
    check_task(processor.checkpoint.task, "embed")
    check_dimensions(dimensions, processor)
    sources: Sequence[Input] = as_many(inputs)
    dim = token_dim(processor)
    kwargs = template_kwargs(input_type, dim)
    params = pooling_params(embedding_pooling(processor), truncate_prompt_tokens=truncate_prompt_tokens)
    outs = run([partial(_prompt, processor, one, kwargs) for one in sources], params)
    return [PoolingRequestOutput.of(out, _embedding(out, dim, dimensions)) for out in outs]


def _embedding(out: RequestOutput, dim: int | None, dimensions: int | None) -> EmbeddingOutput | None:
    pooled = _pooled(out)
    return None if pooled is None else EmbeddingOutput(embedding(pooled, dimensions, dim).tolist())


def _prompt(processor: Processor, source: Input, kwargs: Mapping[str, Any]) -> Prompt:
    match source:
        case str():
            return side_prompt(processor, source, kwargs)
        case {"messages": messages}:
            return processor.from_chat(messages, chat_template_kwargs=kwargs, allow_paths=True)
    return processor.from_prompt(source)


def scores(
    processor: Processor,
    run: Run,
    first: Side | Sequence[Side],
    second: Side | Sequence[Side],
    *,
    instruction: str | None = None,
    truncate_prompt_tokens: int | None = None,
) -> Scores:
    """A model that embeds gives the cosine similarity or MaxSim, a reranker the probability of yes."""
    check_task(processor.checkpoint.task, "score", "embed")
    pairs = paired(sides_of(first), sides_of(second))
    more = {"truncate_prompt_tokens": truncate_prompt_tokens}
    if processor.checkpoint.task == "embed":
        return _similarities(processor, run, pooling_params(embedding_pooling(processor), **more), pairs)
    makers = [partial(pair_prompt, processor, *pair, instruction) for pair in pairs]
    outs = run(makers, pooling_params(no_and_yes(processor), **more))
    return [PoolingRequestOutput.of(out, _relevance(out)) for out in outs]


def pair_prompt(processor: Processor, query: Side, document: Side, instruction: str | None) -> Prompt:
    messages = pair_messages(processor, query, document, instruction)
    return processor.from_chat(messages, chat_template_kwargs=PAIR_KWARGS, allow_paths=True)


def _similarities(
    processor: Processor, run: Run, params: SamplingParams, pairs: Sequence[tuple[Side, Side]]
) -> Scores:
    first, second = columns(pairs)
    dim = token_dim(processor)
    query_kwargs = QUERY_KWARGS if dim is not None else {}
    prompts = [partial(side_prompt, processor, side, query_kwargs) for side in first]
    outs = run([*prompts, *(partial(side_prompt, processor, side, {}) for side in second)], params)
    lefts = outs[: len(first)] if len(first) > 1 else outs[:1] * len(second)
    results = []
    for first_out, second_out in zip(lefts, outs[len(first) :], strict=True):
        query, document = _pooled(first_out), _pooled(second_out)
        score = ScoringOutput(similarity(query, document, dim)) if query and document else None
        results.append(PoolingRequestOutput.of(first_out if first_out.error else second_out, score))
    return results


def side_prompt(processor: Processor, side: Side, kwargs: Mapping[str, Any]) -> Prompt:
    """Text as it is, unless the chat template has a use for `kwargs`; parts as a user's message."""
    if isinstance(side, str) and not kwargs:
        return processor.from_prompt(side)
    content = side if isinstance(side, str) else side.get("content")
    messages = [{"role": "user", "content": content}]
    return processor.from_chat(messages, chat_template_kwargs=kwargs, allow_paths=True)


def _relevance(out: RequestOutput) -> ScoringOutput | None:
    pooled = _pooled(out)
    return None if pooled is None else ScoringOutput(relevance(pooled))


def _pooled(out: RequestOutput) -> bytes | None:
    return out.outputs[0].pooled if out.outputs else None
