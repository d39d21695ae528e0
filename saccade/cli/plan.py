"""`saccade plan`: what a model needs and gives on a GPU, before there is one."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from dataclasses import replace
from pathlib import Path

from saccade.apps.plan.alternatives import alternatives
from saccade.apps.plan.calibration import calibration_for, read_calibration
from saccade.apps.plan.chart import svg
from saccade.apps.plan.hardware import DEFAULT, Hardware, find_hardware
from saccade.apps.plan.model_cards import find_model
from saccade.apps.plan.planner import Deployment, make_plan
from saccade.apps.plan.report import as_json, listing, table
from saccade.apps.plan.workload import SizeShare, Workload
from saccade.cli.numbers import count, positive, share, size, whole
from saccade.cli.option_flags import add_options, chosen_options
from saccade.cli.writable import check_plot
from saccade.errors import ConfigError
from saccade.options.engine import Options
from saccade.types.media import Size
from saccade.util.plain_files import write_whole

_OPTIONS = (  # of the engine, as `saccade serve` takes them
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
_EXAMPLES = """\
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


def add(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Plan a deployment from a model's config, a GPU and a workload: what a request costs in "
        "tokens and KV, how many fit, where the time to the first token goes, how many requests a second a "
        "GPU sustains and what limits it, what cheaper choices would change. Needs no GPU and no weights."
    )
    command.epilog = _EXAMPLES
    command.formatter_class = argparse.RawDescriptionHelpFormatter
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
    skip = {option.name for option in dataclasses.fields(Options)}.difference(_OPTIONS)
    add_options(command, "engine, as for saccade serve", Options, skip=skip)


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
        type=_sized_share,
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


def _sized_share(text: str) -> tuple[tuple[int, int], float]:
    dimensions, _, part = text.partition(":")
    return size(dimensions), positive(part or "1")


def run(args: argparse.Namespace) -> int:
    """2 where the arguments cannot be planned."""
    try:
        return _plan(args, Options(**chosen_options(args, Options)))
    except ConfigError as error:
        if args.debug:
            raise
        print(f"saccade: {error}", file=sys.stderr)
        return 2


def _plan(args: argparse.Namespace, options: Options) -> int:
    if args.model is None:
        print(listing())
        return 0
    check_plot(args.plot)
    calibration, measured = read_calibration(args.calibration) if args.calibration else (None, None)
    hardware = _hardware(args, measured)
    checkpoint = find_model(args.model)
    images = int(checkpoint.config.vision is not None) if args.images is None else args.images
    if calibration is None:
        calibration = calibration_for(hardware)
    deployment = Deployment(checkpoint, hardware, calibration, _workload(args, images), options, args.kv_gb)
    estimate = make_plan(deployment)
    choices = alternatives(estimate)
    if args.json:
        print(json.dumps(as_json(estimate, choices), indent=2))
    else:
        print(table(estimate, choices))
    if args.plot:
        write_whole(args.plot, svg(estimate))
    return 0


def _hardware(args: argparse.Namespace, measured: Hardware | None) -> Hardware:
    """The GPU that is named, else the one that was measured, else an H200."""
    if measured is None:
        gpu = find_hardware(args.gpu or DEFAULT)
        return gpu.having(args.gpu_memory_gib, args.gpu_bandwidth, args.gpu_tflops)
    if any((args.gpu, args.gpu_tflops, args.gpu_bandwidth)):
        raise ConfigError(
            f"--calibration {args.calibration} has shares of what {measured.name} was measured to do; "
            "leave --gpu, --gpu-tflops and --gpu-bandwidth out"
        )
    return measured.having(args.gpu_memory_gib, None, None)


def _workload(args: argparse.Namespace, images: int) -> Workload:
    workload = Workload(
        images=images,
        input_tokens=args.input_tokens,
        output_tokens=args.output_tokens,
        rate=args.rate,
        repeated=args.repeated,
        catalogue=args.catalogue,
        ttft_ms=args.slo_ttft_ms,
        itl_ms=args.slo_itl_ms,
    )
    if not args.image:
        return workload
    return replace(workload, sizes=tuple(SizeShare(Size(*size), share) for size, share in args.image))
