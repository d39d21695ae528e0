"""The command line: one small function per command; the engine's flags are made from `config.Options`.

Commands that need no model weights never import torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
import typing
from collections.abc import Sequence
from typing import Any

from saccade import __version__
from saccade.config import ConfigError, Options
from saccade.processor.count import count_files, table
from saccade.types import RequestError


def main(argv: Sequence[str] | None = None) -> int:
    """0 on success, 2 on a usage error, 1 otherwise; errors are one line on stderr."""
    args = _parse(argv)
    logging.basicConfig(level=logging.DEBUG if args.debug else logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        return int(args.run(args))
    except (ConfigError, RequestError, OSError) as error:
        if args.debug:
            raise
        print(f"saccade: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """As argparse does, but a question may also stand behind the flags: `chat MODEL --image FILE "question"`."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if len(rest) == 1 and not rest[0].startswith("-") and getattr(args, "question", "") is None:
        args.question = rest[0]
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="saccade",
        description="An inference engine for vision-language models that prices a picture before it decodes a pixel.",
        epilog="Start with: saccade count photo.jpg",
    )
    parser.add_argument("--version", action="version", version=f"saccade {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_count(commands)
    _add_chat(commands)
    return parser


# --- count --------------------------------------------------------------------------------------------------------


def _add_count(commands: Any) -> None:
    command = commands.add_parser(
        "count",
        help="what pictures cost: tokens and KV blocks, from their headers alone",
        description="Print the bill of each picture. No weights are loaded and no pixel is decoded.",
        epilog="Example: saccade count --model Qwen/Qwen2-VL-2B-Instruct --max-pixels 1003520 *.jpg",
    )
    command.add_argument("files", nargs="+", metavar="FILE", help="pictures")
    command.add_argument("--model", help="folder or hub id whose rules apply; without it the rules of Qwen2-VL")
    command.add_argument("--min-pixels", type=int, help="smaller pictures are enlarged to this")
    command.add_argument("--max-pixels", type=int, help="larger pictures are reduced to this")
    command.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    command.add_argument("--debug", action="store_true", help="show tracebacks")
    command.set_defaults(run=_count)


def _count(args: argparse.Namespace) -> int:
    """Every readable picture is priced; unreadable ones are named on stderr and make the exit status 1."""
    rows, errors = count_files(args.files, args.model, args.min_pixels, args.max_pixels)
    print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2) if args.json else table(rows))
    for error in errors:
        print(f"saccade: {error}", file=sys.stderr)
    return 1 if errors else 0


# --- chat ---------------------------------------------------------------------------------------------------------


def _add_chat(commands: Any) -> None:
    command = commands.add_parser(
        "chat",
        help="ask a model about pictures in the terminal",
        usage='saccade chat MODEL [--image FILE]... ["question"] [options]',
        description="Answer one question, or hold a conversation when no question is given.",
        epilog='Example: saccade chat Qwen/Qwen2-VL-2B-Instruct --image photo.jpg "What is in this picture?"',
    )
    command.add_argument("model", metavar="MODEL", help="folder or hub id of a checkpoint")
    command.add_argument("question", nargs="?", help="leave it out to hold a conversation")
    command.add_argument("--image", action="append", default=[], metavar="FILE", help="a picture; may be repeated")
    command.add_argument("--max-tokens", type=int, default=512, help="longest answer (default: 512)")
    command.add_argument("--temperature", type=float, default=0.0, help="0 always takes the likeliest token (default)")
    add_engine_options(command)
    command.set_defaults(run=_chat)


def _chat(args: argparse.Namespace) -> int:
    from saccade.chat import converse  # needs torch

    opts = engine_options(args, args.model)
    return converse(opts, args.question, args.image, args.max_tokens, args.temperature)


# --- flags made from the options ----------------------------------------------------------------------------------


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """One flag per option; the default and its meaning are the config class's own."""
    group = parser.add_argument_group("engine")
    kinds, defaults = typing.get_type_hints(Options), Options()
    for option in dataclasses.fields(Options):
        if option.name == "model":
            continue
        help_text = option.metadata["help"]
        if kinds[option.name] is bool:
            name = option.name.removeprefix("enable_").replace("_", "-")
            group.add_argument(f"--no-{name}", dest=option.name, action="store_false", help=f"do not {help_text}")
            continue
        default = getattr(defaults, option.name)
        shown = "" if default is None or isinstance(default, dict) else f" (default: {default})"
        flag = "--" + option.name.replace("_", "-")
        group.add_argument(
            flag, type=_reader(kinds[option.name]), default=default, help=(help_text + shown).replace("%", "%%")
        )
    group.add_argument("--debug", action="store_true", help="show tracebacks and debug logs")


def engine_options(args: argparse.Namespace, model: str | None) -> Options:
    names = [option.name for option in dataclasses.fields(Options) if option.name != "model"]
    return Options(model=model, **{name: getattr(args, name) for name in names})


def _reader(kind: Any) -> Any:
    """The function that reads one flag's text: int, float, str, or image=4,video=1."""
    if typing.get_origin(kind) is dict:
        return _read_limits
    return next((k for k in (int, float) if kind is k or k in typing.get_args(kind)), str)


def _read_limits(text: str) -> dict[str, int]:
    try:
        return {kind: int(count) for kind, count in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected something like image=4,video=1, not {text!r}") from None


if __name__ == "__main__":
    sys.exit(main())
