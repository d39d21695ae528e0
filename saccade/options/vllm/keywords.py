"""vLLM's arguments in our own words: translated, accepted with a log line, or refused with a reason."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Any

from saccade.errors import RequestError, UsageError, quoted
from saccade.options.vllm.table import CALLS, NEUTRAL, OFFLINE, TABLE, Keyword

logger = logging.getLogger("saccade.options.engine")

_PROCESSOR_OPTIONS = {  # as the models' own processors call them -> the option
    "min_pixels": "min_pixels",
    "max_pixels": "max_pixels",
    "fps": "video_fps",
    "max_frames": "max_video_frames",
    "max_video_pixels": "max_video_pixels",
    "video_pruning": "video_pruning",
}
_VIDEO_OPTIONS = {"fps": "video_fps", "num_frames": "max_video_frames"}  # of media_io_kwargs
_MEDIA = ("image", "video")


def translated(
    arguments: Mapping[str, Any], defaults: Mapping[str, Any], *, is_server: bool = False
) -> dict[str, Any]:
    """Arguments as our options take them; `defaults` has the names of these.

    Inert arguments are logged. UsageError for those that are refused or unknown.
    """
    options: dict[str, Any] = {}
    direct: dict[str, Any] = {}  # these win over what others are translated to
    for name, value in arguments.items():
        if name in defaults:
            if value is not None or defaults[name] is None:
                direct[name] = _SPELLINGS.get(name, _as_given)(value)
        elif name in _RENAMED and (is_server or TABLE[name].scope == "engine"):
            if value is not None:
                options |= _RENAMED[name](value)
        else:
            _check(name, value, defaults, is_server)
    return {**options, **direct}


def _check(name: str, value: Any, options: Collection[str], is_server: bool) -> None:
    row = TABLE.get(name)
    if row is None:
        nearest = with_nearest(name, [*options, *TABLE])
        raise UsageError(f"unknown argument {nearest}; docs/options.md lists all")
    if not is_server:
        if name in OFFLINE:
            row = row._replace(scope="engine", fate="inert", what=OFFLINE[name])
        if row.scope == "server" and not _asks_nothing(name, value):
            raise UsageError(f"{name} is an argument of saccade serve, not of LLM; leave it out here")
    if problem := _said(row, value):
        raise UsageError(problem)


def checked_call(arguments: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Arguments of `generate` and `chat` that we know; RequestError for those that we have not."""
    for name, value in arguments.items():
        if name in names:
            continue
        if name not in CALLS:
            raise RequestError(f"unknown argument {with_nearest(name, [*names, *CALLS])}", param=name)
        if refusal := _said(CALLS[name], value):
            raise RequestError(refusal, code="unsupported", param=name)
    return {name: value for name, value in arguments.items() if name in names}


def _said(row: Keyword, value: Any) -> str | None:
    """Why an argument is refused; None if it is not. An inert one is logged."""
    if _asks_nothing(row.name, value):
        return None
    if row.fate == "refused":
        return f"{row.name}={quoted(value)} is not supported: {row.what}"
    logger.warning("%s=%s changes nothing here: %s", row.name, quoted(value), row.what)
    return None


def _asks_nothing(name: str, value: Any) -> bool:
    neutral = (None, False, "", [], (), {}, set[Any](), *NEUTRAL.get(name, ()))
    return any(value == other for other in neutral)


def with_nearest(name: str, names: Collection[str]) -> str:
    near = get_close_matches(name, names, n=1, cutoff=0.7)
    return f"{name} (do you mean {near[0]}?)" if near else name


def literal(text: str) -> Any:
    """A flag's text as the value that Python code would give: JSON, or a word as it is."""
    words = {"none": None, "true": True, "false": False}
    try:
        return json.loads(text)
    except ValueError:
        return words.get(text.lower(), text)


# --- arguments that have another name here ------------------------------------------------------------------


def _processor_options(value: Any) -> dict[str, Any]:
    return _renamed_keys("mm_processor_kwargs", value, _PROCESSOR_OPTIONS)


def _media_io_options(value: Any) -> dict[str, Any]:
    kinds = {kind: how for kind, how in _mapping("media_io_kwargs", value).items() if how}
    video = _renamed_keys("media_io_kwargs.video", kinds.pop("video", {}), _VIDEO_OPTIONS)
    if kinds:
        raise UsageError(f"media_io_kwargs takes fps and num_frames under video, not {', '.join(kinds)}")
    return {name: number for name, number in video.items() if number != -1}  # -1: as many as there are


