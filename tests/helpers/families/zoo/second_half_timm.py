"""Families whose tower is of timm: build and load them in `stand_in_timm`."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.families.zoo import stand_in_timm
from tests.helpers.families.zoo.entry import Entry
from tests.helpers.families.zoo.second_half_makers import LLAMA, SQUARE, WINDOW, Id, family

LABELS = {"label_names": [], "num_classes": 0}  # without them Transformers asks timm for names of ImageNet's classes
TOWER = {**LABELS, "do_pooling": False, "model_args": {"embed_dim": 48, "patch_size": 14}}
KINDS = ("sliding_attention", "full_attention")
GEMMA_NAMES = {
    "image": "<image_soft_token>",
    "audio": "<audio_soft_token>",
    "boi": "<start_of_image>",
    "eoi": "<end_of_image>",
    "boa": "<start_of_audio>",
    "eoa": "<end_of_audio>",
}


def _within(entry: Entry) -> Entry:
    def build(folder: Path) -> Path:
        with stand_in_timm.provided():
            return entry.build(folder)

    return entry._replace(build=build)


GEMMA3N = family(
    "gemma3n",
    {
        # Tokens of pictures are the first behind the vocabulary of the embeddings of each layer, then those of sound.
        "boi_token_id": Id("<start_of_image>"),
        "boa_token_id": Id("<start_of_audio>"),
        "image_token_id": Id("<image_soft_token>"),
        "eoi_token_id": Id("<end_of_image>"),
        "audio_token_id": Id("<audio_soft_token>"),
        "eoa_token_id": Id("<end_of_audio>"),
        "text_config": {
            **LLAMA,
            "model_type": "gemma3n_text",
            "head_dim": 16,
            "num_hidden_layers": 5,
            "layer_types": [*KINDS, "sliding_attention", *KINDS],
            "num_kv_shared_layers": 2,
            "sliding_window": WINDOW,
            "vocab_size_per_layer_input": Id("<image_soft_token>"),
            "hidden_size_per_layer_input": 8,
            "altup_num_inputs": 2,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0, 0.0],
            "tie_word_embeddings": True,
        },
        "vision_config": {
            **TOWER,
            "architecture": stand_in_timm.MAP,
            "hidden_size": 48,
            "vocab_size": 2,
            "vocab_offset": Id("<image_soft_token>"),
        },
        "audio_config": {
            "vocab_size": 16,
            "vocab_offset": Id("<audio_soft_token>"),
            "input_feat_size": 16,
            "hidden_size": 32,
            "conf_num_attention_heads": 2,
            "conf_num_hidden_layers": 1,
            "sscp_conv_channel_size": [8, 4],
        },
        "vision_soft_tokens_per_image": 16,
    },
    {
        "processor_class": "Gemma3nProcessor",
        "image_processor": {"image_processor_type": "SiglipImageProcessor", **SQUARE},
        "image_seq_length": 16,
    },
    "<image_soft_token>",
    named=GEMMA_NAMES,
    gains={"embed_tokens.weight": 0.1, "post_attention_layernorm": 3.0, "post_feedforward_layernorm": 3.0},
)
# Its image processor needs torchvision.
PERCEPTION_LM = family(
    "perception_lm",
    {
        "text_config": LLAMA,
        "vision_config": {**TOWER, "model_type": "timm_wrapper", "architecture": stand_in_timm.TOKENS},
        "projector_pooling_ratio": 2,
        "image_token_id": Id("<|image|>"),
        "video_token_id": Id("<|video|>"),
    },
    {
        "processor_class": "PerceptionLMProcessor",
        "image_processor": {
            "image_processor_type": "PerceptionLMImageProcessor",
            "tile_size": 56,
            "max_num_tiles": 4,
        },
        "patch_size": 14,
        "pooling_ratio": 2,
    },
    "<|image|>",
    named={"image": "<|image|>", "video": "<|video|>"},
)
ENTRIES = {"gemma3n": _within(GEMMA3N), "perception_lm": _within(PERCEPTION_LM)}
