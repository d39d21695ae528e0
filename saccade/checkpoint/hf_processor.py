"""Transformers' AutoProcessor of a checkpoint, for the fallback. Only this imports Transformers here.

That import loads torch, so it happens lazily.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from PIL import Image

from saccade.checkpoint.files import check_named_files, read_optional
from saccade.errors import ConfigError

LOCAL: Mapping[str, bool] = {"local_files_only": True, "trust_remote_code": False}
"""Arguments of every from_pretrained, which may otherwise ask on the terminal whether to run remote code."""

_OPTIONAL = ("torchvision", "timm", "num2words", "sentencepiece", "tiktoken")  # needed by some processors
_HANDLED = frozenset(("input_ids", "attention_mask", "pixel_values", "pixel_attention_mask", "pixel_mask"))
_BIDIRECTIONAL = "token_type_ids"  # marks image tokens that attend to each other in both directions
_TRIED = (64, 64)


def refusal(model_type: str, reason: str) -> ConfigError:
    unknown = f"model_type {model_type!r} is not in our table and cannot be served through Transformers"
    return ConfigError(f"{unknown}: {reason}; docs/models.md lists what can be")


def raised(error: Exception) -> str:
    """A short reason for an exception from Transformers, whose own text is meant for its developers."""
    packages = [name for name in _OPTIONAL if name in str(error).lower() and find_spec(name) is None]
    if packages:
        return f"it needs {packages[0]}, which is not installed (pip install {packages[0]})"
    return f"its code there raises {type(error).__name__}"


def import_transformers(model_type: str) -> Any:
    """The Transformers package."""
    try:
        return import_module("transformers")
    except ImportError:
        reason = "that library is not installed (pip install saccade[transformers])"
        raise refusal(model_type, reason) from None


def load_processor(path: Path, model_type: str) -> Any:
    """The processor of images and text; that of videos is left out, as it needs torchvision."""
    transformers = import_transformers(model_type)
    try:
        return _load(transformers, path)
    except ConfigError:
        raise
    except Exception as error:  # Transformers may raise anything
        raise refusal(model_type, f"its processor cannot be loaded: {raised(error)}") from error


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
    absent_parts = {name: None for name in kind.get_attributes() if name not in parts}
    unchecked = {"check_argument_for_proper_class": lambda self, name, value: None}  # allows None
    return type(kind.__name__, (kind,), unchecked)(**parts, **absent_parts, **_settings(path))


def _settings(path: Path) -> dict[str, Any]:
    config = read_optional(path / "processor_config.json")
    settings = {name: value for name, value in config.items() if not isinstance(value, dict)}
    return {name: value for name, value in settings.items() if name not in ("processor_class", "auto_map")}


def processed(processor: Any, text: str, image: Image.Image) -> Any:
    """One prompt with one image, as tensors by name. Some processors fail without tensors."""
    return processor(text=[text], images=[image], return_tensors="pt", add_special_tokens=False)


def placeholder(processor: Any, model_type: str, image_token_id: int) -> str:
    """The placeholder of an image: the candidate that expands to the largest number of embeddings."""
    tokenizer = processor.tokenizer
    id_token = tokenizer.convert_ids_to_tokens(image_token_id)
    tokens = (id_token, getattr(processor, "image_token", None), getattr(processor, "boi_token", None))
    candidates = dict.fromkeys(filter(None, tokens))
    counts = {token: _embedded(processor, token, image_token_id) for token in candidates}
    token = max(counts, key=lambda name: counts[name])
    if not counts[token]:
        raise refusal(model_type, f"its processor finds no place for a picture at {' or '.join(counts)}")
    if len(tokenizer.encode(token, add_special_tokens=False)) != 1:
        reason = f"a picture's place in the text, {token}, is not one token of its tokenizer"
        raise refusal(model_type, reason)
    return str(token)


def _embedded(processor: Any, token: str, image_token_id: int) -> int:
    try:
        inputs = processed(processor, token, Image.new("RGB", _TRIED))
    except Exception:  # not the placeholder
        return 0
    return int((inputs["input_ids"] == image_token_id).sum())


def check_inputs(processor: Any, path: Path, model_type: str, token: str) -> None:
    """ConfigError if the model takes more inputs than pixel values. Called before any weight is read."""
    parameters = inspect.signature(_model_class(path, model_type).forward).parameters
    inputs = processed(processor, token, Image.new("RGB", _TRIED))
    common = inputs.keys() & parameters.keys()
    names = ", ".join(name for name in inputs if name in common - _HANDLED)
    if "pixel_values" not in inputs:
        raise refusal(model_type, f"its processor makes {names or 'nothing'} of a picture, not pixel_values")
    if _BIDIRECTIONAL in common:
        reason = "its pictures are read in both directions, and our attention looks back only"
        raise refusal(model_type, reason)
    if names:
        reason = f"its model reads {names} beside the pixels, and we hand over pixels alone"
        raise refusal(model_type, reason)


def _model_class(path: Path, model_type: str) -> Any:
    kinds = import_module("transformers.models.auto.modeling_auto").MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    config = import_transformers(model_type).AutoConfig.from_pretrained(path, **LOCAL)
    if type(config) not in kinds:
        raise refusal(model_type, "that library has no model of this type that answers about pictures")
    classes = kinds[type(config)]
    return classes[0] if isinstance(classes, tuple) else classes
