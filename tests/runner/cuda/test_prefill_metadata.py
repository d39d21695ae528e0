"""Metadata of prefill passes: every graph's fits what is staged for it, and padding is harmless."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from saccade import LLM
from saccade.runner.cuda import cross_attention, forward, prefill_graphs
from saccade.runner.cuda.graph_sizes import GRAPH_WINDOWS
from saccade.runner.cuda.prefill_graphs import PrefillGraphs
from saccade.runner.cuda.prefill_metadata import Parts, Window
from tests.helpers.engine.async_engine import FEW, OPTIONS, TWO_LAYERS, answers, overlapped
from tests.helpers.families.families import FAMILIES
from tests.helpers.media.images import make_photo

pytestmark = pytest.mark.transformers

CROSSING = {"text": {**TWO_LAYERS, "cross_attention_layers": [1]}}
DECODERS: dict[str, dict[str, Any]] = {"qwen2_vl": {}, "deepseek_vl_v2": {}, "mllama": CROSSING}


def graphs_of(name: str, folder: Path) -> PrefillGraphs:
    graphs: PrefillGraphs = overlapped(
        FAMILIES[name].build(folder, **DECODERS[name])
    ).engine.core.runner.forward._prefill_graphs
    return graphs


def windows_of(tokens: int, axes: int, past: int) -> list[Window]:
    """As many as a graph takes, of together so many tokens."""
    lengths = [len(part) for part in np.array_split(np.arange(tokens), min(GRAPH_WINDOWS, tokens))]
    return [
        Window(row % 4, np.ones(n, int), np.ones((axes, n), int), np.arange(n), past + n, True)
        for row, n in enumerate(lengths)
    ]


@pytest.mark.parametrize("name", DECODERS)
def test_what_is_staged_holds_the_metadata_of_every_graph(name: str, tmp_path: Path) -> None:
    graphs = graphs_of(name, tmp_path)
    wanted = graphs.wanted_graphs(2048)
    staged = np.zeros(max(sizes.offsets()[-1] for sizes in wanted), np.int32)
    assert {sizes.tokens for sizes in wanted} >= {16, 2048}
    for sizes in wanted:
        past = 0 if sizes.is_short else 4000
        graphs.write(staged, windows_of(sizes.tokens, graphs.axes, past), sizes)
        parts = Parts.of(staged, sizes)
        assert parts.starts[-1] == sizes.tokens and (parts.seq_lens > past).all()


def test_positions_of_padding_are_zero(tmp_path: Path) -> None:
    graphs = graphs_of("qwen2_vl", tmp_path)
    sizes = graphs.graph_sizes(64)
    staged = np.full(sizes.offsets()[-1], 2**30, np.int32)  # of another pass
    graphs.write(staged, windows_of(40, graphs.axes, 0), sizes)
    positions = Parts.of(staged, sizes).positions.reshape(graphs.axes, -1)
    assert (positions[:, :40] == 1).all() and not positions[:, 40:].any()


# --- cross-attention ----------------------------------------------------------------------------------------------


def prompt(text: str, *photos: int) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": [make_photo(50, 40, seed) for seed in photos]}}


@pytest.mark.parametrize("max_stretches", [64, 1])
def test_images_side_by_side_and_again_give_the_tokens_of_eager_pytorch(
    max_stretches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same image twice takes its place in the cache once, and is attended to twice."""
    for module in (cross_attention, forward, prefill_graphs):
        monkeypatch.setattr(module, "GRAPH_STRETCHES", max_stretches)
    family = FAMILIES["mllama"]
    folder, tag = family.build(tmp_path, **CROSSING), family.image
    given = [prompt(f"{tag}{tag}{tag}What?", 1, 1, 2), prompt(f"One {tag} then {tag} and text", 2, 3)]
    assert answers(overlapped(folder), given, FEW) == answers(LLM(str(folder), **OPTIONS), given, FEW)
