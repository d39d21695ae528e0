"""A short benchmark on the CPU, as ratios within one run: `make bench`. Prints a table, then one line of JSON.

The checkpoint is random (about 120 million parameters, made on the first run). Requests are JPEG bytes plus a
question, so decoding and preprocessing count on both sides.
"""

from __future__ import annotations

import argparse
import json
import operator
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.cpu_engine import END, IMAGE, photo
from benchmarks.models import qwen2_vl_120m
from benchmarks.results import write_rows
from benchmarks.scheduling import schedule_and_commit_ms
from benchmarks.transformers_side import TransformersSide
from saccade import LLM, SamplingParams
from saccade.outputs import RequestOutput

QUESTIONS = ("What is in this picture?", "How many red circles are there in it?")
TOKENS = 32
Request = tuple[str, bytes]


def workload(seed: int) -> list[Request]:
    """16 requests over 8 images: image first, two questions each."""
    images = [photo(1000 * seed + i) for i in range(8)]
    return [(f"{IMAGE}{question}{END}", data) for data in images for question in QUESTIONS]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def make_llm(folder: Path, **options: object) -> LLM:
    return LLM(model=str(folder), max_model_len=2048, dtype="float32", use_tqdm=False, **options)


def as_prompt(request: Request) -> dict[str, object]:
    return {"prompt": request[0], "multi_modal_data": {"image": request[1]}}


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# --- throughput ---------------------------------------------------------------------------------------------------


def throughput(folder: Path, rounds: int) -> dict[str, float]:
    """Requests per second: ours, Transformers one by one, and its best batch size. Rounds are interleaved."""
    llm = make_llm(folder)
    other = TransformersSide(folder)
    llm.generate([as_prompt(r) for r in workload(99)[:2]], greedy(4), use_tqdm=False)
    other.generate(workload(99)[:1], 4)
    times: dict[str, list[float]] = {"saccade": [], "sequential": [], "batch 4": [], "batch 8": [], "batch 16": []}
    for index in range(rounds):
        requests = workload(index)
        ours = [as_prompt(r) for r in requests]
        start = time.perf_counter()
        answers = llm.generate(ours, greedy(TOKENS), use_tqdm=False)
        times["saccade"].append(time.perf_counter() - start)
        _compare(answers, other, requests)
        for name, size in (("sequential", 1), ("batch 4", 4), ("batch 8", 8), ("batch 16", 16)):
            times[name].append(seconds(lambda size=size, r=requests: _in_batches(other, r, size)))
    llm.close()
    return {name: 16 / min(values) for name, values in times.items()}


def _compare(answers: Sequence[RequestOutput], other: TransformersSide, requests: Sequence[Request]) -> None:
    """A fast engine with other answers would be no engine: the first answer must be Transformers' own."""
    expected = other.generate(list(requests[:1]), TOKENS)[0]
    assert answers[0].outputs[0].token_ids == expected, "the answers differ from Transformers'"


def _in_batches(other: TransformersSide, requests: Sequence[Request], size: int) -> None:
    for start in range(0, len(requests), size):
        other.generate(list(requests[start : start + size]), TOKENS)


# --- first token --------------------------------------------------------------------------------------------------


def first_token(llm: LLM, prompt: dict[str, object]) -> float:
    return seconds(lambda: llm.generate(prompt, greedy(1), use_tqdm=False))


def seen_image(folder: Path, rounds: int) -> dict[str, float]:
    """An image whose embeddings are at hand against text of as many tokens; then the same with cached prefixes."""
    ids = np.random.default_rng(0)
    data = photo(7)
    result: dict[str, float] = {}
    for name, caching in (("no prefix cache", False), ("prefix cache", True)):
        llm = make_llm(folder, enable_prefix_caching=caching)
        tokens = len(
            llm.generate(as_prompt((f"{IMAGE}{QUESTIONS[0]}{END}", data)), greedy(1), use_tqdm=False)[
                0
            ].prompt_token_ids
        )
        before = llm.stats()["encoder"]
        base = ids.integers(0, 400, tokens).tolist()
        llm.generate({"prompt_token_ids": base}, greedy(1), use_tqdm=False)
        images = []
        texts = []
        for index in range(rounds):
            question = f"Question {index:03d}, what is in this picture?"
            prompt = as_prompt((f"{IMAGE}{question}{END}", data))
            size = len(llm.engine.processor.from_prompt(prompt))
            start = len(llm.engine.processor.from_prompt(as_prompt((IMAGE, data)))) // 16 * 16
            text = [*base[:start], *ids.integers(0, 400, size - start).tolist()]
            images.append(first_token(llm, prompt))
            texts.append(first_token(llm, {"prompt_token_ids": text}))
        after = llm.stats()["encoder"]
        assert after["encoded"] == before["encoded"] and after["decoded"] == before["decoded"], "a seen image is free"
        result[name] = statistics.median(images) / statistics.median(texts)
        llm.close()
    return result


