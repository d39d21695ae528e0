"""Videos for tests: small files made with PyAV, and Transformers' own way with frames."""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import av
import numpy as np
import torch
from PIL import Image
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLForConditionalGeneration,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from saccade import LLM, SamplingParams
from tests.helpers.engine.reference import image_settings, load
from tests.helpers.media.images import make_photo

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
CODECS = {"mp4": "libx264", "mov": "mpeg4", "webm": "libvpx-vp9", "matroska": "libx264", "avi": "mpeg4"}


def frames(count: int, width: int = 84, height: int = 56, seed: int = 0) -> np.ndarray:
    """[count, height, width, 3]: smooth pictures, each different."""
    return np.stack([np.asarray(make_photo(width, height, seed=1000 * seed + i)) for i in range(count)])


def film(
    count: int = 20,
    *,
    container: str = "mp4",
    fps: int = 10,
    size: tuple[int, int] = (84, 56),
    stamps: Sequence[int] | None = None,
    rotation: int = 0,
    gop: int = 6,
    b_frames: int = 2,
    index_first: bool = False,
    images: np.ndarray | None = None,
) -> bytes:
    """A video whose frames grow brighter one by one. `stamps` are times in units of 1 / fps."""
    if index_first:
        return _index_first(film(count, fps=fps, size=size))
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        stream = file.add_stream(CODECS[container], rate=fps)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = *size, "yuv420p", gop
        if CODECS[container] == "mpeg4":
            stream.options = {"qmin": "1", "qmax": "2"}  # else frames may differ by more than their brightness does
        if container in ("mp4", "matroska"):
            stream.codec_context.max_b_frames = b_frames
        if rotation:
            stream.set_display_rotation(rotation)
        shown = brightening(count, size) if images is None else images
        for index, image in enumerate(shown):
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts, frame.time_base = stamps[index] if stamps else index, Fraction(1, fps)
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return out.getvalue()


def _index_first(data: bytes) -> bytes:
    """The same frames in an MP4 that can be played while it arrives, which FFmpeg writes to files only."""
    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        with av.open(io.BytesIO(data)) as read, av.open(file.name, "w", options={"movflags": "faststart"}) as made:
            stream = made.add_stream_from_template(read.streams.video[0])
            for packet in read.demux(video=0):
                if packet.size:
                    packet.stream = stream
                    made.mux(packet)
        return Path(file.name).read_bytes()


def brightening(count: int, size: tuple[int, int]) -> np.ndarray:
    """The upper left quarter is black, so that a turn shows; the rest of frame i is brightness_of(i)."""
    levels = np.array([brightness_of(i) for i in range(count)], np.uint8)
    made = np.broadcast_to(levels[:, None, None, None], (count, size[1], size[0], 3)).copy()
    made[:, : size[1] // 2, : size[0] // 2] = 0
    return made


def brightness_of(index: int) -> int:
    return 40 + 5 * index % 200


def sound() -> bytes:
    """An MP4 with nothing to see."""
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate, frame.pts = 8000, 0
        file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return out.getvalue()


# --- Transformers -------------------------------------------------------------------------------------------------


@contextmanager
def _without_torchvision() -> Iterator[None]:
    """Transformers' module for these videos imports torchvision, which only its resizing uses."""
    names = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]
    modules = {name: ModuleType(name) for name in [*names, "torchvision.transforms.v2.functional"]}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


with _without_torchvision():
    qwen2_module = import_module("transformers.models.qwen2_vl.video_processing_qwen2_vl")
    qwen3_module = import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl")


class _Qwen3Text(Qwen3VLProcessor):
    """The part that writes a video's text, without the parts that would need torchvision."""

    def __init__(self, tokenizer: Any, video_processor: Any) -> None:
        self.tokenizer, self.video_processor = tokenizer, video_processor
        self.video_token, self.vision_start_token, self.vision_end_token = (
            "<|video_pad|>",
            "<|vision_start|>",
            "<|vision_end|>",
        )


