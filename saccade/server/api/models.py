"""GET /v1/models: the model's name and length, and what its pictures may be and cost."""

from __future__ import annotations

from typing import Any

from saccade.costs import blocks_for
from saccade.errors import RequestError, quoted
from saccade.media.probe import FORMATS
from saccade.media.video_file import is_available
from saccade.media.video_probe import FORMATS as VIDEO_FORMATS
from saccade.media.video_sources import FRAME_TYPES
from saccade.processor.generation_config import shown_defaults
from saccade.processor.images import LOW_DETAIL_PIXELS
from saccade.processor.video import Videos
from saccade.server.errors import ApiError
from saccade.server.service import Service
from saccade.types import Size

_SHOWN_SIZES = (Size(336, 336), Size(640, 480), Size(1024, 1024), Size(1280, 720), Size(1920, 1080), Size(3840, 2160))
_TYPICAL_IMAGE, _TYPICAL_TEXT = Size(1280, 720), 500


def model_list(service: Service) -> dict[str, Any]:
    return {"object": "list", "data": [_card(service, name) for name in service.names]}


def model_card(service: Service, name: str) -> dict[str, Any]:
    if not service.serves(name):
        raise ApiError(404, f"the model {quoted(name, 200)} is not served here", code="model_not_found", param="model")
    return _card(service, name if name in service.names else service.names[0])


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "saccade",
        "root": service.names[0],
        "parent": None,
        "max_model_len": service.limits.max_model_len,
        "kv_cache": {"blocks": service.limits.num_blocks, "block_size": service.limits.block_size},
        "default_sampling_params": shown_defaults(service.defaults),
        "multimodal": _multimodal(service),
    }


def _multimodal(service: Service) -> dict[str, Any]:
    images, policy, videos = service.processor.images, service.processor.policy, service.processor.videos
    limits = images.limits
    return {
        "limit_per_prompt": {"image": policy.limits.get("image", 0), "video": videos.max_per_prompt if videos else 0},
        "formats": FORMATS.replace(" and ", ", ").split(", ") if service.processor.takes_images else [],
        "min_pixels": limits.min_pixels,
        "max_pixels": limits.max_pixels,
        "max_image_bytes": policy.max_image_bytes,
        "max_image_pixels": policy.max_image_pixels,
        "max_request_pixels": policy.max_request_pixels,
        "max_body_bytes": service.server.max_body_mb << 20,
        "detail_max_pixels": {"low": min(LOW_DETAIL_PIXELS, limits.max_pixels), "high": limits.max_pixels},
        "tokens_per_picture": _tokens_per_image(service),
        "fetches_urls": bool(service.server.allowed_media_domains),
        "video": video_card(videos) if videos else None,
    }


def video_card(videos: Videos) -> dict[str, Any]:
    policy = videos.policy.video
    return {
        "formats": VIDEO_FORMATS.replace(" and ", ", ").split(", ") if is_available() else [],
        "frame_types": FRAME_TYPES,  # these need no PyAV
        "fps": policy.fps,
        "max_frames": videos.max_frames,
        "max_pixels": videos.rules.limits(policy.max_pixels).max_pixels,
        "max_bytes": policy.max_bytes,
        "max_seconds": policy.max_seconds,
        "pruning": policy.pruning,
    }


def _tokens_per_image(service: Service) -> dict[str, int | None]:
    sizes = _SHOWN_SIZES if service.processor.takes_images else ()
    return {f"{size.width}x{size.height}": tokens_of(service, size) for size in sizes}


def tokens_of(service: Service, size: Size) -> int | None:
    """What a picture of this size costs; None when it is refused."""
    limits = service.processor.images.limits
    try:
        return service.processor.family.geometry(size, limits.min_pixels, limits.max_pixels).tokens
    except RequestError:
        return None


def capacity_line(service: Service) -> str:
    """How many ordinary requests the KV cache holds at once, for the start-up log."""
    limits, (width, height) = service.limits, _TYPICAL_IMAGE
    tokens = (tokens_of(service, _TYPICAL_IMAGE) or 0) + _TYPICAL_TEXT
    blocks = blocks_for(tokens, limits.block_size)
    what = f"a {width}x{height} picture with {_TYPICAL_TEXT} tokens of text is {tokens} tokens"
    if not service.processor.takes_images:
        what = f"the model takes no pictures; a prompt of {tokens} tokens"
    fitting = limits.num_blocks // blocks
    if kept := _kept_slots(service, _TYPICAL_IMAGE):
        what += f", {kept * limits.slot_bytes / 1e6:.1f} MB of the encoder cache"
        fitting = min(fitting, limits.encoder_cache_slots // kept)
    return f"{what} = {blocks} KV blocks; {fitting} such requests fit at once"


def _kept_slots(service: Service, size: Size) -> int:
    """Slots of the encoder cache that a picture keeps while an answer looks at it; 0 where answers do not."""
    family, limits = service.processor.family, service.processor.images.limits
    if not service.processor.takes_images:
        return 0
    geometry = family.geometry(size, limits.min_pixels, limits.max_pixels)
    return geometry.slots if family.expand(geometry).is_cross_attended else 0
