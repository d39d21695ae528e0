"""Settings from flags, the environment, a YAML file and the defaults of the config classes, in this order.

Parses options from text; the command line uses the same parsers.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from saccade.errors import ConfigError, UsageError, is_list_of
from saccade.options.engine import Options
from saccade.options.fields import defaults_of
from saccade.options.server import ServerOptions
from saccade.options.vllm.keywords import translated, with_nearest
from saccade.options.vllm.table import TABLE
from saccade.util.plain_files import read_text

logger = logging.getLogger("saccade.server")

_MAX_BYTES = 1 << 20  # of a config file
_PREFIX = "SACCADE_"
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")  # SACCADE_PORT in pods beside a Service named saccade
_SCALES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Settings(NamedTuple):
    engine: Options
    server: ServerOptions


def load_settings(flags: Mapping[str, Any], environ: Mapping[str, str], file: str | None) -> Settings:
    """`flags` holds only the options that the command line names."""
    kinds = option_kinds(Options) | option_kinds(ServerOptions)
    defaults = {**defaults_of(Options), **defaults_of(ServerOptions)}
    layers = (_from_file(file, kinds), _from_environment(environ, kinds), flags)
    settings: dict[str, Any] = {}
    for layer in layers:
        settings |= translated(layer, defaults, is_server=True)
    return Settings(_make(Options, settings), _make(ServerOptions, settings))


def log_unused(environ: Mapping[str, str]) -> None:
    """Variables that look like options and are none are ignored. They may be a mistake, or Kubernetes'."""
    kinds = option_kinds(Options) | option_kinds(ServerOptions)
    for name in sorted(environ):
        if _option_of(name) not in {*kinds, "config", ""}:
            logger.warning("the environment variable %s is no option of saccade and is not used", name)
        elif _is_service_link(name, environ[name]):
            reason = "is made by Kubernetes for a service named saccade and is not used"
            logger.warning("the environment variable %s=%s %s", name, environ[name], reason)


def _option_of(variable: str) -> str:
    """Empty for another program's."""
    return variable.removeprefix(_PREFIX).lower() if variable.startswith(_PREFIX) else ""


def _is_service_link(name: str, text: str) -> bool:
    return name == f"{_PREFIX}PORT" and _SERVICE_LINK.match(text) is not None


def option_kinds(cls: type) -> dict[str, Any]:
    """The type of each option of a config class, by name."""
    return typing.get_type_hints(cls)


def _make(cls: type, settings: Mapping[str, Any]) -> Any:
    names = {option.name for option in dataclasses.fields(cls)}
    return cls(**{name: value for name, value in settings.items() if name in names})


# --- text ---------------------------------------------------------------------------------------------------


def text_reader(kind: Any) -> Callable[[str], Any]:
    """The function that parses an option of this type. It raises ValueError with a readable message."""
    if typing.get_origin(kind) is dict:
        return _read_limits if int in typing.get_args(kind) else _read_object
    if typing.get_origin(kind) is tuple:
        return _read_list
    if kind is bool:
        return _read_bool
    number = _plain_type(kind)
    if number not in (int, float):
        return str
    return _number_reader(number, is_optional=type(None) in typing.get_args(kind))


def _read_limits(text: str) -> dict[str, int]:
    if text.lstrip().startswith("{"):
        return _read_object(text)
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
    """Commas between the parts, or a JSON list."""
    if text.lstrip().startswith("["):
        try:
            return tuple(str(part) for part in json.loads(text))
        except ValueError:
            raise ValueError(f'expected a, b or a JSON list such as ["a", "b"], not {text!r}') from None
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _read_bool(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError(f"expected true or false, not {text!r}")
    return text.lower() in _TRUE


def _number_reader(kind: Callable[[str], Any], *, is_optional: bool) -> Callable[[str], Any]:
    """Whole numbers may end in k, m or g (thousands) or K, M or G (1024), optional ones may be auto."""
    expected, scales = ("a whole number", _SCALES) if kind is int else ("a number", {})

    def read(text: str) -> Any:
        if is_optional and text.lower() in ("auto", "none"):
            return None
        scale = scales.get(text[-1:], 1)
        try:
            return kind(text[:-1] if scale > 1 else text) * scale
        except ValueError:
            raise ValueError(f"expected {expected}, not {text!r}") from None

    return read


# --- environment and file -----------------------------------------------------------------------------------


def _from_environment(environ: Mapping[str, str], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Variables such as SACCADE_MAX_MODEL_LEN=4096. Unknown ones are ignored, see `log_unused`."""
    settings = {}
    for name, text in sorted(environ.items()):
        option = _option_of(name)
        if option not in kinds or _is_service_link(name, text):
            continue
        try:
            settings[option] = text_reader(kinds[option])(text)
        except ValueError as error:
            raise UsageError(f"the environment variable {name}: {error}") from None
    return settings


def _from_file(file: str | None, kinds: Mapping[str, Any]) -> dict[str, Any]:
    if file is None:
        return {}
    import yaml  # a third of the time of --help, which reads no file

    try:
        content = yaml.safe_load(read_text(file, _MAX_BYTES, f"the config file {file}"))
    except ConfigError as error:
        raise UsageError(str(error)) from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())  # YAML's messages have lines and a drawing
        raise UsageError(f"the config file {file} cannot be read: {reason}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"the config file {file} must hold option: value lines")
    settings = {str(name).replace("-", "_"): value for name, value in content.items()}
    options = [*kinds, *TABLE]
    for name in settings:
        if name not in options:
            near = with_nearest(name, options)
            raise UsageError(f"the config file {file} names {near}; docs/options.md lists all options")
    for name in settings:
        if name in kinds:
            settings[name] = _converted(file, name, kinds[name], settings[name])
    return settings


def _converted(file: str, name: str, kind: Any, value: Any) -> Any:
    """A YAML value as the option's type. Text is parsed like that of a flag."""
    expected = _plain_type(kind)
    if value is None and type(None) in typing.get_args(kind):
        return None
    if expected is tuple and is_list_of(value, str):
        return tuple(value)
    if (expected, type(value)) == (float, int):
        return float(value)
    if isinstance(value, str) and expected is not str:
        try:
            return text_reader(kind)(value)
        except ValueError as error:
            raise UsageError(f"the config file {file}: {name}: {error}") from None
    if type(value) is not expected:
        raise UsageError(f"the config file {file}: {name} must be {expected.__name__}, not {value!r}")
    return value


def _plain_type(kind: Any) -> type:
    """int for `int | None`, tuple for `tuple[str, ...]`, and so on."""
    origin = typing.get_origin(kind)
    if origin in (tuple, dict):
        return typing.cast(type, origin)
    return next((k for k in (bool, int, float, str) if k in (kind, *typing.get_args(kind))), str)
