"""`saccade serve`: its arguments, from flags, the environment and a file."""

from __future__ import annotations

import argparse
import os

from saccade.cli.option_flags import SEVERAL, add_options, chosen_options, names_model
from saccade.cli.vllm_flags import given_vllm_flags
from saccade.errors import UsageError
from saccade.options.engine import Options
from saccade.options.server import ServerOptions
from saccade.server.config import load_settings, log_unused
from saccade.util.logs import FORMAT_VARIABLE, LEVEL_VARIABLE
from saccade.util.logs import set_up as set_up_logs


def add(command: argparse.ArgumentParser) -> None:
    command.usage = "saccade serve [MODEL] [options]"
    command.description = (
        "Serve a model. Options may also be in a YAML file or the environment (SACCADE_PORT)."
    )
    command.epilog = (
        "Example: saccade serve Qwen/Qwen2-VL-2B-Instruct --port 8000 --limit-mm-per-prompt image=4"
    )
    add = command.add_argument
    add("model", nargs="?", metavar="MODEL", help="folder or hub id; nothing: the built-in model")
    add("--config", metavar="FILE", help="YAML file with options; flags and the environment win")
    add_options(command, "server", ServerOptions)
    add_options(command, "engine", Options)
    add("--debug", action="store_true", help="show tracebacks and debug logs")


def run(args: argparse.Namespace) -> int:
    from saccade.server.serve import serve  # loads slowly, and only this command needs it

    _find_model(args)
    file = args.config or os.environ.get("SACCADE_CONFIG")
    flags = {**given_vllm_flags(args), **chosen_options(args, Options, ServerOptions)}
    settings = load_settings(flags, os.environ, file)
    level = "debug" if args.debug else settings.server.log_level
    set_up_logs(level, settings.server.log_format)
    os.environ |= {LEVEL_VARIABLE: level, FORMAT_VARIABLE: settings.server.log_format}
    log_unused(os.environ)
    return serve(settings)


def _find_model(args: argparse.Namespace) -> None:
    """MODEL as --model names it, or after a flag that takes several values: --api-key KEY MODEL."""
    flag, num_words = getattr(args, SEVERAL, ("", 0))
    if args.model is None and num_words > 1 and names_model(getattr(args, flag)[-1]):
        *values, args.model = getattr(args, flag)
        setattr(args, flag, tuple(values))
    if args.named_model is None:
        args.model = args.model or None  # an empty variable of a shell
        return
    if args.model not in (None, args.named_model):
        both = f"MODEL is {args.model} and --model is {args.named_model}"
        raise UsageError(f"{both}; give one of them")
    args.model = args.named_model
