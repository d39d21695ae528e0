"""`saccade tune`: what smaller pictures save and what they lose."""

from __future__ import annotations

import argparse

from saccade.apps.evaluation.commands import ReportFiles, tune
from saccade.cli.eval import add_target, check_results, target
from saccade.cli.option_flags import add_options, flag_reader
from saccade.options.engine import Options


def add(command: argparse.ArgumentParser) -> None:
    command.usage = "saccade tune [MODEL] [options]"
    command.description = (
        "Run an evaluation at several max_pixels: what smaller pictures save and what they lose."
    )
    command.epilog = "Example: saccade tune --url http://127.0.0.1:8000 --questions my-set --plot tune.svg"
    add_target(command)
    command.add_argument(
        "--max-pixels",
        dest="sizes",
        type=flag_reader(_read_sizes),
        metavar="N,N,...",
        help="settings to try; automatic: from the largest picture or the server's limit, halving",
    )
    command.add_argument("--plot", metavar="FILE.svg", help="draw accuracy against pixels")
    add_options(command, "engine, for a server of our own", Options, skip=("max_pixels",))


def run(args: argparse.Namespace) -> int:
    check_results(args, "json", "plot")
    return tune(target(args), args.sizes, ReportFiles(args.json, tuple(args.markdown), plot=args.plot))


def _read_sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"expected whole numbers such as 6400,25600, not {text!r}") from None
