"""Checkpoint loading: open a folder or hub id and read its config files; of weights only the headers."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from saccade.checkpoint import files, hf_config, layouts
from saccade.checkpoint.config import ModelConfig, check_values, model_config
from saccade.checkpoint.hf_processor import refusal
from saccade.checkpoint.late_interaction import TOKEN_DIM, unwrapped
from saccade.checkpoint.plain_config import plain_words
from saccade.checkpoint.schema import IMAGES, PROCESSOR, Table
from saccade.checkpoint.settings import setting
from saccade.errors import ConfigError
from saccade.media.hashing import digest_of
from saccade.options.engine import Options
from saccade.processor import late_interaction
from saccade.processor.families import FAMILIES, built_in_template, is_known, is_ours
from saccade.processor.families.counting_rules import has_rule
from saccade.processor.tasks import Task, task_of
from saccade.util.plain_files import open_plain

logger = logging.getLogger("saccade.processor")

BUILTIN = Path(__file__).parent.parent / "builtin"
BUILTIN_NAME = "saccade-builtin"
"""A small trained model that comes with the package."""

_HUB_ID = re.compile(r"[^./~][^/]*/[^/]*")
_SMALL_FILES = ["*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken"]
_WEIGHT_FILES = ["*.safetensors"]
_MEDIA_FILES: Mapping[str, Table] = {
    "preprocessor_config.json": IMAGES,
    "video_preprocessor_config.json": IMAGES,
    "processor_config.json": PROCESSOR,
}


class Hub(NamedTuple):
    """How a model is downloaded."""

    revision: str | None
    folder: str | None  # None: the hub's own cache
    is_local: bool  # nothing is downloaded


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    path: Path
    config: ModelConfig
    image_processor: Mapping[str, Any]  # preprocessor_config.json
    video_processor: Mapping[str, Any]  # video_preprocessor_config.json; may be empty
    processor: Mapping[str, Any]  # processor_config.json: patch_size, vision_feature_select_strategy ...
    tokenizer_config: Mapping[str, Any]
    tokenizer_path: Path  # where the tokenizer's files are
    chat_template: str | None
    generation: Mapping[str, Any]  # generation_config.json
    fingerprint: bytes  # 32 bytes that change with any setting or weight file
    task: Task = "generate"


def open_checkpoint(
    model: str | None,
    *,
    weights: bool = True,
    is_local: bool = False,
    on_paper: bool = False,
    options: Options = Options(),  # noqa: B008 (immutable)
) -> Checkpoint:
    """Open a folder, a hub id, or with None or its name the model inside the package.

    `weights=False` needs no weight files: dummy weights, counting. `options` may put others in place of the
    checkpoint's tokenizer, chat template, generation config and values. `is_local`: nothing is downloaded.
    `on_paper`: Transformers is not asked about a model that has a counting rule.
    """
    hub = Hub(options.revision, options.download_dir, is_local)
    path = BUILTIN if model is None else _locate(model, weights, hub)
    _check_complete(path, weights)
    if away := files.links_out(path):
        logger.warning("%s has links that lead out of it: %s", path, ", ".join(away))
    config_json = unwrapped(overridden(files.read_json(path / "config.json"), options.hf_overrides))
    words = layouts.in_words(config_json, path)
    raw, task = _for_task(words, model, path, options.task)
    tokenizer_path = _tokenizer_path(model, path, options, hub)
    tokenizer_config = files.read_optional(tokenizer_path / "tokenizer_config.json")
    generation = _generation(path, options.generation_config)
    if not is_ours(raw) and (options.hf_overrides or tokenizer_path != path):
        reason = "Transformers reads the files of this family itself"
        raise ConfigError(f"hf_overrides and tokenizer cannot be used: {reason}; change a copy of {path}")
    config = _config(path, raw, generation, on_paper=on_paper)
    images, video, processor = _media_settings(path, is_checked=is_known(config))
    nested = processor.pop("image_processor", None)
    nested_video = processor.pop("video_processor", None)
    return Checkpoint(
        path=path,
        config=config,
        image_processor=images or nested or _pixel_settings(processor),
        video_processor=video or nested_video or {},
        processor=processor,
        tokenizer_config=tokenizer_config,
        tokenizer_path=tokenizer_path,
        chat_template=_given_template(options.chat_template)
        or late_interaction.chat_template(processor, config.text.token_dim)
        or layouts.chat_template(path, _chat_template(tokenizer_path, tokenizer_config))
        or _chat_template(path, {})
        or built_in_template(config),
        generation=generation,
        fingerprint=digest_of(*_identifying(path), *_identifying_overrides(options.hf_overrides)),
        task=task,
    )


def _media_settings(path: Path, *, is_checked: bool) -> Iterator[dict[str, Any]]:
    """Those of `_MEDIA_FILES`. Not checked for the fallback: Transformers reads them itself."""
    for name, table in _MEDIA_FILES.items():
        settings = files.read_optional(path / name)
        if is_checked:
            check_values(name, settings, table)
        yield settings


def _for_task(
    raw: Mapping[str, Any], model: str | None, path: Path, option: str
) -> tuple[Mapping[str, Any], Task]:
    """The config for the task. To embed, no head is needed, and some checkpoints have none: it is tied."""
    task = task_of(option, model, path, raw)
    if TOKEN_DIM in raw and raw.get("model_type") not in FAMILIES:
        reason = f"its base model is of model_type {raw.get('model_type')!r}, which runs through Transformers"
        raise ConfigError(f"late interaction is not supported: {reason}; known are {', '.join(FAMILIES)}")
    # Where layers cross-attend, the embedding table has more rows than a head.
    text = raw.get("text_config")
    crosses = isinstance(text, Mapping) and "cross_attention_layers" in text
    if task == "embed" and raw.get("model_type") in FAMILIES and not crosses:
        return {**raw, "tie_word_embeddings": True}, task
    return raw, task


def overridden(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Objects are merged, everything else is replaced."""
    merged = dict(config)
    for name, value in changes.items():
        match merged.get(name), value:
            case Mapping() as old, Mapping():
                value = overridden(old, value)
        merged[name] = value
    return merged


