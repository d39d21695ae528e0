"""The borders of docs/architecture.md, read from the imports of every file."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

PROJECT = Path(__file__).parents[2]
ROOT = PROJECT / "saccade"
OPTIONS = {f"options.{name}" for name in ("engine", "server", "fields", "proxies", "vllm")}
NOUNS = OPTIONS | {"types", "errors", "sampling_params", "outputs", "costs", "vision_graph_sizes", "util.plain_files"}
ROOMS = {"util", "options"}  # whose modules have borders of their own
KERNELS = {"kernels.attention", "kernels.gemm", "kernels.gdn", "kernels.moe", "kernels.ops", "kernels.launch"}
MODELS = {
    "models",
    "models.layers",
    "models.vision",
    "models.cuda",
    "models.bridge",
}  # families are imported by name, from their table

# top-level module, package or sub-package -> what it may import from saccade (itself always)
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "options": set(),
    "util": set(),
    "util.plain_files": {"errors"},
    "types": {"errors"},
    "sampling_params": {"errors"},
    "options.proxies": {"errors"},
    "options.fields": {"errors"},
    "options.vllm": {"errors"},
    "options.engine": {"errors", "types", "options.fields", "options.vllm"},
    "options.server": {"errors", "options.fields", "options.proxies"},
    "outputs": {"errors", "types"},
    "util.fair_pool": set(),
    "helpers": set(),
    "util.logs": set(),
    "util.torch_utils": set(),
    "checkpoint": {"errors", "util.plain_files"},
    "costs": {"types", "checkpoint"},
    "vision_graph_sizes": {"types", "checkpoint"},
    "media": {"errors", "types", "options.engine", "helpers"},
    "structured": {"errors", "types", "checkpoint", "util.fair_pool", "helpers"},
    "processor.families": {"errors", "types", "costs", "checkpoint"},
    "processor.dialects": {"errors", "types", "structured"},
    "processor": NOUNS | {"checkpoint", "helpers", "media", "structured", "processor.families", "processor.dialects"},
    "scheduler": {"errors", "types", "options.engine"},
    "kernels": set(),
    "kernels.launch": {"util.torch_utils"},
    "kernels.ops": {"kernels", "kernels.launch"},
    "kernels.attention": {"kernels.launch", "kernels.ops", "util.torch_utils"},
    "kernels.gemm": {"kernels.launch", "kernels.ops"},
    "kernels.gdn": {"kernels.launch"},
    "kernels.moe": {"kernels.launch", "kernels.ops", "kernels.gemm"},
    "models.bridge": {"errors", "types", "checkpoint", "models", "models.layers", "models.quantized", "models.vision"},
    "models.layers": {"errors", "checkpoint", "models"},
    "models.vision": {"errors", "types", "checkpoint", "models", "models.layers"},
    "models.cuda": {"types", "models.layers", "models.bridge", "models.vision"}
    | {"util.torch_utils", "vision_graph_sizes"}
    | KERNELS,
    "models.families": {"errors", "types", "checkpoint", "models", "models.layers", "models.vision"}
    | {"util.torch_utils"},
    "models": {"errors", "types", "checkpoint", "models.layers", "models.quantized", "models.vision"}
    | {"models.families", "util.torch_utils"},
    "models.quantized": {"errors", "checkpoint", "models"},
    "runner.embedding_tiers": NOUNS | {"media"},
    "runner.encoder": NOUNS
    | MODELS
    | {"checkpoint", "util.fair_pool", "helpers", "media", "runner.cuda", "runner.embedding_tiers"},
    "runner.cuda": NOUNS | MODELS | KERNELS | {"checkpoint", "runner", "util.torch_utils"},
    "runner": NOUNS
    | MODELS
    | {"checkpoint", "helpers", "kernels", "structured", "util.torch_utils", "runner.cuda", "runner.encoder"}
    | {"runner.embedding_tiers"},
    "engine": NOUNS | {"checkpoint", "scheduler", "runner", "runner.encoder"},
    "engine.ipc": NOUNS | {"helpers", "util.logs", "checkpoint", "engine", "engine.encoders", "scheduler"},
    "engine.encoders": NOUNS | {"util.logs", "engine", "engine.ipc", "runner", "runner.encoder"},
    "engine.ray_cluster": NOUNS | {"util.logs", "engine.ipc", "engine.encoders", "runner.encoder"},
    "engine.replicas": NOUNS | {"engine", "engine.ipc", "scheduler"},
    "offline_engine": NOUNS | {"processor", "structured", "engine"},
    "llm": NOUNS | {"processor", "structured", "engine", "offline_engine"},
    "async_llm": NOUNS | {"processor", "engine.ipc"},
    "server.http": {"errors", "types", "util.plain_files", "options.engine", "options.server", "server"},
    "server.request": NOUNS
    | {"media", "structured", "processor", "processor.dialects", "apps.plan", "apps.batch", "server", "server.http"},
    "server.api": NOUNS
    | {
        "media",
        "processor",
        "processor.dialects",
        "apps.plan",
        "apps.batch",
        "server",
        "server.http",
        "server.request",
    },
    "server": NOUNS
    | {"__init__", "util.fair_pool", "helpers", "media", "structured", "processor"}
    | {"engine", "engine.ipc", "engine.encoders"}
    | {"engine.replicas", "engine.ray_cluster", "processor.dialects", "apps.batch"}
    | {"server.http", "server.request", "server.api"},
    "apps": set(),  # charts of all of them
    "apps.evaluation": {"errors", "types", "util.plain_files", "options.engine", "costs", "apps"},
    "apps.plan": NOUNS | {"checkpoint", "processor", "processor.families", "scheduler", "runner", "apps"},
    "apps.bench": {"errors", "util.plain_files", "apps"},
    "apps.batch": {"errors", "helpers", "util.plain_files"},
    "cli": NOUNS
    | {
        "__init__",
        "media",
        "processor",
        "processor.families",
        "llm",
        "server",
        "apps.evaluation",
        "apps.bench",
        "apps.plan",
    }
    | {"runner", "util.logs", "apps.batch"},
    "__init__": {"errors", "llm", "async_llm", "outputs", "sampling_params"},
}
HEAVY = {"torch", "transformers", "safetensors"}
TORCH_FREE = ["media", "structured", "checkpoint", "processor", "scheduler", "server", "cli"]
TORCH_FREE += ["apps", "evaluation", "bench", "plan", "batch", "fair_pool", "logs"]
FORBIDDEN_OUTSIDE: dict[str, set[str]] = {  # by row of the page: third-party modules it must never import
    **dict.fromkeys(TORCH_FREE, HEAVY),
    "server": HEAVY | {"PIL", "numpy"},
    "evaluation": HEAVY | {"starlette"},
    "engine": {"transformers", "PIL", "tokenizers"},
    "runner": {"transformers", "tokenizers"},
    "models": {"transformers", "tokenizers"},
    "kernels": {"numpy", "transformers", "tokenizers"},
}
LAZY_ALLOWED = {
    "saccade/__init__.py",
    "saccade/cli/bench.py",  # torch, where the engine runs in this process
    "saccade/cli/chat.py",
    "saccade/cli/serve.py",  # the server, not for --help
    "saccade/server/config.py",  # YAML, where a file is read
    "saccade/cli/conversation.py",  # readline, where Python was built with it
    "saccade/models/__init__.py",
    "saccade/processor/families/__init__.py",
    "saccade/processor/checkpoint_files.py",  # the hub's client, where a model is downloaded
    "saccade/structured/schema.py",  # llguidance, where a machine has it
    "saccade/structured/grammar.py",
    "saccade/media/video_file.py",  # PyAV, where videos are read
    "saccade/media/pdf_reader.py",  # PDFium, where PDFs are
    "saccade/apps/bench/video.py",  # and where they are made
    "saccade/runner/forward_selector.py",  # Triton, where there is a GPU
    "saccade/runner/cuda/kv_host_blocks.py",
    "saccade/runner/cuda/compile_kernels.py",
    "saccade/runner/encoder/graph_capture.py",
    "saccade/kernels/attention/registry.py",  # Gluon, where the GPU is a Hopper
    "saccade/kernels/gemm/linear_act.py",
    "saccade/kernels/gemm/vit_qkv_rope.py",
    "saccade/models/cuda/gemms.py",  # Gluon, too
    "saccade/models/cuda/gemm_self_tests.py",
    "saccade/media/decode.py",  # simplejpeg, where a machine has it
    "saccade/server/tracing.py",  # OpenTelemetry, where traces are sent
}


class Import(NamedTuple):
    file: str
    line: int
    module: str  # dotted
    is_lazy: bool


@cache
def imports_of(path: Path) -> list[Import]:
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    top = {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        if id(node) in typing_only or not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: relative imports hide borders"
        file = str(path.relative_to(ROOT.parent))
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom) and node.module == "saccade":
            names = [
                f"saccade.{a.name}" if (ROOT / f"{a.name}.py").exists() else "saccade.__init__" for a in node.names
            ]
        for name in names:
            found.append(Import(file, node.lineno, name, id(node) not in top))
    return found


def part_of(path: Path) -> str:
    """The top-level module, the package, or the sub-package: `costs`, `runner`, `runner.cuda`."""
    *folders, _ = path.relative_to(ROOT).parts
    name = ".".join(folders)
    return f"{name}.{path.stem}".removesuffix(".__init__") if name in ROOMS else name or path.stem


def row_of(part: str) -> str:
    """The part of the page's table that it stands in."""
    return part.removeprefix("util.").removeprefix("apps.").partition(".")[0]


