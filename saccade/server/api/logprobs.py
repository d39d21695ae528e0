"""Log probabilities in the forms of OpenAI's two completion APIs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any

from saccade.outputs import Logprob, prompt_logprobs
from saccade.processor.tokenizer import Tokenizer
from saccade.types.step import Logprobs

_LOWEST = -9999.0  # JSON has no minus infinity


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[Logprobs], tokenizer: Tokenizer, shows_ids: bool
) -> dict[str, Any]:
    content = [
        _entry(token_id, entry.logprob, tokenizer, shows_ids)
        | {"top_logprobs": [_entry(other, value, tokenizer, shows_ids) for other, value in entry.top]}
        for token_id, entry in zip(token_ids, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[Logprobs | None],
    tokenizer: Tokenizer,
    offset: int,
    shows_ids: bool,
) -> dict[str, Any]:
    """`offset` is where the first token begins in the text of the output. None: of a prompt's first token."""
    text_of = cache(partial(_text, tokenizer=tokenizer))
    texts = [text_of(token_id) for token_id in token_ids]
    offsets = list(accumulate(map(len, texts), initial=offset))[:-1]
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for entry in logprobs:
        if entry is None:
            values.append(None)
            tops.append(None)
            continue
        values.append(_finite(entry.logprob))
        tops.append({_name(other, text_of(other), shows_ids): _finite(value) for other, value in entry.top})
    return {
        "tokens": [_name(token_id, text, shows_ids) for token_id, text in zip(token_ids, texts, strict=True)],
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def prompt_body(token_ids: Sequence[int], entries: Sequence[Logprobs], tokenizer: Tokenizer) -> list[Any]:
    """vLLM's form: for each token of the prompt but the first an object by token id."""
    positions = prompt_logprobs(token_ids, entries, partial(_text, tokenizer=tokenizer))
    return [position and {str(name): _shown(one) for name, one in position.items()} for position in positions]


def _shown(entry: Logprob) -> dict[str, Any]:
    return {**entry._asdict(), "logprob": _finite(entry.logprob)}


def _entry(token_id: int, logprob: float, tokenizer: Tokenizer, shows_ids: bool) -> dict[str, Any]:
    text = _text(token_id, tokenizer)
    # A token that is part of a character decodes to U+FFFD, which hides its bytes.
    utf8 = None if "\ufffd" in text else list(text.encode())
    return {"token": _name(token_id, text, shows_ids), "logprob": _finite(logprob), "bytes": utf8}


def _name(token_id: int, text: str, shows_ids: bool) -> str:
    return f"token_id:{token_id}" if shows_ids else text


def _text(token_id: int, tokenizer: Tokenizer) -> str:
    return tokenizer.decode([token_id], skip_special_tokens=False)


def _finite(value: float) -> float:
    return max(value, _LOWEST)
