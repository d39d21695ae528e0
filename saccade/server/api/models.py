"""GET /v1/models: the name and context length of the model, and what its images may be and cost."""

from __future__ import annotations

from typing import Any

from saccade.costs import blocks_for
from saccade.errors import RequestError, quoted
from saccade.media.probe import FORMATS
from saccade.media.video_file import is_available
from saccade.media.video_probe import FORMATS as VIDEO_FORMATS
from saccade.media.video_sources import FRAME_TYPES
from saccade.processor.checkpoint_files import BUILTIN
from saccade.processor.generation_config import shown_defaults
from saccade.processor.images import LOW_DETAIL_PIXELS
from saccade.processor.video import Videos
from saccade.processor.whole_videos import WholeVideos
from saccade.server.errors import ApiError
from saccade.server.service import Service
from saccade.types.media import Size

_SHOWN_SIZES = ((336, 336), (640, 480), (1024, 1024), (1280, 720), (1920, 1080), (3840, 2160))
_TYPICAL_IMAGE = Size(1280, 720)
_TEXT_TOKENS = 500
_ABOUT_BUILTIN = {  # training/MODEL_CARD.md in short
    "what": "a demonstration model of 18.7 million parameters, trained on drawn pictures",
    "can": "name colours and shapes and say where they are, count to six, read words, numbers, bar charts, "
    "small tables and receipts, answer in JSON under a schema, call tools, compare pictures, "
    "and follow drawn videos",
    "cannot": "recognise photographs, people or handwriting (it says so), read paragraphs, calculate "
    "or know anything of the world (there it may sound sure)",
}


def model_list(service: Service) -> dict[str, Any]:
    return {"object": "list", "data": [_card(service, name) for name in service.names]}


def model_card(service: Service, name: str) -> dict[str, Any]:
    if not service.serves(name):
        message = f"the model {quoted(name, 200)} is not served here"
        raise ApiError(404, message, code="model_not_found", param="model")
    return _card(service, name if name in service.names else service.names[0])


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "saccade",
        "root": service.names[0],
        "parent": None,
        "task": service.processor.checkpoint.task,
        "max_model_len": service.limits.max_model_len,
        "kv_cache": {"blocks": service.limits.num_blocks, "block_size": service.limits.block_size},
        "default_sampling_params": shown_defaults(service.defaults),
        "multimodal": _multimodal(service),
        # What it was made for, where we know: for the model inside the package.
        "about": _ABOUT_BUILTIN if service.processor.checkpoint.path == BUILTIN else None,
    }


def _multimodal(service: Service) -> dict[str, Any]:
    processor = service.processor
    policy = processor.policy
    videos = processor.videos
    limits = processor.images.limits
    max_videos, card = (videos.max_per_prompt, video_card(videos)) if videos else (0, None)
    return {
        "limit_per_prompt": {"image": policy.limits.get("image", 0), "video": max_videos},
        "formats": FORMATS.replace(" and ", ", ").split(", ") if processor.takes_images else [],
        "min_pixels": limits.min_pixels,
        "max_pixels": limits.max_pixels,
        "max_image_bytes": policy.max_image_bytes,
        "max_image_pixels": policy.max_image_pixels,
        "max_request_pixels": policy.max_request_pixels,
        "max_body_bytes": service.server.max_body_mb << 20,
        "detail_max_pixels": {"low": min(LOW_DETAIL_PIXELS, limits.max_pixels), "high": limits.max_pixels},
        "tokens_per_picture": _tokens_per_image(service),
        "fetches_urls": bool(service.server.allowed_media_domains),
        "video": card,
    }


def video_card(videos: Videos | WholeVideos) -> dict[str, Any]:
    policy = videos.policy.video
    return {
        "formats": VIDEO_FORMATS.replace(" and ", ", ").split(", ") if is_available() else [],
        "frame_types": FRAME_TYPES,  # read without PyAV
        "fps": policy.fps,
        "max_frames": videos.max_frames,
        "max_pixels": (
            videos.rules.limits(policy.max_pixels).max_pixels if isinstance(videos, Videos) else None
        ),
        "max_bytes": policy.max_bytes,
        "max_seconds": policy.max_seconds,
        "pruning": policy.pruning,
    }


def _tokens_per_image(service: Service) -> dict[str, int | None]:
    sizes = _SHOWN_SIZES if service.processor.takes_images else ()
    return {f"{width}x{height}": tokens_of(service, Size(width, height)) for width, height in sizes}


def tokens_of(service: Service, size: Size) -> int | None:
    """Tokens of an image of this size; None if it is refused."""
    limits = service.processor.images.limits
    try:
        return service.processor.family.geometry(size, limits.min_pixels, limits.max_pixels).tokens
    except RequestError:
        return None


def capacity_line(service: Service) -> str:
    """How many typical requests the KV cache holds at once, for the start-up log."""
    limits = service.limits
    size = _TYPICAL_IMAGE
    tokens = (tokens_of(service, size) or 0) + _TEXT_TOKENS
    blocks = blocks_for(tokens, limits.block_size)
    fitting = limits.num_blocks // blocks
    what = f"a {size.width}x{size.height} picture with {_TEXT_TOKENS} tokens of text is {tokens} tokens"
    if not service.processor.takes_images:
        what = f"the model takes no pictures; a prompt of {tokens} tokens"
    elif slots := _cross_attended_slots(service, size):
        what += f", {slots * limits.slot_bytes / 1e6:.1f} MB of the encoder cache"
        fitting = min(fitting, limits.encoder_cache_slots // slots)
    each = " in each replica" if service.server.replica_range[1] > 1 else ""
    return f"{what} = {blocks} KV blocks; {fitting} such requests fit at once{each}"


def _cross_attended_slots(service: Service, size: Size) -> int:
    """Slots that an image holds in the encoder cache for the whole request; 0 without cross-attention."""
    family = service.processor.family
    limits = service.processor.images.limits
    geometry = family.geometry(size, limits.min_pixels, limits.max_pixels)
    return geometry.slots if family.expand(geometry).is_cross_attended else 0
