"""The command line. Flags are made from the config classes in `options`.

Each command imports what it needs when it runs, so that `--help` is quick. Those that need no weights never
import torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import re
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from saccade import __version__
from saccade.cli import bench_arguments, plan_arguments, run_batch_arguments
from saccade.cli.vllm_flags import add_vllm_flags, given_vllm_flags, spelled
from saccade.cli.writable import check_writable
from saccade.errors import ConfigError, RequestError, UsageError
from saccade.options.engine import Options, options
from saccade.options.fields import defaults_of
from saccade.options.server import ServerOptions
from saccade.server.config import load_settings, log_unused, option_kinds, text_reader
from saccade.util.logs import FORMAT_VARIABLE, LEVEL_VARIABLE
from saccade.util.logs import set_up as set_up_logs

if TYPE_CHECKING:
    from saccade.apps.evaluation.commands import EvalTarget

_SEVERAL = "latest flag that takes several values"  # an attribute of the parsed arguments


def main(argv: Sequence[str] | None = None) -> int:
    """0 on success, 2 on a usage error, 1 otherwise; errors are one line on stderr."""
    args = _parse(argv)
    level = logging.DEBUG if args.debug else logging.INFO
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    try:
        return int(args.run(args))
    except (ConfigError, RequestError, OSError) as error:
        if args.debug:
            raise
        print(f"saccade: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """As argparse, but a question may also follow the flags: `chat MODEL --image FILE "question"`."""
    parser, commands = _parser()
    words = spelled(sys.argv[1:] if argv is None else argv)
    if "serve" in words:
        add_vllm_flags(commands["serve"])
    args, rest = parser.parse_known_args(words)
    if len(rest) == 1 and not rest[0].startswith("-") and getattr(args, "question", "") is None:
        args.question = rest[0]
    elif rest:
        _refuse(commands[args.command], rest)
    return args


def _refuse(command: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """With the nearest option for each, and the usage of the command, not of all."""
    known = [name for action in command._actions for name in action.option_strings]
    said = []
    for word in unknown:
        name = word.partition("=")[0]
        near = get_close_matches(name, known, n=1, cutoff=0.7) if name.startswith("--") else []
        said.append(f"{name} (do you mean {near[0]}?)" if near else name)
    command.error(f"unrecognized arguments: {', '.join(said)}; {command.prog} --help lists all")


def _parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """With those of the commands."""
    parser = argparse.ArgumentParser(
        prog="saccade",
        description="An inference engine for vision-language models. It prices a picture before decoding it.",
        epilog="Start with: saccade count photo.jpg",
    )
    parser.add_argument("--version", action="version", version=f"saccade {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_count(commands)
    _add_plan(commands)
    _add_chat(commands)
    _add_serve(commands)
    _add_eval(commands)
    _add_tune(commands)
    _add_cluster(commands)
    _add_bench(commands)
    run_batch_arguments.add_command(commands, _run_batch)
    return parser, commands.choices


# --- count --------------------------------------------------------------------------------------------------


def _add_count(commands: Any) -> None:
    command = commands.add_parser(
        "count",
        help="what pictures, videos and PDFs cost: tokens and KV blocks, from their headers alone",
        description="Print the bill of each picture, video and page. Loads no weights and decodes nothing.",
        epilog="Example: saccade count --model Qwen/Qwen2-VL-2B-Instruct --max-pixels 1003520 *.jpg",
    )
    add = command.add_argument
    add("files", nargs="+", metavar="FILE", help="pictures, videos and PDFs")
    add("--model", help="folder, hub id or saccade-builtin, whose rules apply; nothing: those of Qwen2-VL")
    add("--min-pixels", type=int, help="smaller pictures are enlarged to this")
    add("--max-pixels", type=int, help="larger pictures are reduced to this, frames of videos too")
    add("--video-pruning", type=float, default=0.0, help="share of static video tokens to drop")
    add("--together", action="store_true", help="as one prompt: some models shrink many images")
    add("--json", action="store_true", help="print a JSON list instead of a table")
    add("--debug", action="store_true", help="show tracebacks")
    command.set_defaults(run=_count)


def _count(args: argparse.Namespace) -> int:
    """Unreadable files are reported on stderr and make the exit status 1."""
    from saccade.cli.count import count_files, table

    options = Options(**given_options(args, Options))  # checks the values
    rows, errors = count_files(args.files, options, together=args.together)
    if args.model is None and not args.json:
        rules = "counted by the rules of Qwen2-VL; --model names another, saccade-builtin the built-in one"
        print(f"saccade: {rules}", file=sys.stderr)
    print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2) if args.json else table(rows))
    for error in errors:
        print(f"saccade: {error}", file=sys.stderr)
    return 1 if errors else 0


# --- plan ---------------------------------------------------------------------------------------------------


def _add_plan(commands: Any) -> None:
    command = commands.add_parser(
        "plan",
        help="what a model needs and gives on a GPU: tokens, memory, first-token time, requests/s, GPUs",
        description="Plan a deployment from a model's config, a GPU and a workload: what a request costs in "
        "tokens and KV, how many fit, where the time to the first token goes, how many requests a second a "
        "GPU sustains and what limits it, what cheaper choices would change. Needs no GPU and no weights.",
        epilog=plan_arguments.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan_arguments.add_arguments(command)
    skipped = [
        option.name for option in dataclasses.fields(Options) if option.name not in plan_arguments.OPTIONS
    ]
    add_options(command, "engine, as for saccade serve", Options, skip=skipped)
    command.set_defaults(run=_plan)


def _plan(args: argparse.Namespace) -> int:
    from saccade.cli.plan import plan

    return plan(args, given_options(args, Options))


# --- chat ---------------------------------------------------------------------------------------------------


def _add_chat(commands: Any) -> None:
    command = commands.add_parser(
        "chat",
        help="ask a model about pictures in the terminal",
        usage='saccade chat [MODEL] [--image FILE]... ["question"] [options]',
        description="Answer one question, or hold a conversation when no question is given.",
        epilog='Example: saccade chat --image examples/shapes.png "How many circles are there?"',
    )
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
    command.set_defaults(run=_chat)


def _chat(args: argparse.Namespace) -> int:
    from saccade.cli.chat import converse  # needs torch

    if args.question is None and args.model is not None and not _names_model(args.model):
        args.question = args.model
        args.model = None
    opts = options(**given_options(args, Options))
    return converse(opts, args.question, args.image, args.max_tokens, args.temperature)


def _names_model(word: str) -> bool:
    """Whether a single argument is a folder or a hub id, and not a question."""
    return (
        word == "saccade-builtin"
        or Path(word).is_dir()
        or re.fullmatch(r"[./~]*[\w.-]+(/[\w.-]+)+/?", word) is not None
    )


# --- serve --------------------------------------------------------------------------------------------------


def _add_serve(commands: Any) -> None:
    command = commands.add_parser(
        "serve",
        help="answer over HTTP, in the shapes of the OpenAI API",
        usage="saccade serve [MODEL] [options]",
        description="Serve a model. Options may also be in a YAML file or the environment (SACCADE_PORT).",
        epilog="Example: saccade serve Qwen/Qwen2-VL-2B-Instruct --port 8000 --limit-mm-per-prompt image=4",
    )
    add = command.add_argument
    add("model", nargs="?", metavar="MODEL", help="folder or hub id; nothing: the built-in model")
    add("--config", metavar="FILE", help="YAML file with options; flags and the environment win")
    add_options(command, "server", ServerOptions)
    add_options(command, "engine", Options)
    add("--debug", action="store_true", help="show tracebacks and debug logs")
    command.set_defaults(run=_serve)


def _serve(args: argparse.Namespace) -> int:
    from saccade.server.serve import serve  # loads slowly, and only this command needs it

    _find_model(args)
    file = args.config or os.environ.get("SACCADE_CONFIG")
    given = {**given_vllm_flags(args), **given_options(args, Options, ServerOptions)}
    settings = load_settings(given, os.environ, file)
    level = "debug" if args.debug else settings.server.log_level
    set_up_logs(level, settings.server.log_format)
    os.environ |= {LEVEL_VARIABLE: level, FORMAT_VARIABLE: settings.server.log_format}
    log_unused(os.environ)
    return serve(settings)


def _find_model(args: argparse.Namespace) -> None:
    """MODEL as --model names it, or after a flag that takes several values: --api-key KEY MODEL."""
    flag, num_words = getattr(args, _SEVERAL, ("", 0))
    if args.model is None and num_words > 1 and _names_model(getattr(args, flag)[-1]):
        *values, args.model = getattr(args, flag)
        setattr(args, flag, tuple(values))
    if args.named_model is not None and args.model not in (None, args.named_model):
        both = f"MODEL is {args.model} and --model is {args.named_model}"
        raise UsageError(f"{both}; give one of them")
    args.model = args.model or args.named_model


# --- bench --------------------------------------------------------------------------------------------------


def _add_bench(commands: Any) -> None:
    command = commands.add_parser(
        "bench",
        help="put a load on a server, ours or another, and measure it",
        description="Send requests to an OpenAI-compatible server, or to an engine in this process, and "
        "print what they met: times to the first token and between tokens, throughput, and how much of it "
        "kept to the service levels.",
        epilog="Examples: saccade bench image --clients 32; saccade bench text --rate 20 --beside 4; "
        "saccade bench --trace requests.jsonl --plot times.svg; saccade bench image --goodput; "
        "saccade bench most-images; saccade bench image --offline",
    )
    bench_arguments.add_arguments(command)
    command.set_defaults(run=_bench)


def _run_batch(args: argparse.Namespace) -> int:
    from saccade.cli.run_batch import run

    return run(args)


def _bench(args: argparse.Namespace) -> int:
    bench_arguments.resolve(args)
    if args.calibrate:
        from saccade.cli.calibrate import calibrate  # needs torch

        return calibrate(args.calibrate, args.model, bench_arguments.engine_options(args))
    from saccade.cli.bench import bench

    if args.offline is None:
        return bench(args)
    from saccade.cli.bench_offline import offline  # needs torch

    return bench(args, offline)


# --- cluster ------------------------------------------------------------------------------------------------


def _add_cluster(commands: Any) -> None:
    command = commands.add_parser("cluster", help="the workers of a running server")
    verbs = command.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    status = verbs.add_parser(
        "status",
        help="who is where, in which state, how full",
        description="Show a running server's engines and encoder workers: machine, process, device, state, "
        "KV blocks in use, queued work in prompt tokens, requests that run and wait.",
        epilog="Example: saccade cluster status --url http://10.0.0.1:8000 --api-key KEY",
    )
    add = status.add_argument
    add("--url", default="http://127.0.0.1:8000", help="of the server (default: http://127.0.0.1:8000)")
    add("--api-key", metavar="KEY", help="of the server, if it wants one")
    add("--json", action="store_true", help="print a JSON list instead of a table")
    add("--debug", action="store_true", help="show tracebacks")
    status.set_defaults(run=_cluster_status)


def _cluster_status(args: argparse.Namespace) -> int:
    from saccade.cli.cluster import fetch_workers, status_table

    workers = fetch_workers(args.url, args.api_key)
    print(json.dumps(workers, indent=2) if args.json else status_table(workers))
    return 0


# --- eval and tune ------------------------------------------------------------------------------------------


def _add_eval(commands: Any) -> None:
    command = commands.add_parser(
        "eval",
        help="accuracy per skill on questions about pictures",
        usage="saccade eval [MODEL] [options]",
        description="Ask every question of a set and print the share of right answers per skill.",
        epilog="Example: saccade eval --url http://127.0.0.1:8000 --questions my-set --show-wrong 5",
    )
    _add_target(command)
    command.add_argument("--show-wrong", type=int, default=0, metavar="N", help="print N wrong answers")
    add_options(command, "engine, for a server of our own", Options)
    command.set_defaults(run=_eval)


def _add_tune(commands: Any) -> None:
    command = commands.add_parser(
        "tune",
        help="accuracy, tokens and first-token time at several picture sizes, and a recommended max_pixels",
        usage="saccade tune [MODEL] [options]",
        description="Run an evaluation at several max_pixels: what smaller pictures save and what they lose.",
        epilog="Example: saccade tune --url http://127.0.0.1:8000 --questions my-set --plot tune.svg",
    )
    _add_target(command)
    command.add_argument(
        "--max-pixels",
        dest="sizes",
        type=_flag_reader(_read_sizes),
        metavar="N,N,...",
        help="settings to try; automatic: from the largest picture or the server's limit, halving",
    )
    command.add_argument("--plot", metavar="FILE.svg", help="draw accuracy against pixels")
    add_options(command, "engine, for a server of our own", Options, skip=("max_pixels",))
    command.set_defaults(run=_tune)


def _add_target(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("model", nargs="?", metavar="MODEL", help="folder or hub id; nothing: built in; with --url: its name")
    add("--url", help="ask this OpenAI-compatible server; without it one is started and stopped")
    add("--api-key", metavar="KEY", help="of that server")
    add("--questions", metavar="PATH", help="folder or zip with questions.jsonl; nothing: built in")
    add("--limit", type=int, metavar="N", help="ask only the first N questions")
    add("--concurrency", type=int, default=32, metavar="N", help="questions at a time (default: 32)")
    add("--max-tokens", type=int, default=256, metavar="N", help="longest answer (default: 256)")
    add("--json", metavar="FILE", help="also write everything that was found there")
    add("--markdown", action="append", default=[], metavar="FILE", help="also rewrite the table in this file")
    add("--debug", action="store_true", help="show tracebacks and the log of the server we start")


def _eval(args: argparse.Namespace) -> int:
    from saccade.apps.evaluation.commands import ReportFiles, evaluate

    _check_results(args, "json")
    return evaluate(_target(args), ReportFiles(args.json, tuple(args.markdown), args.show_wrong))


def _tune(args: argparse.Namespace) -> int:
    from saccade.apps.evaluation.commands import ReportFiles, tune

    _check_results(args, "json", "plot")
    return tune(_target(args), args.sizes, ReportFiles(args.json, tuple(args.markdown), plot=args.plot))


def _check_results(args: argparse.Namespace, *flags: str) -> None:
    for flag in flags:
        if path := getattr(args, flag):
            check_writable(f"--{flag}", Path(path))


def _target(args: argparse.Namespace) -> EvalTarget:
    from saccade.apps.evaluation.commands import EvalTarget

    given = given_options(args, Options)
    if args.url is None:
        log_unused(os.environ)
        options = load_settings(given, os.environ, os.environ.get("SACCADE_CONFIG")).engine
    else:
        unused = ", ".join(sorted(f"--{name.replace('_', '-')}" for name in given if name != "model"))
        if unused:
            message = f"{unused} cannot change the server at {args.url}; leave it out, or leave --url"
            raise ConfigError(message)
        options = Options(**given)
    return EvalTarget(
        options,
        url=args.url,
        api_key=args.api_key,
        questions=args.questions,
        limit=args.limit,
        concurrency=args.concurrency,
        max_tokens=args.max_tokens,
        show_log=args.debug,
    )


def _read_sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"expected whole numbers such as 6400,25600, not {text!r}") from None


# --- flags made from the options ----------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser, title: str, cls: type, skip: Sequence[str] = ()) -> None:
    """One flag per option, with the default and the help text of the config class.

    A flag that is not given leaves nothing in the namespace, so that the environment or a file can set it.
    """
    group = parser.add_argument_group(title)
    kinds = option_kinds(cls)
    defaults = defaults_of(cls)
    for option in dataclasses.fields(cls):
        if option.name != "model" and option.name not in skip:
            add = _add_switch if kinds[option.name] is bool else _add_flag
            add(group, option.name, kinds[option.name], defaults[option.name], option.metadata["help"])


def _add_switch(group: Any, name: str, kind: Any, default: bool, help_text: str) -> None:
    """The flag that changes the default is shown; vLLM's --enable-x and --no-enable-x work too."""
    flag = name.replace("_", "-")
    on = {f"--{flag}"}
    off = {f"--no-{flag}", f"--no-{flag.removeprefix('enable-')}"}
    shown = f"--no-{flag.removeprefix('enable-')}" if default else f"--{flag}"
    help_text = f"do not {help_text}" if default else help_text
    for word in sorted(on | off):
        action = "store_true" if word in on else "store_false"
        help_shown = help_text if word == shown else argparse.SUPPRESS
        group.add_argument(word, dest=name, default=argparse.SUPPRESS, action=action, help=help_shown)


def _add_flag(group: Any, name: str, kind: Any, default: Any, help_text: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    shown = "" if default in (None, ()) or isinstance(default, dict) else f" (default: {default})"
    help_text = (help_text + shown).replace("%", "%%")
    how = {"type": _flag_reader(text_reader(kind)), "default": argparse.SUPPRESS, "help": help_text}
    if typing.get_origin(kind) is tuple:
        metavar = name.upper()
        group.add_argument(flag, action=_Several, nargs="+", metavar=metavar, **how)
    else:
        group.add_argument(flag, **how)


class _Several(argparse.Action):
    """Values after one flag or several. The latest flag is kept: its last value may be MODEL."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        given = tuple(value for several in values for value in several)
        setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), *given))
        setattr(namespace, _SEVERAL, (self.dest, len(values)))


def _flag_reader(reader: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return reader(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def given_options(args: argparse.Namespace, *classes: type) -> dict[str, Any]:
    """The options that the command line names, as the config classes take them."""
    names = {option.name for cls in classes for option in dataclasses.fields(cls)}
    given = {name: value for name, value in vars(args).items() if name in names and value is not None}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
