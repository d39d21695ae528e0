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


@pytest.mark.parametrize(
    ("embeddings", "head", "reason", "said"),
    [
        (nn.Embedding(20, 8), nn.Linear(8, 20, bias=False), None, None),
        (nn.Embedding(20, 8), nn.Linear(8, 20, bias=True), None, "its head has a bias"),
        (Doubled(20, 8), nn.Linear(8, 20, bias=False), None, "its embeddings are more than a table"),
        (nn.Embedding(20, 8), nn.Linear(8, 20, bias=False), "its logits are scaled", "its logits are scaled"),
    ],
)
def test_what_our_kernels_do_at_the_ends_must_be_all_there_is(
    embeddings: nn.Module, head: nn.Module, reason: str | None, said: str | None
) -> None:
    text = TextConfig(8, 16, 1, 2, 1, 4, 20, 512, 1e-6, 1e4, None, {}, False, "qwen2")
    given = {"layers": nn.Identity(), "eager": lambda: reason}
    made = TextModel(text, embeddings, head, lambda *_: torch.zeros(1), **given)
    assert made.eager_reason() == said
