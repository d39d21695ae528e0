"""Transformers' AutoProcessor of a checkpoint, for the fallback. Only this imports Transformers here.

That import loads torch, so it happens lazily.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from PIL import Image

from saccade.checkpoint.config import ModelConfig
from saccade.checkpoint.files import check_named_files, read_optional
from saccade.checkpoint.layouts import config_of, layout_in, processor_settings
from saccade.errors import ConfigError

LOCAL: Mapping[str, bool] = {"local_files_only": True, "trust_remote_code": False}
"""Arguments of every from_pretrained, which may otherwise ask on the terminal whether to run remote code."""

_OPTIONAL = ("torchvision", "timm", "num2words", "sentencepiece", "tiktoken")  # needed by some processors
_PROCESSOR_FILES = ("preprocessor_config.json", "tokenizer_config.json")
_TOKENS = ("image_token", "image_placeholder_token", "boi_token", "image_start_token", "start_image_token")
_WRAPPERS = ("image_start_token", "image_end_token")
_MODEL_TABLES = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING")
_TRIED = (64, 64)
_MAX_FRAME = 4
_MAX_GAP = 5
_BETWEEN = " a "


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
    """The processor of images and text, and of videos where torchvision is there."""
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
        "image_processor": _image_processor(transformers, path),
        "tokenizer": _tokenizer(transformers, path),
    }
    layout = layout_in(path)
    if layout is not None and layout.patch is not None:
        kind = in_patches(kind, layout.patch)
    if layout is None and "video_processor" in kind.get_attributes():
        with suppress(Exception):  # `hf_video.why_none` says the reason; pictures need none
            parts["video_processor"] = transformers.AutoVideoProcessor.from_pretrained(path, **LOCAL)
    absent = [name for name in kind.get_attributes() if name not in parts]
    unchecked = {"check_argument_for_proper_class": lambda self, name, value: None}  # allows any
    whole = type(kind.__name__, (kind,), unchecked)
    try:
        return whole(**parts, **dict.fromkeys(absent), **_settings(kind, path))
    except AttributeError:  # it asks a part that is left out for its settings, which those of images have
        return whole(**parts, **dict.fromkeys(absent, parts["image_processor"]), **_settings(kind, path))


def auto_config(path: Path) -> Any:
    """Transformers' config of a checkpoint."""
    auto = import_module("transformers").AutoConfig
    if layout_in(path) is None:
        return auto.from_pretrained(path, **LOCAL)
    words = config_of(path)
    return auto.for_model(words.pop("model_type"), **words)


def _image_processor(transformers: Any, path: Path) -> Any:
    auto, layout = transformers.AutoImageProcessor, layout_in(path)
    if layout is None or layout.processor is None:
        return auto.from_pretrained(path, **LOCAL)
    with TemporaryDirectory() as folder:  # that class reads files
        settings = json.dumps(processor_settings(path)["image_processor"])
        Path(folder, "preprocessor_config.json").write_text(settings)
        return auto.from_pretrained(folder, **LOCAL)


def _tokenizer(transformers: Any, path: Path) -> Any:
    layout = layout_in(path)
    if layout is None or layout.processor is None:
        return transformers.AutoTokenizer.from_pretrained(path, **LOCAL)
    kind = transformers.PreTrainedTokenizerFast
    return kind.from_pretrained(path, extra_special_tokens=dict(layout.tokens), **LOCAL)


