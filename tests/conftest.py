"""Checkpoints are made once per test run; pictures are drawn from a seed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

# Without a GPU, kernels are tested in Triton's interpreter. It reads this when Transformers, below, imports it.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

from benchmarks import checkpoints
from tests.helpers.families import FAMILIES, ModelFamily
from tests.helpers.images import make_photo
from tests.helpers.serving import RunningServer, running_server

torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)  # workers share the cores


@pytest.fixture(scope="session")
def qwen2_vl_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.qwen2_vl(tmp_path_factory.mktemp("qwen2_vl"))


@pytest.fixture(scope="session")
def llava_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="session", params=FAMILIES)
def family_name(request: pytest.FixtureRequest) -> str:
    """Each family in turn."""
    return str(request.param)


@pytest.fixture(scope="session")
def family(family_name: str) -> ModelFamily:
    return FAMILIES[family_name]


@pytest.fixture(scope="session")
def family_folder(family_name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES[family_name].build(tmp_path_factory.mktemp(family_name))


@pytest.fixture(scope="session")
def server(qwen2_vl_folder: Path) -> Iterator[RunningServer]:
    """One `saccade serve` for all tests that do not hurt it."""
    with running_server(qwen2_vl_folder) as running:
        yield running


@pytest.fixture(scope="session")
def photo() -> Callable[..., Image.Image]:
    return make_photo
