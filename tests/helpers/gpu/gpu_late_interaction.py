"""Late interaction on a GPU against the CPU in float32: `python -m tests.helpers.gpu.gpu_late_interaction`. A table.

The token vectors of images and texts, several together and in chunks, twice: the second time their images are
cached and their prefixes must not be. Ends with status 1 where a vector differs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from saccade import LLM
from tests.helpers.families import family_colqwen2
from tests.helpers.media.images import make_photo

MAX_DIFFERENCE = 1e-3  # of a number of a vector of length 1, in float32
OPTIONS: dict[str, Any] = {"max_model_len": 512, "max_num_batched_tokens": 64, "kv_cache_gb": 0.05, "use_tqdm": False}


def inputs() -> list[Any]:
    photos = [make_photo(*size, seed=seed) for seed, size in enumerate([(56, 56), (200, 168), (112, 84)])]
    pages = [{"messages": [{"role": "user", "content": [{"type": "image", "image": photo}]}]} for photo in photos]
    return [*pages, "Which fox is quick?", "A longer text about many small things. " * 8]


def vectors(folder: Path, device: str) -> list[list[Any]]:
    """Of each run."""
    with LLM(str(folder), device=device, dtype="float32", **OPTIONS) as llm:
        runs = [llm.embed(inputs(), use_tqdm=False) for _ in range(2)]
    assert all(out.num_cached_tokens == 0 for run in runs for out in run)
    return [[np.array(out.outputs.embedding) for out in run if out.outputs] for run in runs]


def main() -> int:
    worst = 0.0
    print("| base | largest difference, run 1 | run 2 |\n| --- | --- | --- |")
    for base in family_colqwen2.BASES:
        with tempfile.TemporaryDirectory() as folder:
            path = family_colqwen2.build(Path(folder), base)
            (expected, _), found = vectors(path, "cpu"), vectors(path, "cuda")
        pairs = [zip(run, expected, strict=True) for run in found]
        differences = [max(float(np.abs(ours - theirs).max()) for ours, theirs in run) for run in pairs]
        print(f"| {base} | {differences[0]:.1e} | {differences[1]:.1e} |", flush=True)
        worst = max(worst, *differences)
    return int(worst > MAX_DIFFERENCE)


if __name__ == "__main__":
    sys.exit(main())