def _tokenizer_path(model: str | None, path: Path, options: Options, hub: Hub) -> Path:
    """The folder of the tokenizer: the checkpoint's own, unless the options name another or a revision."""
    if options.tokenizer is None and None in (options.tokenizer_revision, model):
        return path
    name = options.tokenizer or model
    return _locate(str(name), False, hub._replace(revision=options.tokenizer_revision))


def _given_template(template: str | None) -> str | None:
    """The option: a template's text has braces or several lines, a file's name has not."""
    if template is None:
        return None
    if not template.strip():
        raise ConfigError("chat_template is empty; give a file or a template's text")
    is_text = any(mark in template for mark in "{\n")
    text = template if is_text else files.read_text(_template_file(template), files.TEMPLATE_BYTES)
    if len(text) > files.TEMPLATE_BYTES:
        length = f"{len(text)} characters; at most {files.TEMPLATE_BYTES} are read"
        raise ConfigError(f"chat_template has {length}")
    return text


def _template_file(name: str) -> Path:
    file = Path(name).expanduser()
    if not file.is_file():
        raise ConfigError(f"chat_template names {name!r}, which is no file; give a file or a template's text")
    return file


def _locate(model: str, weights: bool, hub: Hub) -> Path:
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if model == BUILTIN_NAME:
        return BUILTIN
    if folder.exists():
        raise ConfigError(f"{model} is a file; give the folder that holds config.json and the weights")
    if not _HUB_ID.fullmatch(model):
        message = f"there is no folder {model}; give a checkpoint folder or a hub id such as owner/name"
        raise ConfigError(message)
    return _download(model, weights, hub)


def _download(model: str, weights: bool, hub: Hub) -> Path:
    import huggingface_hub  # takes half a second: only where a model is downloaded
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = _SMALL_FILES + (_WEIGHT_FILES if weights else [])
    try:
        folder = huggingface_hub.snapshot_download(
            model,
            allow_patterns=patterns,
            revision=hub.revision,
            cache_dir=hub.folder,
            local_files_only=hub.is_local,
        )
        return Path(folder)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as error:
        if hub.is_local:
            message = f"{model} is neither a folder here nor in the hub's local cache; download its config"
            raise ConfigError(message) from None
        what = f"{model} at {hub.revision}" if hub.revision else model
        reason = f"{what} is neither a folder here nor could it be had from the hub ({type(error).__name__})"
        remedy = "check the name, the network and, for a gated model, HF_TOKEN"
        raise ConfigError(f"{reason}; {remedy}") from None