def in_patches(kind: Any, side: int) -> Any:
    """A processor whose tiles [n, channels, height, width] become patches [n, values] and their grids."""

    class Patches(kind):  # type: ignore[misc]
        def __call__(self, *args: Any, **named: Any) -> Any:
            made = super().__call__(*args, **named)
            if (tiles := made.pop("pixel_values", None)) is not None:
                rows, columns = (length // side for length in tiles.shape[-2:])
                cut = tiles.unflatten(3, (columns, side)).unflatten(2, (rows, side))
                made["pixel_values"] = cut.permute(0, 2, 4, 1, 3, 5).flatten(0, 2).flatten(1)
                made["image_grid_hw"] = tiles.new_tensor(
                    [[rows, columns]] * len(tiles), dtype=import_module("torch").int64
                )
            return made

    return Patches


def _processor_class(transformers: Any, path: Path) -> Any:
    """The one that the checkpoint names, else that of its config."""
    for settings in (processor_settings(path), *(read_optional(path / file) for file in _PROCESSOR_FILES)):
        named = settings.get("processor_class")
        if isinstance(named, str) and hasattr(transformers, named):
            return getattr(transformers, named)
    kinds = import_module("transformers.models.auto.processing_auto").PROCESSOR_MAPPING
    config = auto_config(path)
    if type(config) not in kinds:
        raise refusal(str(config.model_type), "its files name no processor (processor_class)")
    return kinds[type(config)]


def _settings(kind: Any, path: Path) -> dict[str, Any]:
    """The processor's own, without those of its parts."""
    config = processor_settings(path)
    parameters = inspect.signature(kind.__init__).parameters.keys() - set(kind.get_attributes())
    return {
        name: value
        for name, value in config.items()
        if name not in ("processor_class", "auto_map") and (name in parameters or not isinstance(value, dict))
    }


def processed(processor: Any, text: str, *images: Image.Image, **videos: Any) -> Any:
    """One prompt with its images, as tensors by name. Some processors fail without tensors."""
    media = {"images": list(images), **videos} if images else videos
    how = {"text": [text], "return_tensors": "pt", "add_special_tokens": False, **media}
    try:
        return processor(**how, return_mm_token_type_ids=True)
    except TypeError:  # not all know that argument
        return processor(**how)


class Leaves(NamedTuple):
    """What a processor made of a prompt with one image, taken apart."""

    values: list[Any]
    is_content: list[bool]  # floating-point tensors: what the pixels became. All else follows from the size
    structure: Any  # how they hang together

    @classmethod
    def of(cls, inputs: Mapping[str, Any]) -> Leaves:
        values, structure = _pytree().tree_flatten(dict(inputs))
        return cls(values, list(map(_is_content, values)), structure)

    @property
    def content(self) -> list[Any]:
        return [value for value, yes in zip(self.values, self.is_content, strict=True) if yes]

    @property
    def rest(self) -> list[Any]:
        return [value for value, yes in zip(self.values, self.is_content, strict=True) if not yes]

    def is_like(self, other: Leaves) -> bool:
        """The same but for what content holds."""
        if (self.structure, self.is_content) != (other.structure, other.is_content):
            return False
        shapes = [[(tensor.shape, tensor.dtype) for tensor in leaves.content] for leaves in (self, other)]
        return shapes[0] == shapes[1] and all(map(_is_equal, self.rest, other.rest))

    def without_content(self) -> Leaves:
        """With the shapes of content alone."""
        pairs = zip(self.values, self.is_content, strict=True)
        return self._replace(values=[value.to("meta") if yes else value for value, yes in pairs])

    def joined(self, content: Iterable[Any]) -> dict[str, Any]:
        """The inputs again, with other content of the same shapes."""
        tensors = iter(content)
        pairs = zip(self.values, self.is_content, strict=True)
        inputs: dict[str, Any] = _pytree().tree_unflatten(
            [next(tensors) if yes else value for value, yes in pairs], self.structure
        )
        return inputs


def _is_content(value: Any) -> bool:
    """A row of numbers may be times; pixels have more dimensions."""
    return bool(getattr(value, "is_floating_point", bool)()) and value.dim() > 1


def _is_equal(one: Any, other: Any) -> bool:
    if hasattr(one, "shape") and hasattr(other, "shape"):
        return bool(one.shape == other.shape and (one == other).all())
    return bool(one == other)


def _pytree() -> Any:
    return import_module("torch.utils._pytree")


class Placeholder(NamedTuple):
    """What a prompt says for an image."""

    token: str  # one token, which becomes those of the image
    written: str  # with what has to be around it
    tokens: int = 1  # of that kind: more than one if a prompt has them all itself

    @property
    def wrapped(self) -> int:
        """Tokens before it, and after it, that have to be there."""
        return int(self.token * self.tokens != self.written)


def placeholder(processor: Any, config: ModelConfig) -> Placeholder:
    """The candidate that becomes the largest number of tokens, or else as many as the config says of one."""
    image_token_id = config.image_token_id
    tokenizer = processor.tokenizer
    id_token = None if image_token_id is None else tokenizer.convert_ids_to_tokens(image_token_id)
    candidates = dict.fromkeys(filter(None, (id_token, *(getattr(processor, n, None) for n in _TOKENS))))
    single = [str(token) for token in candidates if len(_plain_ids(tokenizer, token)) == 1]
    start, end = (getattr(processor, name, None) for name in _WRAPPERS)
    forms = [Placeholder(token, token) for token in single]
    forms += [Placeholder(token, f"{start}{token}{end}") for token in single if start and end]
    lengths = {form: _expanded(processor, form.written) - 2 * form.wrapped for form in forms}
    form = max(lengths, key=lambda name: lengths[name], default=None)
    count = config.raw.get("image_seq_length")
    if form is not None and lengths[form] == 1 and isinstance(count, int):
        return Placeholder(form.token, form.token * count, count)
    if form is None or lengths[form] <= 1:
        tried = " or ".join(map(str, candidates)) or "any token of its own"
        raise refusal(config.model_type, f"its processor finds no place for a picture at {tried}")
    return form


class Frame(NamedTuple):
    """Tokens that a processor puts around every prompt, and around images."""

    before: tuple[int, ...]  # a prompt
    after: tuple[int, ...]
    wrapped: int  # tokens that have to be before an image, and after it
    lead: int = 0  # tokens before an image, and after it, that depend on its place in the prompt
    trail: int = 0
    takes_many: bool = True  # images in a prompt
    is_joined: bool = False  # one image after another shares those that it has before
    puts_space: bool = False  # between an image and a word that follows at once

    def inside(self, values: Any) -> Any:
        """Without theirs, of values for each token of an image alone."""
        start = len(self.before) + self.wrapped + self.lead
        return values[start : len(values) - len(self.after) - self.wrapped - self.trail]

    def around(self, ids: Sequence[int]) -> list[int]:
        """With those of a prompt, where it does not have them."""
        has_before = tuple(ids[: len(self.before)]) == self.before
        has_after = tuple(ids[len(ids) - len(self.after) :]) == self.after
        return [*(() if has_before else self.before), *ids, *(() if has_after else self.after)]


def ids_of(processor: Any, text: str, images: int) -> tuple[int, ...]:
    """Of a prompt with so many small images."""
    inputs = processed(processor, text, *[Image.new("RGB", _TRIED)] * images)
    return tuple(inputs["input_ids"][0].tolist())


IdsOf = Callable[[Any, str, int], tuple[int, ...]]


def frame_of(processor: Any, place: Placeholder, ids_of: IdsOf = ids_of) -> Frame:
    """What is around an image that is alone, and not around one inside text; or around other media."""
    alone = ids_of(processor, place.written, 1)
    inside = ids_of(processor, f"a {place.written} b", 1)
    puts_space = ids_of(processor, f"{place.written}b", 1) == ids_of(processor, f"{place.written} b", 1)
    runs = ((start, end) for end in range(len(alone), 0, -1) for start in range(min(end, _MAX_FRAME)))
    for start, end in sorted(runs, key=lambda run: run[0] - run[1]):
        if starts_of(inside, alone[start:end]):
            frame = Frame(alone[:start], alone[end:], place.wrapped, puts_space=puts_space)
            return _beside_another(processor, place, frame, frame.inside(alone), ids_of)
    return Frame((), (), place.wrapped, takes_many=False)


def _beside_another(
    processor: Any, place: Placeholder, frame: Frame, alone: tuple[int, ...], ids_of: IdsOf
) -> Frame:
    """The same, with the tokens of an image that two in a prompt do not share."""
    texts = (place.written + _BETWEEN + place.written, place.written * 2)
    try:
        prompts = [ids_of(processor, text, 2) for text in texts]
    except Exception:  # it may take one image alone
        return frame._replace(takes_many=False)
    ends = [(lead, trail) for lead in range(_MAX_GAP) for trail in range(_MAX_GAP)]
    for lead, trail in sorted(ends, key=lambda end: (sum(end), end[1])):
        part = alone[lead : len(alone) - trail]
        if part and all(_has_two(ids, part) for ids in prompts):
            is_joined = lead > 0 and alone[:lead] + part * 2 == frame.inside(prompts[1])
            return frame._replace(lead=lead, trail=trail, is_joined=is_joined)
    return frame._replace(takes_many=False)


def _has_two(ids: Sequence[int], part: Sequence[int]) -> bool:
    starts = starts_of(ids, part)
    return bool(starts) and starts[-1] - starts[0] >= len(part)


def gaps(processor: Any, place: Placeholder, frame: Frame, images: int) -> list[tuple[int, ...]]:
    """Tokens before each of so many images, such as its number, and after the last."""
    image = frame.inside(ids_of(processor, place.written, 1))
    between = _plain_ids(processor.tokenizer, _BETWEEN)
    ids = ids_of(processor, _BETWEEN.join([place.written] * images), images)
    ids = ids[len(frame.before) : len(ids) - len(frame.after)]
    before: list[tuple[int, ...]] = []
    start = 0
    for number in range(images):
        if number:
            start += frame.wrapped
            if list(ids[start : start + len(between)]) != between:
                raise ValueError("tokens after an image that is not the last")
            start += len(between)
        end = next(place for place in range(start, len(ids)) if ids[place : place + len(image)] == image)
        before.append(ids[start : end - frame.wrapped])
        start = end + len(image)
    return [*before, ids[start + frame.wrapped :]]


def starts_of(ids: Sequence[int], part: Sequence[int]) -> list[int]:
    length = len(part)
    return [i for i in range(len(ids) - length + 1) if list(ids[i : i + length]) == list(part)]


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
    config = auto_config(path)
    for table in _MODEL_TABLES:
        kinds = getattr(tables, table, {})
        if type(config) in kinds:
            classes = kinds[type(config)]
            return (classes[0] if isinstance(classes, tuple) else classes), config
    raise refusal(model_type, "that library has no model of this type that answers about pictures")
