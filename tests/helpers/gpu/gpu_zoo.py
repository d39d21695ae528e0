"""Bridged families on a GPU against the CPU, in float32: `python -m tests.helpers.gpu.gpu_zoo [FAMILY ...]`. A table.

layers    Transformers' inside our passes, or a decoder of ours where it is one of our kinds
passes    CUDA graphs, or why not
equal     greedy tokens before the first that differs, as a share: two pictures and texts, alone, together, known
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from saccade import LLM
from saccade.models.bridge.text_model import TextModel
from tests.helpers.families.bridged import transformers_layers
from tests.helpers.families.zoo import ZOO, second_half
from tests.helpers.gpu.gpu_families import OPTIONS, WORDS, equal_share, generate
from tests.helpers.media.images import make_photo

TOKENS = 12
SIZES: dict[str, Any] = {**OPTIONS, "max_model_len": 2048, "max_num_batched_tokens": 2048, "kv_cache_gb": 0.5}


def prompts(image: str) -> list[dict[str, Any]]:
    photos = [make_photo(*size, seed=seed) for seed, size in enumerate([(60, 50), (300, 211)])]
    imaged = [{"prompt": f"{image}What is it?", "multi_modal_data": {"image": photo}} for photo in photos]
    return [{"prompt": "Count to three."}, *imaged, {"prompt": 3 * WORDS}]


def tokens_of(name: str, folder: Path, device: str) -> tuple[list[list[int]], bool, str | None]:
    """Of prompts alone and together; whether the decoder is ours; why there are no graphs."""
    given = prompts(ZOO[name].image)
    with LLM(str(folder), device=device, dtype="float32", **{**SIZES, **ZOO[name].options}) as llm:
        found = [tokens for prompt in given for tokens in generate(llm, [prompt], TOKENS)]
        found += generate(llm, given, TOKENS)
        runner = llm.engine.core.runner
        return found, not isinstance(runner.model.decoder, TextModel), runner.eager_reason


def check(name: str) -> bool:
    is_equal = True
    with tempfile.TemporaryDirectory() as folder, second_half.libraries(name):
        path = ZOO[name].build(Path(folder))
        expected, is_ours, _ = tokens_of(name, path, "cpu")
        for is_theirs in (False, True) if is_ours else (True,):
            with transformers_layers() if is_theirs else nullcontext():
                found, _, reason = tokens_of(name, path, "cuda")
            share = equal_share(found, expected)
            layers = "Transformers'" if is_theirs else "ours"
            print(f"| {name} | {layers} | {reason or 'graphs'} | {share:.0%} |", flush=True)
            is_equal &= share == 1
    return is_equal


def main(names: Sequence[str]) -> int:
    failed = []
    for name in names or [name for name, entry in ZOO.items() if entry.refusal is None]:
        try:
            if not check(name):
                failed.append(name)
        except Exception as error:
            failed.append(name)
            print(f"| {name} | {type(error).__name__}: {str(error)[:200]} | | |", flush=True)
    print(f"differ: {', '.join(failed)}" if failed else "all equal")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
