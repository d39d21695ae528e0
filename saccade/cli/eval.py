"""`saccade eval`: accuracy per skill. Its model and server are also those of `saccade tune`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from saccade.apps.evaluation.commands import EvalTarget, ReportFiles, evaluate
from saccade.cli.option_flags import add_options, chosen_options
from saccade.cli.writable import check_writable
from saccade.errors import ConfigError
from saccade.options.engine import Options
from saccade.server.config import load_settings, log_unused


def add(command: argparse.ArgumentParser) -> None:
    command.usage = "saccade eval [MODEL] [options]"
    command.description = "Ask every question of a set and print the share of right answers per skill."
    command.epilog = "Example: saccade eval --url http://127.0.0.1:8000 --questions my-set --show-wrong 5"
    add_target(command)
    command.add_argument("--show-wrong", type=int, default=0, metavar="N", help="print N wrong answers")
    add_options(command, "engine, for a server of our own", Options)


def run(args: argparse.Namespace) -> int:
    check_results(args, "json")
    return evaluate(target(args), ReportFiles(args.json, tuple(args.markdown), args.show_wrong))


def add_target(command: argparse.ArgumentParser) -> None:
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


def check_results(args: argparse.Namespace, *flags: str) -> None:
    for flag in flags:
        if path := getattr(args, flag):
            check_writable(f"--{flag}", Path(path))


def target(args: argparse.Namespace) -> EvalTarget:
    engine = chosen_options(args, Options)
    if args.url is None:
        log_unused(os.environ)
        options = load_settings(engine, os.environ, os.environ.get("SACCADE_CONFIG")).engine
    else:
        unused = ", ".join(sorted(f"--{name.replace('_', '-')}" for name in engine if name != "model"))
        if unused:
            message = f"{unused} cannot change the server at {args.url}; leave it out, or leave --url"
            raise ConfigError(message)
        options = Options(**engine)
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