def part_named(module: str) -> str:
    """The same for a dotted name, which may end with something that a module defines."""
    names = module.split(".")[1:]
    path = ROOT
    for depth, name in enumerate(names):
        if not (path / name).is_dir():
            room = ".".join(names[:depth])
            return f"{room}.{name}" if room in ROOMS else room or name
        path = path / name
    return ".".join(names) or "__init__"


FORBIDDEN_OUTSIDE |= {row_of(noun): HEAVY | {"numpy"} for noun in NOUNS}
FILES = sorted(ROOT.rglob("*.py"))


def test_no_import_crosses_a_border_the_wrong_way() -> None:
    wrong = []
    for path in FILES:
        part = part_of(path)
        assert part in ALLOWED, f"{part} is not in the table of borders: add it to docs/architecture.md and here"
        inside = [item for item in imports_of(path) if item.module.startswith("saccade")]
        wrong += [item for item in inside if part_named(item.module) not in {part, *ALLOWED[part]}]
    assert not wrong, told(wrong)


def test_no_package_imports_a_library_it_must_not_know() -> None:
    wrong = []
    for path in FILES:
        package = row_of(part_of(path))
        for item in imports_of(path):
            library = item.module.split(".")[0]
            is_standard = library in sys.stdlib_module_names | {"saccade"}
            if library in FORBIDDEN_OUTSIDE.get(package, set()) or (package == "scheduler" and not is_standard):
                wrong.append(item)
    assert not wrong, told(wrong)


