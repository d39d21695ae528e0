"""`saccade bench most-images`: the largest number of images in one request that works."""

from __future__ import annotations

from collections.abc import Callable

from saccade.apps.bench.max_images import Attempt, MaxImages, find_max_images


def max_images(attempt: Callable[[int], Attempt], up_to: int) -> MaxImages:
    """Tells of each attempt, and of the end."""

    def tell(images: int) -> Attempt:
        found = attempt(images)
        how = "answered" if found.error is None else "refused" if found.is_refusal else "failed"
        print(f"{images:8} images: {how}", flush=True)
        return found

    found = find_max_images(tell, up_to)
    print(_summary(found, up_to))
    return found


def _summary(found: MaxImages, up_to: int) -> str:
    if found.limit is None:
        return f"most images: {found.images} or more; no more were tried (--max-images {up_to})"
    how = "refused" if found.limit.is_refusal else "failed, so the search ended"
    return f"most images: {found.images}; {found.limit.images} {how}: {found.limit.error}"
