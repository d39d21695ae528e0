"""The Hugging Face folder of a trained model: written with Transformers, so that anything reads it."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from training import chat
from training.canvas import FRAMES, PATCH
from training.model import MEAN, MERGE, STD, Model, Sizes
from training.tokenizer import token_id, write_tokenizer

MIN_PIXELS, MAX_PIXELS = 96 * 96, 320 * 320
MAX_LENGTH = 2048
_SHARD = "14MB"


def qwen2_vl_config(sizes: Sizes, tokenizer: Tokenizer) -> Any:
    from transformers import Qwen2VLConfig

    text = {
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": sizes.rope_theta,
            "mrope_section": list(sizes.mrope_section),
        },
        "tie_word_embeddings": True,
        "bos_token_id": token_id(tokenizer, chat.END_OF_TEXT),
        "eos_token_id": token_id(tokenizer, chat.END),
    }
    vision = {
        "depth": sizes.vision_depth,
        "embed_dim": sizes.vision_width,
        "num_heads": sizes.vision_heads,
        "mlp_ratio": sizes.vision_ratio,
        "hidden_size": sizes.hidden,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": FRAMES,
    }
    return Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=token_id(tokenizer, chat.IMAGE),
        video_token_id=token_id(tokenizer, chat.VIDEO),
        vision_start_token_id=token_id(tokenizer, chat.VISION_START),
        vision_end_token_id=token_id(tokenizer, chat.VISION_END),
        tie_word_embeddings=True,
    )


def export(folder: Path, model: Model, tokenizer: Tokenizer, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write weights (in shards that travel well), config, tokenizer, chat template and image processor."""
    from transformers import Qwen2VLForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    make: Any = Qwen2VLForConditionalGeneration  # untyped in Transformers
    target = make(qwen2_vl_config(model.sizes, tokenizer))
    state = {name: tensor.detach().float().cpu() for name, tensor in model.exported().items()}
    missing, unexpected = target.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, f"names differ: {missing} {unexpected}"
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    target.to(dtype).save_pretrained(folder, max_shard_size=_SHARD)
    write_tokenizer(folder, tokenizer)
    _write_processor(folder)
    ends = [token_id(tokenizer, chat.END), token_id(tokenizer, chat.END_OF_TEXT)]
    _write(folder / "generation_config.json", {"do_sample": False, "eos_token_id": ends, "pad_token_id": ends[1]})


def write_weights(folder: Path, model: Model, tokenizer: Tokenizer) -> None:
    """Weights and tokenizer alone, without Transformers: enough to resume from, and to export from elsewhere."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    state = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in model.exported().items()}
    names = sorted(state, key=lambda name: state[name].numel())
    for part in range(3):
        save_file({name: state[name] for name in names[part::3]}, folder / f"weights-{part}.safetensors")
    write_tokenizer(folder, tokenizer)


def _write_processor(folder: Path) -> None:
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": list(MEAN),
        "image_std": list(STD),
        "merge_size": MERGE,
        "patch_size": PATCH,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "temporal_patch_size": FRAMES,
    }
    _write(
        folder / "preprocessor_config.json",
        {**settings, "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}},
    )


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of an exported folder, float32, under the names of `Model`."""
    state: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        state |= load_file(file)
    if not state:
        raise FileNotFoundError(f"no *.safetensors in {folder}; give the folder that a training run wrote")
    return {_saved_name(name): tensor.float() for name, tensor in state.items() if name != "lm_head.weight"}


def _saved_name(name: str) -> str:
    """Transformers saves under Qwen2-VL's published names in some versions and under its own in others."""
    if name.startswith("visual."):
        return f"model.{name}"
    is_old = name.startswith("model.") and not name.startswith(("model.visual.", "model.language_model."))
    return name.replace("model.", "model.language_model.", 1) if is_old else name


def ship(folder: Path, target: Path, log: Path) -> None:
    """The folder in few files: its shards as they are, the rest in one archive, and the log."""
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("*.safetensors"):
        old.unlink()
    for shard in folder.glob("*.safetensors"):
        shutil.copy(shard, target / shard.name)
    with tarfile.open(target / "rest.tar.gz", "w:gz") as archive:
        for file in sorted(folder.iterdir()):
            if file.suffix != ".safetensors" and file.is_file() and file.name != "state.pt":
                archive.add(file, file.name)
    shutil.copy(log, target / "log.txt")


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1))
