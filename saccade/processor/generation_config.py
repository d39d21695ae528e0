"""Default sampling parameters from generation_config.json, for requests that set none. Opens no file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from saccade.errors import ConfigError, RequestError
from saccade.options.engine import Options
from saccade.sampling_params import OF_CHECKPOINT, SamplingParams

_FILE = "generation_config.json"
_OVERRIDE = "override_generation_config"
_FIELDS: Mapping[str, str] = {  # generation_config.json -> SamplingParams
    **{name: name for name in OF_CHECKPOINT},
    "max_new_tokens": "max_tokens",
}
_LARGEST = 2**31 - 1  # integers cross to the engine process as int32
_GREEDY = "do_sample"  # false: greedy, whatever the temperature


def sampling_defaults(options: Options, file: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults by the names of SamplingParams; other keys of the file are ignored.

    A value that no request could send is a ConfigError. Null counts as unset, in an override too.
    """
    override = _override(options)
    settings = {} if options.generation_config == "none" else dict(file)
    if "temperature" in override:
        settings.pop(_GREEDY, None)  # do_sample=false means temperature 0, which the override replaces
    checked = {
        **{name: _checked(_FILE, name, settings[name]) for name in settings if name not in override},
        **{name: _checked(_OVERRIDE, name, value) for name, value in override.items()},
    }
    values = {field: value for name, field in _FIELDS.items() if (value := checked.get(name)) is not None}
    return {**values, "temperature": 0.0} if checked.get(_GREEDY) is False else values


def shown_defaults(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """All defaults, the engine's own included; max_tokens only if it is set."""
    filled = SamplingParams(**defaults)
    names = [name for name in _FIELDS.values() if name != "max_tokens" or name in defaults]
    return {name: getattr(filled, name) for name in names}


def defaults_line(defaults: Mapping[str, Any]) -> str:
    """One line for the start-up log."""
    values = ", ".join(f"{name}={value}" for name, value in defaults.items())
    if not values:
        return "sampling defaults: the engine's own, temperature=1.0; the checkpoint names none that are used"
    remedy = "--override-generation-config changes them"
    return f"sampling defaults of requests that set none: {values} ({_FILE}; {remedy})"


def _override(options: Options) -> Mapping[str, Any]:
    override = options.override_generation_config
    if not isinstance(override, Mapping):
        raise ConfigError(f"{_OVERRIDE} must be an object of names and values, not {override!r}")
    names = (*_FIELDS, _GREEDY)
    unknown = sorted(str(name) for name in override if name not in names)
    if unknown:
        raise ConfigError(f"{_OVERRIDE} takes {', '.join(names)}, not {', '.join(unknown)}")
    return override


def _checked(source: str, name: str, value: Any) -> Any:
    if value is None:
        return None
    wrong = _wrong(name, value)
    if wrong is None:
        return value
    remedy = "; --override-generation-config sets another, --generation-config none goes without the file's"
    raise ConfigError(f"{source}: {wrong:.200}{remedy if source == _FILE else ''}")


def _wrong(name: str, value: Any) -> str | None:
    """What is wrong with a value, in the same words as for a request; None if nothing is."""
    if name == _GREEDY:
        if not isinstance(value, bool):
            return f"{name} must be true or false, but {value!r:.80} was given"
        return None
    if name not in _FIELDS:
        return None
    if isinstance(value, int) and abs(value) > _LARGEST:
        return f"{name} must be at most {_LARGEST}, but a number of {value.bit_length()} bits was given"
    try:
        SamplingParams(**{_FIELDS[name]: value})
    except RequestError as error:
        return error.message.replace(_FIELDS[name], name, 1)
    return None