def _check_complete(path: Path, weights: bool) -> None:
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} has no config.json, so it is not a checkpoint folder; check the path")
    if not weights:
        return
    partial = sorted(path.rglob("*.incomplete"))
    if partial:
        raise ConfigError(f"{path} is half-downloaded ({partial[0].name} is left over); download it again")
    for index in sorted(path.glob("*.safetensors.index.json")):
        weight_files = files.weight_files(index)
        absent = [name for name in weight_files if not (path / name).is_file()]
        if absent:
            number = f"{len(absent)} of {len(weight_files)} weight files"
            reason = f"{number} are missing, the first is {absent[0]}"
            raise ConfigError(f"{path} is half-downloaded: {reason}; download it again")


def _config(
    path: Path, raw: Mapping[str, Any], generation: Mapping[str, Any], *, on_paper: bool
) -> ModelConfig:
    """Transformers reads that of a family which is not in our table."""
    if on_paper and (config := on_paper_config(raw, generation)):
        return config
    kind = raw.get("model_type")
    if not isinstance(kind, str) or is_ours(raw):
        return model_config(raw, generation)
    ours = hf_config.readable(path, raw)
    try:
        return replace(model_config(ours, generation), is_bridged=True)
    except ConfigError as error:
        raise refusal(kind, str(error)) from None


def on_paper_config(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig | None:
    """Of a model that runs through Transformers and has a counting rule."""
    if is_ours(raw) or not has_rule(str(raw.get("model_type"))):
        return None
    config = model_config(plain_words(raw), generation)
    return replace(config, raw=raw, is_bridged=True, is_on_paper=True)


def _generation(path: Path, option: str) -> dict[str, Any]:
    """generation_config.json. With "none" only its EOS ids are used, so it is read too."""
    if option in ("auto", "none"):
        return files.read_optional(path / "generation_config.json")
    file = Path(option).expanduser() / "generation_config.json"
    if not file.is_file():
        choices = "auto, none or a folder that holds a generation_config.json"
        raise ConfigError(f"generation_config must be {choices}, not {option!r}; change --generation-config")
    return files.read_json(file)


def _pixel_settings(processor: Mapping[str, Any]) -> dict[str, Any]:
    """Pixel settings of a processor_config.json that has no image_processor of its own."""
    names = {"image_mean": "image_mean", "image_std": "image_std", "normalize": "do_normalize"}
    return {common: processor[name] for name, common in names.items() if processor.get(name) is not None}


def _chat_template(path: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja in newer checkpoints; chat_template.json or tokenizer_config.json in older ones."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return files.read_text(file, files.TEMPLATE_BYTES)
    settings = files.read_optional(path / "chat_template.json")
    template = setting(settings, "chat_template", tokenizer_config.get("chat_template"))
    if isinstance(template, list):  # several named ones
        entries = [entry for entry in reversed(template) if isinstance(entry, Mapping)]
        template = next((entry.get("template") for entry in entries if entry.get("name") == "default"), None)
    if not isinstance(template, str):
        return None
    if len(template) > files.TEMPLATE_BYTES:
        length = f"{len(template)} characters; at most {files.TEMPLATE_BYTES} are read"
        raise ConfigError(f"{path} has a chat template of {length}")
    return template


def _identifying(path: Path) -> Iterator[bytes]:
    """The config files, and of weight files name, size and header: to hash all weights would take seconds."""
    for file in filter(Path.is_file, sorted([*path.glob("*.json"), *path.glob("*.tiktoken")])):
        yield os.fsencode(file.name)
        with open_plain(file) as stream:
            yield hashlib.file_digest(stream, "sha256").digest()
    for file in filter(Path.is_file, sorted(path.glob("*.safetensors"))):
        yield os.fsencode(file.name)
        yield file.stat().st_size.to_bytes(8, "little")
        yield _safetensors_header(file)


def _identifying_overrides(overrides: Mapping[str, Any]) -> Iterator[bytes]:
    if overrides:
        yield json.dumps(overrides, sort_keys=True, default=str).encode()


def _safetensors_header(file: Path) -> bytes:
    """Eight bytes of length, then JSON with every tensor's name, dtype, shape and offsets."""
    with open_plain(file) as stream:
        length = int.from_bytes(stream.read(8), "little")
        return stream.read(min(length, files.HEADER_BYTES))
