"""Captioners, encoder-decoders and others that hold a picture in cross-attention or in front of every prompt.

Where a prompt says nothing of a picture, its processor puts the picture's tokens in front, or there are none.
"""

from __future__ import annotations

from pathlib import Path
from shutil import copy

from tests.helpers.families.zoo.entry import Entry
from tests.helpers.families.zoo.second_half_makers import (
    ENDS,
    LLAMA,
    SIGLIP,
    SQUARE,
    TOWER,
    VOCABULARY,
    WINDOW,
    Id,
    family,
)

NOTHING = ""
IMAGE = "<image>"
START = {"decoder_start_token_id": Id("<|im_end|>")}
BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    **ENDS,
}
OPT = {
    "model_type": "opt",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    **ENDS,
}
QUERIES = {**TOWER, "encoder_hidden_size": 48, "cross_attention_frequency": 2, "vocab_size": VOCABULARY}
BLIP_IMAGES = {"image_processor_type": "BlipImageProcessor", **SQUARE}
BART = {
    "model_type": "bart",
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 512,
    **ENDS,
    **START,
}
KOSMOS_TEXT = {
    "vocab_size": VOCABULARY,
    "embed_dim": 64,
    "layers": 2,
    "ffn_dim": 96,
    "attention_heads": 4,
    "max_position_embeddings": 1024,
    **ENDS,
}
OPT_GAINS = {"fc2": 4.0, "out_proj": 4.0, "output.dense": 4.0}
BERT_GAINS = {"word_embeddings": 6.0, "attention.output.dense": 0.3}
BART_GAINS = {"v_proj": 0.2, "fc1": 2.0, "fc2": 4.0}
KOSMOS_GAINS = {"embed_tokens": 0.3, "fc2": 20.0, "out_proj": 0.5}
PATCHES = tuple(f"<patch_index_{place:04d}>" for place in range(64))
TAGS = ("chunk", "line", "phrase", "object", "delimiter_of_multi_objects/", "doc", "image")
KOSMOS_MARKS = (*PATCHES, IMAGE, "<grounding>", "<phrase>", "<object>", *(f"</{tag}>" for tag in TAGS))
GEMMA = {
    **{key: value for key, value in LLAMA.items() if key != "model_type"},
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
    "tie_word_embeddings": True,
}
VISUAL = [f"<|visual token {code:06d}|>" for code in range(32)]
T5 = {"d_kv": 16, **ENDS}


def _blip(kind: str, processor: str) -> Entry:
    return family(
        kind,
        {
            "text_config": OPT,
            "vision_config": TOWER,
            "qformer_config": QUERIES,
            "num_query_tokens": 8,
            "image_token_index": Id(IMAGE),
        },
        {"processor_class": processor, "image_processor": BLIP_IMAGES, "num_query_tokens": 8},
        NOTHING,
        gains=OPT_GAINS,
    )


def _instructblip(folder: Path) -> Path:
    """Its processor has a second tokenizer, for the tower that reads the question."""
    _blip("instructblip", "InstructBlipProcessor").build(folder)
    second = folder / "qformer_tokenizer"
    second.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copy(folder / name, second / name)
    return folder


