"""First tokens, decoding and memory of the engine on a CPU, for one checkout or for two in turns.

    python -m benchmarks.cpu_engine [--dtype float32] [--rounds 3] [--beside OTHER_CHECKOUT] [--threads 1]

Each round is a process of its own, so that peak memory is one engine's. Two checkouts take turns, and the table has
medians and their ratios. The checkpoint is random: 105 million parameters, 78 million of them the embeddings of
Qwen's vocabulary. `--threads 1` counts processor time instead of the clock's, for a machine with other work on it.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from saccade import LLM, SamplingParams

IMAGE = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>"
END = "<|im_end|>\n<|im_start|>assistant\n"
TOKENS = 65
REPEATS = 3
ROWS = {
    "new": "first token, new image, s",
    "seen": "the same image seen, s",
    "decode_1": "decode of 1, tokens/s",
    "decode_8": "decode of 8, tokens/s",
    "new_8": "8 new images at once, 65 tokens out, s",
    "shared_8": "8 questions about 2 images, s",
    "peak_mib": "peak memory, MiB",
}
Prompt = dict[str, object]


def photo(seed: int, width: int = 640, height: int = 480) -> bytes:
    """A smooth random image as JPEG bytes."""
    small = np.random.default_rng(seed).integers(0, 255, (height // 40, width // 40, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).save(stream, "JPEG", quality=90)
    return stream.getvalue()


def prompt(seed: int, question: str) -> Prompt:
    return {"prompt": f"{IMAGE}{question}{END}", "multi_modal_data": {"image": photo(seed)}}


class Round:
    """One engine, measured once."""

    def __init__(self, folder: str, dtype: str, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.llm = LLM(model=folder, dtype=dtype, max_model_len=4096, use_tqdm=False)
        self.ask([prompt(1, "What?")], 4)

    def ask(self, prompts: Sequence[Prompt], tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        start = self.clock()
        self.llm.generate(list(prompts), params, use_tqdm=False)
        return self.clock() - start

    def rate(self, prompts: Sequence[Prompt], tokens: int = TOKENS) -> float:
        """Tokens a second once all prompts are computed."""
        self.ask(prompts, 1)
        first = statistics.median(self.ask(prompts, 1) for _ in range(REPEATS))
        whole = statistics.median(self.ask(prompts, tokens) for _ in range(REPEATS))
        return len(prompts) * (tokens - 1) / (whole - first)

    def measure(self) -> dict[str, float]:
        question = "What is in this picture?"
        return {
            "new": statistics.median(self.ask([prompt(10 + i, question)], 1) for i in range(REPEATS)),
            "seen": statistics.median(self.ask([prompt(10, f"Question {i}?")], 1) for i in range(REPEATS)),
            "decode_1": self.rate([prompt(10, question)]),
            "decode_8": self.rate([prompt(10, f"Question {i}, what?") for i in range(8)]),
            "new_8": self.ask([prompt(50 + i, question) for i in range(8)], TOKENS),
            "shared_8": self.ask([prompt(70 + i % 2, f"Question {i}?") for i in range(8)], TOKENS),
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }


def run_round(checkout: Path, args: argparse.Namespace, dtype: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--worker", "--model-dir", str(args.model_dir), "--dtype", dtype]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command += ["--threads", str(args.threads)]
    process = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(f"a round of {checkout} failed:\n{process.stderr}")
    figures: dict[str, float] = json.loads(process.stdout.splitlines()[-1])
    return figures


def compare(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """Medians of each checkout, this one first; they are measured in turns."""
    checkouts = {"here": Path(__file__).resolve().parent.parent}
    if args.beside:
        checkouts["beside"] = args.beside.resolve()
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for _ in range(args.rounds):
        for name, checkout in checkouts.items():
            rounds[name].append(run_round(checkout, args, dtype))
    medians = {
        name: {key: statistics.median(figures[key] for figures in rounds[name]) for key in ROWS} for name in rounds
    }
    head = f"\n{dtype:44}" + "".join(f" {name:>9}" for name in checkouts)
    if args.beside:
        head += f" {'here/beside':>11}"
    print(head)
    for key, title in ROWS.items():
        values = [figures[key] for figures in medians.values()]
        line = f"{title:44}" + "".join(f" {value:9.3f}" for value in values)
        if args.beside:
            line += f" {values[0] / values[1]:11.2f}"
        print(line)
    return {"dtype": dtype, **medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path("build/bench-qwen2-vl-105m")
    parser.add_argument("--model-dir", type=Path, default=default, help="made when it is missing")
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="another checkout, measured in turns")
    parser.add_argument("--threads", type=int, default=0, help="of PyTorch; 0: its own choice")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.worker:
        clock = time.process_time if args.threads == 1 else time.perf_counter
        print(json.dumps(Round(str(args.model_dir), args.dtype[0], clock).measure()))
        return
    from benchmarks.models import qwen2_vl_105m  # loads Transformers, which a round shall not

    args.model_dir = qwen2_vl_105m(args.model_dir).resolve()
    print(json.dumps([compare(args, dtype) for dtype in args.dtype]))


if __name__ == "__main__":
    main()
