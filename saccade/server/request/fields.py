"""Tables of request fields: the type of each, which are ignored, which are refused by name.

The tables are JSON schema, and /openapi.json shows them.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Set
from types import MappingProxyType
from typing import Any

from saccade.errors import RequestError, quoted
from saccade.processor.dialects.parser import OutputFormats
from saccade.sampling_params import FLOATS

logger = logging.getLogger("saccade.server")

Schema = Mapping[str, Any]

_INT: Schema = {"type": "integer"}
_NUM: Schema = {"type": "number"}
_BOOL: Schema = {"type": "boolean"}
_STR: Schema = {"type": "string"}
_LABEL: Schema = {"type": "string", "maxLength": 1024}  # stored, hashed or echoed, never interpreted
_OBJ: Schema = {"type": "object"}
_EFFORT: Schema = {"type": "string", "maxLength": 32}  # the chat template says which values it knows

SAMPLING: Mapping[str, Schema] = {
    "n": _INT,
    **dict.fromkeys(FLOATS, _NUM),
    "top_k": _INT,
    "seed": _INT,
    "stop": {"type": ["string", "array"], "items": _STR},
    "stop_token_ids": {"type": "array", "items": _INT},
    "max_tokens": _INT,
    "min_tokens": _INT,
    "ignore_eos": _BOOL,
    "skip_special_tokens": _BOOL,
    "include_stop_str_in_output": _BOOL,
    "logit_bias": {"type": "object", "additionalProperties": _NUM},
    "allowed_token_ids": {"type": "array", "items": _INT},
    "bad_words": {"type": "array", "items": _STR},
    "truncate_prompt_tokens": _INT,
    "thinking_token_budget": _INT,
    "prompt_logprobs": _INT,
    "best_of": _INT,
}
STRUCTURED: Mapping[str, Schema] = {  # the first is vLLM's newer spelling of the others
    "structured_outputs": _OBJ,
    "guided_json": {"type": ["string", "object"]},
    "guided_regex": _STR,
    "guided_choice": {"type": "array", "items": _STR},
    "guided_grammar": _STR,
    "structural_tag": {"type": ["string", "object"]},
}
_STREAM_OPTIONS: Schema = {
    "type": "object",
    "properties": {"include_usage": _BOOL, "continuous_usage_stats": _BOOL, "include_obfuscation": _BOOL},
}
_COMMON: Mapping[str, Schema] = {
    **SAMPLING,
    "model": _STR,
    "stream": _BOOL,
    "stream_options": _STREAM_OPTIONS,
    "return_token_ids": _BOOL,
    "return_tokens_as_token_ids": _BOOL,
    "include_bill": _BOOL,
    "cache_salt": _LABEL,
    "priority": _INT,
    "request_id": _STR,
    "user": _LABEL,
    "response_format": _OBJ,
    **STRUCTURED,
}
_DOCUMENT: Mapping[str, Schema] = {"pages": _STR, "text_layer": _BOOL}  # which pages, and their text
_PART: Schema = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["text", "image_url", "video_url", "file"]},
        "text": _STR,
        "image_url": {
            "type": ["object", "null"],
            "properties": {
                "url": _STR,
                "file_id": _STR,
                "detail": {"enum": ["auto", "low", "high", "original"]},
            },
        },
        "video_url": {"type": ["object", "null"], "properties": {"url": _STR}},
        "file": {
            "type": ["object", "null"],
            "properties": {"file_data": _STR, "file_url": _STR, "file_id": _STR, "filename": _STR},
        },
        **_DOCUMENT,
        "uuid": _STR,
    },
    "required": ["type"],
}
_MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"type": ["string", "array", "null"], "items": _PART},
    },
    "required": ["role"],
}
CHAT: Mapping[str, Schema] = {
    **_COMMON,
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
    "max_completion_tokens": _INT,
    "logprobs": _BOOL,
    "top_logprobs": _INT,
    "tools": {"type": "array", "items": _OBJ},
    "tool_choice": {"type": ["string", "object"]},
    "parallel_tool_calls": _BOOL,
    "add_generation_prompt": _BOOL,
    "continue_final_message": _BOOL,
    "chat_template_kwargs": _OBJ,
    "reasoning_effort": _EFFORT,
    "mm_processor_kwargs": _OBJ,
    "media_io_kwargs": {"type": "object", "properties": {"video": _OBJ}},
}
COMPLETION: Mapping[str, Schema] = {
    **_COMMON,
    "prompt": {"type": ["string", "array"]},
    "logprobs": _INT,
    "echo": _BOOL,
    "add_special_tokens": _BOOL,
}
TOKENIZE: Mapping[str, Schema] = {
    "model": _STR,
    "cache_salt": _LABEL,
    "prompt": _STR,
    "messages": CHAT["messages"],
    "add_special_tokens": _BOOL,
    "add_generation_prompt": _BOOL,
    "return_token_strs": _BOOL,
    "chat_template_kwargs": _OBJ,
    "mm_processor_kwargs": _OBJ,
    "tools": CHAT["tools"],
}
DETOKENIZE: Mapping[str, Schema] = {"model": _STR, "tokens": {"type": "array", "items": _INT}}

# --- routes that pool: no output is generated ---

_POOLING: Mapping[str, Schema] = {
    "model": _STR,
    "cache_salt": _LABEL,
    "priority": _INT,
    "request_id": _STR,
    "user": _LABEL,
    "include_bill": _BOOL,
    "truncate_prompt_tokens": _INT,
    "mm_processor_kwargs": _OBJ,
}
EMBEDDING: Mapping[str, Schema] = {
    **_POOLING,
    "input": {"type": ["string", "array"]},
    "messages": CHAT["messages"],
    "encoding_format": {"type": "string", "enum": ["float", "base64"]},
    "dimensions": _INT,
    "input_type": {"type": "string", "enum": ["query", "document"]},
    "add_special_tokens": _BOOL,
    "add_generation_prompt": _BOOL,
    "continue_final_message": _BOOL,
    "chat_template_kwargs": _OBJ,
    "media_io_kwargs": CHAT["media_io_kwargs"],
}
_SIDES: Schema = {"type": ["string", "array", "object"]}
SCORE: Mapping[str, Schema] = {
    **_POOLING,
    **dict.fromkeys(("text_1", "text_2", "data_1", "data_2", "queries", "documents", "items"), _SIDES),
    "instruction": _STR,
}
RERANK: Mapping[str, Schema] = {
    **_POOLING,
    "query": {"type": ["string", "object"]},
    "documents": {"type": ["array", "object"]},
    "top_n": _INT,
    "return_documents": _BOOL,
    "instruction": _STR,
}

# --- the Responses and the Messages API: their own fields, and a chat's where they have none ---

_OF_COMPLETIONS = ("n", "max_tokens", "stop", "best_of", "prompt_logprobs")
CHAT_EXTRAS: Mapping[str, Schema] = {
    **{name: schema for name, schema in SAMPLING.items() if name not in _OF_COMPLETIONS},
    "model": _STR,
    "stream": _BOOL,
    "cache_salt": _LABEL,
    "priority": _INT,
    "request_id": _STR,
    "chat_template_kwargs": _OBJ,
    "mm_processor_kwargs": _OBJ,
}
_INPUT_PART: Schema = {
    "type": "object",
    "properties": {
        "type": {
            "type": "string",
            "enum": ["input_text", "input_image", "input_file", "output_text", "refusal"],
        },
        "text": _STR,
        "image_url": _STR,
        "file_data": _STR,
        "file_url": _STR,
        "detail": {"enum": ["auto", "low", "high", "original"]},
        **_DOCUMENT,
    },
    "required": ["type"],
}
_INPUT_ITEM: Schema = {
    "type": "object",
    "properties": {
        "type": {"enum": ["message", "function_call", "function_call_output", "reasoning"]},
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant"]},
        "content": {"type": ["string", "array"], "items": _INPUT_PART},
        "call_id": _STR,
        "name": _STR,
        "arguments": _STR,
        "output": {"type": ["string", "array"], "items": _INPUT_PART},
    },
}
RESPONSES: Mapping[str, Schema] = {
    **CHAT_EXTRAS,
    "input": {"type": ["string", "array"], "items": _INPUT_ITEM},
    "instructions": _STR,
    "max_output_tokens": _INT,
    "stream_options": _STREAM_OPTIONS,
    "stop": SAMPLING["stop"],
    "text": {"type": "object", "properties": {"format": _OBJ}},
    "reasoning": {"type": "object", "properties": {"effort": _EFFORT}},
    "tools": CHAT["tools"],
    "tool_choice": CHAT["tool_choice"],
    "parallel_tool_calls": _BOOL,
    "include": {"type": "array", "items": _STR},
    "metadata": _OBJ,
    "user": _LABEL,
}
_BLOCK: Schema = {
    "type": "object",
    "properties": {
        "type": {
            "enum": ["text", "image", "document", "tool_use", "tool_result", "thinking", "redacted_thinking"]
        },
        "text": _STR,
        "source": {
            "type": "object",
            "properties": {
                "type": {"type": "string", "enum": ["base64", "url", "text"]},
                "media_type": _STR,
                "data": _STR,
                "url": _STR,
            },
        },
        "id": _STR,
        "name": _STR,
        "input": _OBJ,
        **_DOCUMENT,
        "tool_use_id": _STR,
        "content": {"type": ["string", "array"]},
    },
    "required": ["type"],
}
_ANTHROPIC_MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "enum": ["user", "assistant"]},
        "content": {"type": ["string", "array"], "items": _BLOCK},
    },
    "required": ["role", "content"],
}
MESSAGES: Mapping[str, Schema] = {
    **CHAT_EXTRAS,
    "messages": {"type": "array", "items": _ANTHROPIC_MESSAGE, "minItems": 1},
    "max_tokens": _INT,
    "system": {"type": ["string", "array"]},
    "stop_sequences": {"type": "array", "items": _STR},
    "tools": {"type": "array", "items": _OBJ},
    "tool_choice": {
        "type": "object",
        "properties": {"type": {"enum": ["auto", "any", "tool", "none"]}, "name": _STR},
    },
    "output_config": {"type": "object", "properties": {"format": _OBJ, "effort": _EFFORT}},
    "thinking": {
        "type": "object",
        "properties": {"type": {"enum": ["enabled", "disabled", "adaptive"]}, "budget_tokens": _INT},
    },
}

IGNORED: Set[str] = (
    {"metadata", "store", "service_tier", "safety_identifier", "verbosity", "prediction", "moderation"}
    | {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_control"}
    | {"reasoning", "web_search_options", "max_tool_calls"}
    | {"guided_decoding_backend", "spaces_between_special_tokens"}
)
"""Sent by client libraries. They have no effect."""

INERT: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),  # the template writes them
    "best_of": (1,),
    "return_tokens_as_token_ids": (False,),
    "continue_final_message": (False,),
    "echo": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "media_io_kwargs": ({},),
    "truncation": ("disabled",),
    "background": (False,),
    "top_logprobs": (0,),
}
"""Unsupported fields, ignored with these values."""

STATELESS = "this server keeps nothing between requests; send the whole conversation"
UNSUPPORTED: Mapping[str, str] = {  # and what to do instead
    "add_special_tokens": "the chat template writes them; leave it out, or send /v1/completions",
    "audio": "models here write text",
    "background": STATELESS,
    "bad_words_token_ids": "send bad_words",
    "best_of": "only /v1/chat/completions and /v1/completions have it",
    "chat_template": "the checkpoint's own is used; chat_template_kwargs sets its variables",
    "container": STATELESS,
    "context_management": STATELESS,
    "continue_final_message": "only /v1/chat/completions has it",
    "conversation": STATELESS,
    "documents": "put their text into messages",
    "echo": "only /v1/completions has it",
    "function_call": "send tool_choice",
    "functions": "send tools",
    "guided_whitespace_pattern": "two spaces or a line break may be between tokens of JSON; leave it out",
    "kv_transfer_params": "engines here do not hand KV blocks to each other",
    "length_penalty": "it is for beam search, which answers no requests here",
    "logits_processors": "send logit_bias, allowed_token_ids, bad_words or structured_outputs",
    "lora_path": "no adapters are loaded",
    "mcp_servers": "this server calls no tools; run them and send their results",
    "media_io_kwargs": "send mm_processor_kwargs",
    "modalities": "models here write text",
    "previous_response_id": STATELESS,
    "prompt_embeds": "send text, token ids or images",
    "prompt_logprobs": "only /v1/chat/completions and /v1/completions have it",
    "repetition_detection": "send repetition_penalty, frequency_penalty or stop",
    "return_tokens_as_token_ids": "only /v1/chat/completions and /v1/completions have it",
    "stop_regex": "send stop or stop_token_ids",
    "suffix": "models here do not fill in the middle",
    "top_logprobs": "only /v1/chat/completions has it",
    "truncation": "send less, or truncate_prompt_tokens",
    "use_beam_search": "send n and a temperature; beam search is LLM.beam_search in Python",
    "vllm_xargs": "they are for plugins, and there are none",
}

_TYPES: Mapping[str, tuple[type | tuple[type, ...], str]] = {  # in Python, and in words
    "integer": (int, "a whole number"),
    "number": ((int, float), "a number"),
    "boolean": (bool, "true or false"),
    "string": (str, "a string"),
    "object": (dict, "an object"),
    "array": (list, "a list"),
    "null": (type(None), "null"),
}


class FieldReader:
    """Checks bodies against a table. Logs each unknown field once."""

    def __init__(
        self,
        *,
        strict: bool,
        defaults: Mapping[str, Any] = MappingProxyType({}),
        formats: OutputFormats | None = None,
    ) -> None:
        self.defaults = defaults  # of sampling parameters
        self.formats = formats  # how the model writes calls
        self.scope = ""  # tenant whose requests share cached schema checks
        self._strict = strict
        self._logged: set[str] = set()

    def for_scope(self, scope: str) -> FieldReader:
        """A reader for the requests of one tenant."""
        reader = copy.copy(self)
        reader.scope = scope
        return reader

    def read(self, body: Mapping[str, Any], table: Mapping[str, Schema]) -> dict[str, Any]:
        """The known fields that are set. RequestError if one has a wrong type or is unsupported."""
        values = {name: value for name, value in body.items() if value is not None}
        for name, value in values.items():
            if name in table:
                _check(value, table[name], name)
            elif name in IGNORED:
                self._log_once(name, "which has no effect")
            else:
                self._check_unknown(name, value)
        return {name: value for name, value in values.items() if name in table}

    def _check_unknown(self, name: str, value: Any) -> None:
        if value in INERT.get(name, ()):
            return
        if name in UNSUPPORTED:
            raise unsupported(name)
        short_name = name[:64]
        if self._strict:
            reason = "this server refuses unknown fields (--strict-params)"
            message = f"the field {short_name!r} is unknown, and {reason}"
            raise RequestError(message, code="unknown_parameter", param=short_name)
        self._log_once(short_name, "which is unknown and ignored")

    def _log_once(self, name: str, what: str) -> None:
        if name not in self._logged and len(self._logged) < 1000:  # bounded: clients choose the names
            self._logged.add(name)
            logger.info("a request has the field %r, %s", name, what)


def unsupported(name: str) -> RequestError:
    message = f"{name} is not supported by this server: {UNSUPPORTED[name]}"
    return RequestError(message, code="unsupported", param=name)


def _check(value: Any, schema: Schema, path: str) -> None:
    kinds = schema.get("type", ())
    if isinstance(kinds, str):
        kinds = (kinds,)
    if kinds and not any(_has_type(value, kind) for kind in kinds):
        expected = " or ".join(_TYPES[kind][1] for kind in kinds)
        raise RequestError(f"{path} must be {expected}, not {_shown(value)}", param=path)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise RequestError(f"{path} must fit in 64 bits", param=path)
    max_chars = schema.get("maxLength")
    if max_chars is not None and len(value) > max_chars:
        message = f"{path} has {len(value)} characters and may have {max_chars}; send less"
        raise RequestError(message, param=path)
    if isinstance(value, list) and schema.get("items", {}).get("type") in ("integer", "string"):
        for item in value:
            _check(item, schema["items"], path)


def _has_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind][0])


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    return "a list" if isinstance(value, list) else quoted(value)
