"""A raw prompt as a caller writes it: its keys, token ids, images and videos. Checks them, decodes none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from saccade.errors import RequestError
from saccade.media.video_sources import Video
from saccade.processor.images import ImageInput

_KEYS = ("prompt", "prompt_token_ids", "multi_modal_data", "mm_processor_kwargs", "cache_salt")

Ids = npt.NDArray[np.int64]


def by_key(prompt: Any) -> Any:
    return {"prompt": prompt} if isinstance(prompt, str) else prompt


def prompt_parts(prompt: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """By key, with either text or ids."""
    parts = by_key(prompt)
    if not isinstance(parts, Mapping):
        raise RequestError(f"a prompt is a string or a mapping, not {type(parts).__name__}", param="prompt")
    unknown = sorted(str(name) for name in set(parts) - set(_KEYS))
    if unknown:
        raise RequestError(f"unknown prompt key {', '.join(unknown)}; the keys are {', '.join(_KEYS)}")
    if (parts.get("prompt") is None) == (parts.get("prompt_token_ids") is None):
        raise RequestError("give either prompt or prompt_token_ids", param="prompt")
    return parts


def checked_ids(token_ids: Any, vocab_size: int, placeholder_ids: Sequence[int]) -> Ids:
    try:
        ids = np.array(token_ids, np.int64)
    except (TypeError, ValueError, OverflowError):
        ids = np.empty((0, 0), np.int64)
    if ids.ndim != 1 or not len(ids) or not _are_whole(token_ids):
        message = "prompt_token_ids must be a list of token ids that is not empty"
        raise RequestError(message, param="prompt_token_ids")
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    # A placeholder's id may be above the vocabulary that the model can sample from.
    wrong = wrong[~np.isin(wrong, placeholder_ids)]
    if len(wrong):
        message = f"prompt_token_ids holds {wrong[0]}, but this model's ids go from 0 to {vocab_size - 1}"
        raise RequestError(message, param="prompt_token_ids")
    return ids


def media_inputs(data: Any) -> tuple[list[ImageInput], list[Video]]:
    if not data:
        return [], []
    if not isinstance(data, Mapping):
        message = "multi_modal_data must be a mapping such as {'image': picture}"
        raise RequestError(message, param="multi_modal_data")
    unknown = sorted(str(name) for name in set(data) - {"image", "video"})
    if unknown:
        message = f"multi_modal_data takes image and video, not {', '.join(unknown)}"
        raise RequestError(message, param="multi_modal_data")
    videos = data.get("video")
    is_video = isinstance(videos, (list, tuple)) and len(videos) > 0 and all(map(_is_frame, videos))
    images = [ImageInput(*one) for one in _listed(data.get("image"), "multi_modal_data.image")]
    if is_video:  # a list of decoded images is one video
        return images, [Video(videos, "multi_modal_data.video")]
    return images, [Video(*one) for one in _listed(videos, "multi_modal_data.video")]


def _is_frame(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim < 4
    return isinstance(value, Image.Image)


def _listed(media: Any, where: str) -> list[tuple[Any, str]]:
    """One or a list of them, each with its path in the request."""
    if media is None:
        return []
    if not isinstance(media, (list, tuple)):
        return [(media, where)]
    return [(one, f"{where}[{index}]") for index, one in enumerate(media)]


def _are_whole(ids: Any) -> bool:
    if isinstance(ids, np.ndarray):
        return bool(np.issubdtype(ids.dtype, np.integer))
    kinds = set(map(type, ids))  # thousands of ids, one or two types
    return all(issubclass(kind, (int, np.integer)) and kind is not bool for kind in kinds)
