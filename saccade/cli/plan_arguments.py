"""The arguments of `saccade plan`, apart from the planning, so that `saccade --help` stays quick."""

from __future__ import annotations

import argparse
from pathlib import Path

from saccade.cli.bench_arguments import count, positive, size

OPTIONS = (  # of the engine, as `saccade serve` takes them
    "dtype",
    "quantization",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "block_size",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "encoder_cache_gb",
    "embedding_host_gb",
    "limit_mm_per_prompt",
    "min_pixels",
    "max_pixels",
    "image_decode_threads",
)
EXAMPLES = """\
examples:
  saccade plan                                         the models and GPUs with names here
  saccade plan Qwen/Qwen3-VL-8B --gpu h200             one new image of 1280x720 a request
  saccade plan Qwen/Qwen2-VL-2B --gpu l4 --image 1280x960 --rate 10 --slo-ttft-ms 800
                                                       how many L4s it takes to keep to 800 ms
  saccade plan ./my-model --gpu a100-80 --image 1920x1080:3 640x480:1 --images 2 --repeated 0.4
                                                       a mix of sizes, two images a request, 40 % came before
  saccade plan Qwen/Qwen3-VL-8B --gpu h200 --gpu-memory-gib 94 --json
                                                       a GPU by numbers; all figures for a program
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL",
        help="card, folder, or hub id in the local cache; nothing: a list",
    )
    _add_gpu(command)
    _add_workload(command)
    add = command.add_argument_group("output").add_argument
    add("--json", action="store_true", help="print JSON instead of a table")
    add("--plot", type=Path, metavar="FILE.svg", help="draw times against requests/s")
    add("--debug", action="store_true", help="show tracebacks")


def _add_gpu(command: argparse.ArgumentParser) -> None:
    add = command.add_argument_group("GPU").add_argument
    add("--gpu", metavar="NAME", help="l4, a100-80, h200, cpu ... (default: the calibration's, or h200)")
    add("--gpu-memory-gib", type=positive, metavar="X", help="instead of the named GPU's: memory")
    add("--gpu-bandwidth", type=positive, metavar="GB/S", help="its bandwidth")
    add("--gpu-tflops", type=positive, metavar="X", help="its dense TFLOP/s in bfloat16")
    add("--calibration", type=Path, metavar="FILE", help="JSON of saccade bench --calibrate; else built in")
    add("--kv-gb", type=positive, metavar="X", help="10^9 bytes for KV on paper; automatic: what is left")


def _add_workload(command: argparse.ArgumentParser) -> None:
    add = command.add_argument_group("workload").add_argument
    add(
        "--image",
        type=sized_share,
        action="extend",
        nargs="+",
        metavar="WxH[:SHARE]",
        help="size of images (default: 1280x720); several for a mix, with their shares",
    )
    add(
        "--images", type=whole, default=None, metavar="N", help="in a request (default: 1; 0 for text models)"
    )
    add(
        "--input-tokens", type=count, default=64, metavar="N", help="of text, template included (default: 64)"
    )
    add("--output-tokens", type=whole, default=128, metavar="N", help="of an answer (default: 128)")
    add("--rate", type=positive, metavar="R", help="requests a second to serve; tells the number of GPUs")
    add(
        "--repeated", type=share, default=0.0, metavar="SHARE", help="of images that came before (default: 0)"
    )
    add(
        "--catalogue",
        type=count,
        default=1000,
        metavar="N",
        help="different images among those (default: 1000)",
    )
    add("--slo-ttft-ms", type=positive, metavar="X", help="service level of the first token, at p99")
    add("--slo-itl-ms", type=positive, metavar="X", help="and between two tokens, on average")


def sized_share(text: str) -> tuple[tuple[int, int], float]:
    given, _, part = text.partition(":")
    return size(given), positive(part) if part else 1.0


def whole(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more")
    return value


def share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share from 0 to 1")
    return value
