"""Transformers run on the same folder and the same pictures: what our engine must reproduce."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast

Read = Callable[[list[Image.Image]], tuple[dict[str, Any], list[str]]]
"""RGB pictures -> the model's arguments for them, and the text that stands for each in the expanded prompt."""


def nothing_more(_ids: torch.Tensor) -> dict[str, Any]:
    return {}


@dataclass
class Reference:
    """A Transformers model with its tokenizer and its way of reading pictures."""

    model: Any
    tokenizer: PreTrainedTokenizerFast
    placeholder: str  # of one picture in a prompt that is not expanded yet
    read: Read
    more: Callable[[torch.Tensor], dict[str, Any]] = field(default=nothing_more)  # arguments made from the ids [1, T]

    def inputs(self, text: str, images: list[Image.Image]) -> dict[str, Any]:
        """Expanded ids and pixels, as Transformers' processor would hand them to the model."""
        made, spelled = self.read([p.convert("RGB") for p in images]) if images else ({}, [])
        parts = text.split(self.placeholder)
        text = parts[0] + "".join(stands + part for stands, part in zip(spelled, parts[1:], strict=True))
        ids = self.tokenizer(text, return_tensors="pt")["input_ids"]
        return {**made, "input_ids": ids, "attention_mask": torch.ones_like(ids), **self.more(ids)}

    @torch.inference_mode()
    def logits(self, text: str, images: list[Image.Image]) -> torch.Tensor:  # [tokens, V]
        return torch.as_tensor(self.model(**self.inputs(text, images)).logits[0])

    @torch.inference_mode()
    def chosen(self, text: str, images: list[Image.Image], answer: list[int]) -> list[int]:
        """The likeliest token at each place of an answer: the answer itself, if it is the greedy one.

        In one pass, unless the answer has a token that stands for an image in a prompt.
        """
        if set(answer) & set(self.tokenizer(self.placeholder, return_tensors="pt")["input_ids"][0].tolist()):
            return self.greedy(text, images, len(answer))
        inputs = self.inputs(text, images)
        ids = torch.cat([inputs["input_ids"], torch.tensor([answer[:-1]])], dim=1)
        inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids), **self.more(ids)}
        return list(self.model(**inputs).logits[0, -len(answer) :].argmax(-1).tolist())

    @torch.inference_mode()
    def greedy(self, text: str, images: list[Image.Image], tokens: int = 24) -> list[int]:
        inputs = self.inputs(text, images)
        out = self.model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        return list(out[0, inputs["input_ids"].shape[1] :].tolist())


def load(kind: Any, folder: Path) -> tuple[Any, PreTrainedTokenizerFast]:
    """Model and tokenizer; the model gives answers of a fixed length."""
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model, PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))


def image_settings(folder: Path) -> dict[str, Any]:
    """What the image processor is made with, from whichever file the layout keeps it in."""
    file = folder / "preprocessor_config.json"
    whole = json.loads((file if file.exists() else folder / "processor_config.json").read_text())
    settings = dict(whole if file.exists() else whole["image_processor"])
    settings.pop("image_processor_type", None)
    return settings
