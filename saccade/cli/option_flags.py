"""Flags made from the config classes in `options`, and what the command line says of them."""

from __future__ import annotations

import argparse
import dataclasses
import re
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from saccade.options.fields import defaults_of
from saccade.server.config import option_kinds, text_reader

SEVERAL = "latest flag that takes several values"  # an attribute of the parsed arguments


def add_options(parser: argparse.ArgumentParser, title: str, cls: type, skip: Iterable[str] = ()) -> None:
    """One flag per option, with the default and the help text of the config class.

    A flag that is not given leaves nothing in the namespace, so that the environment or a file can set it.
    """
    group = parser.add_argument_group(title)
    kinds = option_kinds(cls)
    defaults = defaults_of(cls)
    for option in dataclasses.fields(cls):
        if option.name not in ("model", *skip):
            add = _add_switch if kinds[option.name] is bool else _add_flag
            add(group, option.name, kinds[option.name], defaults[option.name], option.metadata["help"])


def _add_switch(group: Any, name: str, kind: Any, default: bool, help_text: str) -> None:
    """The flag that changes the default is shown; vLLM's --enable-x and --no-enable-x work too."""
    flag = name.replace("_", "-")
    on = {f"--{flag}"}
    off = {f"--no-{flag}", f"--no-{flag.removeprefix('enable-')}"}
    visible = f"--{flag}"
    if default:
        visible = f"--no-{flag.removeprefix('enable-')}"
        help_text = f"do not {help_text}"
    texts = dict.fromkeys(sorted(on | off), argparse.SUPPRESS) | {visible: help_text}
    for word, text in texts.items():
        action = "store_true" if word in on else "store_false"
        group.add_argument(word, dest=name, default=argparse.SUPPRESS, action=action, help=text)


def _add_flag(group: Any, name: str, kind: Any, default: Any, help_text: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    if default not in (None, ()) and not isinstance(default, dict):
        help_text += f" (default: {default})"
    help_text = help_text.replace("%", "%%")
    how = {"type": flag_reader(text_reader(kind)), "default": argparse.SUPPRESS, "help": help_text}
    if typing.get_origin(kind) is tuple:
        metavar = name.upper()
        group.add_argument(flag, action=_Several, nargs="+", metavar=metavar, **how)
    else:
        group.add_argument(flag, **how)


class _Several(argparse.Action):
    """Values after one flag or several. The latest flag is kept: its last value may be MODEL."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        items = tuple(value for several in values for value in several)
        setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), *items))
        setattr(namespace, SEVERAL, (self.dest, len(values)))


def flag_reader(reader: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return reader(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def chosen_options(args: argparse.Namespace, *classes: type) -> dict[str, Any]:
    """The options that the command line names, as the config classes take them."""
    names = [option.name for cls in classes for option in dataclasses.fields(cls)]
    options = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def names_model(word: str) -> bool:
    """Whether a single argument is a folder or a hub id, and not a question."""
    is_id = re.fullmatch(r"[./~]*[\w.-]+(/[\w.-]+)+/?", word) is not None
    return is_id or word == "saccade-builtin" or Path(word).is_dir()
