"""The other side of the comparison: Transformers' own `generate` on the same checkpoint and the same JPEG bytes."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

IMAGE_PAD = "<|image_pad|>"


class TransformersSide:
    def __init__(self, folder: Path) -> None:
        self.model = Qwen2VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), padding_side="left")
        self.tokenizer.pad_token = "<|endoftext|>"
        size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
        self.images = Qwen2VLImageProcessorPil(size=size)

    def generate(self, requests: list[tuple[str, bytes]], tokens: int) -> list[list[int]]:
        """One batch: decode, preprocess, expand, pad on the left, generate greedily."""
        images = self.images([Image.open(io.BytesIO(data)).convert("RGB") for _, data in requests], return_tensors="pt")
        grids = images["image_grid_thw"]
        texts = [
            prompt.replace(IMAGE_PAD, IMAGE_PAD * int(grid.prod() // 4))
            for (prompt, _), grid in zip(requests, grids, strict=True)
        ]
        inputs = self.tokenizer(texts, return_tensors="pt", padding=True)
        types = (inputs["input_ids"] == self.model.config.image_token_id).int()
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                mm_token_type_ids=types,
                pixel_values=images["pixel_values"],
                image_grid_thw=grids,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
            )
        return [row[inputs["input_ids"].shape[1] :].tolist() for row in out]
