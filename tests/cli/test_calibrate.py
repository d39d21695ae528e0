"""`saccade bench --calibrate` on the CPU, and a plan with what it wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from saccade.cli import calibrate
from saccade.cli.main import main


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_REPEATS", 1)
    monkeypatch.setattr(calibrate, "_CONTEXT", 64)
    monkeypatch.setattr(calibrate, "_STEPS", 4)
    monkeypatch.setattr(calibrate, "_TEXTS", (16, 128))
    monkeypatch.setattr(calibrate, "_SIZES", {"cpu": (320, 240)})


@pytest.mark.usefixtures("short")
def test_a_folder_without_weights_is_measured_with_random_ones(
    tmp_path: Path, qwen2_vl_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "shape"
    shutil.copytree(qwen2_vl_folder, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    given = ["--calibrate", str(tmp_path / "a.json"), "--model", str(folder)]
    assert main(["bench", *given]) == 1
    assert "safetensors" in capsys.readouterr().err
    assert main(["bench", *given, "--load-format", "dummy", "--dtype", "float32"]) == 0
    assert str(folder) in json.loads((tmp_path / "a.json").read_text())["source"]
    load = ["--requests", "1", "--clients", "1", "--tokens", "2", "--words", "4", "--quiet"]
    assert main(["bench", "text", "--offline", str(folder), "--load-format", "dummy", *load]) == 0
    assert "text: 1 requests" in capsys.readouterr().out


@pytest.mark.usefixtures("short")
def test_what_is_measured_here_is_what_a_plan_uses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "here.json"
    assert main(["bench", "--calibrate", str(file)]) == 0
    printed = capsys.readouterr().out
    assert printed.count(" ms predicted") == 5 and str(file) in printed
    written = json.loads(file.read_text())
    assert written["hardware"]["is_cpu"] and written["hardware"]["tflops"] > 0
    assert 0 < written["gemm"] <= 1 and written["megapixel_ms"] > 0
    assert main(["plan", "Qwen/Qwen2-VL-2B", "--calibration", str(file), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["gpu"] == written["hardware"]
    assert f"times: {written['source']}" in planned["notes"]
    assert main(["plan", "Qwen/Qwen2-VL-2B", "--calibration", str(file), "--gpu", "l4"]) == 2
    assert "leave --gpu, --gpu-tflops and --gpu-bandwidth out" in capsys.readouterr().err