# --- distance from the matrix products ----------------------------------------------------------------------------


def matrix_products(folder: Path, rounds: int) -> dict[str, float]:
    """Time of our prefill, decode and encode over the time of bare matrix products of the same shapes."""
    llm = make_llm(folder, enable_prefix_caching=False)
    config = llm.engine.processor.checkpoint.config
    text = config.text
    vision = config.vision
    assert vision is not None
    ids = np.random.default_rng(1)
    prefill = min(first_token(llm, {"prompt_token_ids": ids.integers(0, 400, 420).tolist()}) for _ in range(rounds))
    decode = _decode_step(llm, [ids.integers(0, 400, 420).tolist() for _ in range(16)])
    encodes = []
    for index in range(rounds):
        out = llm.generate(as_prompt((f"{IMAGE}?{END}", photo(500 + index))), greedy(1), use_tqdm=False)[0]
        encodes.append(out.bill.times_ms["encode"] / 1e3)
    llm.close()
    qkv = (text.num_heads + 2 * text.num_kv_heads) * text.head_dim
    layer = [(text.hidden_size, qkv), (text.num_heads * text.head_dim, text.hidden_size)]
    layer += [(text.hidden_size, 2 * text.intermediate_size), (text.intermediate_size, text.hidden_size)]
    head = [(text.hidden_size, text.vocab_size)]
    width = vision.hidden_size
    tower = [(width, 3 * width), (width, width), (width, vision.intermediate_size), (vision.intermediate_size, width)]
    return {
        "prefill of 420 tokens": prefill / _products([*layer * text.num_layers], 420, rounds),
        "decode step of 16": decode / _products([*layer * text.num_layers, *head], 16, rounds),
        "encode of 1564 patches": min(encodes) / _products(tower * vision.num_layers, 1564, rounds),
    }


def _decode_step(llm: LLM, prompts: Sequence[list[int]]) -> float:
    """Median time of a step in which every prompt decodes one token."""
    for index, ids in enumerate(prompts):
        llm.engine.add_request(str(index), {"prompt_token_ids": ids}, greedy(20))
    times = []
    while llm.engine.has_unfinished_requests():
        times.append(seconds(llm.engine.step))
    return statistics.median(times[-19:])


def _products(shapes: Sequence[tuple[int, int]], rows: int, rounds: int) -> float:
    weights = [torch.randn(outputs, inputs) for inputs, outputs in shapes]
    inputs = {n: torch.randn(rows, n) for n, _ in shapes}
    with torch.inference_mode():
        return min(
            seconds(lambda: [torch.nn.functional.linear(inputs[w.shape[1]], w) for w in weights]) for _ in range(rounds)
        )


# --- report -------------------------------------------------------------------------------------------------------


def report(rows: Sequence[tuple[str, float, str]]) -> None:
    print(f"{'measure':58} {'value':>9}  goal")
    for name, value, goal in rows:
        print(f"{name:58} {value:9.3f}  {goal}")


def missed(rows: Sequence[tuple[str, float, str]]) -> list[str]:
    """Rows whose value does not meet their goal."""
    compare = {">=": operator.ge, "<=": operator.le, "<": operator.lt}
    goals = [(name, value, goal.split()) for name, value, goal in rows if goal]
    return [name for name, value, (sign, limit) in goals if not compare[sign](value, float(limit))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model-dir", type=Path, default=Path("build/bench-qwen2-vl-120m"), help="made when it is missing"
    )
    parser.add_argument("--rounds", type=int, default=2, help="repeats of the slow parts")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there, with the commit")
    args = parser.parse_args()
    folder = qwen2_vl_120m(args.model_dir)
    rates = throughput(folder, args.rounds)
    best = max(rate for name, rate in rates.items() if name.startswith("batch"))
    ratios = seen_image(folder, 4 * args.rounds)
    gemms = matrix_products(folder, args.rounds)
    step = schedule_and_commit_ms(64)
    rows = [
        *((f"requests/s, {name}", rate, "") for name, rate in rates.items()),
        ("times sequential generate", rates["saccade"] / rates["sequential"], ">= 2.5"),
        ("times the best batched generate", rates["saccade"] / best, ">= 1.4"),
        ("first token, seen picture / text of as many tokens", ratios["no prefix cache"], "<= 1.15"),
        ("the same, both prefixes cached", ratios["prefix cache"], "<= 1.3"),
        *((f"{name} / its matrix products", value, "") for name, value in gemms.items()),
        ("schedule + commit of 64 running requests, ms", step, "< 1"),
    ]
    report(rows)
    for name in missed(rows):
        print(f"missed: {name}")
    print(json.dumps({name: round(value, 4) for name, value, _ in rows}))
    if args.json:
        write_rows(args.json, rows)
    return 1 if missed(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
