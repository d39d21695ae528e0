"""requirements/: every package that set-up and the image install has one version, which was tested, and hashes."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
LIGHT_EXTRAS = ("video", "jpeg", "pdf", "otel", "valkey", "kv-events")  # of serving; others are large
EXTRAS = {"serving": LIGHT_EXTRAS, "everything": ("dev",)}
TORCH = Requirement((FOLDER / "torch.txt").read_text("utf-8").splitlines()[-1])
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


class Locked(NamedTuple):
    version: str
    has_hash: bool


def lock(level: str) -> dict[str, Locked]:
    """The packages of a file; every line that is none belongs to the one above."""
    packages = re.split(r"(?m)^(?=[a-z0-9])", (FOLDER / f"{level}.txt").read_text("utf-8"))[1:]
    found = {}
    for package in packages:
        name, version = re.match(r"([a-z0-9-]+)==([^ ]+)", package).groups()  # type: ignore[union-attr]
        found[name] = Locked(version, HASH.search(package) is not None)
    return found


def named(level: str) -> list[Requirement]:
    """What pyproject.toml asks for, the tool that builds the package included."""
    project = PROJECT["project"]
    extras = [line for extra in EXTRAS[level] for line in project["optional-dependencies"][extra]]
    return [Requirement(line) for line in [*PROJECT["build-system"]["requires"], *project["dependencies"], *extras]]


@pytest.mark.parametrize("level", EXTRAS)
def test_all_that_the_project_names_is_locked_within_its_bounds(level: str) -> None:
    locked = {**lock(level), "torch": Locked(str(TORCH.specifier).removeprefix("=="), False)}
    for requirement in named(level):
        name = canonicalize_name(requirement.name)
        assert name in locked, f"{level}.txt lacks {name}: run `make lock`"
        assert locked[name].version in requirement.specifier, f"{requirement} is {locked[name].version}"


@pytest.mark.parametrize("level", EXTRAS)
def test_all_that_is_locked_has_a_hash_and_torch_alone_stands_apart(level: str) -> None:
    locked = lock(level)
    assert len(locked) > 40 and "torch" not in locked
    assert [name for name, package in locked.items() if not package.has_hash] == []
    assert not any(name.startswith(("nvidia-", "cuda-")) for name in locked)


def test_serving_has_the_versions_of_the_tests() -> None:
    assert lock("serving").items() <= lock("everything").items()


@pytest.mark.parametrize("level", EXTRAS)
def test_what_locked_packages_need_is_locked_too(level: str) -> None:
    """It is installed without looking for dependencies. As far as this machine has the packages."""
    locked = lock(level)
    for name in locked:
        try:
            lines = requires(name) or ()
        except PackageNotFoundError:  # for another machine
            continue
        for needed in map(Requirement, lines):
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                assert canonicalize_name(needed.name) in locked, f"{name} needs {needed}"


@pytest.mark.parametrize("path", ["tools/setup.sh", "deploy/Dockerfile"])
def test_set_up_and_the_image_install_nothing_else(path: str) -> None:
    text = re.sub(r"\\\n\s*", "", (ROOT / path).read_text("utf-8"))
    installs = re.findall(r"pip_install (--[^\n]*)|pip install ([^\n&]*)", text.replace('"', ""))
    options = [" ".join(parts) for parts in installs if "$@" not in " ".join(parts)]
    assert len(options) == 3
    assert all(
        "--require-hashes --only-binary :all: --no-deps" in option
        or "--requirement requirements/torch.txt" in option
        or "--no-deps --no-build-isolation" in option
        for option in options
    )
