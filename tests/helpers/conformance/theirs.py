"""Transformers' own answers: its processor and its `generate`, on a checkpoint's folder."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils import _pytree as pytree

from saccade.checkpoint import hf_processor
from saccade.models.bridge.model import decoder_of


class Prompt:
    """`image` in the text stands for each picture."""

    def __init__(self, name: str, text: str, *images: Image.Image) -> None:
        self.name = name
        self.text = text
        self.images = list(images)

    @property
    def ours(self) -> dict[str, Any]:
        return {"prompt": self.text, "multi_modal_data": {"image": self.images or None}}


class Expected(NamedTuple):
    """Of a prompt, and of the greedy tokens after it."""

    ids: list[int]  # of the prompt
    embeds: Tensor  # [T, hidden]: what its decoder gets for the prompt
    positions: Tensor | None  # [axes, T], as well; the last rows are those of RoPE
    beside: Mapping[str, Tensor]  # by path: of the other arguments
    tokens: list[int]
    logprobs: Tensor  # [tokens, vocabulary]


class Theirs:
    def __init__(self, folder: Path) -> None:
        kind = "a family of the zoo"
        self.processor = hf_processor.load_processor(folder, kind)
        model_class, _ = hf_processor.model_class(folder, kind)
        self.model = model_class.from_pretrained(folder, dtype=torch.float32).eval()
        config = self.model.generation_config
        config.eos_token_id = None  # answers of a fixed length
        config.use_cache = True
        config.do_sample = False
        markers = _markers(self.processor.tokenizer, self.model.config.to_dict())
        size = self.model.config.get_text_config().vocab_size
        self.banned = sorted(token for token in markers if token < size)
        config.suppress_tokens = self.banned

    def inputs(self, prompt: Prompt) -> dict[str, Any]:
        known = inspect.signature(self.model.forward).parameters
        if prompt.images:
            made = dict(hf_processor.processed(self.processor, prompt.text, *prompt.images))
            return {name: value for name, value in made.items() if name in known or name != "mm_token_type_ids"}
        ids = self.processor.tokenizer(prompt.text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        kinds = {"token_type_ids": torch.zeros_like(ids)} if "token_type_ids" in known else {}
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **kinds}

    def greedy(self, prompt: Prompt, tokens: int) -> list[int]:
        return self.expected(prompt, tokens).tokens

    @torch.inference_mode()
    def expected(self, prompt: Prompt, tokens: int) -> Expected:
        inputs = self.inputs(prompt)
        how = {"return_dict_in_generate": True, "output_logits": True}
        with self._first_call() as call:
            out = self.model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, **how)
        ids: list[int] = inputs["input_ids"][0].tolist()
        found = call.get("position_ids")
        positions = None if found is None else found.reshape(-1, len(ids))
        logprobs = torch.cat(out.logits).float().log_softmax(-1)
        said = out.sequences[0, -tokens:].tolist()
        return Expected(ids, call["inputs_embeds"][0], positions, dict(leaves_of(call)), said, logprobs)

    @contextmanager
    def _first_call(self) -> Iterator[dict[str, Any]]:
        """What its decoder is called with for a prompt, or its first layer, where it makes embeddings itself."""
        text = decoder_of(self.model)
        call: dict[str, Any] = {}

        def decoder(_: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            if not call and isinstance(named.get("inputs_embeds"), Tensor):
                call.update(named)

        def first_layer(_: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            hidden = positional[0] if positional else named["hidden_states"]
            if not call:
                call.update(inputs_embeds=hidden, position_ids=named.get("position_ids"))

        hooks = [text.register_forward_pre_hook(decoder, with_kwargs=True)]
        hooks += [layer.register_forward_pre_hook(first_layer, with_kwargs=True) for layer in text.layers[:1]]
        try:
            yield call
        finally:
            for hook in hooks:
                hook.remove()


def leaves_of(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for path, leaf in pytree.tree_flatten_with_path(dict(arguments))[0]:
        if isinstance(leaf, Tensor):
            yield pytree.keystr(path), leaf


def _markers(tokenizer: Any, config: dict[str, Any]) -> set[int]:
    """Tokens that stand for images and ends: a trained model writes none of an image's."""
    named = {value for name, value in config.items() if name.endswith(("_token_id", "_token_index"))}
    return {token for token in named if isinstance(token, int) and token >= 0} | set(tokenizer.all_special_ids)
