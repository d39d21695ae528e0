"""Pruned videos against Transformers, whose decoder is given the same tokens at the same positions, for each family."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from saccade import LLM, SamplingParams
from saccade.media.decode import decode_item
from saccade.media.video_pruning import kept_of
from saccade.media.video_reader import VideoReaders
from saccade.types.prompt import Prompt
from tests.helpers.families.families import FAMILIES as ALL
from tests.helpers.media.videos import FAMILIES, VIDEO, VideoReference, frames, metadata, video_reference

pytestmark = pytest.mark.transformers

TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=1)


class PrunedReference:
    """What Transformers' decoder is given for the whole video, without the tokens that are pruned."""

    def __init__(self, reference: VideoReference) -> None:
        self.reference = reference
        self.decoder = reference.model.model.language_model

    def given(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The arguments its own code hands to the decoder."""
        seen: dict[str, Any] = {}
        hook = self.decoder.register_forward_pre_hook(lambda _m, _a, kwargs: seen.update(kwargs), with_kwargs=True)
        self.reference.model.model(**inputs)
        hook.remove()
        names = ("inputs_embeds", "position_ids", "visual_pos_masks", "deepstack_visual_embeds")
        return {name: seen[name] for name in names if seen.get(name) is not None}

    @torch.inference_mode()
    def greedy(self, inputs: dict[str, Any], stays: torch.Tensor) -> tuple[list[int], list[float]]:
        """`stays` [tokens of the whole prompt]. Every token is computed anew, without a cache."""
        model, given = self.reference.model, self.given(inputs)
        after = int(given["position_ids"][0, 0, -1]) + 1  # as its `generate` counts on
        made = _without(given, stays)
        tokens, logprobs = [], []
        for index in range(TOKENS):
            hidden = self.decoder(input_ids=None, use_cache=False, **made).last_hidden_state[:, -1]
            scores = model.lm_head(hidden)[0].log_softmax(-1)
            tokens.append(int(scores.argmax()))
            logprobs.append(float(scores.max()))
            made = _with_text(made, model.get_input_embeddings()(torch.tensor([[tokens[-1]]])), after + index)
        return tokens, logprobs


def _without(given: dict[str, Any], stays: torch.Tensor) -> dict[str, Any]:
    made = {"inputs_embeds": given["inputs_embeds"][:, stays], "position_ids": given["position_ids"][..., stays]}
    if "visual_pos_masks" in given:
        mask = given["visual_pos_masks"]
        made["visual_pos_masks"] = mask[:, stays]
        made["deepstack_visual_embeds"] = [rows[stays[mask[0]]] for rows in given["deepstack_visual_embeds"]]
    return made


def _with_text(made: dict[str, Any], embed: torch.Tensor, position: int) -> dict[str, Any]:
    last = torch.full_like(made["position_ids"][..., :1], position)
    more = {
        "inputs_embeds": torch.cat([made["inputs_embeds"], embed], 1),
        "position_ids": torch.cat([made["position_ids"], last], -1),
    }
    if "visual_pos_masks" in made:
        mask = made["visual_pos_masks"]
        more["visual_pos_masks"] = torch.cat([mask, torch.zeros_like(mask[:, :1])], 1)
    return {**made, **more}


class Pair:
    def __init__(self, name: str, folder: Path) -> None:
        self.llm = LLM(model=str(folder), max_model_len=2048, kv_cache_gb=0.05, use_tqdm=False)
        self.reference = video_reference(name, folder)

    def check(self, video: np.ndarray, pruning: float, fps: float = 24.0) -> None:
        text = f"Look: {VIDEO}what happens?"
        kwargs = {"fps": fps, "video_pruning": pruning}
        asked = {"prompt": text, "multi_modal_data": {"video": video}, "mm_processor_kwargs": kwargs}
        out = self.llm.generate(asked, GREEDY, use_tqdm=False)[0]
        inputs = self.reference.inputs(text, video, metadata(len(video), fps))
        stays = self.stays(inputs, self.llm.engine.processor.from_prompt(asked))
        assert out.prompt_token_ids == inputs["input_ids"][0][stays].tolist()
        assert out.bill.items[0].pruned == int((~stays).sum()) > 0
        tokens, logprobs = PrunedReference(self.reference).greedy(inputs, stays)
        assert out.outputs[0].token_ids == tokens
        np.testing.assert_allclose([entry.logprob for entry in out.outputs[0].logprobs], logprobs, atol=2e-4)

    def stays(self, inputs: dict[str, Any], prompt: Prompt) -> torch.Tensor:
        """Which tokens of the whole prompt: all text, and of each group what was chosen."""
        stays = torch.ne(inputs["input_ids"][0], self.reference.model.config.video_token_id)
        places, readers = torch.nonzero(~stays)[:, 0], VideoReaders()
        whole = prompt.items[0].geometry.tokens
        for index, item in enumerate(prompt.items):
            kept, own = kept_of(item, decode_item(item, readers)), places[index * whole : (index + 1) * whole]
            stays[own if kept is None else own[torch.from_numpy(kept.tokens)]] = True
        readers.close()
        return stays


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(request.param, ALL[request.param].build(tmp_path_factory.mktemp(request.param)))
    yield made
    made.llm.close()


@pytest.mark.parametrize("pruning", [0.3, 0.75])
def test_logprobs_and_greedy_tokens_equal_those_of_transformers_without_the_same_tokens(
    pair: Pair, pruning: float
) -> None:
    pair.check(frames(7, 192, 128), pruning)


def test_a_pruned_group_keeps_its_time(pair: Pair) -> None:
    """At a low rate the groups of some families stand several positions apart."""
    pair.check(frames(6, 160, 96), 0.5, fps=0.7)
