"""Which tokens see tokens after them, in families whose images are read in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Blocks = Literal["image", "images", "prompt", "before answer"]
"""All tokens of an image see each other; those of all images of a prompt; or all tokens of a prompt.
Before the answer: none do, but the answer sees all of the prompt and a window of itself."""

_BLOCKS: Mapping[str, Blocks] = {
    "gemma3": "image",
    "gemma4": "image",
    "gemma4_unified": "image",
    "molmo2": "images",
    "paligemma": "prompt",
    "unlimited_ocr": "before answer",
}


def blocks_of(model_type: str, text: Any) -> Blocks | None:
    """`text`: the decoder's config in Transformers. Gemma 4 has sizes of both kinds."""
    if model_type.startswith("gemma4") and text.use_bidirectional_attention != "vision":
        return None
    if model_type == "unlimited_ocr" and "reference_sliding_attention" not in text.layer_types:
        return None
    return _BLOCKS.get(model_type)


def block_row(kinds: npt.NDArray[np.int64], blocks: Blocks) -> npt.NDArray[np.int32]:
    """The first token of each token's block; a token in none is its own. `kinds`: above 0 in images."""
    row = np.arange(len(kinds), dtype=np.int32)
    if blocks == "before answer":
        return np.full_like(row, len(kinds))
    if blocks == "prompt":
        return np.zeros_like(row)
    is_image = kinds > 0
    if not is_image.any():
        return row
    if blocks == "images":
        row[is_image] = np.flatnonzero(is_image)[0]
        return row
    begins = is_image & ~np.concatenate([[False], is_image[:-1]])
    starts = np.maximum.accumulate(np.where(begins, row, 0))
    return np.where(is_image, starts, row).astype(np.int32)
