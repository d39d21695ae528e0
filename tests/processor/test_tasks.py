"""Which task a checkpoint serves, and the arithmetic of scores, without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from saccade.errors import RequestError, UsageError
from saccade.options.engine import options
from saccade.processor.pooling import content_of, embedding, relevance, sides_of, similarity
from saccade.processor.tasks import task_of


@pytest.mark.parametrize(
    ("model", "task"),
    [
        ("Qwen/Qwen3-VL-Embedding-2B", "embed"),
        ("Alibaba-NLP/gme-Qwen2-VL-2B-Instruct", "embed"),
        ("Qwen/Qwen3-VL-Reranker-8B", "score"),
        ("Qwen/Qwen3-VL-8B-Instruct", "generate"),
        ("owner/embeddingless", "generate"),
        (None, "generate"),
    ],
)
def test_the_name_tells_the_task(model: str | None, task: str, tmp_path: Path) -> None:
    assert task_of("auto", model, tmp_path, {}) == task
    assert task_of("pooling", model, tmp_path, {}) == ("embed" if task == "generate" else task)
    assert task_of("generate", model, tmp_path, {}) == "generate"


def test_files_and_the_config_tell_it_too(tmp_path: Path) -> None:
    assert task_of("auto", str(tmp_path), tmp_path, {"classifier_from_token": ["no", "yes"]}) == "score"
    (tmp_path / "1_Pooling").mkdir()
    assert task_of("auto", str(tmp_path), tmp_path, {}) == "embed"
    (tmp_path / "1_LogitScore").mkdir()
    assert task_of("auto", str(tmp_path), tmp_path, {}) == "score"


def test_vllms_spellings_of_the_task() -> None:
    assert options(runner="pooling").task == "pooling" and options(runner="auto").task == "auto"
    assert options(convert="classify").task == "score" and options(task="embedding").task == "embed"
    with pytest.raises(UsageError, match="runner must be auto, generate or pooling, not 'draft'"):
        options(runner="draft")
    with pytest.raises(UsageError, match="task must be auto, generate, embed, score or pooling"):
        options(task="sing")


def test_an_embedding_has_length_one_and_a_zero_vector_stays_finite() -> None:
    found = embedding(np.array([3, 4, 12], np.float32).tobytes(), 2)
    assert found.tolist() == pytest.approx([0.6, 0.8]) and found.dtype == np.float32
    assert not embedding(np.zeros(4, np.float32).tobytes()).any()
    first, second = (np.array(values, np.float32).tobytes() for values in ((1, 0), (1, 1)))
    assert similarity(first, second) == pytest.approx(0.5**0.5)


def test_relevance_is_the_share_of_yes_also_far_out() -> None:
    scores = [relevance(np.array(pair, np.float32).tobytes()) for pair in ((1, 2), (0, 0), (5000, 0), (0, 5000))]
    assert scores == pytest.approx([1 / (1 + np.exp(-1)), 0.5, 0, 1])


def test_sides_are_read_as_vllm_jina_and_cohere_write_them() -> None:
    image, text = {"type": "image_url", "image_url": {"url": "u"}}, {"type": "text", "text": "t"}
    assert sides_of("a") == ["a"] and sides_of(["a", {"text": "t"}]) == ["a", "t"]
    assert sides_of({"content": [image, text]}) == [{"content": [image]}, {"content": [text]}]
    assert sides_of([{"image": "u", "text": "t"}, {"content": [text]}]) == [
        {"content": [image, text]},
        {"content": [text]},
    ]
    assert content_of({"content": "t"}) == [text]


@pytest.mark.parametrize("side", ["", 5, None, {}, {"content": []}, {"content": [5]}, {"content": [{"type": "text"}]}])
def test_a_side_that_is_neither_is_refused(side: Any) -> None:
    with pytest.raises(RequestError, match="a query or a document must be"):
        content_of(side)
