"""A small ColQwen2 checkpoint (late interaction) in two layouts, and Transformers' way of running it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, ColQwen2Config, ColQwen2ForRetrieval, PreTrainedTokenizerFast
from transformers.models.colqwen2.processing_colqwen2 import ColQwen2Processor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks import checkpoints
from tests.helpers.engine.reference import image_settings
from tests.helpers.families import family_qwen2_5_vl

DIM = 24
BASES = {"qwen2_vl": checkpoints.qwen2_vl, "qwen2_5_vl": family_qwen2_5_vl.build}


def build(folder: Path, base: str = "qwen2_vl", layout: str = "transformers") -> Path:
    """`layout`: the base model's config wrapped, as Transformers saves it; or as colpali-engine merges it."""
    BASES[base](folder, text={"num_hidden_layers": 2})
    config = ColQwen2Config(vlm_config=AutoConfig.from_pretrained(folder).to_dict(), embedding_dim=DIM)
    checkpoints._save_model(ColQwen2ForRetrieval, config, folder, 0, "5GB")
    if layout == "colpali-engine":
        _merge_like_colpali_engine(folder)
    return folder


def _merge_like_colpali_engine(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    flat = {**config["vlm_config"], "architectures": ["ColQwen2"], "dim": DIM, "dtype": config["dtype"]}
    (folder / "config.json").write_text(json.dumps(flat))
    file = folder / "model.safetensors"
    save_file({_old_name(name): tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})


def _old_name(name: str) -> str:
    name = name.removeprefix("vlm.").removeprefix("model.").replace("language_model.", "model.")
    return name.replace("embedding_proj_layer", "custom_text_proj")


class LateReference:
    def __init__(self, folder: Path) -> None:
        self.model: Any = ColQwen2ForRetrieval.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), pad_token="<|endoftext|>")
        self.processor: Any = ColQwen2Processor(Qwen2VLImageProcessorPil(**image_settings(folder)), tokenizer)

    def query(self, text: str) -> tuple[list[int], torch.Tensor]:
        """Token ids, and their vectors."""
        return self._run(self.processor.process_queries([text]))

    def document(self, image: Image.Image) -> tuple[list[int], torch.Tensor]:
        return self._run(self.processor.process_images([image.convert("RGB")]))

    @torch.inference_mode()
    def _run(self, inputs: Any) -> tuple[list[int], torch.Tensor]:
        ids = inputs["input_ids"]
        positions = None
        if "image_grid_thw" in inputs:  # the model was trained with M-RoPE, which this class of Transformers leaves out
            kinds = torch.eq(ids, self.model.config.vlm_config.image_token_id).int()
            positions, _ = self.model.vlm.get_rope_index(ids, kinds, inputs["image_grid_thw"])
        known = {name: inputs[name] for name in ("pixel_values", "image_grid_thw") if name in inputs}
        made = self.model(input_ids=ids, attention_mask=inputs["attention_mask"], position_ids=positions, **known)
        return ids[0].tolist(), made.embeddings[0]
