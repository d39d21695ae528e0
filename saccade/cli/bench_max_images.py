"""`saccade bench most-images`: the largest number of images in one request that works."""

from __future__ import annotations

from collections.abc import Callable

from saccade.apps.bench.max_images import Attempt, MaxImages, find_max_images


def max_images(attempt: Callable[[int], Attempt], up_to: int) -> MaxImages:
    """Tells of each attempt, and of the end."""

    def tell(images: int) -> Attempt:
        trial = attempt(images)
        how = "answered" if trial.error is None else _problem(trial, "failed")
        print(f"{images:8} images: {how}", flush=True)
        return trial

    search = find_max_images(tell, up_to)
    print(_summary(search, up_to))
    return search


def _summary(search: MaxImages, up_to: int) -> str:
    limit = search.limit
    if limit is None:
        return f"most images: {search.images} or more; no more were tried (--max-images {up_to})"
    how = _problem(limit, "failed, so the search ended")
    return f"most images: {search.images}; {limit.images} {how}: {limit.error}"


def _problem(trial: Attempt, failure: str) -> str:
    return "refused" if trial.is_refusal else failure
