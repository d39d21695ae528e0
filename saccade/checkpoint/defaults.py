"""Defaults of Transformers' config classes, which published configs leave out: `defaults.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_DEFAULTS: Mapping[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = _DEFAULTS["text"]  # by the decoder's model_type
VISION_DEFAULTS: Mapping[str, Any] = _DEFAULTS["vision"]  # of any tower
TOWER_DEFAULTS: Mapping[str, Mapping[str, Any]] = _DEFAULTS["towers"]  # by the tower's model_type
LANGUAGE_TYPE = "deepseek_v2"  # of a language_config without model_type
