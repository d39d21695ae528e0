"""Transformers run on the same folder and the same pictures: what our engine must reproduce."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast, Qwen2VLForConditionalGeneration
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil


@dataclass
class Reference:
    """A Transformers model with its tokenizer and picture processor."""

    model: Any
    tokenizer: PreTrainedTokenizerFast
    images: Any
    placeholder: str
    is_qwen: bool

    def inputs(self, text: str, pictures: list[Image.Image]) -> dict[str, Any]:
        """Expanded ids and pixels, as Transformers' processor would hand them to the model."""
        made: dict[str, Any] = {}
        if pictures:
            made = dict(self.images([p.convert("RGB") for p in pictures], return_tensors="pt"))
        counts = iter(self._tokens(made, len(pictures)))
        parts = text.split(self.placeholder)
        text = parts[0] + "".join(self.placeholder * next(counts) + part for part in parts[1:])
        ids = self.tokenizer(text, return_tensors="pt")["input_ids"]
        made["input_ids"] = ids
        made["attention_mask"] = torch.ones_like(ids)
        if self.is_qwen:
            made["mm_token_type_ids"] = (ids == self.model.config.image_token_id).int()
        return made

    def _tokens(self, made: dict[str, Any], count: int) -> list[int]:
        if not count:
            return []
        if self.is_qwen:
            return [int(grid.prod()) // 4 for grid in made["image_grid_thw"]]
        side = made["pixel_values"].shape[-1] // 14
        return [side * side] * count

    @torch.inference_mode()
    def logits(self, text: str, pictures: list[Image.Image]) -> torch.Tensor:  # [tokens, V]
        return torch.as_tensor(self.model(**self.inputs(text, pictures)).logits[0])

    @torch.inference_mode()
    def greedy(self, text: str, pictures: list[Image.Image], tokens: int = 24) -> list[int]:
        inputs = self.inputs(text, pictures)
        out = self.model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        return list(out[0, inputs["input_ids"].shape[1] :].tolist())


def load_reference(folder: Path) -> Reference:
    is_qwen = json.loads((folder / "config.json").read_text())["model_type"] == "qwen2_vl"
    kind = Qwen2VLForConditionalGeneration if is_qwen else LlavaForConditionalGeneration
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # answers of a fixed length
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    settings = _image_settings(folder)
    images = Qwen2VLImageProcessorPil(**settings) if is_qwen else CLIPImageProcessorPil(**settings)
    return Reference(model, tokenizer, images, "<|image_pad|>" if is_qwen else "<image>", is_qwen)


def _image_settings(folder: Path) -> dict[str, Any]:
    file = folder / "preprocessor_config.json"
    settings = json.loads(file.read_text()) if file.exists() else _nested(folder)
    settings.pop("image_processor_type", None)
    return dict(settings)


def _nested(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "processor_config.json").read_text())["image_processor"])
