"""Routes that need no engine: /tokenize, /detokenize, the bill of a chat, and counting of prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from saccade.errors import RequestError
from saccade.processor.input_processor import Processor
from saccade.server.api.chunks import bill_body
from saccade.server.http.request_context import Exchange
from saccade.server.request import fields
from saccade.server.request.chat import read_chat
from saccade.server.request.messages import MessageRequest, read_message
from saccade.server.request.responses import ResponseRequest, read_response
from saccade.server.service import Service


async def bill(service: Service, exchange: Exchange) -> dict[str, Any]:
    """What the engine would charge for a chat. Reads the headers of its images, decodes none."""
    request = await service.read(read_chat, exchange)
    service.check_model(request.response_options.model)
    billed, timing = await service.prepare_chat(request, exchange)
    tokens_left = max(0, service.limits.max_model_len - len(billed.prompt))
    return {
        "object": "bill",
        "model": service.names[0],
        **bill_body(billed.bill),
        "times_ms": {"prepare": round(timing.prepare_ms, 3)},
        "max_model_len": service.limits.max_model_len,
        "max_tokens_left": tokens_left,
        "fits": tokens_left > 0,
    }


async def tokenize(service: Service, exchange: Exchange) -> dict[str, Any]:
    caller = exchange.caller
    body = await service.decode(exchange)
    given = await service.in_thread(caller, service.fields.read, body, fields.TOKENIZE)
    service.check_model(given.get("model"))
    if ("prompt" in given) == ("messages" in given):
        raise RequestError("give either prompt or messages", param="prompt")
    if "messages" in given:
        chat = {name: value for name, value in given.items() if name in fields.CHAT}
        request = await service.check(read_chat, chat, caller)
        billed, _ = await service.prepare_chat(request, exchange)
        ids: Sequence[int] = billed.prompt.token_ids
    else:
        encode = service.processor.tokenizer.encode
        ids = await service.in_thread(caller, encode, given["prompt"], given.get("add_special_tokens", True))
    strings = None
    if given.get("return_token_strs"):
        token = service.processor.tokenizer.token
        strings = await service.in_thread(caller, lambda: list(map(token, ids)))
    return {
        "count": len(ids),
        "max_model_len": service.limits.max_model_len,
        "tokens": list(ids),
        "token_strs": strings,
    }


async def detokenize(service: Service, exchange: Exchange) -> dict[str, Any]:
    body = await service.decode(exchange)
    if isinstance(body.get("tokens"), list):
        service.check_ids(len(body["tokens"]), "tokens")
    given = await service.in_thread(exchange.caller, service.fields.read, body, fields.DETOKENIZE)
    service.check_model(given.get("model"))
    text = await service.in_thread(exchange.caller, _text_of, service.processor, given.get("tokens"))
    return {"prompt": text}


def _text_of(processor: Processor, tokens: Sequence[int] | None) -> str:
    size = processor.checkpoint.config.text.vocab_size
    if not tokens or not all(0 <= token < size for token in tokens):
        message = f"tokens must be a list of ids from 0 to {size - 1} that is not empty"
        raise RequestError(message, param="tokens")
    return processor.tokenizer.decode(tokens, False)


async def input_tokens(service: Service, exchange: Exchange) -> dict[str, Any]:
    """OpenAI's counting route. Takes the body of /v1/responses."""
    request = await service.read(read_response, exchange)
    return {"object": "response.input_tokens", "input_tokens": await _count(service, request, exchange)}


async def message_tokens(service: Service, exchange: Exchange) -> dict[str, Any]:
    """Anthropic's counting route. Takes the body of /v1/messages, in which max_tokens may be missing."""
    request = await service.read(read_message, exchange, False)
    return {"input_tokens": await _count(service, request, exchange)}


async def _count(service: Service, request: ResponseRequest | MessageRequest, exchange: Exchange) -> int:
    with request.source_paths.renaming():
        service.check_model(request.chat.response_options.model)
        billed, _ = await service.prepare_chat(request.chat, exchange)
    return len(billed.prompt)
