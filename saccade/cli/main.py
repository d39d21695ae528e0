"""The command line: finds the command's module and runs it.

Each command is a module with `add`, its arguments, and `run`. Only the named one is imported, so that
`--help` is quick. Those that need no weights never import torch.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NoReturn

from saccade import __version__
from saccade.cli.vllm_flags import add_vllm_flags, spelled
from saccade.errors import ConfigError, RequestError, UsageError
from saccade.options.vllm.keywords import with_nearest

COMMANDS: Mapping[str, str] = {  # in the order of --help
    "count": "what pictures, videos and PDFs cost: tokens and KV blocks, from their headers alone",
    "plan": "what a model needs and gives on a GPU: tokens, memory, first-token time, requests/s, GPUs",
    "chat": "ask a model about pictures in the terminal",
    "serve": "answer over HTTP, in the shapes of the OpenAI API",
    "eval": "accuracy per skill on questions about pictures",
    "tune": "accuracy, tokens and first-token time at several picture sizes, and a recommended max_pixels",
    "cluster": "the workers of a running server",
    "bench": "put a load on a server, ours or another, and measure it",
    "run-batch": "answer a file of requests, in OpenAI's batch format",
}


def main(argv: Sequence[str] | None = None) -> int:
    """0 on success, 2 on a usage error, 1 otherwise; errors are one line on stderr."""
    shows_tracebacks = False
    try:
        args = _parse(argv)
        shows_tracebacks = args.debug
        level = logging.DEBUG if args.debug else logging.INFO
        logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
        return int(args.run(args))
    except (ConfigError, RequestError, OSError) as error:
        if shows_tracebacks:
            raise
        print(f"saccade: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """What argparse reads; a question may also follow the flags: `chat MODEL --image FILE "question"`."""
    if argv is None:
        argv = sys.argv[1:]
    words = spelled(argv)
    parser, commands = _parser(words)
    args, unknown = parser.parse_known_args(words)
    if len(unknown) == 1 and not unknown[0].startswith("-") and getattr(args, "question", "") is None:
        args.question = unknown[0]
    elif unknown:
        _refuse(commands[args.command], unknown)
    return args


def _refuse(command: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """Names the nearest option for each, with the usage of the command, not of all."""
    options = [name for action in command._actions for name in action.option_strings]
    problems = [word.partition("=")[0] for word in unknown]
    for index, name in enumerate(problems):
        if name.startswith("--"):
            problems[index] = with_nearest(name, options)
    command.error(f"unrecognized arguments: {', '.join(problems)}; {command.prog} --help lists all")


def _parser(words: Sequence[str]) -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser and those of the commands. Only a command among the words has its arguments."""
    parser = argparse.ArgumentParser(
        prog="saccade",
        description="An inference engine for vision-language models. It prices a picture before decoding it.",
        epilog="Start with: saccade count photo.jpg",
    )
    parser.add_argument("--version", action="version", version=f"saccade {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if name in words:
            module = import_module(f"saccade.cli.{name.replace('-', '_')}")
            module.add(command)
            command.set_defaults(run=module.run)
    if "serve" in words:
        add_vllm_flags(commands.choices["serve"])
    return parser, commands.choices
