"""Configs of late interaction (ColQwen2 and its kind): a base model, and a projection of every token.

Transformers wraps the base model's config in `vlm_config`; colpali-engine keeps it and renames the
architecture.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from saccade.errors import ConfigError

TOKEN_DIM = "late_interaction_dim"
"""A field of an unwrapped config: numbers in a token's vector."""

_WIDTHS = ("embedding_dim", "embed_dim", "dims", "dim")
_DEFAULT_DIM = 128
_NAMES = re.compile(r"(Ops)?Col[A-Z]\w*")


def unwrapped(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the base model, with `TOKEN_DIM`. Any other config as it is."""
    inner = config.get("vlm_config")
    if inner is None:
        if not _is_named(config):
            return config
        inner = {"model_type": config.get("model_type")}
    if not isinstance(inner, Mapping):
        raise ConfigError(f"config.json: vlm_config is {str(inner)[:80]!r}, but an object is needed")
    base = {name: value for name, value in config.items() if name not in ("vlm_config", "model_type")}
    dim = next((config[name] for name in _WIDTHS if config.get(name) is not None), _DEFAULT_DIM)
    dtype = {name: config[name] for name in ("dtype", "torch_dtype") if config.get(name) is not None}
    return {**base, **inner, **dtype, TOKEN_DIM: config.get(TOKEN_DIM, dim)}


def _is_named(config: Mapping[str, Any]) -> bool:
    match config.get("architectures"):
        case [name, *_]:
            return _NAMES.fullmatch(str(name)) is not None
    return False
