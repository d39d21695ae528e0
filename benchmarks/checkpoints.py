"""Small checkpoints for tests, made with Transformers: random weights, real files, real layouts.

`qwen2_vl(folder)` and `llava(folder)` write a whole Hugging Face folder (config, weights, tokenizer, image processor,
chat template) and return it. `layout="saved"` is what Transformers 5 writes; `layout="published"` is what the hub
holds: flat config with `rope_scaling`, `preprocessor_config.json`, older tensor names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

CORPUS = [
    "Describe this image in one sentence. What is in the picture? A golden retriever sits on a wooden dock.",
    "The quick brown fox jumps over the lazy dog. How many red circles are there? Compare these two pictures.",
    "user\nassistant\nsystem\nYou are a helpful assistant.\nUSER: ASSISTANT: naïve café, 你好, emoji 🙂, 12345 67890",
]

QWEN_SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]

QWEN_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or 'image' in part %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' or 'video' in part %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LLAVA_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] + ' ' }}{% else %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)

CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
CLIP_STD = [0.26862954, 0.26130258, 0.27577711]

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}
QWEN2_VL_TEXT: dict[str, Any] = {
    **TEXT,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    "tie_word_embeddings": True,
}
QWEN2_VL_VISION: dict[str, Any] = {
    "depth": 2,
    "embed_dim": 48,
    "num_heads": 4,
    "mlp_ratio": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
LLAVA_TEXT: dict[str, Any] = {**TEXT, "num_key_value_heads": 4, "rms_norm_eps": 1e-5}
LLAVA_VISION: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
    "projection_dim": 32,
}
IMAGE_PROCESSOR: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
    "resample": 3,
    "rescale_factor": 1 / 255,
}


# --- tokenizers ---------------------------------------------------------------------------------------------------


def qwen_tokenizer(vocab_size: int = 480) -> Tokenizer:
    """Byte-level BPE with Qwen's control tokens behind the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in QWEN_SPECIALS])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in ("<tool_call>", "</tool_call>")])
    return tokenizer


