"""`saccade chat`: its arguments. `conversation` answers."""

from __future__ import annotations

import argparse

from saccade.cli.option_flags import add_options, chosen_options, names_model
from saccade.options.engine import Options, options


def add(command: argparse.ArgumentParser) -> None:
    command.usage = 'saccade chat [MODEL] [--image FILE]... ["question"] [options]'
    command.description = "Answer one question, or hold a conversation when no question is given."
    command.epilog = 'Example: saccade chat --image examples/shapes.png "How many circles are there?"'
    add = command.add_argument
    add("model", nargs="?", metavar="MODEL", help="folder or hub id; nothing: the built-in model")
    add("question", nargs="?", help="leave it out to hold a conversation")
    add("--image", action="append", default=[], metavar="FILE", help="a picture; may be repeated")
    add("--max-tokens", type=int, default=512, help="longest answer (default: 512)")
    add(
        "--temperature",
        type=float,
        help="0 always takes the likeliest token; automatic: the checkpoint's (--generation-config), or 0",
    )
    add_options(command, "engine", Options)
    add("--debug", action="store_true", help="show tracebacks and debug logs")


def run(args: argparse.Namespace) -> int:
    from saccade.cli.conversation import converse  # needs torch

    if args.question is None and args.model is not None and not names_model(args.model):
        args.question = args.model
        args.model = None
    engine = options(**chosen_options(args, Options))
    return converse(engine, args.question, args.image, args.max_tokens, args.temperature)
