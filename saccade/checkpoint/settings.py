"""Settings of a model's JSON files, where null means the default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NULL_IS_MEANT = {"sliding_window", "q_lora_rank", "num_key_value_heads", "head_dim"}  # null has a meaning


def setting(settings: Mapping[str, Any], name: str, default: Any) -> Any:
    """What is said there; the default where that is nothing, null, zero or empty."""
    return settings.get(name) or default


def without_nulls(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields without nulls, which would hide a default, except where null has a meaning."""
    values: dict[str, Any] = {}
    for name, value in raw.items():
        if value is not None or name in _NULL_IS_MEANT:
            values[name] = without_nulls(value) if isinstance(value, Mapping) else value
    return values
