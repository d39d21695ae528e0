"""Opens a checkpoint folder or hub id and reads its small files. Never reads weights beyond their headers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from saccade.config import ConfigError, ModelConfig, check_values, model_config
from saccade.kinds import PICTURES, PROCESSOR, Table
from saccade.processor.families import built_in_template, is_known

BUILTIN = Path(__file__).parent.parent / "builtin"
"""A small trained model that comes with the package."""

_SMALL_FILES = ["*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken"]
_WEIGHT_FILES = ["*.safetensors"]
_MEDIA_FILES: Mapping[str, Table] = {
    "preprocessor_config.json": PICTURES,
    "video_preprocessor_config.json": PICTURES,
    "processor_config.json": PROCESSOR,
}


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    path: Path
    config: ModelConfig
    image_processor: Mapping[str, Any]  # how pictures are prepared
    video_processor: Mapping[str, Any]  # how videos are, where the checkpoint says so
    processor: Mapping[str, Any]  # how they enter the prompt: patch_size, vision_feature_select_strategy ...
    tokenizer_config: Mapping[str, Any]
    chat_template: str | None
    fingerprint: bytes  # 32 bytes that change with any setting or weight file


def open_checkpoint(model: str | None, *, weights: bool = True) -> Checkpoint:
    """A folder, a hub id, or None for the model inside the package.

    `weights=False` is for callers that need the small files only: dummy weights, counting.
    """
    path = BUILTIN if model is None else _locate(model, weights)
    _check_complete(path, weights)
    raw = _read_json(path / "config.json")
    tokenizer_config = _read_optional(path / "tokenizer_config.json")
    config = model_config(raw, _read_optional(path / "generation_config.json"))
    settings = {name: _read_optional(path / name) for name in _MEDIA_FILES}
    if is_known(config):  # of the others Transformers reads these files, and says what it makes of them
        for name, table in _MEDIA_FILES.items():
            check_values(name, settings[name], table)
    pictures, video, processor = settings.values()
    nested, nested_video = processor.pop("image_processor", None), processor.pop("video_processor", None)
    return Checkpoint(
        path=path,
        config=config,
        image_processor=pictures or nested or _pixel_settings(processor),
        video_processor=video or nested_video or {},
        processor=processor,
        tokenizer_config=tokenizer_config,
        chat_template=_chat_template(path, tokenizer_config) or built_in_template(config),
        fingerprint=_fingerprint(path),
    )


# --- finding the folder -------------------------------------------------------------------------------------------


def _locate(model: str, weights: bool) -> Path:
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigError(f"{model} is a file; give the folder that holds config.json and the weights")
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ConfigError(f"there is no folder {model}; give a checkpoint folder or a hub id such as owner/name")
    return _download(model, weights)


def _download(model: str, weights: bool) -> Path:
    patterns = _SMALL_FILES + (_WEIGHT_FILES if weights else [])
    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ConfigError(
            f"{model} is neither a folder here nor could it be had from the hub ({type(error).__name__}); check the "
            "name, the network and, for a gated model, HF_TOKEN"
        ) from None


def _check_complete(path: Path, weights: bool) -> None:
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} has no config.json, so it is not a checkpoint folder; check the path")
    if not weights:
        return
    partial = sorted(path.rglob("*.incomplete"))
    if partial:
        raise ConfigError(f"{path} is half-downloaded ({partial[0].name} is left over); download it again")
    for index in sorted(path.glob("*.safetensors.index.json")):
        named = set(_read_json(index).get("weight_map", {}).values())
        missing = sorted(name for name in named if not (path / name).is_file())
        if missing:
            raise ConfigError(
                f"{path} is half-downloaded: {len(missing)} of {len(named)} weight files are missing, the first is "
                f"{missing[0]}; download it again"
            )


# --- reading the small files --------------------------------------------------------------------------------------


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds {type(value).__name__}, not a JSON object; download it again")
    return value


def _read_optional(path: Path) -> dict[str, Any]:
    return _read_json(path) if path.is_file() else {}


def _pixel_settings(processor: Mapping[str, Any]) -> dict[str, Any]:
    """Processors without an image processor of their own say themselves how pixels are prepared."""
    names = {"image_mean": "image_mean", "image_std": "image_std", "normalize": "do_normalize"}
    return {common: processor[name] for name, common in names.items() if processor.get(name) is not None}


def _chat_template(path: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """A file of its own in newer checkpoints, JSON beside or inside the tokenizer's in older ones."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = _read_optional(path / "chat_template.json").get("chat_template") or tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several named ones
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


# --- identity -----------------------------------------------------------------------------------------------------


def _fingerprint(path: Path) -> bytes:
    """Over the small files and the weight files' names, sizes and headers: seconds saved, and different enough."""
    digest = hashlib.sha256()
    for field in _identifying(path):
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return digest.digest()


def _identifying(path: Path) -> Iterator[bytes]:
    for file in sorted([*path.glob("*.json"), *path.glob("*.tiktoken")]):
        yield file.name.encode()
        yield file.read_bytes()
    for file in sorted(path.glob("*.safetensors")):
        yield file.name.encode()
        yield file.stat().st_size.to_bytes(8, "little")
        yield _safetensors_header(file)


def _safetensors_header(file: Path) -> bytes:
    """Eight bytes of length, then that much JSON with every tensor's name, type, shape and place."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        return stream.read(min(length, file.stat().st_size))
