"""tools/setup.sh: what it keeps, what it makes anew and what it refuses. Nothing is installed here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLD_PYTHON = '#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2\nexit 1\n'


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with an environment that was set up for serving, and a Python that is too old."""
    folder = tmp_path / "project"
    (folder / "tools").mkdir(parents=True)
    for name in ("pyproject.toml", "tools/setup.sh"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / ".venv"], check=True)
    write_stamp(folder, "serving")
    old = folder / "old-python"
    old.write_text(OLD_PYTHON)
    old.chmod(0o755)
    return folder


def write_stamp(folder: Path, installed: str) -> None:
    recipe = "cat pyproject.toml requirements/*.txt | cksum"
    number = subprocess.run(recipe, shell=True, cwd=folder, check=True, capture_output=True, text=True).stdout
    (folder / ".venv/.installed").write_text(f"{folder}\n{number}{installed}\n")


def set_up(folder: Path, wanted: str) -> subprocess.CompletedProcess[str]:
    """With a Python that cannot make an environment, so that nothing is installed if one is to be made."""
    environment = {**os.environ, "PYTHON": "./old-python"}
    command = ["tools/setup.sh", wanted]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_an_environment_that_is_up_to_date_is_left_alone(project: Path) -> None:
    done = set_up(project, "serving")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    write_stamp(project, "everything")
    assert set_up(project, "serving").stdout == set_up(project, "everything").stdout == ""


def test_more_is_installed_for_tests_and_when_the_project_or_its_lock_changed(project: Path) -> None:
    python = project / ".venv/bin/python"
    python.unlink()
    python.write_text('#!/bin/sh\n[ "$2" = pip ] && exit 7\nexit 0\n')  # pip fails
    python.chmod(0o755)
    done = set_up(project, "everything")
    assert done.returncode == 7 and "tests and serving" in done.stdout and "[2/4] packages" in done.stdout
    assert set_up(project, "serving").returncode == 0
    for name in ("pyproject.toml", "requirements/serving.txt"):
        (project / name).write_text("")
        assert set_up(project, "serving").returncode == 7
        write_stamp(project, "serving")


@pytest.mark.parametrize("harm", ["moved", "broken", "old"])
def test_an_environment_that_cannot_be_used_is_removed(project: Path, harm: str) -> None:
    if harm == "moved":
        project = project.rename(project.with_name("elsewhere"))
    else:
        (project / ".venv/bin/python").unlink()
    if harm == "old":
        (project / ".venv/bin/python").symlink_to(project / "old-python")
    done = set_up(project, "serving")
    assert "is made anew" in done.stdout and not (project / ".venv").exists()
    assert done.returncode == 1
    assert "Python 3.11 or newer is needed, and ./old-python is Python 3.9.2" in done.stderr
    assert "PYTHON=python3.12" in done.stderr
