"""Every family that Transformers answers about images with, as a small random checkpoint."""

from __future__ import annotations

from tests.helpers.families.zoo import first_half, second_half
from tests.helpers.families.zoo.entry import BUDGET, Entry

ZOO: dict[str, Entry] = {**first_half.ENTRIES, **second_half.ENTRIES}
INDEXED = ("dots3_note", "glm5_next", "minimax_m3_vl", "mistral_large4", "qwen4_exp")
ZOO |= {name: ZOO[name]._replace(options={"max_model_len": BUDGET}) for name in INDEXED}
