"""GLM's families: towers with grids, positions of three axes."""

from __future__ import annotations

from tests.helpers.families.zoo.entry import BUDGET
from tests.helpers.families.zoo.first_half_makers import MLA, ROUTED, Recipe, entry, recipe

_MARKS = tuple(f"<|{name}_of_{kind}|>" for kind in ("image", "video") for name in ("begin", "end"))
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}

GLM4V = Recipe(
    "glm4v",
    text={"rope_parameters": _ROPE},
    vision={
        "depth": 2,
        "hidden_size": 48,
        "num_heads": 4,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "image_size": 56,
    },
    marks=("<|image|>", "<|video|>", *_MARKS),
    ids={
        "image_token_id": "<|image|>",
        "video_token_id": "<|video|>",
        "image_start_token_id": "<|begin_of_image|>",
        "image_end_token_id": "<|end_of_image|>",
        "video_start_token_id": "<|begin_of_video|>",
        "video_end_token_id": "<|end_of_video|>",
    },
    processor={"processor_class": "Glm4vProcessor"},
    images={"image_processor_type": "Glm4vImageProcessor", "size": {"shortest_edge": 3136, "longest_edge": 100352}},
    image="<|begin_of_image|><|image|><|end_of_image|>",
    names={"image": "<|image|>", "video": "<|video|>"},
    seed=3,
)
GLM46V = recipe(
    "glm46v",
    GLM4V,
    processor={"processor_class": "Glm46VProcessor"},
    images={"image_processor_type": "Glm46VImageProcessor"},
)
# Delta nets beside attention through an indexer, several residual streams.
_NEXT = {
    **MLA,
    **ROUTED,
    "qk_rope_head_dim": 0,
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    "num_hidden_layers": 4,
    "index_topk": BUDGET,
    "index_kpool": 4,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "hc_mult": 2,
}

RECIPES = (
    GLM4V,
    GLM46V,
    recipe("glm4v_moe", GLM4V, text={**ROUTED, "first_k_dense_replace": 1}),
    recipe("glm_ocr", GLM46V),
    recipe("glmga", GLM46V),
    recipe(
        "glm5_next",
        GLM4V,
        vision={"projection_intermediate_size": 64},
        processor={"processor_class": "Glm5NextProcessor"},
        images={"image_processor_type": "Glm5NextImageProcessor", "min_image_tokens": 4, "max_image_tokens": 64},
    )._replace(text=_NEXT),
)
ENTRIES = {each.model_type: entry(each) for each in RECIPES}
