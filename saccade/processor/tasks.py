"""What a checkpoint is served for: text, embeddings or scores."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast, get_args

from saccade.checkpoint.late_interaction import TOKEN_DIM
from saccade.errors import ConfigError, RequestError

Task = Literal["generate", "embed", "score"]

_RERANKERS = re.compile(r"(^|[-_.])rerank(er)?([-_.]|$)", re.IGNORECASE)
_EMBEDDERS = re.compile(r"(^|[-_.])(embed|embedding|gme)([-_.]|$)", re.IGNORECASE)
_DOES = {"generate": "generate text", "embed": "make embeddings", "score": "score pairs"}


def task_of(option: str, model: str | None, path: Path, config: Mapping[str, Any]) -> Task:
    """The option `task`; with "auto" by the checkpoint. "pooling" is "embed" where nothing says more."""
    if TOKEN_DIM in config:
        if option in ("generate", "score"):
            reason = "the checkpoint projects its tokens to vectors (late interaction)"
            raise ConfigError(f"task={option} cannot be used: {reason}; serve it with --task embed")
        return "embed"
    if option in get_args(Task):
        return cast(Task, option)
    return _found(model, path, config, "embed" if option == "pooling" else "generate")


def _found(model: str | None, path: Path, config: Mapping[str, Any], default: Task) -> Task:
    """The task by the files of Sentence Transformers, vLLM's `classifier_from_token`, or the model's name."""
    name = path.resolve().name if model is None or Path(model).is_dir() else model.rpartition("/")[2]
    if (path / "1_LogitScore").is_dir() or "classifier_from_token" in config or _RERANKERS.search(name):
        return "score"
    if (path / "1_Pooling").is_dir() or _EMBEDDERS.search(name):
        return "embed"
    return default


def check_task(task: Task, *tasks: Task) -> None:
    if task not in tasks:
        first = tasks[0]
        reason = f"the model is served to {_DOES[task]} (--task {task}), not to {_DOES[first]}"
        raise RequestError(f"{reason}; serve it with --task {first}", code="unsupported")
