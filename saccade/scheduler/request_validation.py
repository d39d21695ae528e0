"""Requests that could never run are refused on arrival, with the values and the flag that moves the limit."""

from __future__ import annotations

from collections.abc import Sequence

from saccade.errors import RequestError
from saccade.options.engine import SchedulerConfig
from saccade.scheduler.fair_queue import FairQueue
from saccade.types.prompt import Span
from saccade.types.request import Request, Tenant


def refuse_overload(tenant: Tenant, queue: FairQueue, num_running: int, config: SchedulerConfig) -> None:
    """Raise RequestError if the queue is full. Requests that could start in the next step do not count.

    A tenant may use its share of the queue even where others have filled it: fewer than twice `max_waiting`.
    """
    limit = config.max_waiting
    free = config.max_num_seqs - num_running
    num_waiting = queue.num_waiting
    if limit is None or num_waiting - free < limit:
        return
    of_tenant = queue.waiting_of(tenant)
    is_crowded = num_waiting - free >= 2 * limit  # shares of tenants that came one by one add up to more
    if is_crowded or of_tenant + 1 > queue.max_waiting(tenant, limit):
        shared = f"; {of_tenant} of them are yours, and others wait too" if of_tenant < num_waiting else ""
        raise RequestError(
            f"{num_waiting} requests are waiting and {limit} may{shared}; try again later or raise "
            "--max-waiting",
            code="overloaded",
        )


def refuse_impossible(request: Request, config: SchedulerConfig) -> None:
    """Raise RequestError if the request could not run even alone."""
    _check_length(request, config)
    _check_blocks(request, config)
    for index, span in enumerate(request.prompt.spans):
        _check_span(index, span, config)
        if span.is_cross_attended:
            _check_company(index, request.prompt.spans, config)


def _check_length(request: Request, config: SchedulerConfig) -> None:
    num_prompt = len(request.prompt)
    if num_prompt == 0:
        raise RequestError("the prompt is empty; it needs at least one token")
    if request.params.pooling is not None:
        _check_pooled_length(num_prompt, config)
        return
    total = num_prompt + request.max_tokens
    if total > config.max_model_len or request.max_tokens < 1:
        num_media = sum(span.length for span in request.prompt.spans)
        raise RequestError(
            f"the prompt has {num_prompt} tokens ({num_media} of them for pictures) and max_tokens is "
            f"{request.max_tokens}, {total} together, but prompt and answer may have {config.max_model_len} "
            "with at least 1 for the answer; send less, lower max_tokens or raise --max-model-len",
            code="context_length_exceeded",
        )


def _check_pooled_length(num_prompt: int, config: SchedulerConfig) -> None:
    if num_prompt > config.max_model_len:
        raise RequestError(
            f"the input has {num_prompt} tokens and may have {config.max_model_len}; send less or raise "
            "--max-model-len",
            code="context_length_exceeded",
        )


def _check_blocks(request: Request, config: SchedulerConfig) -> None:
    # The last generated token is never computed, so it needs no slot.
    num_positions = len(request.prompt) + request.max_tokens - 1
    num_needed = -(-num_positions // config.block_size)
    if num_needed > config.num_blocks:
        raise RequestError(
            f"the prompt of {len(request.prompt)} tokens with max_tokens {request.max_tokens} needs "
            f"{num_needed} KV blocks of {config.block_size} tokens, but there are {config.num_blocks}; send "
            "less, lower max_tokens or raise --kv-cache-gb",
            code="context_length_exceeded",
        )


def _check_company(index: int, spans: Sequence[Span], config: SchedulerConfig) -> None:
    """Images that one token attends to are resident together. The same image twice is there once."""
    start = spans[index].start
    together = {span.key: span.num_embeds for span in spans[: index + 1] if span.pinned_until > start}
    total = sum(together.values())
    if total > config.encoder_cache_slots:
        raise RequestError(
            f"{len(together)} pictures of the prompt stand together and have {total} embeddings, but "
            f"{config.encoder_cache_slots} fit in the encoder cache; send fewer of them side by side, lower "
            "--max-pixels or raise --encoder-cache-gb",
            code="image_too_large",
        )


def _check_span(index: int, span: Span, config: SchedulerConfig) -> None:
    limits = (
        (span.encode_cost, config.encoder_budget, "may be encoded in one step", "--encoder-budget"),
        (span.num_embeds, config.encoder_cache_slots, "fit in the encoder cache", "--encoder-cache-gb"),
    )
    for count, limit, what, flag in limits:
        if count > limit:
            raise RequestError(
                f"picture {index + 1} of the prompt has {count} embeddings, but {limit} {what}; send it "
                f"smaller, lower --max-pixels or raise {flag}",
                code="image_too_large",
                key=span.key,
            )
