"""How soon a conversation that left the device comes back: `python -m benchmarks.kv_offload [SHAPE ...]`

A conversation of `--tokens` is answered; others push it out of the KV cache; it returns with a question of 32 tokens.
Milliseconds until its first token, the median of `--rounds`:

    device      it was never pushed out: all its blocks are in the prefix cache
    restored    it comes back from host memory (`--kv-offload-gb`)
    computed    the same engine without host memory: prefill of all its tokens

Shapes of published models with random weights. `tiny --tokens 512` runs on a CPU in seconds.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_shapes import SHAPES, write_folder
from saccade import LLM, SamplingParams, costs
from saccade.processor.checkpoint_files import open_checkpoint

QUESTION = 32  # tokens
HELD = 4  # conversations, by the KV cache
FIRST = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


class Conversations:
    """Texts of random tokens that never repeat."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._seeds = count(1)

    def text(self, tokens: int) -> list[int]:
        made = torch.Generator().manual_seed(next(self._seeds))
        return torch.randint(self._vocabulary, (tokens,), generator=made).tolist()


def first_token_ms(llm: LLM, tokens: list[int]) -> tuple[float, int, int]:
    """With the token, and how many of the prompt were cached."""
    begun = time.perf_counter()
    (out,) = llm.generate({"prompt_token_ids": tokens}, FIRST, use_tqdm=False)
    return (time.perf_counter() - begun) * 1e3, out.outputs[0].token_ids[0], out.num_cached_tokens or 0


def open_engine(folder: Path, given: argparse.Namespace, offload_gb: float) -> LLM:
    """A KV cache that holds a few conversations."""
    text = open_checkpoint(str(folder)).config.text
    dtype = given.dtype if given.dtype != "auto" else "bfloat16"
    blocks = HELD * costs.blocks_for(given.tokens + 2 * QUESTION)
    return LLM(
        str(folder),
        load_format="dummy",
        dtype=dtype,
        kv_cache_gb=(blocks + 0.5) * costs.kv_bytes_per_block(text, dtype) / costs.GIB,
        kv_offload_gb=offload_gb,
        max_model_len=given.tokens + 2 * QUESTION,
        max_num_batched_tokens=given.step_tokens,
        max_num_seqs=16,
        limit_mm_per_prompt={"image": 0, "video": 0},
        use_tqdm=False,
    )


def measure(llm: LLM, given: argparse.Namespace, vocabulary: int) -> dict[str, Any]:
    """Of an engine with host memory or without."""
    texts = Conversations(vocabulary)
    ours = texts.text(given.tokens)
    for _ in range(HELD):  # fills the KV cache, and compiles what is left to compile
        first_token_ms(llm, texts.text(given.tokens))
    first_token_ms(llm, ours)
    device: list[float] = []
    returned: list[float] = []
    answers: list[int] = []
    cached = 0
    for _ in range(given.rounds):
        device.append(first_token_ms(llm, ours + texts.text(QUESTION))[0])
        for _ in range(HELD + 1):
            first_token_ms(llm, texts.text(given.tokens))
        ms, token, cached = first_token_ms(llm, ours + texts.text(QUESTION))
        returned.append(ms)
        answers.append(token)
    return {
        "device_ms": statistics.median(device),
        "returned_ms": statistics.median(returned),
        "returned_cached_tokens": cached,
        "answers": answers,
        "kv_offload": llm.stats()["kv_offload"],
        "reason": next((line for line in llm.engine.core.reasons if "from host memory" in line), None),
    }


def compare(name: str, given: argparse.Namespace) -> dict[str, Any]:
    shape = SHAPES[name]
    vocabulary = shape.first_special
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = write_folder(shape, Path(folder))
        for offload_gb in (given.offload_gb, 0.0):
            with open_engine(path, given, offload_gb) as llm:
                found.append(measure(llm, given, vocabulary))
            gc.collect()
    offload, without = found
    return {
        "shape": name,
        "tokens": given.tokens,
        "device_ms": round(offload["device_ms"], 2),
        "restored_ms": round(offload["returned_ms"], 2),
        "computed_ms": round(without["returned_ms"], 2),
        "times_sooner": round(without["returned_ms"] / offload["returned_ms"], 2),
        "restored_tokens": offload["returned_cached_tokens"],
        "same_answers": offload["answers"] == without["answers"],
        "kv_offload": offload["kv_offload"],
        "reason": offload["reason"],
    }


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_offload", description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="*", default=["qwen2_vl_2b", "qwen2_5_vl_7b"], help=", ".join(SHAPES))
    parser.add_argument("--tokens", type=int, default=8192, help="of the conversation")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--offload-gb", type=float, default=8.0, help="host memory")
    parser.add_argument("--step-tokens", type=int, default=2048, help="max_num_batched_tokens")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    return parser.parse_args(given)


def main(argv: Sequence[str] | None = None) -> int:
    given = arguments(argv)
    rows = []
    for name in given.shapes:
        row = compare(name, given)
        rows.append(row)
        print(
            f"{name}, {given.tokens} tokens: device {row['device_ms']} ms, restored {row['restored_ms']} ms, "
            f"computed {row['computed_ms']} ms, {row['times_sooner']} times sooner\n  {row['reason']}",
            flush=True,
        )
    print(json.dumps(rows))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
