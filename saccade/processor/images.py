"""From whatever stands for a picture to a `MediaItem` with its key and cost. Needs no tokenizer and no template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from saccade.costs import blocks_for
from saccade.errors import RequestError, quoted
from saccade.media.hashing import RecentKeys
from saccade.media.load import load_image
from saccade.options import MediaPolicy
from saccade.processor.checkpoint import Checkpoint
from saccade.processor.families import Family, family_for
from saccade.processor.families.base import ManyImagesPolicy
from saccade.types import BillItem, Geometry, Key, MediaItem, short_key

LOW_DETAIL_PIXELS = 512 * 512
"""What OpenAI's `detail: "low"` allows; auto, high and original mean the deployment's own limit."""
_DETAILS = ("auto", "low", "high", "original")


@dataclass(frozen=True, slots=True)
class Limits:
    """Pixel limits in force for one picture."""

    min_pixels: int
    max_pixels: int

    def lowered(self, max_pixels: int) -> Limits:
        highest = min(self.max_pixels, max_pixels)
        return Limits(min(self.min_pixels, highest), highest)


@dataclass(frozen=True, slots=True)
class ImageInput:
    """A picture as a caller gave it."""

    source: Any
    param: str  # where it stands in the request, for errors
    detail: str = "auto"
    allow_path: bool = True  # False for strings that a client sent


PrefetchMedia = Callable[[Sequence[MediaItem]], None]
"""Is told pictures that will be wanted, in their order, long before the prompt they stand in is ready."""
_Source = tuple[int, str]  # of one picture as it was given: object and detail


class Images:
    """Resolves pictures under one deployment's policy."""

    def __init__(self, checkpoint: Checkpoint, policy: MediaPolicy) -> None:
        self.family: Family = family_for(checkpoint.config).from_checkpoint(checkpoint)
        self.policy = policy if self.family.image_token_id is not None else replace(policy, limits={})
        self.limits = Limits(*self.family.policy(policy.min_pixels, policy.max_pixels))
        self._tag = lru_cache(maxsize=64)(self.family.policy_tag)
        self._keys = RecentKeys(checkpoint.fingerprint)

    def largest(self) -> Geometry | None:
        """The most expensive picture a request may bring; None when it may bring none."""
        if self.policy.limits.get("image", 0) < 1:
            return None
        return self.family.largest(self.limits.min_pixels, self.limits.max_pixels)

    def resolve(
        self, images: list[ImageInput], limits: Limits, salt: bytes, prefetch_media: PrefetchMedia | None = None
    ) -> list[MediaItem]:
        """One item per picture. The same picture twice is hashed once and comes out as the same object."""
        self._check_count(len(images))
        if isinstance(self.family, ManyImagesPolicy):
            limits = limits.lowered(self.family.among(len(images), limits.max_pixels))
        by_source: dict[_Source, MediaItem] = {}
        if prefetch_media:
            by_source = self._ends(images, limits, salt)
            prefetch_media(list(by_source.values()))
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

    def _ends(self, images: list[ImageInput], limits: Limits, salt: bytes) -> dict[_Source, MediaItem]:
        """The first and the last one, before all others: in a conversation the last one alone is new."""
        found: dict[_Source, MediaItem] = {}
        with suppress(RequestError):  # it is raised again when it is that picture's turn
            for image in images[:: max(len(images) - 1, 1)]:
                _check_detail(image)
                found[_source(image)] = self.item(image, limits, salt)
        return found

    def _check_count(self, given: int) -> None:
        if self.family.image_token_id is None:
            raise reads_text_only(given)
        allowed = self.policy.limits.get("image", 0)
        if given > allowed:
            raise RequestError(
                f"at most {allowed} images per prompt are allowed (limit_mm_per_prompt image={allowed}), but {given} "
                "were given"
            )

    def _check_total(self, items: Mapping[Key, MediaItem]) -> None:
        """Each may be small enough and all of them together still more than a request should make anyone decode."""
        sizes = [item.header.size for item in items.values()]
        total = sum(size.width * size.height for size in sizes)
        if total > self.policy.max_request_pixels:
            shown = ", ".join(f"{width}x{height}" for width, height in sizes[:8])
            raise RequestError(
                f"the first {len(sizes)} different pictures of the request ({shown}{', ...' * (len(sizes) > 8)}) have "
                f"{total} pixels together, and at most {self.policy.max_request_pixels} are allowed "
                "(max_request_pixels)",
                code="context_length_exceeded",
            )

    def item(self, image: ImageInput, limits: Limits, salt: bytes = b"") -> MediaItem:
        limits = limits.lowered(LOW_DETAIL_PIXELS) if image.detail == "low" else limits
        loaded = load_image(image.source, self.policy, param=image.param, allow_paths=image.allow_path)
        try:
            geometry = self.family.geometry(loaded.header.size, limits.min_pixels, limits.max_pixels)
        except RequestError as error:
            raise RequestError(error.message, code=error.code, param=image.param) from None
        key = self._keys.of(loaded, self._tag(limits.min_pixels, limits.max_pixels), salt)
        return MediaItem(key, "image", loaded.data, loaded.header, geometry)

    def request_limits(self, given: Any) -> Limits:
        """Limits of one request from its mm_processor_kwargs, which may ask for fewer pixels, never for more."""
        if not given:
            return self.limits
        _check_names(given)
        if self.family.is_fixed_size:
            raise RequestError(
                "the size of this model's pictures cannot be chosen, so mm_processor_kwargs must be left out",
                param="mm_processor_kwargs",
            )
        highest = _pixels(given, "max_pixels", self.limits.max_pixels, self.limits.max_pixels)
        lowest = _pixels(given, "min_pixels", min(self.limits.min_pixels, highest), highest)
        return Limits(lowest, highest)


def reads_text_only(images: int, param: str | None = None) -> RequestError:
    given = f"{images} pictures were" if images > 1 else "a picture was"
    return RequestError(
        f"this model reads text only and takes no pictures, but {given} given; leave them out or ask a model that does",
        code="unsupported",
        param=param,
    )


def bill_item(item: MediaItem, block_size: int) -> BillItem:
    width, height = item.header.size
    resized, tokens = item.geometry.resized, item.geometry.tokens
    blocks = blocks_for(tokens, block_size)
    return BillItem(
        kind=item.kind,
        width=width,
        height=height,
        resized_width=resized.width,
        resized_height=resized.height,
        tokens=tokens,
        kv_blocks=blocks,
        key=short_key(item.key),
        grid=item.geometry.grid,
    )


def _source(image: ImageInput) -> _Source:
    return id(image.source), image.detail


def _check_detail(image: ImageInput) -> None:
    if not isinstance(image.detail, str) or image.detail not in _DETAILS:
        raise RequestError(
            f"detail must be one of {', '.join(_DETAILS)}, but {quoted(image.detail)} was given", param=image.param
        )


def _check_names(given: Any) -> None:
    unknown = sorted(set(given) - {"min_pixels", "max_pixels"}) if isinstance(given, Mapping) else [given]
    if unknown:
        raise RequestError(
            f"mm_processor_kwargs takes min_pixels and max_pixels, not {', '.join(map(quoted, unknown[:4]))}",
            param=f"mm_processor_kwargs.{unknown[0][:64]}" if isinstance(given, Mapping) else "mm_processor_kwargs",
        )


def _pixels(given: Mapping[str, Any], name: str, default: int, ceiling: int) -> int:
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= ceiling:
        raise RequestError(
            f"{name} must be a whole number from 1 to {ceiling}, the limit in force, but {quoted(value)} was given",
            param=f"mm_processor_kwargs.{name}",
        )
    return value
