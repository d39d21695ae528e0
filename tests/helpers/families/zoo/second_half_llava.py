"""A tower, a projector, a decoder: the families that follow LLaVA, Idefics and InternVL."""

from __future__ import annotations

from tests.helpers.families.family_llava_next import PINPOINTS
from tests.helpers.families.zoo import second_half_configs
from tests.helpers.families.zoo.entry import Entry
from tests.helpers.families.zoo.second_half_makers import (
    CLIP,
    CROPPED,
    GRIDS,
    LLAMA,
    MISTRAL,
    QWEN2,
    SIGLIP,
    SQUARE,
    TOWER,
    WINDOW,
    Id,
    family,
)

IMAGE = "<image>"
PERCEIVER = {
    "hidden_size": 64,
    "resampler_n_latents": 4,
    "resampler_depth": 1,
    "resampler_n_heads": 4,
    "resampler_head_dim": 16,
    "num_key_value_heads": 2,
}
ROWS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))


def idefics2(*, splits: bool) -> Entry:
    edges = {"shortest_edge": 28, "longest_edge": 56}
    images = {"image_processor_type": "Idefics2ImageProcessor", "size": edges, "do_image_splitting": splits}
    return family(
        "idefics2",
        {
            "text_config": {**MISTRAL, "sliding_window": WINDOW},
            "vision_config": TOWER,
            "perceiver_config": PERCEIVER,
            "image_token_id": Id(IMAGE),
        },
        {"processor_class": "Idefics2Processor", "image_processor": images, "image_seq_len": 4},
        IMAGE,
        marks=("<fake_token_around_image>", "<end_of_utterance>"),
    )


ENTRIES = {
    "llava_next_video": Entry(second_half_configs.llava_next_video, IMAGE),
    "video_llava": Entry(second_half_configs.video_llava, IMAGE),
    "vipllava": family(
        "vipllava",
        {
            "text_config": LLAMA,
            "vision_config": {**CLIP, "num_hidden_layers": 3},
            "vision_feature_layer": [-1, -2, 1],
            "image_token_index": Id(IMAGE),
            "image_seq_length": 16,
        },
        {
            "processor_class": "LlavaProcessor",
            "image_processor": {"image_processor_type": "CLIPImageProcessor", **CROPPED},
            "patch_size": 14,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
        IMAGE,
    ),
    "llava_next@granite": family(
        "llava_next",
        {
            "text_config": {
                **LLAMA,
                "model_type": "granite",
                "embedding_multiplier": 3.0,
                "attention_multiplier": 0.2,
                "residual_multiplier": 0.7,
                "logits_scaling": 2.0,
            },
            "vision_config": {**SIGLIP, "num_hidden_layers": 4},
            "vision_feature_layer": [-4, -2, -1],
            "vision_feature_select_strategy": "full",
            "image_grid_pinpoints": PINPOINTS,
            "image_token_index": Id(IMAGE),
            "use_image_newline_parameter": True,
        },
        {
            "processor_class": "LlavaNextProcessor",
            "image_processor": {
                "image_processor_type": "LlavaNextImageProcessor",
                **CROPPED,
                "image_grid_pinpoints": PINPOINTS,
            },
            "patch_size": 14,
            "num_additional_image_tokens": 0,
            "vision_feature_select_strategy": "full",
        },
        IMAGE,
    ),
    "idefics2": idefics2(splits=False),
    "idefics2@split": idefics2(splits=True),
    # Its own processor needs num2words for the words of videos, even where there are none; Idefics3's does the same
    # with a picture.
    "smolvlm": family(
        "smolvlm",
        {"text_config": LLAMA, "vision_config": TOWER, "scale_factor": 2, "image_token_id": Id(IMAGE)},
        {
            "processor_class": "Idefics3Processor",
            "image_processor": {
                "image_processor_type": "SmolVLMImageProcessor",
                "size": {"longest_edge": 112},
                "max_image_size": {"longest_edge": 56},
            },
            "image_seq_len": 4,
        },
        IMAGE,
        marks=("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *ROWS),
    ),
    "ovis2": Entry(second_half_configs.ovis2, IMAGE),
    # In a prompt <image> stands for a picture, and <IMG_CONTEXT> in the ids.
    "qianfan_ocr": family(
        "qianfan_ocr",
        {
            "text_config": {**LLAMA, "model_type": "qwen3", "head_dim": 16},
            "vision_config": {**TOWER, "image_size": [56, 56], "patch_size": [14, 14]},
            "image_token_id": Id("<IMG_CONTEXT>"),
            "image_seq_length": 4,
        },
        {
            "processor_class": "QianfanOCRProcessor",
            "image_processor": {"image_processor_type": "GotOcr2ImageProcessor", **SQUARE, "max_patches": 4},
            "image_seq_length": 4,
        },
        IMAGE,
        marks=("<img>", "</img>", IMAGE),
        named={"start_image": "<img>", "end_image": "</img>", "context_image": "<IMG_CONTEXT>"},
    ),
    # Its processor does not expand: a prompt has all tokens of a picture.
    "pp_chart2table": family(
        "pp_chart2table",
        {
            "text_config": {**QWEN2, "tie_word_embeddings": True},
            "vision_config": {
                "hidden_size": 48,
                "output_channels": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 128,
                "patch_size": 16,
                "window_size": 3,
                "global_attn_indexes": [1],
                "mlp_dim": 64,
            },
            "image_token_index": Id("<imgpad>"),
            "image_seq_length": 4,
        },
        {
            "processor_class": "PPChart2TableProcessor",
            "image_processor": {
                "image_processor_type": "PPChart2TableImageProcessor",
                "size": {"height": 128, "width": 128},
            },
        },
        "<img>" + "<imgpad>" * 4 + "</img>",
        marks=("<img>", "</img>"),
    ),
    "video_llama_3": family(
        "video_llama_3",
        {
            "text_config": QWEN2,
            "vision_config": {**TOWER, "model_type": "video_llama_3_vision"},
            "image_token_id": Id("<|image_pad|>"),
            "video_token_id": Id("<|video_pad|>"),
        },
        {
            "processor_class": "VideoLlama3Processor",
            "image_processor": {"image_processor_type": "VideoLlama3ImageProcessor", **GRIDS},
        },
        "<|image_pad|>",
        named={"image": "<|image_pad|>", "video": "<|video_pad|>"},
    ),
}
