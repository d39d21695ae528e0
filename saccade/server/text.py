"""The routes that run nothing: tokens of a text or a chat, text of tokens, the bill of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from saccade.server import fields
from saccade.server.deliver import bill_body
from saccade.server.limits import Held, Upload
from saccade.server.media import check_chars
from saccade.server.protocol import read_chat
from saccade.server.service import Caller, Service
from saccade.types import RequestError


async def bill(service: Service, upload: Upload, caller: Caller, held: Held) -> dict[str, Any]:
    """What a chat would cost: the numbers the engine would charge, from headers alone."""
    request = await service.read(read_chat, await service.decode(upload))
    service.check_model(request.wanted.model)
    priced, timing = await service.price_chat(request, caller, held)
    room = max(0, service.limits.max_model_len - len(priced.prompt))
    costs = bill_body(priced.bill) | {"times_ms": {"prepare": round(timing.prepare_ms, 3)}}
    return {"object": "bill", "model": service.names[0], **costs, "max_tokens_left": room, "fits": room > 0}


async def tokenize(service: Service, upload: Upload, caller: Caller, held: Held) -> dict[str, Any]:
    given = service.fields.read(await service.decode(upload), fields.TOKENIZE)
    service.check_model(given.get("model"))
    if ("prompt" in given) == ("messages" in given):
        raise RequestError("give either prompt or messages", param="prompt")
    if "messages" in given:
        chat = {name: value for name, value in given.items() if name in fields.CHAT}
        request = await service.read(read_chat, chat)
        priced, _ = await service.price_chat(request, caller, held)
        ids: Sequence[int] = priced.prompt.token_ids
    else:
        check_chars(len(given["prompt"]), service.max_chars, "prompt")
        encode = service.processor.tokenizer.encode
        ids = await service.in_thread(encode, given["prompt"], given.get("add_special_tokens", True))
    strings = [service.processor.tokenizer.token(i) for i in ids] if given.get("return_token_strs") else None
    return {
        "count": len(ids),
        "max_model_len": service.limits.max_model_len,
        "tokens": list(ids),
        "token_strs": strings,
    }


async def detokenize(service: Service, upload: Upload, caller: Caller, held: Held) -> dict[str, Any]:
    given = service.fields.read(await service.decode(upload), fields.DETOKENIZE)
    service.check_model(given.get("model"))
    tokens, size = given.get("tokens"), service.processor.checkpoint.config.text.vocab_size
    if not tokens or not all(0 <= token < size for token in tokens):
        raise RequestError(f"tokens must be a list of ids from 0 to {size - 1} that is not empty", param="tokens")
    return {"prompt": await service.in_thread(service.processor.tokenizer.decode, tokens, False)}


async def input_tokens(service: Service, upload: Upload, caller: Caller, held: Held) -> dict[str, Any]:
    """OpenAI's counting route: the input of its Responses API, counted as the chat it stands for."""
    given = service.fields.read(await service.decode(upload), fields.INPUT_TOKENS)
    if "input" not in given:
        raise RequestError("input is missing; send a string or a list of messages", param="input")
    chat: dict[str, Any] = {"messages": _messages(given), "model": given.get("model"), "tools": given.get("tools")}
    request = await service.read(read_chat, chat)
    service.check_model(request.wanted.model)
    priced, _ = await service.price_chat(request, caller, held)
    return {"object": "response.input_tokens", "input_tokens": len(priced.prompt)}


def _messages(given: Mapping[str, Any]) -> list[Any]:
    first = [{"role": "system", "content": given["instructions"]}] if "instructions" in given else []
    if isinstance(given["input"], str):
        return [*first, {"role": "user", "content": given["input"]}]
    return first + [_message(item, f"input[{index}]") for index, item in enumerate(given["input"])]


def _message(item: Any, where: str) -> Any:
    if not isinstance(item, Mapping) or item.get("type", "message") != "message":
        raise RequestError(f"{where} must be a message with role and content", param=where)
    content = item.get("content")
    if isinstance(content, list):
        content = [_part(part, f"{where}.content[{index}]") for index, part in enumerate(content)]
    return {"role": item.get("role"), "content": content}


def _part(part: Any, where: str) -> Any:
    """input_text and input_image as chats have them. There an image's URL is a bare string."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("input_text", "output_text"):
        return {"type": "text", "text": part.get("text")}
    if kind == "input_image" and part.get("file_id") is None:
        return {"type": "image_url", "image_url": {"url": part.get("image_url"), "detail": part.get("detail")}}
    raise RequestError(f"{where} must be an input_text or an input_image with image_url", param=where)
