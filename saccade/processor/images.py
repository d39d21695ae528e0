"""Image inputs: load, size and hash each image of a request into a `MediaItem`. Decodes no pixels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

from saccade.costs import MAX_GPU_JPEG_PIXELS, MIN_GPU_JPEG_PIXELS, blocks_for
from saccade.errors import RequestError, is_int_within, quoted
from saccade.media.documents import PdfPage
from saccade.media.hashing import RecentKeys
from saccade.media.jpeg_layout import is_plain_jpeg
from saccade.media.load import load_image
from saccade.options.engine import MediaPolicy
from saccade.processor.checkpoint_files import Checkpoint
from saccade.processor.families import family_for
from saccade.processor.families.base import Family, ManyImagesPolicy
from saccade.types.bill import BillItem
from saccade.types.media import Geometry, Header, Key, MediaItem, Size, short_key

LOW_DETAIL_PIXELS = 512 * 512
"""The limit for OpenAI's `detail: "low"`; auto, high and original use the deployment's limit."""
_PAGE_PASSES = 4  # what a page shows is not known before it is rendered
_DETAILS = ("auto", "low", "high", "original")


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Pixel limits in force for one image."""

    min_pixels: int
    max_pixels: int

    def lowered(self, max_pixels: int) -> ImageLimits:
        highest = min(self.max_pixels, max_pixels)
        return ImageLimits(min(self.min_pixels, highest), highest)


@dataclass(frozen=True, slots=True)
class ImageInput:
    """An image as a caller gave it."""

    source: Any
    param: str  # its path in the request, for errors
    detail: str = "auto"
    allow_path: bool = True  # False for strings that a client sent


PrefetchMedia = Callable[[Sequence[MediaItem]], None]
"""Called with images in prompt order before the prompt is tokenized, so that decoding can start early."""
Default = TypeVar("Default", int, None)
_Source = tuple[int, str]  # id of the object as given, and detail


class Images:
    """Resolves images under one deployment's policy."""

    def __init__(self, checkpoint: Checkpoint, policy: MediaPolicy) -> None:
        self.family: Family = family_for(checkpoint.config).from_checkpoint(checkpoint)
        self.policy = policy if self.family.image_token_id is not None else replace(policy, limits={})
        self.limits = ImageLimits(*self.family.policy(policy.min_pixels, policy.max_pixels))
        self._tag = lru_cache(maxsize=64)(self.family.policy_tag)
        self._keys = RecentKeys(checkpoint.fingerprint)

    def largest(self) -> Geometry | None:
        """The most expensive image a request may contain; None when it may contain none."""
        if self.policy.limits.get("image", 0) < 1:
            return None
        return self.family.largest(self.limits.min_pixels, self.limits.max_pixels)

    def resolve(
        self,
        images: list[ImageInput],
        limits: ImageLimits,
        salt: bytes,
        prefetch: PrefetchMedia | None = None,
    ) -> list[MediaItem]:
        """One item per image. An image given twice is hashed once and becomes the same object."""
        self._check_count(len(images))
        limits = limits_among(self.family, limits, len(images))
        by_source: dict[_Source, MediaItem] = {}
        if prefetch:
            by_source = self._prefetched(images, limits, salt)
            prefetch(list(by_source.values()))
        by_key: dict[Key, MediaItem] = {}
        items = []
        for image in images:
            _check_detail(image)
            same = _source(image)
            item = by_source.get(same) or self.item(image, limits, salt)
            by_source[same] = by_key.setdefault(item.key, item)
            items.append(by_source[same])
            self._check_total(by_key)
        return items

    def _prefetched(
        self, images: list[ImageInput], limits: ImageLimits, salt: bytes
    ) -> dict[_Source, MediaItem]:
        """The first image and the last: in a conversation only the last one is new."""
        items: dict[_Source, MediaItem] = {}
        with suppress(RequestError):  # `resolve` raises it again, in order
            for image in images[:: max(len(images) - 1, 1)]:
                _check_detail(image)
                items[_source(image)] = self.item(image, limits, salt)
        return items

    def _check_count(self, count: int) -> None:
        if self.family.image_token_id is None:
            raise reads_text_only(count)
        maximum = self.policy.limits.get("image", 0)
        if count > maximum:
            limit = f"at most {maximum} images per prompt are allowed (limit_mm_per_prompt image={maximum})"
            raise RequestError(f"{limit}, but {count} were given")

    def _check_total(self, items: Mapping[Key, MediaItem]) -> None:
        """Bound the pixels that one request makes the decoder work on, beside the limit per image."""
        sizes = [item.header.size for item in items.values()]
        total = sum(size.width * size.height for size in sizes)
        if total > self.policy.max_request_pixels:
            texts = [f"{width}x{height}" for width, height in sizes[:8]] + ["..."] * (len(sizes) > 8)
            images = f"the first {len(sizes)} different pictures of the request ({', '.join(texts)})"
            limit = f"at most {self.policy.max_request_pixels} are allowed (max_request_pixels)"
            message = f"{images} have {total} pixels together, and {limit}"
            raise RequestError(message, code="context_length_exceeded")

    def item(self, image: ImageInput, limits: ImageLimits, salt: bytes = b"") -> MediaItem:
        limits = limits.lowered(LOW_DETAIL_PIXELS) if image.detail == "low" else limits
        if isinstance(image.source, PdfPage):
            return self._page(image.source, image.param, limits, salt)
        loaded = load_image(image.source, self.policy, param=image.param, allow_paths=image.allow_path)
        geometry = self._geometry(loaded.header.size, limits, image.param)
        tag = self._tag(limits.min_pixels, limits.max_pixels)
        reduction, gpu_jpeg = 1, self.policy.gpu_jpeg and is_for_gpu(loaded.data, loaded.header)
        if gpu_jpeg:
            tag += b" gpu_jpeg"
        elif self.policy.scaled_jpeg and (reduction := jpeg_reduction(loaded.header, geometry.resized)) > 1:
            tag += b" scaled_jpeg %d" % reduction
        key = self._keys.of(loaded, tag, salt)
        header = loaded.header
        return MediaItem(key, "image", loaded.data, header, geometry, reduction=reduction, gpu_jpeg=gpu_jpeg)

    def _page(self, page: PdfPage, param: str, limits: ImageLimits, salt: bytes) -> MediaItem:
        """A page of a PDF is rendered no larger than the model can see."""
        size = page_size(page, self.family, self.policy, limits)
        geometry = self._geometry(size, limits, param)
        key = self._keys.of_page(page, size, self._tag(limits.min_pixels, limits.max_pixels), salt)
        header = Header("pdf", size, 1, 1, "RGB", passes=_PAGE_PASSES)
        return MediaItem(key, "image", page.data, header, geometry, page=page.index)

    def _geometry(self, size: Size, limits: ImageLimits, param: str) -> Geometry:
        try:
            return self.family.geometry(size, limits.min_pixels, limits.max_pixels)
        except RequestError as error:
            raise RequestError(error.message, code=error.code, param=param) from None

    def request_limits(self, kwargs: Any) -> ImageLimits:
        """Limits from a request's mm_processor_kwargs, which may only lower the deployment's."""
        if not kwargs:
            return self.limits
        _check_names(kwargs)
        if self.family.is_fixed_size:
            reason = "the size of this model's pictures cannot be chosen"
            message = f"{reason}, so mm_processor_kwargs must be left out"
            raise RequestError(message, param="mm_processor_kwargs")
        highest = whole_number(kwargs, "max_pixels", self.limits.max_pixels, self.limits.max_pixels)
        lowest = whole_number(kwargs, "min_pixels", highest, min(self.limits.min_pixels, highest))
        return ImageLimits(lowest, highest)


