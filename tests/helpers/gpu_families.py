"""Every family on a GPU against the CPU in float32: `python -m tests.helpers.gpu_families [FAMILY ...]`. A table.

kernels      what the GPU runs: our kernels, or why not
float32      tokens equal to the CPU's, greedy, of all prompts together
again        the same after a second run, which finds its prompts in the prefix cache
bfloat16     tokens before the first that differs, as a share: near ties may break either way
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from saccade import LLM, SamplingParams
from saccade.runner.build import eager_reason_of
from tests.helpers.families import FAMILIES
from tests.helpers.images import make_photo

TOKENS = 12
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
OPTIONS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 8, "kv_cache_gb": 0.05, "use_tqdm": False}
WORDS = "A longer text about many small things that has several blocks of tokens in it, at least three. "


def prompts(tag: str) -> list[dict[str, Any]]:
    imaged = [
        {"prompt": f"{tag} What is it?", "multi_modal_data": {"image": make_photo(*size, seed=seed)}}
        for seed, size in enumerate([(56, 56), (84, 56), (112, 84)])
    ]
    return [{"prompt": "Count to three."}, *imaged, {"prompt": 3 * WORDS}, {"prompt": WORDS + "Five."}]


def generate(llm: LLM, given: list[dict[str, Any]]) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in llm.generate(given, GREEDY, use_tqdm=False)]


def equal_share(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    """Tokens before the first of their output that differs."""
    same = 0
    for ours, theirs in zip(found, expected, strict=True):
        same += next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(theirs))
    return same / sum(map(len, expected))


def on(device: str, folder: Path, dtype: str, given: list[dict[str, Any]], runs: int = 1) -> Any:
    """The tokens of each run, and why the GPU runs no kernels, if it does not."""
    llm = LLM(str(folder), device=device, dtype=dtype, **OPTIONS)
    found = [generate(llm, given) for _ in range(runs)]
    reason = eager_reason_of(llm.engine.core.runner.model, torch.device(device))
    llm.close()
    gc.collect()
    return found, reason


def check(name: str, folder: Path) -> bool:
    family = FAMILIES[name]
    path, given = family.build(folder, layout=family.layouts[0]), prompts(family.image)
    (expected,), _ = on("cpu", path, "float32", given)
    (first, again), reason = on("cuda", path, "float32", given, runs=2)
    (half,), _ = on("cuda", path, "bfloat16", given)
    shares = [equal_share(found, expected) for found in (first, again, half)]
    kernels = "eager" if reason else "kernels"
    print(f"| {name} | {kernels} | " + " | ".join(f"{share:.0%}" for share in shares) + " |", flush=True)
    return shares[0] == shares[1] == 1


def main(names: Sequence[str]) -> int:
    print("| family | GPU | float32 | again | bfloat16 |\n| --- | --- | --- | --- | --- |", flush=True)
    failed = []
    for name in names or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                if not check(name, Path(folder)):
                    failed.append(name)
            except Exception as error:
                failed.append(name)
                print(f"| {name} | {type(error).__name__}: {str(error)[:200]} | | | |", flush=True)
    print(f"differ: {', '.join(failed)}" if failed else "all equal in float32")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
