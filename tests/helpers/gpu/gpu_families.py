"""Every family on a GPU against the CPU in float32: `python -m tests.helpers.gpu.gpu_families [FAMILY ...]`. A table.

`qwen3_5:fp8-blocks` is such a family quantised, with widths that are whole blocks: any format of `quantize`.

kernels      what the GPU runs: our kernels, or why not
float32      tokens equal to the CPU's, greedy, of all prompts together
again        the same after a second run, which finds its prompts in the prefix cache
prompts      largest difference of the log probabilities of prompts from the CPU's, in float32
preempted    the same with so few KV blocks that requests are preempted and come back
one expert   64 requests of a model whose tokens all choose the same experts, so that none chooses the others
bfloat16     tokens before the first that differs, as a share: near ties may break either way
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from saccade import LLM, SamplingParams, costs
from saccade.processor.checkpoint_files import open_checkpoint
from tests.helpers.families.families import FAMILIES
from tests.helpers.families.family_qwen3_5 import WHOLE_BLOCKS
from tests.helpers.families.quantize import quantize
from tests.helpers.media.images import make_photo

TOKENS = 40
OPTIONS: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_batched_tokens": 256,  # few sizes of CUDA graphs
    "max_num_seqs": 8,
    "kv_cache_gb": 0.05,
    "use_tqdm": False,
}
MANY = 64
MAX_DIFFERENCE = 2e-3  # of a log probability in float32
WORDS = "A longer text about many small things that has several blocks of tokens in it, at least three. "


def prompts(tag: str) -> list[dict[str, Any]]:
    imaged = [
        {"prompt": f"{tag} What is it?", "multi_modal_data": {"image": make_photo(*size, seed=seed)}}
        for seed, size in enumerate([(56, 56), (84, 56), (112, 84)])
    ]
    return [{"prompt": "Count to three."}, *imaged, {"prompt": 3 * WORDS}, {"prompt": WORDS + "Five."}]


def generate(llm: LLM, given: list[dict[str, Any]], tokens: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    return [list(out.outputs[0].token_ids) for out in llm.generate(given, params, use_tqdm=False)]


def prompt_logprobs(llm: LLM, given: list[dict[str, Any]]) -> list[float]:
    """Of all tokens of all prompts; several prompts share a step, and the longest has more than one."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    outs = llm.generate(given, params, use_tqdm=False)
    return [entry.logprob for out in outs for entry in out.prompt_logprobs or () if entry is not None]


def largest_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """A placeholder outside of the vocabulary has minus infinity in both."""
    ours, theirs = (np.nan_to_num(values, neginf=-1e3) for values in (found, expected))
    return float(np.abs(ours - theirs).max())


def equal_share(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    """Tokens before the first of their output that differs."""
    same = 0
    for ours, theirs in zip(found, expected, strict=True):
        same += next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(theirs))
    return same / sum(map(len, expected))


class Run:
    """An engine's tokens of each run, and what it says of itself."""

    def __init__(
        self, device: str, folder: Path, dtype: str, given: list[dict[str, Any]], *,
        runs: int = 1, tokens: int = TOKENS, **options: Any,
    ) -> None:  # fmt: skip
        llm = LLM(str(folder), device=device, dtype=dtype, **{**OPTIONS, **options})
        self.tokens = [generate(llm, given, tokens) for _ in range(runs)]
        self.prompts = prompt_logprobs(llm, given)
        self.eager_reason = llm.engine.core.runner.eager_reason
        self.preemptions = llm.stats()["preemptions"]
        llm.close()
        gc.collect()


def few_blocks(folder: Path) -> float:
    """GiB of KV cache for two or three of the prompts."""
    text = open_checkpoint(str(folder)).config.text
    return 20.5 * costs.kv_bytes_per_block(text, "float32") / costs.GIB


def one_expert(folder: Path) -> float | None:
    """All routers at zero: of equal scores the first experts are chosen. None: the model has no experts."""
    if open_checkpoint(str(folder)).config.text.experts is None:
        return None
    for path in folder.glob("*.safetensors"):
        weights = load_file(path)
        routers = {name: torch.zeros_like(w) for name, w in weights.items() if name.endswith("mlp.gate.weight")}
        save_file({**weights, **routers}, path, metadata={"format": "pt"})
    given = [{"prompt": f"Request {number}."} for number in range(MANY)]
    options = {"max_num_seqs": MANY, "tokens": 6}
    (expected,) = Run("cpu", folder, "float32", given, **options).tokens
    (found,) = Run("cuda", folder, "float32", given, **options).tokens
    return equal_share(found, expected)


def build(name: str, folder: Path) -> Path:
    name, _, layout = name.partition(":")
    family = FAMILIES[name]
    if not layout:
        return family.build(folder, layout=family.layouts[0])
    plain = family.build(folder / "plain", layout=family.layouts[0], text={**WHOLE_BLOCKS, "hidden_size": 512})
    quantize(plain, folder / layout, layout)
    return folder / layout


def check(name: str, folder: Path) -> bool:
    path, given = build(name, folder), prompts(FAMILIES[name.partition(":")[0]].image)
    cpu = Run("cpu", path, "float32", given)
    (expected,) = cpu.tokens
    whole = Run("cuda", path, "float32", given, runs=2)
    small = Run("cuda", path, "float32", given, max_model_len=320, kv_cache_gb=few_blocks(path))
    half = Run("cuda", path, "bfloat16", given)
    shares = [equal_share(found, expected) for found in (*whole.tokens, *small.tokens)]
    shares += [] if (routed := one_expert(path)) is None else [routed]
    cells = [f"{share:.0%}" for share in shares] + ["-"] * (4 - len(shares))
    cells[2] += f" ({small.preemptions})"
    cells.append(f"{equal_share(half.tokens[0], expected):.0%}")
    difference = max(largest_difference(run.prompts, cpu.prompts) for run in (whole, small))
    cells.append(f"{difference:.1e}")
    print(f"| {name} | {whole.eager_reason or 'kernels'} | " + " | ".join(cells) + " |", flush=True)
    is_equal = min(shares) == 1 and difference <= MAX_DIFFERENCE
    return is_equal and small.preemptions > 0 and whole.eager_reason is None


def main(names: Sequence[str]) -> int:
    print("| family | GPU | float32 | again | preempted (times) | one expert | bfloat16 | prompts |", flush=True)
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    failed = []
    for name in names or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                if not check(name, Path(folder)):
                    failed.append(name)
            except Exception as error:
                failed.append(name)
                print(f"| {name} | {type(error).__name__}: {str(error)[:200]} | | | | | | |", flush=True)
    print(f"differ: {', '.join(failed)}" if failed else "all equal in float32, preempted too")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
