"""`saccade plan`: what a model needs and gives on a GPU, before there is one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from saccade.apps.plan.alternatives import alternatives
from saccade.apps.plan.calibration import calibration_for, read_calibration
from saccade.apps.plan.chart import svg
from saccade.apps.plan.hardware import DEFAULT, Hardware, find_hardware
from saccade.apps.plan.model_cards import find_model
from saccade.apps.plan.planner import Deployment, make_plan
from saccade.apps.plan.report import as_json, listing, table
from saccade.apps.plan.workload import SizeShare, Workload
from saccade.errors import ConfigError
from saccade.options.engine import Options
from saccade.types.media import Size
from saccade.util.plain_files import write_whole


def plan(args: argparse.Namespace, options: Mapping[str, Any]) -> int:
    """2 where the arguments cannot be planned. `options`: the engine's, as they were given."""
    try:
        return _plan(args, Options(**options))
    except ConfigError as error:
        if args.debug:
            raise
        print(f"saccade: {error}", file=sys.stderr)
        return 2


def _plan(args: argparse.Namespace, options: Options) -> int:
    if args.model is None:
        print(listing())
        return 0
    if args.plot and args.plot.suffix.lower() != ".svg":
        raise ConfigError(f"--plot {args.plot} is not an .svg file, and no other is drawn")
    calibration, measured = read_calibration(args.calibration) if args.calibration else (None, None)
    hardware = _hardware(args, measured)
    checkpoint = find_model(args.model)
    images = args.images if args.images is not None else int(checkpoint.config.vision is not None)
    calibration = calibration or calibration_for(hardware)
    deployment = Deployment(checkpoint, hardware, calibration, _workload(args, images), options, args.kv_gb)
    made = make_plan(deployment)
    others = alternatives(made)
    print(json.dumps(as_json(made, others), indent=2) if args.json else table(made, others))
    if args.plot:
        write_whole(args.plot, svg(made))
    return 0


def _hardware(args: argparse.Namespace, measured: Hardware | None) -> Hardware:
    """The GPU that is named, else the one that was measured, else an H200."""
    if measured and (args.gpu or args.gpu_tflops or args.gpu_bandwidth):
        raise ConfigError(
            f"--calibration {args.calibration} has shares of what {measured.name} was measured to do; "
            "leave --gpu, --gpu-tflops and --gpu-bandwidth out"
        )
    found = find_hardware(args.gpu) if args.gpu else measured or find_hardware(DEFAULT)
    return found.having(args.gpu_memory_gib, args.gpu_bandwidth, args.gpu_tflops)


def _workload(args: argparse.Namespace, images: int) -> Workload:
    given = Workload(
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
        return given
    return replace(given, sizes=tuple(SizeShare(Size(*size), share) for size, share in args.image))
