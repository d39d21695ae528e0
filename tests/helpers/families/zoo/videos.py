"""Families of the zoo that read videos: the processor of videos that a checkpoint gets, and what a prompt says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

NOTHING: Mapping[str, Any] = MappingProxyType({})


class VideoEntry(NamedTuple):
    kind: str  # class of its processor of videos
    video: str  # what a raw prompt says where a video goes
    settings: Mapping[str, Any] = NOTHING  # of that processor
    processor: Mapping[str, Any] = NOTHING  # fields of the whole
    refusal: str | None = None  # of a family whose videos are not read: a part of the sentence


_EDGES = {"size": {"shortest_edge": 56 * 56, "longest_edge": 8 * 56 * 84}}  # pixels of all frames
_SQUARE = {"size": {"height": 56, "width": 56}}
_CROPPED = {"size": {"shortest_edge": 56}, "crop_size": _SQUARE["size"]}
_SCALED = {"do_rescale": True, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_QWEN = "<|vision_start|><|video_pad|><|vision_end|>"
_GLM = "<|begin_of_video|><|video|><|end_of_video|>"

VIDEOS: dict[str, VideoEntry] = {
    "glm4v": VideoEntry("Glm4vVideoProcessor", _GLM, _EDGES),
    "glm4v_moe": VideoEntry("Glm4vVideoProcessor", _GLM, _EDGES),
    "glm46v": VideoEntry("Glm46VVideoProcessor", _GLM, _EDGES),
    "glm_ocr": VideoEntry("Glm46VVideoProcessor", _GLM, _EDGES),
    "glmga": VideoEntry("GlmgaVideoProcessor", _GLM, _EDGES),
    "gemma4": VideoEntry("Gemma4VideoProcessor", "<|video|>", {"num_frames": 4}),
    "gemma4_unified": VideoEntry("Gemma4UnifiedVideoProcessor", "<|video|>", {"num_frames": 4}),
    "internvl": VideoEntry("InternVLVideoProcessor", "<video>", _SQUARE),
    "minicpmv4_6": VideoEntry(
        "MiniCPMV4_6VideoProcessor", "<|video_pad|>", {"scale_resolution": 112, "patch_size": 14}
    ),
    "minicpmv4_7": VideoEntry(
        "MiniCPMV4_6VideoProcessor", "<|video_pad|>", {"scale_resolution": 112, "patch_size": 14}
    ),
    "qwen2_5_omni_thinker": VideoEntry("Qwen2VLVideoProcessor", _QWEN, _EDGES),
    "qwen3_omni_moe_thinker": VideoEntry("Qwen2VLVideoProcessor", _QWEN, {"patch_size": 16, **_EDGES}),
    "smolvlm": VideoEntry(
        "SmolVLMVideoProcessor",
        "<video>",
        {
            "size": {"longest_edge": 56},
            "max_image_size": {"longest_edge": 56},
            "video_sampling": {"fps": 1, "max_frames": 4, "video_size": {"longest_edge": 56}},
        },
        {"processor_class": "SmolVLMProcessor"},
        refusal="marks a video by the text <video>, which is no token of its own",
    ),
    "video_llama_3": VideoEntry(
        "VideoLlama3VideoProcessor", "<|video_pad|>", {"use_token_compression": False, **_EDGES}
    ),
    "llava_next_video": VideoEntry("LlavaNextVideoVideoProcessor", "<video>", _CROPPED),
    "video_llava": VideoEntry("VideoLlavaVideoProcessor", "<video>", _CROPPED),
    "perception_lm": VideoEntry("PerceptionLMVideoProcessor", "<|video|>", _SQUARE),
    "molmo2": VideoEntry("Molmo2VideoProcessor", "<|video|>", {**_SQUARE, **_SCALED, "num_frames": 4}),
    "ernie4_5_vl_moe": VideoEntry(
        "Ernie4_5_VLMoeVideoProcessor",
        "<|VIDEO_START|><|VIDEO_PLACEHOLDER|><|VIDEO_END|>",
        {"draw_on_frames": False, **_EDGES},
    ),
    "cohere_compass": VideoEntry("CohereCompassVideoProcessor", "<|VISION_START|><|VIDEO_PAD|><|VISION_END|>", _EDGES),
    "cosmos3_edge": VideoEntry("Cosmos3EdgeVideoProcessor", _QWEN, _EDGES),
    "cosmos3_omni": VideoEntry("Qwen3VLVideoProcessor", _QWEN, _EDGES),
    "exaone4_5": VideoEntry("Qwen2VLVideoProcessor", _QWEN, _EDGES),
    "hyperclovax_vision_v2": VideoEntry("Qwen2VLVideoProcessor", _QWEN, _EDGES),
    "lfm3_vl": VideoEntry("Qwen3VLVideoProcessor", _QWEN, _EDGES),
    "qwen4_exp": VideoEntry("Qwen3VLVideoProcessor", _QWEN, _EDGES),
    "dots3_note": VideoEntry("Qwen3VLVideoProcessor", _QWEN, {"temporal_patch_size": 1, "patch_size": 14, **_EDGES}),
    "muse_glimmer": VideoEntry("MuseGlimmerVideoProcessor", "<|video|>", {"num_frames": 4}),
    "muse_spark": VideoEntry("MuseGlimmerVideoProcessor", "<|video|>", {"num_frames": 4}),
    "glm5_next": VideoEntry("Glm5NextVideoProcessor", _GLM, {"min_image_tokens": 4, "max_image_tokens": 16}),
    "minicpm_ocr": VideoEntry("MiniCPMOcrVideoProcessor", "<|video_pad|>", {"scale_resolution": 112, "patch_size": 14}),
}


def add_video(entry: VideoEntry, folder: Path) -> None:
    """A checkpoint of the zoo gets a processor of videos."""
    file = folder / "processor_config.json"
    settings = json.loads(file.read_text("utf-8"))
    part = {"video_processor_type": entry.kind, **entry.settings}
    file.write_text(json.dumps({**settings, **entry.processor, "video_processor": part}), "utf-8")
