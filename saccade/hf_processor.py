"""Transformers' own processor of a checkpoint, for families that are not in our tables. The one way to import it.

Importing that library brings torch along, so whoever calls this is no longer free of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from PIL import Image

from saccade.config import ConfigError
from saccade.folder import check_named_files, read_optional

LOCAL: Mapping[str, bool] = {"local_files_only": True, "trust_remote_code": False}
"""For whatever that library loads. Unless told so, it asks the terminal whether to run a folder's code, and waits."""


def refusal(model_type: str, reason: str) -> ConfigError:
    return ConfigError(
        f"model_type {model_type!r} is not in our table and cannot be served through Transformers: {reason}"
    )


def library(model_type: str) -> Any:
    """The Transformers package."""
    try:
        return import_module("transformers")
    except ImportError:
        raise refusal(model_type, "that library is not installed (pip install saccade[transformers])") from None


def load_processor(path: Path, model_type: str) -> Any:
    """Pictures and text only: the part for video would need torchvision, and nobody asks for it."""
    transformers = library(model_type)
    try:
        return _load(transformers, path)
    except ConfigError:
        raise
    except Exception as error:  # a library of hundreds of models may raise anything
        raise refusal(model_type, f"its processor cannot be loaded ({type(error).__name__}: {error})") from None


def _load(transformers: Any, path: Path) -> Any:
    check_named_files(read_optional(path / "tokenizer_config.json"), path / "tokenizer_config.json")
    kinds = import_module("transformers.models.auto.processing_auto").PROCESSOR_MAPPING
    config = transformers.AutoConfig.from_pretrained(path, **LOCAL)
    if type(config) not in kinds:
        raise LookupError(f"it knows no processor for {type(config).__name__}")
    kind = kinds[type(config)]
    parts = {
        "image_processor": transformers.AutoImageProcessor.from_pretrained(path, **LOCAL),
        "tokenizer": transformers.AutoTokenizer.from_pretrained(path, **LOCAL),
    }
    missing = {name: None for name in kind.get_attributes() if name not in parts}
    unchecked = {"check_argument_for_proper_class": lambda self, name, value: None}  # None is no video processor
    return type(kind.__name__, (kind,), unchecked)(**parts, **missing, **_settings(path))


def _settings(path: Path) -> dict[str, Any]:
    given = read_optional(path / "processor_config.json")
    own = {name: value for name, value in given.items() if not isinstance(value, dict)}
    return {name: value for name, value in own.items() if name not in ("processor_class", "auto_map")}


def placeholder(processor: Any, model_type: str, image_token_id: int) -> str:
    """What a prompt says where a picture goes: the token that embeddings replace, or one that begins a picture."""
    named = (processor.tokenizer.convert_ids_to_tokens(image_token_id), getattr(processor, "boi_token", None))
    reasons = []
    for token in filter(None, named):
        try:
            processor(text=[token], images=[Image.new("RGB", (64, 64))], add_special_tokens=False)
            return str(token)
        except Exception as error:
            reasons.append(f"{token}: {error}")
    raise refusal(model_type, f"its processor finds no place for a picture ({'; '.join(reasons)})")
