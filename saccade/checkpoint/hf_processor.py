"""Transformers' AutoProcessor of a checkpoint, for the fallback. Only this imports Transformers here.

That import loads torch, so it happens lazily.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from saccade.checkpoint.files import check_named_files, read_optional
from saccade.errors import ConfigError

LOCAL: Mapping[str, bool] = {"local_files_only": True, "trust_remote_code": False}
"""Arguments of every from_pretrained, which may otherwise ask on the terminal whether to run remote code."""

_OPTIONAL = ("torchvision", "timm", "num2words", "sentencepiece", "tiktoken")  # needed by some processors
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
_TOKENS = ("image_token", "image_placeholder_token", "boi_token", "image_start_token", "start_image_token")
_MODEL_TABLES = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING")
_TRIED = (64, 64)
_MAX_FRAME = 4


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
    kind = _processor_class(transformers, path)
    parts = {
        "image_processor": transformers.AutoImageProcessor.from_pretrained(path, **LOCAL),
        "tokenizer": transformers.AutoTokenizer.from_pretrained(path, **LOCAL),
    }
    absent_parts = {name: None for name in kind.get_attributes() if name not in parts}
    unchecked = {"check_argument_for_proper_class": lambda self, name, value: None}  # allows None
    return type(kind.__name__, (kind,), unchecked)(**parts, **absent_parts, **_settings(path))


def _processor_class(transformers: Any, path: Path) -> Any:
    """The one that the checkpoint names, else that of its config."""
    for file in _PROCESSOR_FILES:
        named = read_optional(path / file).get("processor_class")
        if isinstance(named, str) and hasattr(transformers, named):
            return getattr(transformers, named)
    kinds = import_module("transformers.models.auto.processing_auto").PROCESSOR_MAPPING
    config = transformers.AutoConfig.from_pretrained(path, **LOCAL)
    if type(config) not in kinds:
        raise refusal(str(config.model_type), "its files name no processor (processor_class)")
    return kinds[type(config)]


def _settings(path: Path) -> dict[str, Any]:
    config = read_optional(path / "processor_config.json")
    settings = {name: value for name, value in config.items() if not isinstance(value, dict)}
    return {name: value for name, value in settings.items() if name not in ("processor_class", "auto_map")}


def processed(processor: Any, text: str, image: Image.Image) -> Any:
    """One prompt with one image, as tensors by name. Some processors fail without tensors."""
    return processor(text=[text], images=[image], return_tensors="pt", add_special_tokens=False)


class Leaves(NamedTuple):
    """What a processor made of a prompt with one image, taken apart."""

    values: list[Any]
    is_content: list[bool]  # floating-point tensors: what the pixels became. All else follows from the size
    structure: Any  # how they hang together

    @classmethod
    def of(cls, inputs: Mapping[str, Any]) -> Leaves:
        values, structure = _pytree().tree_flatten(dict(inputs))
        return cls(values, [getattr(value, "is_floating_point", bool)() for value in values], structure)

    @property
    def content(self) -> list[Any]:
        return [value for value, yes in zip(self.values, self.is_content, strict=True) if yes]

    def joined(self, content: Iterable[Any]) -> dict[str, Any]:
        """The inputs again, with other content of the same shapes."""
        tensors = iter(content)
        pairs = zip(self.values, self.is_content, strict=True)
        inputs: dict[str, Any] = _pytree().tree_unflatten(
            [next(tensors) if yes else value for value, yes in pairs], self.structure
        )
        return inputs


def _pytree() -> Any:
    return import_module("torch.utils._pytree")


def placeholder(processor: Any, model_type: str, image_token_id: int | None) -> str:
    """What a prompt says for an image: the candidate that becomes the largest number of tokens."""
    tokenizer = processor.tokenizer
    id_token = None if image_token_id is None else tokenizer.convert_ids_to_tokens(image_token_id)
    candidates = dict.fromkeys(filter(None, (id_token, *(getattr(processor, n, None) for n in _TOKENS))))
    single = [token for token in candidates if len(_plain_ids(tokenizer, token)) == 1]
    lengths = {token: _expanded(processor, token) for token in single}
    token = max(lengths, key=lambda name: lengths[name], default=None)
    if token is None or lengths[token] <= 1:
        tried = " or ".join(map(str, candidates)) or "any token of its own"
        raise refusal(model_type, f"its processor finds no place for a picture at {tried}")
    return str(token)


class Frame(NamedTuple):
    """Tokens that a processor puts around every prompt."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    def inside(self, values: Any) -> Any:
        """Without theirs, of values for each token."""
        return values[len(self.before) : len(values) - len(self.after)]

    def around(self, ids: Sequence[int]) -> list[int]:
        """With them, where a prompt does not have them."""
        has_before = tuple(ids[: len(self.before)]) == self.before
        has_after = tuple(ids[len(ids) - len(self.after) :]) == self.after
        return [*(() if has_before else self.before), *ids, *(() if has_after else self.after)]


def frame_of(processor: Any, token: str) -> Frame:
    """What is around an image that is alone, and not around one inside text."""
    image = Image.new("RGB", _TRIED)
    alone, inside = (
        tuple(processed(processor, text, image)["input_ids"][0].tolist()) for text in (token, f"a {token} b")
    )
    runs = ((start, end) for end in range(len(alone), 0, -1) for start in range(min(end, _MAX_FRAME)))
    for start, end in sorted(runs, key=lambda run: run[0] - run[1]):
        length = end - start
        if any(inside[i : i + length] == alone[start:end] for i in range(len(inside) - length + 1)):
            return Frame(alone[:start], alone[end:])
    return Frame((), ())


def _plain_ids(tokenizer: Any, token: Any) -> list[int]:
    return list(tokenizer.encode(str(token), add_special_tokens=False))


def _expanded(processor: Any, token: str) -> int:
    try:
        inputs = processed(processor, token, Image.new("RGB", _TRIED))
    except Exception:  # not the placeholder
        return 0
    return len(inputs["input_ids"][0])


def model_class(path: Path, model_type: str) -> Any:
    """The class that answers about images, and its config."""
    tables = import_module("transformers.models.auto.modeling_auto")
    config = import_transformers(model_type).AutoConfig.from_pretrained(path, **LOCAL)
    for table in _MODEL_TABLES:
        kinds = getattr(tables, table, {})
        if type(config) in kinds:
            classes = kinds[type(config)]
            return (classes[0] if isinstance(classes, tuple) else classes), config
    raise refusal(model_type, "that library has no model of this type that answers about pictures")
