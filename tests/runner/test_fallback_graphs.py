"""Which models that run through Transformers' code get CUDA graphs, and what the start-up log says of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from saccade.checkpoint.config import TextConfig
from saccade.models import load_model
from saccade.models.bridge.model import ModelBridge
from saccade.models.bridge.tail import Tail
from saccade.models.bridge.text_model import TextModel
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.runner.forward_selector import try_graphs
from tests.helpers.families.bridged import transformers_layers
from tests.helpers.families.families import FAMILIES

pytestmark = pytest.mark.transformers

GRAPHS: Any = object()


@pytest.fixture
def model(tmp_path: Path) -> ModelBridge:
    folder = FAMILIES["internvl"].build(tmp_path)
    config = open_checkpoint(str(folder)).config
    with transformers_layers():
        made = load_model(folder, config, dtype=torch.float32, device=torch.device("cpu"))
    assert isinstance(made, ModelBridge)
    return made


def test_what_was_captured_and_checked_is_used() -> None:
    checked = list[Any]()
    assert try_graphs(lambda: GRAPHS, checked.append) == (GRAPHS, None)
    assert checked == [GRAPHS]


def test_what_cannot_be_captured_or_differs_is_not_used_and_the_reason_is_told() -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("called a synchronizing CUDA operation\nand more lines")

    reason = "RuntimeError: called a synchronizing CUDA operation"
    assert try_graphs(fail, lambda _: None) == (None, reason)
    assert try_graphs(lambda: GRAPHS, fail) == (None, reason)


def test_layers_of_which_nothing_is_known_are_tried(model: ModelBridge) -> None:
    assert isinstance(model.decoder, TextModel)
    assert model.decoder.eager_reason() is None


class Doubled(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class Passes:
    """A model whose embeddings and tail are as given."""

    axes = 1

    def __init__(self, embeddings: nn.Module, tail: Tail, reason: str | None = None) -> None:
        self.embeddings = embeddings
        self.tail = tail
        self.reason = reason

    def embed(self, token_ids: torch.Tensor) -> Any:
        return self.embeddings(token_ids)

    def forward(self, embeds: torch.Tensor, positions: torch.Tensor, attention: Any) -> torch.Tensor:
        return embeds

    def eager_reason(self) -> str | None:
        return self.reason


def text_model(passes: Passes, *, bias: bool = False) -> TextModel:
    text = TextConfig(8, 16, 1, 2, 1, 4, 20, 512, 1e-6, 1e4, None, {}, False, "qwen2")
    return TextModel(text, passes.embeddings, nn.Linear(8, 20, bias=bias), passes, layers=nn.Identity())


@pytest.mark.parametrize(
    ("embeddings", "is_table"), [(nn.Embedding(20, 8), True), (Doubled(20, 8, padding_idx=0), False)]
)
def test_embeddings_that_are_more_than_a_table_are_made_by_the_model(embeddings: nn.Module, is_table: bool) -> None:
    made = text_model(Passes(embeddings, Tail()))
    assert made.is_table is is_table
    ids = torch.tensor([3, 1])
    torch.testing.assert_close(made.embed(ids), embeddings(ids))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tail", [Tail(), Tail(0.5, 3.0, torch.arange(20) == 7)])
def test_what_follows_the_heads_gemm_is_done_in_place(tail: Tail, bias: bool) -> None:
    made = text_model(Passes(nn.Embedding(20, 8), tail), bias=bias)
    logits = torch.randn(2, 20)
    added = logits if made._bias is None else logits + made._bias
    expected = tail(added)
    made.finish(logits)
    torch.testing.assert_close(logits, expected)


def test_a_reason_of_the_model_is_told() -> None:
    assert text_model(Passes(nn.Embedding(20, 8), Tail(), "its layers keep states")).eager_reason() == (
        "its layers keep states"
    )
