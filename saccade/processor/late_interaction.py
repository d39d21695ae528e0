"""Late interaction: prompts of queries and documents as the model was trained, token vectors, and MaxSim."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from saccade.checkpoint.settings import setting
from saccade.errors import RequestError, quoted
from saccade.sampling_params import Pooling

Vectors = npt.NDArray[np.float32]  # [tokens, dim]

MAX_VECTOR_BYTES = 64 << 20
"""The limit of a request's token vectors, as they are sent: float32, or numbers of JSON."""

QUERY_KWARGS = {"input_type": "query"}
"""Arguments of the chat template."""

_FLOAT_BYTES = 4
_NUMBER_BYTES = 20  # of JSON, with a comma

EVERY_TOKEN = Pooling(every_token=True)

_VISUAL_PROMPT = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|><|endoftext|>"
)
_QUERY_PREFIX = "Query: "
_TEMPLATE = """\
{%- macro text_of(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- else -%}
    {%- for part in content -%}
      {{- VISUAL_PROMPT if part.type == 'image' else part.text -}}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
  {%- if input_type is defined and input_type == 'query' -%}
    {{- QUERY_PREFIX + text_of(message.content) + pad_token * 10 + '\\n' -}}
  {%- else -%}
    {{- text_of(message.content) -}}
  {%- endif -%}
{%- endfor -%}
"""


def chat_template(processor: Mapping[str, Any], dim: int | None) -> str | None:
    """An image becomes the prompt that documents were trained with. None for other models.

    `processor`: processor_config.json. `dim`: of token vectors.
    """
    if dim is None:
        return None
    visual = setting(processor, "visual_prompt_prefix", _VISUAL_PROMPT)
    query = setting(processor, "query_prefix", _QUERY_PREFIX)
    filled = _TEMPLATE.replace("VISUAL_PROMPT", json.dumps(visual, ensure_ascii=False))
    return filled.replace("QUERY_PREFIX", json.dumps(query, ensure_ascii=False))


def token_vectors(pooled: bytes, dim: int) -> Vectors:
    """One of length 1 for each token."""
    return np.frombuffer(pooled, np.float32).reshape(-1, dim)


def max_sim(query: Vectors, document: Vectors) -> float:
    """Each token of the query with the token of the document that is most like it, summed."""
    best: npt.NDArray[np.float64] = (query @ document.T).max(axis=1).astype(np.float64)
    return float(best.sum())


def check_size(num_tokens: int, dim: int, *, as_numbers: bool = False) -> None:
    """Check all token vectors of a request together."""
    size = num_tokens * dim * (_NUMBER_BYTES if as_numbers else _FLOAT_BYTES)
    if size > MAX_VECTOR_BYTES:
        took = f"{num_tokens} tokens give {size} bytes of vectors, and a request may have {MAX_VECTOR_BYTES}"
        how = ", or set encoding_format to base64" if as_numbers else ""
        message = f"{took}; send fewer inputs at once{how}"
        raise RequestError(message, code="request_too_large", param="input")


def template_kwargs(input_type: Any, dim: int | None) -> Mapping[str, Any]:
    """What `input_type` of a request means for the chat template."""
    if input_type is None:
        return {}
    if input_type not in ("query", "document"):
        message = f"input_type must be query or document, not {quoted(input_type)}"
        raise RequestError(message, param="input_type")
    if dim is None:
        reason = "this model does not tell queries from documents"
        raise RequestError(f"input_type cannot be used: {reason}", code="unsupported", param="input_type")
    return QUERY_KWARGS if input_type == "query" else {}
