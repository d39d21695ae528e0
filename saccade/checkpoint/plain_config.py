"""The shape of a model that runs through Transformers, from config.json alone: for bills and plans on paper.

What published configs leave out is in `bridged_defaults.json`: defaults of Transformers' classes, as data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saccade.checkpoint.hf_config import translated
from saccade.errors import ConfigError

_DEFAULTS: Mapping[str, Any] = json.loads(
    Path(__file__).with_name("bridged_defaults.json").read_text("utf-8")
)
_ALIASES = {
    "layers_block_type": "layer_types",
    "moe_k": "num_experts_per_tok",
    "moe_num_experts": "num_experts",
    "top_k_experts": "num_experts_per_tok",
}
_TOWER = ("intermediate_size", "image_size")  # beside what the bridge asks for


class PlainFields:
    """A part of config.json as attributes. None for what is absent."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = {_ALIASES.get(name, name): value for name, value in values.items()}
        if layers := self._values.get("layer_types"):
            self._values.setdefault("num_hidden_layers", len(layers))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value = self._values.get(name)
        return PlainFields(value) if isinstance(value, dict) and name.endswith("_config") else value

    def get_text_config(self, *, decoder: bool) -> Any:
        return self.text_config or self


def plain_words(raw: Mapping[str, Any]) -> dict[str, Any]:
    """config.json in our words. ConfigError where defaults of a part are not known here."""
    kind = str(raw.get("model_type"))
    whole = _DEFAULTS["whole"].get(kind)
    if whole is None:
        raise ConfigError(f"model_type {kind!r} is not known without Transformers")
    parts = {**whole, **raw}
    if "text_type" in whole:
        parts["text_config"] = _with_defaults("text", raw.get("text_config", {}), whole["text_type"])
    tower = whole.get("tower", "vision_config")
    parts[tower] = _with_defaults("towers", raw.get(tower, {}), whole.get("tower_type"))
    words = translated(kind, raw, PlainFields(parts))
    words["vision_config"] |= {name: parts[tower][name] for name in _TOWER if parts[tower].get(name)}
    return words


def _with_defaults(part: str, values: Any, kind: str | None) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise ConfigError(f"config.json: {part} is {values!r}, not a part with names and values")
    kind = values.get("model_type", kind)
    defaults = _DEFAULTS[part].get(kind)
    if defaults is None:
        raise ConfigError(f"config.json has a part of model_type {kind!r}, whose defaults are not known here")
    fields = {name: value for name, value in values.items() if value is not None}
    if "image_size" not in defaults:  # its tower takes any size
        fields.pop("image_size", None)
    merged = {**defaults, **fields}
    if "global_head_dim" in merged:  # a row of the cache holds the widest head
        layers = merged.get("per_layer_config", {"": {"head_dim": merged.pop("global_head_dim")}}).values()
        merged["head_dim"] = max(merged["head_dim"], *(layer.get("head_dim", 0) for layer in layers))
        merged["global_head_dim"] = None
    return merged
