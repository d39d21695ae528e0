"""Small folders of Mistral 3 and of LLaVA with a Pixtral tower, and Transformers' way of reading pictures for them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralVisionConfig,
)
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from benchmarks import checkpoints
from tests.helpers.engine.reference import Reference, image_settings, load
from tests.helpers.families.family_llava_next import text_config
from tests.helpers.families.made_once import made_once

PATCH = 14
SPECIALS = ["<pad>", "<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}[INST]"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}[IMG]{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}[/INST]"
    "{% else %}{{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 8,  # so that short prompts are long ones
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.4,
}
VISION = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 112,
    "patch_size": PATCH,
    "hidden_act": "silu",
}


def tokenizer(*, adds_bos: bool) -> Tokenizer:
    """Byte-level BPE with the control tokens in front, as in Mistral's newer tokenizers."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=480, initial_alphabet=alphabet, special_tokens=SPECIALS)
    made.train_from_iterator(checkpoints.CORPUS, trainer)
    made.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIALS])
    if adds_bos:
        bos = [("<s>", made.token_to_id("<s>"))]
        made.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=bos)
    return made


@made_once
def build(
    folder: Path,
    *,
    layout: str = "saved",
    seed: int = 0,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
) -> Path:
    """Mistral 3: four patches a token, projector without biases, heads of a size of their own."""
    made = tokenizer(adds_bos=True)
    config = Mistral3Config(
        text_config=text_config("mistral", made, head_dim=24, **(text or {})),
        vision_config=PixtralVisionConfig(**{**VISION, **(vision or {})}),
        image_token_index=made.token_to_id("[IMG]"),
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )
    checkpoints._save_model(Mistral3ForConditionalGeneration, config, folder, seed, "5GB")
    return _write_rest(folder, made, layout, merge=2, longest=140)


@made_once
def build_ministral(
    folder: Path, *, layout: str = "saved", seed: int = 0, rope: dict[str, Any] | None = None, ties: bool = False
) -> Path:
    """Ministral 3: the same tower before a decoder whose rotary waves are stretched and whose queries grow.

    The hub's folders are as Transformers saves them: there is one layout.
    """
    made = tokenizer(adds_bos=True)
    text = text_config("ministral3", made, head_dim=24, rope_parameters={**MINISTRAL_ROPE, **(rope or {})})
    text.tie_word_embeddings = ties
    config = Mistral3Config(
        text_config=text,
        vision_config=PixtralVisionConfig(**VISION),
        image_token_index=made.token_to_id("[IMG]"),
        spatial_merge_size=2,
        tie_word_embeddings=ties,
    )
    checkpoints._save_model(Mistral3ForConditionalGeneration, config, folder, seed, "5GB")
    return _write_rest(folder, made, layout, merge=2, longest=140)


@made_once
def build_pixtral(folder: Path, *, layout: str = "saved", seed: int = 0, vision: dict[str, Any] | None = None) -> Path:
    """Pixtral: a token for every patch."""
    made = tokenizer(adds_bos=False)
    config = LlavaConfig(
        text_config=text_config("mistral", made, head_dim=24),
        vision_config=PixtralVisionConfig(**{**VISION, **(vision or {})}),
        image_token_index=made.token_to_id("[IMG]"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )
    checkpoints._save_model(LlavaForConditionalGeneration, config, folder, seed, "5GB")
    return _write_rest(folder, made, layout, merge=1, longest=84)


def _write_rest(folder: Path, made: Tokenizer, layout: str, *, merge: int, longest: int) -> Path:
    image_processor = {
        "image_processor_type": "PixtralImageProcessor",
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": checkpoints.CLIP_MEAN,
        "image_std": checkpoints.CLIP_STD,
        "patch_size": {"height": PATCH, "width": PATCH},
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"longest_edge": longest},
    }
    processor = {
        "image_break_token": "[IMG_BREAK]",
        "image_end_token": "[IMG_END]",
        "image_token": "[IMG]",
        "patch_size": PATCH,
        "processor_class": "PixtralProcessor",
        **({"spatial_merge_size": merge} if merge > 1 else {}),
    }
    if layout == "published":
        checkpoints._publish(folder, _old_names, flatten=False)
        checkpoints._write(folder / "preprocessor_config.json", image_processor)
        checkpoints._write(folder / "processor_config.json", processor)
    else:
        checkpoints._write(folder / "processor_config.json", {"image_processor": image_processor, **processor})
    checkpoints._write_tokenizer(folder, made, TEMPLATE, layout, eos="</s>", pad="<pad>", bos="<s>")
    return folder


def _old_names(name: str) -> str:
    name = name.removeprefix("model.")
    if name.startswith("language_model.") and not name.startswith(("language_model.model.", "language_model.lm_head")):
        name = name.replace("language_model.", "language_model.model.", 1)
    return "language_model.lm_head.weight" if name == "lm_head.weight" else name


def spell(rows: int, columns: int) -> str:
    return (("[IMG]" * columns + "[IMG_BREAK]") * rows).removesuffix("[IMG_BREAK]") + "[IMG_END]"


def _reference(kind: Any, merge: int, folder: Path) -> Reference:
    model, made = load(kind, folder)
    side = PATCH * merge
    images = PixtralImageProcessorPil(**{**image_settings(folder), "patch_size": {"height": side, "width": side}})

    def read(pictures: list[Image.Image]) -> tuple[dict[str, Any], list[str]]:
        found = dict(images(pictures, return_tensors="pt"))
        return found, [spell(h // side, w // side) for h, w in found["image_sizes"].tolist()]

    return Reference(model, made, "[IMG]", read)


reference = partial(_reference, Mistral3ForConditionalGeneration, 2)
pixtral_reference = partial(_reference, LlavaForConditionalGeneration, 1)