def llama_tokenizer(vocab_size: int = 480) -> Tokenizer:
    """Sentencepiece-style BPE: byte fallback, a leading space on each piece, BOS added by the post-processor."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens])
    tokenizer.train_from_iterator(CORPUS, trainer)
    # The trainer marks the byte tokens as special; a published tokenizer has them in the vocabulary only.
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] in ("<unk>", "<s>", "</s>")]
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ("<image>", "<pad>")])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", bos)]
    )
    return tokenizer


# --- folders ------------------------------------------------------------------------------------------------------


def qwen2_vl(
    folder: Path,
    *,
    layout: str = "saved",
    seed: int = 0,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    max_shard_size: str = "5GB",
    min_pixels: int = 56 * 56,
    max_pixels: int = 28 * 28 * 1280,
    tokenizer: Tokenizer | None = None,
) -> Path:
    """A small Qwen2-VL folder with every structural feature on: GQA, biases, M-RoPE, 2x2 merge, tied embeddings."""
    tokenizer = tokenizer or qwen_tokenizer()
    text_config = {**QWEN2_VL_TEXT, **qwen_vocabulary(tokenizer), **(text or {})}
    vision_config = {**QWEN2_VL_VISION, "hidden_size": text_config["hidden_size"], **(vision or {})}
    config = Qwen2VLConfig(
        text_config=text_config,
        vision_config=vision_config,
        tie_word_embeddings=text_config["tie_word_embeddings"],
        **qwen_image_tokens(tokenizer),
    )
    _save_model(Qwen2VLForConditionalGeneration, config, folder, seed, max_shard_size)
    image_processor = {
        **IMAGE_PROCESSOR,
        "image_processor_type": "Qwen2VLImageProcessor",
        "merge_size": vision_config["spatial_merge_size"],
        "patch_size": vision_config["patch_size"],
        "temporal_patch_size": vision_config["temporal_patch_size"],
    }
    if layout == "published":
        _publish(folder, QWEN_OLD_NAMES, flatten=True)
        pixels = {"min_pixels": min_pixels, "max_pixels": max_pixels}
        _write(folder / "preprocessor_config.json", {**image_processor, **pixels})
    else:
        size = {"size": {"shortest_edge": min_pixels, "longest_edge": max_pixels}}
        _write(
            folder / "processor_config.json",
            {"image_processor": {**image_processor, **size}, "processor_class": "Qwen2VLProcessor"},
        )
    write_qwen_tokenizer(folder, tokenizer, layout)
    return folder


def qwen_vocabulary(tokenizer: Tokenizer) -> dict[str, int]:
    """What a text config says of it."""
    return {
        "vocab_size": tokenizer.get_vocab_size() + 6,  # published vocabularies are padded too
        "bos_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
    }


def qwen_image_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """What a whole config says of them."""
    names = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    return {f"{key}_token_id": tokenizer.token_to_id(f"<|{name}|>") for key, name in names.items()}


def write_qwen_tokenizer(folder: Path, tokenizer: Tokenizer, layout: str) -> None:
    ends = ("<|im_end|>", "<|endoftext|>")
    _write_tokenizer(folder, tokenizer, QWEN_TEMPLATE, layout, eos=ends[0], pad=ends[1])
    _write(folder / "generation_config.json", {"eos_token_id": [tokenizer.token_to_id(name) for name in ends]})


def llava(
    folder: Path,
    *,
    layout: str = "saved",
    seed: int = 0,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    max_shard_size: str = "5GB",
) -> Path:
    """A small LLaVA-1.5 folder: CLIP tower of 56x56 images (16 patches), projector, Llama decoder, untied head."""
    tokenizer = llama_tokenizer()
    vocabulary = {
        "vocab_size": tokenizer.get_vocab_size() + 6,
        "bos_token_id": tokenizer.token_to_id("<s>"),
        "eos_token_id": tokenizer.token_to_id("</s>"),
    }
    vision_config = CLIPVisionConfig(**{**LLAVA_VISION, **(vision or {})})
    config = LlavaConfig(
        text_config=LlamaConfig(**{**LLAVA_TEXT, **vocabulary, **(text or {})}),
        vision_config=vision_config,
        image_token_index=tokenizer.token_to_id("<image>"),
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
    )
    _save_model(LlavaForConditionalGeneration, config, folder, seed, max_shard_size)
    side = vision_config.image_size
    image_processor = {
        **IMAGE_PROCESSOR,
        "image_processor_type": "CLIPImageProcessor",
        "crop_size": {"height": side, "width": side},
        "do_center_crop": True,
        "size": {"shortest_edge": side},
    }
    processor = {
        "image_token": "<image>",
        "num_additional_image_tokens": 1,
        "patch_size": vision_config.patch_size,
        "vision_feature_select_strategy": "default",
        "processor_class": "LlavaProcessor",
    }
    if layout == "published":
        _publish(folder, LLAVA_OLD_NAMES, flatten=False)
        _write(folder / "preprocessor_config.json", image_processor)
        _write(folder / "processor_config.json", processor)
    else:
        _write(folder / "processor_config.json", {"image_processor": image_processor, **processor})
    _write_tokenizer(folder, tokenizer, LLAVA_TEMPLATE, layout, eos="</s>", pad="<pad>", bos="<s>")
    return folder


# --- parts --------------------------------------------------------------------------------------------------------


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights under which the next token depends on every input.

    With small embeddings and strong layers the residual stream is what the layers made of it; otherwise a tied head
    just repeats the last token.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "embed_tokens" in name:
                parameter.copy_(0.2 * noise)
            elif parameter.dim() >= 2:
                gain = 6.0 if "o_proj" in name or "down_proj" in name else 1.5
                parameter.copy_(noise * gain / parameter[0].numel() ** 0.5)
            elif name.endswith("weight"):
                parameter.copy_(1 + 0.1 * noise)
            else:
                parameter.copy_(0.1 * noise)


def _save_model(kind: type[Any], config: Any, folder: Path, seed: int, max_shard_size: str) -> None:
    model = kind(config).float().eval()
    randomise(model, seed)
    model.save_pretrained(folder, max_shard_size=max_shard_size)


def QWEN_OLD_NAMES(name: str) -> str:
    return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")


def LLAVA_OLD_NAMES(name: str) -> str:
    name = name.removeprefix("model.")
    if name.startswith("language_model.") and not name.startswith(("language_model.model.", "language_model.lm_head")):
        name = name.replace("language_model.", "language_model.model.", 1)
    if name.startswith("vision_tower.") and not name.startswith("vision_tower.vision_model."):
        name = name.replace("vision_tower.", "vision_tower.vision_model.", 1)
    return "language_model.lm_head.weight" if name == "lm_head.weight" else name


def _publish(folder: Path, rename: Callable[[str], str], *, flatten: bool) -> None:
    """Rewrite a saved folder in the older dialect."""
    tensors = dict(_tensors(folder))
    for file in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        file.unlink()
    save_file({rename(n): t for n, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    _write(folder / "config.json", _flat_config(config) if flatten else _old_llava_config(config))


def _tensors(folder: Path) -> Iterable[tuple[str, torch.Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            for name in handle.keys():  # noqa: SIM118 (not a dict)
                yield name, handle.get_tensor(name)


def _flat_config(config: dict[str, Any]) -> dict[str, Any]:
    text = dict(config.pop("text_config"))
    rope = dict(text.pop("rope_parameters"))
    text["rope_theta"] = rope.pop("rope_theta")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    for key in ("model_type", "dtype", "layer_types"):
        text.pop(key, None)
    vision = dict(config.pop("vision_config"))
    vision["in_chans"] = vision.pop("in_channels", 3)
    for key in ("rope_parameters", "dtype"):
        vision.pop(key, None)
    config["torch_dtype"] = config.pop("dtype", "float32")
    return {**config, **text, "vision_config": vision}


def _old_llava_config(config: dict[str, Any]) -> dict[str, Any]:
    text = dict(config["text_config"])
    rope = text.pop("rope_parameters", None) or {}
    text["rope_theta"] = rope.get("rope_theta", 10000.0)
    text["torch_dtype"] = text.pop("dtype", "float32")
    index = config.pop("image_token_id", None)
    config["image_token_index"] = config.get("image_token_index", index)
    config["torch_dtype"] = config.pop("dtype", "float32")
    return {**config, "text_config": text}


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, template: str, layout: str, **tokens: str) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {f"{name}_token": value for name, value in tokens.items()}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if layout == "published":
        config["chat_template"] = template
    else:
        (folder / "chat_template.jinja").write_text(template)
    _write(folder / "tokenizer_config.json", config)


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1))