@dataclass
class VideoReference:
    """A Transformers model and its video processor. Frames are resized by Pillow, as ours are."""

    model: Any
    tokenizer: PreTrainedTokenizerFast
    processor: Any
    is_qwen3: bool
    has_seconds: bool

    def resized(self, given: np.ndarray) -> np.ndarray:
        _, height, width, _ = given.shape
        size = self.processor.size
        limits = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
        side = self.processor.patch_size * self.processor.merge_size
        if self.is_qwen3:
            new = qwen3_module.smart_resize(len(given), height, width, factor=side, **limits)
        else:
            new = qwen2_module.smart_resize(height, width, factor=side, **limits)
        images = [Image.fromarray(frame).resize(new[::-1], Image.Resampling.BICUBIC) for frame in given]
        return np.stack([np.asarray(image) for image in images])

    def inputs(self, text: str, given: np.ndarray, metadata: VideoMetadata) -> dict[str, Any]:
        values = torch.from_numpy(self.resized(given)).permute(0, 3, 1, 2).float() / 255
        mean, std = (torch.tensor(v)[:, None, None] for v in (self.processor.image_mean, self.processor.image_std))
        patches, *grid = self.processor.patchify(((values - mean) / std)[None], self.processor.patch_size, 2, 2)
        made = {"pixel_values_videos": patches[0], "video_grid_thw": torch.tensor([grid])}
        ids = self.tokenizer(text.replace("<|video_pad|>", self._spelled(made, metadata)), return_tensors="pt")
        token_ids = ids["input_ids"]
        seconds = {"second_per_grid_ts": torch.tensor([2 / metadata.sampled_fps])} if self.has_seconds else {}
        kinds = torch.eq(token_ids, self.model.config.video_token_id).int() * 2
        mask = torch.ones_like(token_ids)
        return {**made, **seconds, "input_ids": token_ids, "attention_mask": mask, "mm_token_type_ids": kinds}

    def _spelled(self, made: dict[str, Any], metadata: VideoMetadata) -> str:
        if self.is_qwen3:
            asked = {**made, "video_metadata": [metadata]}
            return _Qwen3Text(self.tokenizer, self.processor).replace_video_token(asked, 0)
        return "<|video_pad|>" * (int(made["video_grid_thw"].prod()) // 4)

    @torch.inference_mode()
    def greedy(self, inputs: dict[str, Any], tokens: int = 24) -> list[int]:
        out = self.model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        return list(out[0, inputs["input_ids"].shape[1] :].tolist())


_KINDS = {
    "qwen2_vl": (Qwen2VLForConditionalGeneration, False),
    "qwen2_5_vl": (Qwen2_5_VLForConditionalGeneration, True),
    "qwen3_vl": (Qwen3VLForConditionalGeneration, False),
    "qwen3_5": (Qwen3_5ForConditionalGeneration, False),
}
FAMILIES = tuple(_KINDS)


def video_processor(name: str, **settings: Any) -> Any:
    settings.pop("video_processor_type", None)
    if name.startswith("qwen3"):
        return qwen3_module.Qwen3VLVideoProcessor(**settings)
    return qwen2_module.Qwen2VLVideoProcessor(**settings)


def video_reference(name: str, folder: Path) -> VideoReference:
    kind, has_seconds = _KINDS[name]
    model, tokenizer = load(kind, folder)
    return VideoReference(
        model, tokenizer, video_processor(name, **image_settings(folder)), name.startswith("qwen3"), has_seconds
    )


def metadata(total: int, fps: float = 24.0, indices: Sequence[int] | None = None) -> VideoMetadata:
    chosen = list(range(total)) if indices is None else list(indices)
    return VideoMetadata(total_num_frames=total, fps=fps, frames_indices=chosen)


def answers(folder: Path, asked: list[Any], *, together: bool = True, **given: Any) -> list[list[int]]:
    """Eight greedy tokens for each prompt, by an engine that keeps its books right."""
    llm = LLM(model=str(folder), use_tqdm=False, **{"max_model_len": 512, "kv_cache_gb": 0.02, **given})
    batches = [asked] if together else [[prompt] for prompt in asked]
    outs = [out for batch in batches for out in llm.generate(batch, GREEDY, use_tqdm=False)]
    llm.engine.core.scheduler.check()
    llm.close()
    return [out.outputs[0].token_ids for out in outs]
