"""Where settings come from: flags over the environment over a YAML file over the defaults of the config classes.

Knows how each kind of option is written as text; the command line is made with the same readers.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from saccade.errors import ConfigError
from saccade.options import Options, ServerOptions

logger = logging.getLogger("saccade.server")

_PREFIX = "SACCADE_"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class Settings(NamedTuple):
    engine: Options
    server: ServerOptions


def load_settings(flags: Mapping[str, Any], environ: Mapping[str, str], file: str | None) -> Settings:
    """`flags` holds what the command line names, and nothing else."""
    kinds = option_kinds(Options) | option_kinds(ServerOptions)
    given = {**_from_file(file, kinds), **_from_environment(environ, kinds), **flags}
    return Settings(_make(Options, given), _make(ServerOptions, given))


def option_kinds(cls: type) -> dict[str, Any]:
    """The type of each option of a config class, by name."""
    return typing.get_type_hints(cls)


def _make(cls: type, given: Mapping[str, Any]) -> Any:
    names = {option.name for option in dataclasses.fields(cls)}
    return cls(**{name: value for name, value in given.items() if name in names})


# --- text ---------------------------------------------------------------------------------------------------------


def text_reader(kind: Any) -> Callable[[str], Any]:
    """The function that reads one option from text; it raises ValueError with a sentence."""
    if typing.get_origin(kind) is dict:
        return _read_limits if int in typing.get_args(kind) else _read_object
    if typing.get_origin(kind) is tuple:
        return _read_list
    if kind is bool:
        return _read_bool
    return next((_number(k) for k in (int, float) if kind is k or k in typing.get_args(kind)), str)


def _read_limits(text: str) -> dict[str, int]:
    try:
        return {kind: int(count) for kind, count in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise ValueError(f"expected something like image=4, not {text!r}") from None


def _read_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f'expected a JSON object such as {{"temperature": 0.5}}, not {text!r}')
    return value


def _read_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _read_bool(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError(f"expected true or false, not {text!r}")
    return text.lower() in _TRUE


def _number(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"expected {'a whole number' if kind is int else 'a number'}, not {text!r}") from None

    return read


# --- environment and file -----------------------------------------------------------------------------------------


def _from_environment(environ: Mapping[str, str], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """SACCADE_MAX_MODEL_LEN=4096 and so on. A name that is no option is only named in the log: others may own it."""
    found = {}
    for name, text in sorted(environ.items()):
        option = name.removeprefix(_PREFIX).lower()
        if not name.startswith(_PREFIX) or option == "config":
            continue
        if option not in kinds:
            logger.warning("the environment variable %s is no option of saccade and is not used", name)
            continue
        try:
            found[option] = text_reader(kinds[option])(text)
        except ValueError as error:
            raise ConfigError(f"the environment variable {name}: {error}") from None
    return found


def _from_file(file: str | None, kinds: Mapping[str, Any]) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"the config file {file} cannot be read: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"the config file {file} must hold option: value lines")
    named = {str(name).replace("-", "_"): value for name, value in content.items()}
    unknown = sorted(set(named) - set(kinds))
    if unknown:
        raise ConfigError(f"the config file {file} names {', '.join(unknown)}; the options are {', '.join(kinds)}")
    return {name: _plain(file, name, kinds[name], value) for name, value in named.items()}


def _plain(file: str, name: str, kind: Any, value: Any) -> Any:
    """A YAML value as the option's type; text is read as a flag's would be."""
    wanted = _wanted(kind)
    if value is None and type(None) in typing.get_args(kind):
        return None
    if isinstance(value, list) and wanted is tuple and all(isinstance(v, str) for v in value):
        return tuple(value)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and wanted is not str:
        try:
            return text_reader(kind)(value)
        except ValueError as error:
            raise ConfigError(f"the config file {file}: {name}: {error}") from None
    if type(value) is not wanted:
        raise ConfigError(f"the config file {file}: {name} must be {wanted.__name__}, not {value!r}")
    return value


def _wanted(kind: Any) -> type:
    """int for `int | None`, tuple for `tuple[str, ...]`, and so on."""
    origin = typing.get_origin(kind)
    if origin in (tuple, dict):
        return typing.cast(type, origin)
    return next((k for k in (bool, int, float, str) if kind is k or k in typing.get_args(kind)), str)