def _renamed_keys(name: str, value: Any, names: Mapping[str, str]) -> dict[str, Any]:
    options = _mapping(name, value)
    unknown = sorted(str(key) for key in options if key not in names)
    if unknown:
        raise UsageError(f"{name} takes {', '.join(names)}, not {', '.join(unknown)}")
    return {names[key]: options[key] for key in options}


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} must be an object of names and values, not {quoted(value)}")
    return value


def _gib(value: Any) -> dict[str, Any]:
    if not isinstance(value, (int, float)):
        raise UsageError(f"kv_cache_memory_bytes must be a number of bytes, not {quoted(value)}")
    return {"kv_cache_gb": value / (1 << 30)}


def _profile_dir(value: Any) -> dict[str, Any]:
    folder = _mapping("profiler_config", value).get("torch_profiler_dir")
    return {"profile_dir": str(folder)} if folder else {}


def _task_of(name: str, value: Any, tasks: Mapping[str, str]) -> dict[str, Any]:
    if value in ("auto", "none"):
        return {}
    if value not in tasks:
        raise UsageError(f"{name} must be auto, {' or '.join(tasks)}, not {quoted(value)}")
    return {"task": tasks[value]}


def _no_media(value: Any) -> dict[str, Any]:
    return {"limit_mm_per_prompt": dict.fromkeys(_MEDIA, 0)} if value else {}


_RENAMED: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "mm_processor_kwargs": _processor_options,
    "media_io_kwargs": _media_io_options,
    "video_pruning_rate": lambda value: {"video_pruning": value},
    "language_model_only": _no_media,
    "kv_cache_memory_bytes": _gib,
    "profiler_config": _profile_dir,
    "kv_offloading_size": lambda value: {"kv_offload_gb": float(value)},
    "runner": lambda value: _task_of("runner", value, {"generate": "generate", "pooling": "pooling"}),
    "convert": lambda value: _task_of("convert", value, {"embed": "embed", "classify": "score"}),
    "data_parallel_size": lambda value: {"replicas": value},
    "shutdown_timeout": lambda value: {"drain_timeout": float(value)},
    "disable_uvicorn_access_log": lambda value: {"enable_access_log": not value},
}


# --- values that have another spelling here -----------------------------------------------------------------

_DTYPES = {"half": "float16", "float": "float32", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
_BACKENDS = {"flash_attn": "auto", "triton_attn": "triton"}


def _as_given(value: Any) -> Any:
    return value


def _dtype(value: Any) -> str:
    """Also a torch.dtype."""
    name = str(value).removeprefix("torch.")
    return _DTYPES.get(name, name)


def _limits(value: Any) -> Any:
    """vLLM's {"image": {"count": 2, "width": 512}} and {"audio": 0} too."""
    if not isinstance(value, Mapping):
        return value
    counts = {kind: how.get("count", how) if isinstance(how, Mapping) else how for kind, how in value.items()}
    return {kind: count for kind, count in counts.items() if kind in _MEDIA or count != 0}


def _backend(value: Any) -> str:
    name = str(getattr(value, "name", value)).lower()
    return _BACKENDS.get(name, name)


def _text(value: Any) -> str | None:
    """Also a Path."""
    return None if value is None else str(value)


def _overrides(value: Any) -> Mapping[str, Any]:
    if callable(value):
        raise UsageError("hf_overrides must be an object of names and values; a function is not supported")
    return _mapping("hf_overrides", value)


_SPELLINGS: Mapping[str, Callable[[Any], Any]] = {
    "dtype": _dtype,
    "model": _text,
    "tokenizer": _text,
    "download_dir": _text,
    "chat_template": _text,
    "hf_overrides": _overrides,
    "device": str,
    "task": lambda value: {"embedding": "embed", "classify": "score"}.get(value, value),
    "max_model_len": lambda value: None if value in (-1, "auto") else value,
    "limit_mm_per_prompt": _limits,
    "generation_config": lambda value: "none" if value == "vllm" else value,
    "attention_backend": _backend,
    "quantization": lambda value: None if value in NEUTRAL["quantization"] else value,
}
