"""PaddleOCR-VL and HunyuanOCR: published with the decoder's fields at the top, which Transformers' classes read."""

from __future__ import annotations

import json
from typing import Any

from tests.helpers.families.layouts.base import Published, unchanged
from tests.helpers.families.zoo import ZOO


def _flat(config: Any) -> dict[str, Any]:
    fields = json.loads(config.to_json_string())
    text = {name: value for name, value in fields.pop("text_config").items() if name != "model_type"}
    rope = text.pop("rope_parameters")
    scaling = {"type" if name == "rope_type" else name: value for name, value in rope.items() if name != "rope_theta"}
    fields["vision_config"]["model_type"] = fields["model_type"]
    return {**text, **fields, "rope_theta": rope["rope_theta"], "rope_scaling": scaling}


def _published(name: str) -> Published:
    entry = ZOO[name]
    copied = ("processor_config.json",)
    return Published(entry.build, _flat, unchanged, entry.image, stored=True, copied=copied, is_named=True)


PUBLISHED = {name: _published(name) for name in ("hunyuan_vl", "paddleocr_vl")}