def test_imports_are_lazy_only_where_a_reason_is_known() -> None:
    lazy = [item for path in FILES for item in imports_of(path) if item.is_lazy]
    wrong = [item for item in lazy if item.file not in LAZY_ALLOWED]
    assert not wrong, told(wrong) + " inside a function"


def told(imports: list[Import]) -> str:
    return "\n".join(f"{item.file}:{item.line} imports {item.module}" for item in imports)


def modules_imported_by(path: Path) -> Iterator[tuple[int, str]]:
    """Every module a file imports, or may: of `from a import b` also `a.b`. Each with its line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)


def test_benchmarks_do_not_import_tests() -> None:
    for path in (PROJECT / "benchmarks").rglob("*.py"):
        for line, name in modules_imported_by(path):
            assert name.split(".")[0] != "tests", f"{path}:{line} imports tests"


def test_no_test_imports_another_test() -> None:
    """What tests share is in tests/helpers, which imports no test either."""
    for path in (PROJECT / "tests").rglob("*.py"):
        for line, name in modules_imported_by(path):
            is_test = name.startswith("tests.") and not name.startswith("tests.helpers.")
            assert not is_test, f"{path}:{line} imports {name}: move what both need to tests/helpers"


def test_model_names_appear_only_in_the_two_folders_and_their_tables() -> None:
    shared = ("__init__", "base", "text")  # the last: for models of several names
    names = [p.stem for p in (ROOT / "processor" / "families").glob("*.py") if p.stem not in shared]
    assert names
    for path in FILES:
        if "families" in path.parts or "models" in path.parts:
            continue
        words = {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}
        assert not words & set(names), f"{path} names a model family"


@pytest.mark.slow  # a process for each
@pytest.mark.parametrize(
    "module",
    [
        "saccade",
        "saccade.scheduler.scheduler",
        "saccade.processor.input_processor",
        "saccade.engine.ipc.client",
        "saccade.server.serve",
        "saccade.cli.main",
        "saccade.cli.plan",
    ],
)
def test_importing_it_does_not_load_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_scheduler_runs_on_the_standard_library_alone() -> None:
    code = "import sys, saccade.scheduler.scheduler; sys.exit(bool({'numpy', 'torch', 'PIL'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_import_table_of_the_architecture_page_is_the_one_above() -> None:
    page = (PROJECT / "docs" / "architecture.md").read_text().partition("## Import table")[2].partition("\n## ")[0]
    lines = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("|")][2:]
    written = {frozenset(_parts(cells[0])): _parts(cells[2]) for cells in lines}
    for packages, allowed in written.items():
        expected = {row_of(target) for part in ALLOWED if row_of(part) in packages for target in ALLOWED[part]}
        assert allowed - packages == expected - packages, f"docs/architecture.md, row of {sorted(packages)}"
    assert {package for packages in written for package in packages} == {row_of(part) for part in ALLOWED}


def _parts(cell: str) -> set[str]:
    """The packages that a cell names; "nouns" are several."""
    return set(re.findall(r"`(\w+)`", cell)) | ({row_of(noun) for noun in NOUNS} if "nouns" in cell else set())
