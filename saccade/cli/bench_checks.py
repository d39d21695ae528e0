"""What `saccade bench` refuses before it sends anything: flags that contradict each other, unusable files."""

from __future__ import annotations

import argparse

from saccade.apps.bench.trace import TraceRequest, read_trace
from saccade.apps.bench.video import check_av
from saccade.cli.bench import DOCUMENTS, MAX_IMAGES, NAMES, engine_options
from saccade.cli.writable import check_plot, check_writable
from saccade.errors import ConfigError

_WORKLOAD = "image"  # where none is named
_REQUESTS = 100
_CLIENTS = (8,)
_PAGE = (1275, 1650)  # letter paper at 150 dpi
_LEVELS = (1, 4, 16, 32)  # of clients that read documents


def check(args: argparse.Namespace) -> tuple[TraceRequest, ...]:
    """The trace, if one is given. Sets what depends on it. ConfigError names the flag at fault."""
    check_plot(args.plot)
    for flag in ("json", "csv", "plot"):
        if path := getattr(args, flag):
            check_writable(f"--{flag}", path)
    if args.trace and args.workload:
        raise ConfigError(f"--trace says what requests hold: leave out the workload {args.workload!r}")
    if args.offline is not None:
        _refuse_server_flags(args)
    elif engine := engine_options(args):
        flag = "--" + next(iter(engine)).replace("_", "-")
        raise ConfigError(f"{flag} is of an engine in this process: give a MODEL, or leave it out")
    if args.workload == MAX_IMAGES:
        _refuse_load_flags(args)
    if args.workload == "video":
        check_av()
    if args.trace:
        trace = read_trace(args.trace)
        args.workload = "trace"
        args.levels = ()
        args.requests = min(args.requests or len(trace), len(trace))
        return trace
    args.workload = args.workload or _WORKLOAD
    _set_levels(args)
    if not args.levels:
        args.requests = args.requests or _REQUESTS
    return ()


def _set_levels(args: argparse.Namespace) -> None:
    """`levels`: of clients, where a table is wanted."""
    reads = args.workload == DOCUMENTS
    is_closed = not (args.rate or args.goodput)
    args.levels = args.clients or (_LEVELS if reads else _CLIENTS)
    args.clients = args.levels[0]
    if not is_closed or (len(args.levels) == 1 and not reads):
        args.levels = ()
    if reads:
        args.size = args.size or [_PAGE]
    for flag in ("csv", "plot", "beside") if args.levels else ():
        if getattr(args, flag):
            raise ConfigError(f"a table has several loads: leave out --{flag}, or name one --rate")


def _refuse_load_flags(args: argparse.Namespace) -> None:
    for flag in ("rate", "goodput", "beside", "csv", "plot"):
        if getattr(args, flag):
            raise ConfigError(f"{MAX_IMAGES} sends one request at a time: leave out --{flag}")


def _refuse_server_flags(args: argparse.Namespace) -> None:
    if args.offline in NAMES and not args.workload:
        example = f"saccade bench {args.offline} --offline"
        raise ConfigError(f"--offline takes {args.offline!r} for a model; put the workload first: {example}")
    if args.model:
        raise ConfigError(f"--offline names the model: say --offline {args.model}, without --model")
    if args.processes:
        raise ConfigError("--offline has no processes of clients: leave out --processes")
