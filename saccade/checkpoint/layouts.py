"""Checkpoints that were published for code of their own, in the words of Transformers' class of the model.

    config.json             words of the class
    weights                 its names                 rows of data: `layout_table.py`
    processor, chat         its class and settings

Nothing that comes with a checkpoint is run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from saccade.checkpoint.files import read_json, read_optional
from saccade.checkpoint.layout import Fields, Layout
from saccade.checkpoint.layout_table import LAYOUTS, NOT_READ
from saccade.checkpoint.tokenizer_json import added_tokens
from saccade.errors import ConfigError

_KEPT = ("dtype", "eos_token_id", "quantization_config", "tie_word_embeddings", "torch_dtype")
_MAX_LAYERS = 10_000
PUBLISHED = "is_published_layout"  # in words: weights are read by our table, dequantised
_AS_TEXT = """\
{%- set flat = namespace(messages=[]) -%}
{%- for message in messages -%}
  {%- set content = namespace(text='') -%}
  {%- for part in ([message.content] if message.content is string else message.content or []) -%}
    {%- set said = part if part is string else WRITTEN if part.type == 'image' else part.text -%}
    {%- set content.text = content.text + ('' if loop.first else BETWEEN) + said -%}
  {%- endfor -%}
  {%- set flat.messages = flat.messages + [dict(message, content=content.text)] -%}
{%- endfor -%}
{%- set messages = flat.messages -%}
"""


def layout_of(raw: Fields) -> Layout | None:
    """By the architecture: one model type may stand for several models."""
    return LAYOUTS.get(_architecture(raw))


def reason_not_read(raw: Fields) -> str | None:
    return NOT_READ.get(_architecture(raw)) or NOT_READ.get(str(raw.get("model_type")))


def _architecture(raw: Fields) -> str:
    names = raw.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def layout_in(folder: Path) -> Layout | None:
    return layout_of(read_optional(folder / "config.json"))


def _check_depths(raw: Fields) -> None:
    for part in (raw, *(value for value in raw.values() if isinstance(value, dict))):
        depth = part.get("num_hidden_layers", 1)
        if not isinstance(depth, int) or not 0 < depth <= _MAX_LAYERS:
            raise ConfigError(f"config.json: num_hidden_layers is {depth!r}, not 1 to {_MAX_LAYERS}")


def in_words(raw: Fields, folder: Path) -> dict[str, Any]:
    """config.json in the words of a class that Transformers or we have."""
    layout = layout_of(raw)
    if layout is None:
        return dict(raw)
    kept = {name: raw[name] for name in _KEPT if name in raw}
    try:
        _check_depths(raw)
        words = {**kept, **layout.words(raw), PUBLISHED: True}
    except ConfigError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        what = f"{error} is missing or of another type" if isinstance(error, KeyError) else str(error)
        reason = f"config.json is not of the layout that {_architecture(raw)} has ({what})"
        raise ConfigError(f"{reason}; download it again") from None
    if layout.image is not None:
        words["image_token_id"] = _token_id(layout.image, folder)
    return words


def processor_settings(folder: Path) -> dict[str, Any]:
    """processor_config.json of a checkpoint in Transformers' words."""
    raw = read_optional(folder / "config.json")
    layout = layout_of(raw)
    if layout is None or layout.processor is None:
        return read_optional(folder / "processor_config.json")
    return layout.processor(raw, read_optional(folder / "preprocessor_config.json"))


def chat_template(folder: Path, template: str | None) -> str | None:
    """The checkpoint's own, with pictures written in its text, if code did that."""
    layout = layout_in(folder)
    if template is None or layout is None or not layout.written:
        return template
    if "image" in template and not layout.takes_texts:
        return template
    texts = _AS_TEXT.replace("WRITTEN", repr(layout.written)).replace("BETWEEN", repr(layout.between))
    return texts + template


def config_of(folder: Path) -> dict[str, Any]:
    return in_words(read_json(folder / "config.json"), folder)


def _token_id(name: str, folder: Path) -> int:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{file} is missing; save the tokenizer in its fast form (tokenizer.json)")
    tokens = added_tokens(file)
    if name not in tokens:
        raise ConfigError(f"{file} has no token {name!r}, which stands for a picture; add it there")
    return tokens[name]
