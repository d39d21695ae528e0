"""What families answer about videos beside Transformers, in the ways in which a server computes an answer."""

from __future__ import annotations

import inspect
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image
from transformers.video_utils import VideoMetadata

from saccade import LLM, SamplingParams
from saccade.checkpoint import hf_processor
from tests.helpers.conformance.modes import CHUNK, SIZES, TOKENS, Asked, Mode, Result, alone, preempted, together
from tests.helpers.conformance.theirs import Prompt, Theirs
from tests.helpers.conformance.values import answer_difference
from tests.helpers.families.zoo import second_half, stand_in_videos
from tests.helpers.families.zoo.entry import Entry
from tests.helpers.families.zoo.videos import VideoEntry, add_video
from tests.helpers.media.images import make_photo
from tests.helpers.media.videos import film, frames

RATE = 4  # frames a second of files
SAMPLED = 2.0  # of those frames a second, where the processor does not say


class VideoPrompt(Prompt):
    """With a video: a file, or a list of frames."""

    def __init__(self, name: str, text: str, *images: Image.Image, video: bytes | np.ndarray) -> None:
        super().__init__(name, text, *images)
        self.video = video

    @property
    def ours(self) -> dict[str, Any]:
        return {"prompt": self.text, "multi_modal_data": {"image": self.images or None, "video": self.video}}

    def metadata(self) -> VideoMetadata | None:
        if not isinstance(self.video, bytes):
            return None
        total, height, width, _ = self.pixels().shape
        return VideoMetadata(total, fps=float(RATE), width=width, height=height, duration=total / RATE)

    def pixels(self) -> np.ndarray:
        """[frames, height, width, 3]"""
        if not isinstance(self.video, bytes):
            return self.video
        with av.open(io.BytesIO(self.video)) as file:
            return np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])


class TheirsOnVideos(Theirs):
    def inputs(self, prompt: Prompt) -> dict[str, Any]:
        if not isinstance(prompt, VideoPrompt):
            return super().inputs(prompt)
        metadata = prompt.metadata()
        how: dict[str, Any] = {"do_sample_frames": metadata is not None, "return_metadata": True}
        part = self.processor.video_processor
        if metadata is not None:
            how["video_metadata"] = [metadata]
            if not (part.do_sample_frames or part.fps or part.num_frames):
                how["fps"] = SAMPLED
        made = dict(
            hf_processor.processed(self.processor, prompt.text, *prompt.images, videos=[prompt.pixels()], **how)
        )
        known = inspect.signature(self.model.forward).parameters
        unread = {"video_metadata", *({"mm_token_type_ids"} - known.keys())}
        return {name: value for name, value in made.items() if name not in unread}


def prompts_of(entry: Entry, video: str) -> list[Prompt]:
    moving = film(16, fps=RATE, size=(84, 56), images=frames(16))
    wide = film(9, fps=RATE, size=(112, 48), images=frames(9, 112, 48, seed=1))
    photo = make_photo(60, 50)
    return [
        VideoPrompt("video", f"{video}What is it?", video=moving),
        VideoPrompt("text around", f"The quick brown {video} fox jumps over it.", video=wide),
        Prompt("text", "The quick brown fox jumps over the lazy dog. " * 3),
        Prompt("picture", f"{entry.image}What is it?", photo),
        VideoPrompt("picture before", f"{entry.image} and {video} differ?", photo, video=moving),
        VideoPrompt("picture after", f"{video} and {entry.image} differ?", photo, video=moving),
        VideoPrompt("list of frames", f"{video} More.", video=frames(4, 70, 70, seed=2)),
    ]


@contextmanager
def libraries(name: str, video: VideoEntry) -> Iterator[None]:
    with second_half.libraries(name), stand_in_videos.provided(video.kind):
        yield


def compare(name: str, entry: Entry, video: VideoEntry, folder: Path) -> Result:
    with libraries(name, video):
        entry.build(folder)
        add_video(video, folder)
        theirs = TheirsOnVideos(folder)
        asked = _asked(prompts_of(entry, video.video), theirs, entry)
        bias = dict.fromkeys(theirs.banned, -100.0)
        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logit_bias=bias, logprobs=5)
        return Result([prompt.name for prompt, _ in asked], list(_differences(folder, entry, sampling, asked)))


def _asked(prompts: Sequence[Prompt], theirs: Theirs, entry: Entry) -> list[Asked]:
    """With what Transformers answers; a prompt that its own code fails on is left out, unless it is the first."""
    asked: list[Asked] = []
    for prompt in prompts:
        try:
            expected = theirs.expected(prompt, TOKENS)
        except Exception:
            if prompt is prompts[0]:
                raise
            continue
        if len(expected.ids) + TOKENS <= entry.options.get("max_model_len", SIZES["max_model_len"]):
            asked.append(Asked(prompt, expected))
    return asked


def _differences(folder: Path, entry: Entry, sampling: SamplingParams, asked: Sequence[Asked]) -> Iterator[str]:
    sizes = {**SIZES, **entry.options}
    chunks = {"max_num_batched_tokens": CHUNK, "encoder_budget": SIZES["max_model_len"], "max_num_seqs": 3}
    engines: list[tuple[Mapping[str, Any], dict[str, Mode]]] = [
        (sizes, {"alone": alone, "warm": alone, "together, warm": together}),
        ({**sizes, "enable_prefix_caching": False}, {"together": together, "preempted": preempted}),
        ({**sizes, **chunks}, {"in chunks": together}),
    ]
    for options, modes in engines:
        with LLM(str(folder), **options) as llm:
            for mode, run in modes.items():
                outs = run(llm, [prompt for prompt, _ in asked], sampling)
                for (prompt, expected), out in zip(asked, outs, strict=True):
                    if difference := answer_difference(out, expected):
                        yield f"{mode}: {prompt.name} {difference}"
