"""The proof before a model reads videos: its logits about one are those of its own forward.

What fails here leaves pictures and text as they are: only videos are refused then, each with the reason.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from saccade.checkpoint.hf_processor import raised, starts_of
from saccade.checkpoint.hf_video import form_of
from saccade.models.bridge import proof
from saccade.models.bridge.errors import Unfit
from saccade.models.bridge.images import on_device
from saccade.models.bridge.model import ModelBridge
from saccade.models.bridge.proof import Probe
from saccade.models.bridge.videos import VideoInputs
from saccade.types.media import Clip, Geometry, Grid, Size

logger = logging.getLogger("saccade.models")
_SIZE = Size(120, 90)
_FRAMES, _RATE, _SAMPLED = 8, 4.0, 2.0


@torch.inference_mode()
def check_videos(model: ModelBridge) -> None:
    """Takes its videos from a model whose code reads them in another way than ours."""
    if model.videos is None:
        return
    try:
        _check(model, model.videos)
        return
    except Unfit as error:
        model.no_videos = str(error)
    except Exception as error:  # Transformers may raise anything
        model.no_videos = f"its code for videos fails: {raised(error)}"
    model.videos = None
    logger.warning("it reads pictures and no videos: %s", model.no_videos)


def _check(model: ModelBridge, videos: VideoInputs) -> None:
    choice = {} if videos.runs.samples else {"fps": _SAMPLED}
    indices = videos.runs.chosen(_SIZE, _FRAMES, _RATE, choice)
    clip = Clip(_FRAMES, _RATE, indices, choice.get("fps"))
    form = form_of(_SIZE, clip)
    shape = (len(indices), _SIZE.height, _SIZE.width, 3)
    noise = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    output = videos.runs.of_frames(torch.from_numpy(noise), form, f"a {videos.place.written} b c d e")
    inputs = {name: proof.cast(value, model.dtype) for name, value in on_device(output, model.device).items()}
    ids = inputs["input_ids"][0]
    alone = videos.frame.inside(videos.runs(form)["input_ids"][0].tolist())
    starts = starts_of(ids.tolist(), alone)
    if not starts:
        raise Unfit("its processor writes a video in other tokens where text is around it")
    embeds = model.embed(ids)
    patches = model.prepare(noise, geometry := _geometry(clip, len(alone)))
    embeds[starts[0] : starts[0] + len(alone)] = model.encoded(patches, geometry)
    expected, _ = proof.own(model, inputs)
    positions = proof.positions_of(model, inputs, ids)
    rounding = proof.rounding_of(model, inputs, expected)
    probe = Probe(embeds, positions, expected, rounding, (len(ids),))
    difference = proof.difference_in_steps(model, [probe])
    if not difference <= proof.limit_of(model, [probe]):
        raise Unfit(f"about a video its logits differ by {difference:.1e} from those of its own code")


def _geometry(clip: Clip, tokens: int) -> Geometry:
    return Geometry(_SIZE, Grid(1, 1, 1), tokens, tokens, clip=clip)
