"""Every family that Transformers answers about images with, as a small random checkpoint."""

from __future__ import annotations

from tests.helpers.families.zoo import first_half, second_half
from tests.helpers.families.zoo.entry import BUDGET, Entry

ZOO: dict[str, Entry] = {**first_half.ENTRIES, **second_half.ENTRIES}
INDEXED = ("dots3_note", "glm5_next", "minimax_m3_vl", "mistral_large4", "qwen4_exp")
_ACROSS = "it is an encoder and a decoder"
REFUSED = {
    **dict.fromkeys(
        ("florence2", "t5gemma2", "pix2struct", "udop", "pp_formulanet", "vision-encoder-decoder"), _ACROSS
    ),
    "blip": "it captions one picture, which its decoder attends to across",
    "blip-2": "it captions one picture, which stands before the text",
    "git": "it captions one picture, which stands before the text",
    "idefics": "its layers attend across to pictures",
    "inkling2": "its attention adds a bias by distance",
    "inkling_mm_model": "its attention adds a bias by distance",
    "instructblip": "it reads the question beside each picture",
    "kosmos-2": "its decoder adds embeddings of positions that it counts itself",
    "kosmos-2.5": "its decoder adds embeddings of positions that it counts itself",
}
ZOO |= {name: ZOO[name]._replace(refusal=sentence) for name, sentence in REFUSED.items()}
ZOO |= {name: ZOO[name]._replace(options={"max_model_len": BUDGET}) for name in INDEXED}
