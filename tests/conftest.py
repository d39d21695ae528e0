"""Fixtures for all tests: checkpoints, made once per run, and one server. Heavy modules are imported when used."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest

if TYPE_CHECKING:
    from PIL import Image

    from tests.helpers.families.families import ModelFamily
    from tests.helpers.servers.serving import RunningServer

# Without a GPU, kernels are tested in Triton's interpreter, which reads this when it is first imported.
HAS_GPU = Path("/dev/nvidiactl").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
os.environ.setdefault("TRITON_INTERPRET", "0" if HAS_GPU else "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers share the cores

pytest.register_assert_rewrite("tests.helpers")

# Transformers imports filelock, which has each audit event call a function of its own: `id` takes eight times as long,
# and all tests a twentieth more. It watches for forks while a lock is taken; no test forks.
with mock.patch.object(sys, "addaudithook"):
    importlib.import_module("filelock")

# Marks by folder; `transformers`, `browser` and `slow` stand in the files themselves.
FOLDERS = {
    "kernels/": "kernels",
    "models/cuda/": "kernels",
    "runner/cuda/": "kernels",
    "runner/": "engine",
    "engine/": "engine",
    "training/": "engine",
    "test_llm.py": "engine",
}

FIRST = ("test_tiny_caches", "test_async_core", "test_training", "test_encoders", "test_limits")  # the longest tests


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported stays. To look for garbage among it takes a quarter of the collection, and time of each test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # libraries that count what is left at the end would call it leaked


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Last, it would run while others are idle.
    items.sort(key=lambda item: not item.path.name.startswith(FIRST))
    root = Path(__file__).parent
    marks = {  # by file
        path: [mark for folder, mark in FOLDERS.items() if path.relative_to(root).as_posix().startswith(folder)]
        for path in {item.path for item in items}
    }
    for item in items:
        for mark in marks[item.path]:
            item.add_marker(mark)
        assert isinstance(item, pytest.Function)
        names, fixtures = vars(item.module), set(item.fixturenames)
        if "running_server" in names or "running_builtin" in names or fixtures & {"server", "page_server", "apart"}:
            item.add_marker("server")
        if fixtures & {"browser", "page"}:
            item.add_marker("browser")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    by_itself = [mark for mark in metafunc.definition.iter_markers("parametrize") if mark.args[0] == "family_name"]
    if "family_name" in metafunc.fixturenames and not by_itself:
        from tests.helpers.families.families import FAMILIES

        metafunc.parametrize("family_name", FAMILIES, scope="session")


def pytest_collection_finish() -> None:
    if os.environ["TRITON_INTERPRET"] == "1" and "triton" in sys.modules:
        from tests.helpers.kernels.interpreter import hasten

        hasten()


@pytest.fixture(scope="session", autouse=True)
def checkpoints_made_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where tests.helpers.families.made_once keeps them: for all workers."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["CHECKPOINTS_OF_TESTS"] = str(folder / "checkpoints")


@pytest.fixture(scope="session")
def family(family_name: str) -> ModelFamily:
    from tests.helpers.families.families import FAMILIES

    return FAMILIES[family_name]


@pytest.fixture(scope="session")
def family_folder(family: ModelFamily, family_name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family.build(tmp_path_factory.mktemp(family_name))


@pytest.fixture(scope="session")
def qwen2_vl_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from benchmarks import checkpoints

    return checkpoints.qwen2_vl(tmp_path_factory.mktemp("qwen2_vl"))


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2-VL with a decoder of two layers, for engines whose kernels run in the interpreter."""
    from benchmarks import checkpoints

    return checkpoints.qwen2_vl(tmp_path_factory.mktemp("two_layers"), text={"num_hidden_layers": 2})


@pytest.fixture(scope="session")
def llava_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from benchmarks import checkpoints

    return checkpoints.llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="session")
def server(qwen2_vl_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One `saccade serve` for all tests that do not hurt it."""
    from tests.helpers.servers.serving import running_server

    batches = tmp_path_factory.mktemp("batches")
    with running_server(qwen2_vl_folder, "--batch-dir", str(batches)) as running:
        yield running


@pytest.fixture(scope="session")
def photo() -> Callable[..., Image.Image]:
    from tests.helpers.media.images import make_photo

    return make_photo
