"""Routes that need no engine: /tokenize, /detokenize, the bill of a chat, and counting of prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from saccade.errors import RequestError
from saccade.processor.input_processor import Processor
from saccade.server.api.chunks import bill_body
from saccade.server.http.request_context import Exchange
from saccade.server.pipeline import check_ids, check_request, prepare_chat, read_request
from saccade.server.request import fields
from saccade.server.request.chat import read_chat
from saccade.server.request.messages import MessageRequest, read_message
from saccade.server.request.responses import ResponseRequest, read_response
from saccade.server.service import Service


async def bill(service: Service, exchange: Exchange) -> dict[str, Any]:
    """What the engine would charge for a chat. Reads the headers of its images, decodes none."""
    request = await read_request(service, read_chat, exchange)
    service.check_model(request.response_options.model)
    prompt, prices = await prepare_chat(service, request, exchange)
    tokens_left = max(0, service.limits.max_model_len - len(prompt))
    return {
        "object": "bill",
        "model": service.names[0],
        **bill_body(prices),
        "times_ms": {"prepare": round(exchange.caller.record.ms_between("arrived", "prepared"), 3)},
        "max_model_len": service.limits.max_model_len,
        "max_tokens_left": tokens_left,
        "fits": tokens_left > 0,
    }


async def tokenize(service: Service, exchange: Exchange) -> dict[str, Any]:
    in_thread = partial(service.turns.in_thread, exchange.caller)
    body = await service.bodies.read(exchange)
    options = await in_thread(service.fields.read, body, fields.TOKENIZE)
    service.check_model(options.get("model"))
    if ("prompt" in options) == ("messages" in options):
        raise RequestError("give either prompt or messages", param="prompt")
    if "messages" in options:
        chat = {name: value for name, value in options.items() if name in fields.CHAT}
        request = await check_request(service, read_chat, chat, exchange.caller)
        ids: Sequence[int] = (await prepare_chat(service, request, exchange)).prompt.token_ids
    else:
        encode = service.processor.tokenizer.encode
        ids = await in_thread(encode, options["prompt"], options.get("add_special_tokens", True))
    strings = None
    if options.get("return_token_strs"):
        token = service.processor.tokenizer.token
        strings = await in_thread(lambda: list(map(token, ids)))
    return {
        "count": len(ids),
        "max_model_len": service.limits.max_model_len,
        "tokens": list(ids),
        "token_strs": strings,
    }


async def detokenize(service: Service, exchange: Exchange) -> dict[str, Any]:
    in_thread = partial(service.turns.in_thread, exchange.caller)
    body = await service.bodies.read(exchange)
    if isinstance(body.get("tokens"), list):
        check_ids(service, len(body["tokens"]), "tokens")
    options = await in_thread(service.fields.read, body, fields.DETOKENIZE)
    service.check_model(options.get("model"))
    return {"prompt": await in_thread(_text_of, service.processor, options.get("tokens"))}


def _text_of(processor: Processor, tokens: Sequence[int] | None) -> str:
    size = processor.checkpoint.config.text.vocab_size
    if not tokens or not all(0 <= token < size for token in tokens):
        message = f"tokens must be a list of ids from 0 to {size - 1} that is not empty"
        raise RequestError(message, param="tokens")
    return processor.tokenizer.decode(tokens, False)


async def input_tokens(service: Service, exchange: Exchange) -> dict[str, Any]:
    """OpenAI's counting route. Takes the body of /v1/responses."""
    request = await read_request(service, read_response, exchange)
    return {"object": "response.input_tokens", "input_tokens": await _count(service, request, exchange)}


async def message_tokens(service: Service, exchange: Exchange) -> dict[str, Any]:
    """Anthropic's counting route. Takes the body of /v1/messages, in which max_tokens may be missing."""
    request = await read_request(service, read_message, exchange, False)
    return {"input_tokens": await _count(service, request, exchange)}


async def _count(service: Service, request: ResponseRequest | MessageRequest, exchange: Exchange) -> int:
    with request.source_paths.renaming():
        service.check_model(request.chat.response_options.model)
        return len((await prepare_chat(service, request.chat, exchange)).prompt)