ENTRIES = {
    "blip-2": _blip("blip-2", "Blip2Processor"),
    "instructblip": Entry(_instructblip, NOTHING),
    # Its processor gives every picture 64 tokens, those behind <unk>.
    "kosmos-2": family(
        "kosmos-2",
        {"text_config": KOSMOS_TEXT, "vision_config": TOWER, "latent_query_num": 64},
        {
            "processor_class": "Kosmos2Processor",
            "image_processor": {"image_processor_type": "CLIPImageProcessor", **SQUARE, "crop_size": SQUARE["size"]},
            "num_patch_index_tokens": len(PATCHES),
        },
        NOTHING,
        marks=KOSMOS_MARKS,
        named={"unk": "<unk>", "bos": "<|endoftext|>"},
        gains=KOSMOS_GAINS,
    ),
    "emu3": family(
        "emu3",
        {
            "text_config": {**LLAMA, "model_type": "emu3_text_model", "attention_dropout": 0.0},
            "vq_config": {
                "codebook_size": len(VISUAL),
                "base_channels": 32,
                "channel_multiplier": [1, 1, 1, 1],
                "num_res_blocks": 1,
                "hidden_size": 32,
            },
            "vocabulary_map": {name: Id(name) for name in (IMAGE, "<|extra_200|>", *VISUAL)},
        },
        {
            "processor_class": "Emu3Processor",
            "image_processor": {
                "image_processor_type": "Emu3ImageProcessor",
                "min_pixels": 48 * 48,
                "max_pixels": 64 * 64,
            },
        },
        IMAGE,
        named={
            "image": IMAGE,
            "boi": "<|image start|>",
            "eoi": "<|image end|>",
            "image_wrapper": "<|image token|>",
            "eof": "<|extra_201|>",
            "bos": "<|endoftext|>",
        },
        pads_together=True,
    ),
    "florence2": family(
        "florence2",
        {
            "text_config": BART,
            "vision_config": {
                "depths": [1, 1],
                "patch_size": [7, 3],
                "patch_stride": [4, 2],
                "patch_padding": [3, 1],
                "patch_prenorm": [False, True],
                "embed_dim": [16, 32],
                "num_heads": [2, 4],
                "num_groups": [2, 4],
                "window_size": 4,
                "projection_dim": 64,
            },
            "image_token_id": Id(IMAGE),
            **ENDS,
            **START,
        },
        {
            "processor_class": "Florence2Processor",
            "image_processor": {
                "image_processor_type": "CLIPImageProcessor",
                "size": {"height": 64, "width": 64},
                "do_center_crop": False,
                "image_seq_length": 65,
            },
        },
        NOTHING,
        named={"image": IMAGE, "bos": "<|endoftext|>"},
        gains={"fc2": 8.0, "embed_tokens": 0.3, "shared": 0.3},
    ),
    "t5gemma2": family(
        "t5gemma2",
        {
            "encoder": {
                "text_config": GEMMA,
                "vision_config": SIGLIP,
                "mm_tokens_per_image": 4,
                "boi_token_index": Id("<start_of_image>"),
                "eoi_token_index": Id("<end_of_image>"),
                "image_token_index": Id("<image_soft_token>"),
            },
            "decoder": GEMMA,
            "image_token_index": Id("<image_soft_token>"),
        },
        {
            "processor_class": "Gemma3Processor",
            "image_processor": {"image_processor_type": "Gemma3ImageProcessor", **SQUARE},
            "image_seq_length": 4,
        },
        "<start_of_image>",
        named={
            "boi": "<start_of_image>",
            "eoi": "<end_of_image>",
            "image": "<image_soft_token>",
            "bos": "<|endoftext|>",
        },
        gains={"embed_tokens": 0.3},
    ),
    "blip": family(
        "blip",
        {"text_config": {**BERT, "sep_token_id": Id("<|im_end|>"), "projection_dim": 64}, "vision_config": TOWER},
        {"processor_class": "BlipProcessor", "image_processor": BLIP_IMAGES},
        NOTHING,
        gains=BERT_GAINS,
    ),
    "git": family(
        "git",
        {**BERT, "vision_config": TOWER},
        {
            "processor_class": "GitProcessor",
            "image_processor": {"image_processor_type": "CLIPImageProcessor", **SQUARE, "crop_size": SQUARE["size"]},
        },
        NOTHING,
        gains=BERT_GAINS,
    ),
    "idefics": family(
        "idefics",
        {
            **{key: value for key, value in LLAMA.items() if key not in ("model_type", "num_key_value_heads")},
            "vocab_size": Id("<fake_token_around_image>"),
            "additional_vocab_size": 4,
            "vision_config": {
                "embed_dim": 48,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 56,
            },
            "perceiver_config": {
                "use_resampler": True,
                "resampler_n_latents": 8,
                "resampler_depth": 1,
                "resampler_n_heads": 4,
                "resampler_head_dim": 16,
            },
            "use_resampler": True,
            "alpha_initializer": "ones",
        },
        {
            "processor_class": "IdeficsProcessor",
            "image_processor": {"image_processor_type": "IdeficsImageProcessor", "image_size": 56},
        },
        "<fake_token_around_image><image><fake_token_around_image>",
        marks=(IMAGE,),
        named={"image": IMAGE, "bos": "<|endoftext|>"},
    ),
    "kosmos-2.5": family(
        "kosmos-2.5",
        {
            "text_config": KOSMOS_TEXT,
            "vision_config": {
                "hidden_size": 48,
                "patch_embed_hidden_size": 768,
                "intermediate_size": 64,
                "head_dim": 12,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "max_num_patches": 4096,
            },
            "latent_query_num": 16,
        },
        {
            "processor_class": "Kosmos2_5Processor",
            "image_processor": {"image_processor_type": "Kosmos2_5ImageProcessor"},
            "num_image_tokens": 16,
        },
        NOTHING,
        gains=KOSMOS_GAINS,
        named={"boi": IMAGE, "eoi": "</image>", "image": "<s>", "bos": "<|endoftext|>"},
    ),
    # The question is a part of the picture.
    "pix2struct": family(
        "pix2struct",
        {
            "text_config": {
                **T5,
                **START,
                "vocab_size": VOCABULARY,
                "hidden_size": 64,
                "d_ff": 96,
                "num_layers": 2,
                "num_heads": 4,
            },
            "vision_config": {
                "hidden_size": 64,
                "patch_embed_hidden_size": 768,
                "d_ff": 64,
                "d_kv": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "seq_len": 2048,
            },
        },
        {
            "processor_class": "Pix2StructProcessor",
            "image_processor": {"image_processor_type": "Pix2StructImageProcessor"},
        },
        NOTHING,
    ),
    # It reads words and their boxes beside the picture.
    "udop": family(
        "udop",
        {
            **T5,
            **START,
            "vocab_size": VOCABULARY,
            "d_model": 64,
            "d_ff": 96,
            "num_layers": 2,
            "num_heads": 4,
            "image_size": 64,
        },
        {
            "processor_class": "UdopProcessor",
            "image_processor": {
                "image_processor_type": "LayoutLMv3ImageProcessor",
                "size": {"height": 64, "width": 64},
                "apply_ocr": False,
            },
        },
        NOTHING,
    ),
    # It reads no text. Its image processor needs torchvision.
    "pp_formulanet": family(
        "pp_formulanet",
        {
            "text_config": {
                **{key: value for key, value in BART.items() if key != "model_type"},
                "forced_eos_token_id": None,
            },
            "vision_config": {
                "hidden_size": 48,
                "output_channels": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 64,
                "window_size": 3,
                "global_attn_indexes": [1],
                "mlp_dim": 64,
                "post_conv_in_channels": 16,
                "post_conv_mid_channels": 32,
                "post_conv_out_channels": 64,
                "decoder_hidden_size": 64,
            },
            **ENDS,
            **START,
        },
        {
            "processor_class": "PPFormulaNetProcessor",
            "image_processor": {
                "image_processor_type": "PPFormulaNetImageProcessor",
                "size": {"height": 64, "width": 64},
            },
        },
        NOTHING,
        gains=BART_GAINS,
    ),
    # It reads no text.
    "vision-encoder-decoder": family(
        "vision-encoder-decoder",
        {
            "encoder": {**TOWER, "model_type": "vit"},
            "decoder": {
                **BERT,
                "model_type": "bert",
                "is_decoder": True,
                "add_cross_attention": True,
                "tie_word_embeddings": False,
            },
            **ENDS,
            **START,
        },
        {
            "processor_class": "TrOCRProcessor",
            "image_processor": {"image_processor_type": "ViTImageProcessor", **SQUARE},
        },
        NOTHING,
        gains=BERT_GAINS,
    ),
}
