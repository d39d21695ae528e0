"""The requests to plan for, and what one costs in tokens: the bill that the engine itself would write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from saccade.errors import ConfigError, RequestError
from saccade.options.engine import MediaPolicy, Options
from saccade.processor.checkpoint_files import Checkpoint
from saccade.processor.images import Images, limits_among, reads_text_only
from saccade.processor.whole_videos import largest_item, videos_for
from saccade.types.media import Geometry, Size


class SizeShare(NamedTuple):
    size: Size
    share: float  # of the images, in any unit


@dataclass(frozen=True, slots=True)
class Workload:
    sizes: tuple[SizeShare, ...] = (SizeShare(Size(1280, 720), 1.0),)
    images: int = 1  # of a request
    input_tokens: int = 64  # text and chat template
    output_tokens: int = 128
    rate: float | None = None  # requests a second, over all GPUs
    repeated: float = 0.0  # share of images that came before
    catalogue: int = 1000  # different images among those, equally popular
    ttft_ms: float | None = None  # service level of the first token, at p99
    itl_ms: float | None = None  # and between two tokens

    @property
    def image_sizes(self) -> tuple[SizeShare, ...]:
        return self.sizes if self.images else ()


class ImageCost(NamedTuple):
    size: Size
    share: float  # of the images; all add up to 1
    geometry: Geometry


@dataclass(frozen=True, slots=True)
class RequestCost:
    """One request. Numbers of images of several sizes are averages."""

    images: tuple[ImageCost, ...]  # by size; empty without images
    num_images: int
    text_tokens: int
    output_tokens: int
    is_cross_attended: bool  # images are in the encoder cache, not in KV blocks, until the request ends

    @property
    def image_tokens(self) -> float:
        return sum(image.share * image.geometry.tokens for image in self.images)

    @property
    def slots(self) -> float:
        """Embeddings of one image."""
        return sum(image.share * image.geometry.slots for image in self.images)

    @property
    def megapixels(self) -> float:
        return sum(image.share * image.size.width * image.size.height for image in self.images) / 1e6

    @property
    def prompt_tokens(self) -> int:
        return self.text_tokens + round(self.num_images * self.image_tokens)

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @property
    def max_tokens(self) -> int:
        """Tokens with the largest of the sizes."""
        largest = max((image.geometry.tokens for image in self.images), default=0)
        return self.text_tokens + self.num_images * largest + self.output_tokens


def request_cost(checkpoint: Checkpoint, options: Options, workload: Workload) -> RequestCost:
    images = Images(checkpoint, MediaPolicy.of(options))
    family = images.family
    if workload.images and family.image_token_id is None:
        raise ConfigError(f"{reads_text_only(workload.images).message}: --images 0")
    _check_limits(options, workload)
    image_costs: list[ImageCost] = []
    limits = limits_among(family, images.limits, max(1, workload.images))
    total = sum(item.share for item in workload.sizes)
    for size, share in workload.image_sizes:
        try:
            geometry = family.geometry(size, limits.min_pixels, limits.max_pixels)
        except RequestError as error:
            raise ConfigError(f"--image {size.width}x{size.height}: {error.message}") from None
        image_costs.append(ImageCost(size, share / total, geometry))
    return RequestCost(
        images=tuple(image_costs),
        num_images=workload.images if image_costs else 0,
        text_tokens=workload.input_tokens,
        output_tokens=workload.output_tokens,
        is_cross_attended=any(family.expand(image.geometry).is_cross_attended for image in image_costs),
    )


def _check_limits(options: Options, workload: Workload) -> None:
    """What a server with these options would refuse."""
    maximum = options.limit_mm_per_prompt.get("image", 0)
    if workload.images > maximum:
        remedy = f"lower it or add --limit-mm-per-prompt image={workload.images}"
        raise ConfigError(
            f"--images {workload.images} is above limit_mm_per_prompt image={maximum}; {remedy}"
        )
    for size, _ in workload.image_sizes:
        pixels = size.width * size.height
        if pixels > options.max_image_pixels:
            limit = f"at most {options.max_image_pixels} pixels are taken (max_image_pixels)"
            raise ConfigError(f"--image {size.width}x{size.height} has {pixels} pixels; {limit}")


def largest_image(checkpoint: Checkpoint, options: Options) -> Geometry | None:
    """The most expensive image or frame group that the limits allow, for which an engine plans its memory."""
    policy = MediaPolicy.of(options)
    images = Images(checkpoint, policy)
    return largest_item(images, videos_for(checkpoint, policy, images))


def is_fixed_size(checkpoint: Checkpoint, options: Options) -> bool:
    return Images(checkpoint, MediaPolicy.of(options)).family.is_fixed_size


def max_resized_pixels(images: Sequence[ImageCost]) -> int:
    areas = [image.geometry.resized.width * image.geometry.resized.height for image in images]
    return max(areas, default=0)