def limits_among(family: Family, limits: ImageLimits, images: int) -> ImageLimits:
    """The limits for each of so many images of one prompt."""
    if not isinstance(family, ManyImagesPolicy):
        return limits
    return limits.lowered(family.max_pixels_for(images, limits.max_pixels))


def page_size(page: PdfPage, family: Family, policy: MediaPolicy, limits: ImageLimits) -> Size:
    """The page's size in pixels, before the model's own resizing."""
    highest = policy.max_image_pixels
    return page.size(policy.document, highest if family.is_fixed_size else min(highest, limits.max_pixels))


def jpeg_reduction(header: Header, resized: Size) -> int:
    """The lowest scale of a JPEG that is not below the resized size; 1 for other formats."""
    if header.format != "jpeg":
        return 1
    width, height = header.size
    max_scale = min(width // resized.width, height // resized.height)
    return next((scale for scale in (8, 4, 2) if scale <= max_scale), 1)


def is_for_gpu(data: bytes, header: Header) -> bool:
    """Whether nvJPEG may decode it. Its header tells: the content key says so before a pixel is decoded."""
    pixels = header.size.width * header.size.height
    is_large = MIN_GPU_JPEG_PIXELS <= pixels <= MAX_GPU_JPEG_PIXELS
    return header.format == "jpeg" and is_large and is_plain_jpeg(data, header)


def reads_text_only(images: int, param: str | None = None) -> RequestError:
    subject = f"{images} pictures were" if images > 1 else "a picture was"
    remedy = "leave them out or ask a model that does"
    message = f"this model reads text only and takes no pictures, but {subject} given; {remedy}"
    return RequestError(message, code="unsupported", param=param)


def bill_item(item: MediaItem, block_size: int) -> BillItem:
    geometry = item.geometry
    return BillItem(
        kind=item.kind,
        width=item.header.size.width,
        height=item.header.size.height,
        resized_width=geometry.resized.width,
        resized_height=geometry.resized.height,
        tokens=geometry.tokens,
        kv_blocks=blocks_for(geometry.tokens, block_size),
        key=short_key(item.key),
        grid=geometry.grid,
    )


def _source(image: ImageInput) -> _Source:
    return id(image.source), image.detail


def _check_detail(image: ImageInput) -> None:
    if image.detail not in _DETAILS:
        message = f"detail must be one of {', '.join(_DETAILS)}, but {quoted(image.detail)} was given"
        raise RequestError(message, param=image.param)


def _check_names(kwargs: Any) -> None:
    param = "mm_processor_kwargs"
    unknown = [kwargs]
    if isinstance(kwargs, Mapping):
        unknown = sorted(set(kwargs) - {"min_pixels", "max_pixels"})
        param += "".join(f".{name[:64]}" for name in unknown[:1])
    if unknown:
        names = ", ".join(map(quoted, unknown[:4]))
        raise RequestError(f"mm_processor_kwargs takes min_pixels and max_pixels, not {names}", param=param)


def whole_number(kwargs: Mapping[str, Any], name: str, ceiling: int, default: Default) -> int | Default:
    """A value of mm_processor_kwargs."""
    value = kwargs.get(name)
    if value is None:
        return default
    if not is_int_within(value, 1, ceiling):
        rule = f"{name} must be a whole number from 1 to {ceiling}, the limit in force"
        raise RequestError(f"{rule}, but {quoted(value)} was given", param=f"mm_processor_kwargs.{name}")
    return value
