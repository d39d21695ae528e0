"""The routes that run nothing: tokens of a text or a chat, text of tokens, the bill of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from saccade.errors import RequestError
from saccade.processor.prompt import Processor
from saccade.server.api.chunks import bill_body
from saccade.server.http.caller import Caller
from saccade.server.http.limits import ByteLease, Upload
from saccade.server.request import fields
from saccade.server.request.adapter import SourcePaths
from saccade.server.request.chat import ChatRequest, read_chat
from saccade.server.request.messages import read_message
from saccade.server.request.responses import read_response
from saccade.server.service import Service


async def bill(service: Service, upload: Upload, caller: Caller, lease: ByteLease) -> dict[str, Any]:
    """What a chat would cost: the numbers the engine would charge, from headers alone."""
    request = await service.read(read_chat, await service.decode(upload), caller)
    service.check_model(request.response_options.model)
    billed, timing = await service.price_chat(request, caller, lease)
    context = service.limits.max_model_len
    room = max(0, context - len(billed.prompt))
    costs = bill_body(billed.bill) | {"times_ms": {"prepare": round(timing.prepare_ms, 3)}}
    fit = {"max_model_len": context, "max_tokens_left": room, "fits": room > 0}
    return {"object": "bill", "model": service.names[0], **costs, **fit}


async def tokenize(service: Service, upload: Upload, caller: Caller, lease: ByteLease) -> dict[str, Any]:
    given = service.fields.read(await service.decode(upload), fields.TOKENIZE)
    service.check_model(given.get("model"))
    if ("prompt" in given) == ("messages" in given):
        raise RequestError("give either prompt or messages", param="prompt")
    if "messages" in given:
        chat = {name: value for name, value in given.items() if name in fields.CHAT}
        request = await service.read(read_chat, chat, caller)
        billed, _ = await service.price_chat(request, caller, lease)
        ids: Sequence[int] = billed.prompt.token_ids
    else:
        encode = service.processor.tokenizer.encode
        ids = await service.in_thread(encode, given["prompt"], given.get("add_special_tokens", True))
    name = service.processor.tokenizer.token
    strings = await service.in_thread(lambda: list(map(name, ids))) if given.get("return_token_strs") else None
    return {
        "count": len(ids),
        "max_model_len": service.limits.max_model_len,
        "tokens": list(ids),
        "token_strs": strings,
    }


async def detokenize(service: Service, upload: Upload, caller: Caller, lease: ByteLease) -> dict[str, Any]:
    body = await service.decode(upload)
    if isinstance(body.get("tokens"), list):
        service.check_ids(len(body["tokens"]), "tokens")
    given = await service.in_thread(service.fields.read, body, fields.DETOKENIZE)
    service.check_model(given.get("model"))
    return {"prompt": await service.in_thread(_text_of, service.processor, given.get("tokens"))}


def _text_of(processor: Processor, tokens: Sequence[int] | None) -> str:
    size = processor.checkpoint.config.text.vocab_size
    if not tokens or not all(0 <= token < size for token in tokens):
        raise RequestError(f"tokens must be a list of ids from 0 to {size - 1} that is not empty", param="tokens")
    return processor.tokenizer.decode(tokens, False)


async def input_tokens(service: Service, upload: Upload, caller: Caller, lease: ByteLease) -> dict[str, Any]:
    """OpenAI's counting route: the body of /v1/responses, counted as the chat it stands for."""
    chat, places, _ = await service.read(read_response, await service.decode(upload), caller)
    return {"object": "response.input_tokens", "input_tokens": await _count(service, chat, places, caller, lease)}


async def message_tokens(service: Service, upload: Upload, caller: Caller, lease: ByteLease) -> dict[str, Any]:
    """Anthropic's counting route: the body of /v1/messages, but for the length of the answer."""
    chat, places = await service.read(read_message, await service.decode(upload), caller, False)
    return {"input_tokens": await _count(service, chat, places, caller, lease)}


async def _count(service: Service, chat: ChatRequest, places: SourcePaths, caller: Caller, lease: ByteLease) -> int:
    with places.renaming():
        service.check_model(chat.response_options.model)
        billed, _ = await service.price_chat(chat, caller, lease)
    return len(billed.prompt)
