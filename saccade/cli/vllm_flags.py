"""vLLM's flags of `serve`: spelled as there, not shown by --help. `vllm_keywords` says what they mean."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from saccade.options.vllm.keywords import literal
from saccade.options.vllm.table import SHORT, TABLE, Keyword

_DEST = "vllm:"  # no option of ours begins so


def spelled(argv: Sequence[str]) -> list[str]:
    """The words with dashes in the names of flags, and --name.key VALUE as --name '{"key": VALUE}'."""
    words: list[str] = []
    nested: dict[str, dict[str, Any]] = {}
    remaining = iter(argv)
    for word in remaining:
        name, equals, value = word.partition("=")
        if word == "--":
            words += [word, *remaining]
        elif not name.startswith("--"):
            words.append(word)
        else:
            flag, dot, path = name.partition(".")
            flag = flag.replace("_", "-")
            if dot:
                _put(nested.setdefault(flag, {}), path, literal(value if equals else next(remaining, "")))
            else:
                words.append(f"{flag}{equals}{value}")
    return [*words[:1], *(f"{flag}={json.dumps(value)}" for flag, value in nested.items()), *words[1:]]


def _put(values: dict[str, Any], path: str, value: Any) -> None:
    first, dot, inner_path = path.partition(".")
    if not dot:
        values[first] = value
        return
    inner = values.setdefault(first, {})
    if isinstance(inner, dict):
        _put(inner, inner_path, value)


def add_vllm_flags(command: argparse.ArgumentParser) -> None:
    """Those that are no options of ours."""
    ours = {flag for action in command._actions for flag in action.option_strings}
    for row in TABLE.values():
        short = (flag for flag, name in SHORT.items() if name == row.name)
        flags = [f"--{row.name.replace('_', '-')}", *short]
        if row.fate != "supported" and not ours.intersection(flags):
            _add(command, row, flags)
    command.add_argument("--model", dest="named_model", help=argparse.SUPPRESS)


def _add(command: argparse.ArgumentParser, row: Keyword, flags: Sequence[str]) -> None:
    how: dict[str, Any] = {"dest": _DEST + row.name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    if row.is_switch:
        command.add_argument(*flags, action="store_true", **how)
        command.add_argument(f"--no-{flags[0].removeprefix('--')}", action="store_false", **how)
    else:
        command.add_argument(*flags, type=literal, nargs="*" if row.takes_several else None, **how)


def given_vllm_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Values by vLLM's names."""
    arguments = vars(args).items()
    return {name.removeprefix(_DEST): value for name, value in arguments if name.startswith(_DEST)}
