"""Settings of a model's JSON files, where null means the default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def setting(settings: Mapping[str, Any], name: str, default: Any) -> Any:
    """What is said there; the default where that is nothing, null, zero or empty."""
    return settings.get(name) or default
