"""The body of POST /v1/batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from saccade.apps.batch.batch_store import WINDOW
from saccade.apps.batch.line_helper import URLS
from saccade.errors import RequestError, quoted
from saccade.server.request.fields import FieldReader, Schema

_MAX_PAIRS = 16  # of metadata
_MAX_KEY = 64
_MAX_VALUE = 512

BATCH: Mapping[str, Schema] = {
    "input_file_id": {"type": "string", "maxLength": 64},
    "endpoint": {"type": "string", "enum": list(URLS)},
    "completion_window": {"type": "string", "enum": [WINDOW]},
    "metadata": {"type": "object", "additionalProperties": {"type": "string"}, "maxProperties": _MAX_PAIRS},
}


class BatchOrder(NamedTuple):
    input_file_id: str
    endpoint: str
    metadata: dict[str, str] | None


def read_batch(body: Mapping[str, Any], fields: FieldReader) -> BatchOrder:
    values = fields.read(body, BATCH)
    for name in ("input_file_id", "endpoint", "completion_window"):
        if name not in values:
            raise RequestError(f"{name} is missing", param=name)
    for name, choices in (("endpoint", URLS), ("completion_window", (WINDOW,))):
        if values[name] not in choices:
            message = f"{name} must be one of {', '.join(choices)}, not {quoted(values[name])}"
            raise RequestError(message, param=name)
    metadata = values.get("metadata")
    if metadata is not None:
        _check_metadata(metadata)
    return BatchOrder(values["input_file_id"], values["endpoint"], metadata)


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    if len(metadata) > _MAX_PAIRS:
        raise RequestError(f"metadata has {len(metadata)} pairs and may have {_MAX_PAIRS}", param="metadata")
    for key, value in metadata.items():
        if not isinstance(value, str) or len(key) > _MAX_KEY or len(value) > _MAX_VALUE:
            limits = f"strings, keys of up to {_MAX_KEY} characters and values of up to {_MAX_VALUE}"
            raise RequestError(f"metadata must have {limits}; {quoted(key)} is not so", param="metadata")
