"""Transformers' own answers: its processor and its `generate`, on a checkpoint's folder."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from saccade.checkpoint import hf_processor


class Prompt:
    """`image` in the text stands for each picture."""

    def __init__(self, name: str, text: str, *images: Image.Image) -> None:
        self.name = name
        self.text = text
        self.images = list(images)


class Theirs:
    def __init__(self, folder: Path) -> None:
        kind = "a family of the zoo"
        self.processor = hf_processor.load_processor(folder, kind)
        model_class, _ = hf_processor.model_class(folder, kind)
        self.model = model_class.from_pretrained(folder, dtype=torch.float32).eval()
        config = self.model.generation_config
        config.eos_token_id = None  # answers of a fixed length
        config.use_cache = True
        config.do_sample = False
        markers = _markers(self.processor.tokenizer, self.model.config.to_dict())
        size = self.model.config.get_text_config().vocab_size
        self.banned = sorted(token for token in markers if token < size)
        config.suppress_tokens = self.banned

    def inputs(self, prompt: Prompt) -> dict[str, Any]:
        known = inspect.signature(self.model.forward).parameters
        if prompt.images:
            made = dict(hf_processor.processed(self.processor, prompt.text, *prompt.images))
            return {name: value for name, value in made.items() if name in known or name != "mm_token_type_ids"}
        ids = self.processor.tokenizer(prompt.text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        kinds = {"token_type_ids": torch.zeros_like(ids)} if "token_type_ids" in known else {}
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **kinds}

    @torch.inference_mode()
    def greedy(self, prompt: Prompt, tokens: int) -> list[int]:
        inputs = self.inputs(prompt)
        out = self.model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens)
        sequence: Tensor = out[0]
        length = inputs["input_ids"].shape[1]
        return list(sequence[-tokens:].tolist()) if len(sequence) != tokens + length else sequence[length:].tolist()


def _markers(tokenizer: Any, config: dict[str, Any]) -> set[int]:
    """Tokens that stand for images and ends: a trained model writes none of an image's."""
    named = {value for name, value in config.items() if name.endswith(("_token_id", "_token_index"))}
    return {token for token in named if isinstance(token, int) and token >= 0} | set(tokenizer.all_special_ids)
