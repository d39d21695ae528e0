"""`saccade plan` at the command line."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from saccade.cli.main import main

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLE = ["plan", "Qwen/Qwen3-VL-8B", "--gpu", "h200", "--rate", "50", "--slo-ttft-ms", "500", "--repeated", "0.3"]
CONTRACT = (
    *("image_tokens", "request_tokens", "kv_bytes_per_token", "kv_bytes_per_request", "kv_blocks_per_request"),
    *("weights_bytes", "concurrent_requests", "ttft_ms", "requests_per_s", "bound_by", "gpus"),
)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    status = main(["plan", *args])
    out, err = capsys.readouterr()
    return status, out, err


def as_json(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    status, out, err = run(capsys, *args, "--json")
    assert (status, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def test_a_whole_plan_imports_no_torch() -> None:
    code = f"import sys; from saccade.cli.main import main; main({EXAMPLE!r}); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "requests/s" in done.stdout


def test_alone_it_lists_models_and_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys)
    assert status == 0
    assert "Qwen/Qwen3-VL-8B" in out and "rtx5090" in out


def test_a_model_and_a_gpu_are_enough(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "Qwen/Qwen3-VL-8B", "--gpu", "h200")
    assert all(found[name] is not None for name in CONTRACT)
    assert found["request_tokens"] == found["image_tokens"] + 64 + 128
    assert found["kv_bytes_per_request"] == found["request_tokens"] * found["kv_bytes_per_token"]
    stages = found["ttft_ms"]
    assert stages["total"] == pytest.approx(sum(stages[name] for name in ("queue", "preprocess", "encode", "prefill")))


def test_workload_and_engine_options_arrive(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--image", "1280x960:3", "640x480:1", "--images", "2", "--input-tokens", "10", "--output-tokens", "20"]
    found = as_json(capsys, "qwen2-vl-2b", *args, "--block-size", "32", "--max-pixels", "401408", "--rate", "7")
    tokens = [image["tokens"] for image in found["images"]]
    assert [image["share"] for image in found["images"]] == [0.75, 0.25]
    assert found["image_tokens"] == 0.75 * tokens[0] + 0.25 * tokens[1]
    assert found["request_tokens"] == 30 + round(2 * found["image_tokens"])
    assert found["kv_blocks_per_request"] == -(-found["request_tokens"] // 32)
    assert found["rate"] == 7 and found["gpus"] == 1


def test_a_gpu_by_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    small = as_json(capsys, "qwen2-vl-2b", "--gpu", "l4")
    large = as_json(capsys, "qwen2-vl-2b", "--gpu", "l4", "--gpu-memory-gib", "44", "--gpu-tflops", "242")
    assert large["concurrent_requests"] > 2 * small["concurrent_requests"]
    assert large["ttft_ms"]["encode"] < 0.6 * small["ttft_ms"]["encode"]


def test_more_requests_need_more_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "Qwen/Qwen3-VL-8B", "--rate", "1000")
    assert found["gpus"] >= 1000 / found["requests_per_s"]


def test_a_service_level_that_cannot_be_kept_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "Qwen/Qwen3-VL-8B", "--gpu", "l4", "--rate", "1", "--slo-ttft-ms", "10")
    assert "no number of them serves 1 requests/s: first-token service level" in out


def test_a_calibration_of_ones_own_is_used(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    known = json.loads((DOCS.parent / "saccade" / "apps" / "plan" / "calibrations.json").read_text("utf-8"))["h200"]
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({**known, "gemm": known["gemm"] / 2, "source": "mine"}))
    built_in = as_json(capsys, "Qwen/Qwen3-VL-8B")
    own = as_json(capsys, "Qwen/Qwen3-VL-8B", "--calibration", str(file))
    assert own["ttft_ms"]["prefill"] > 1.5 * built_in["ttft_ms"]["prefill"]
    assert "times: mine" in own["notes"]


def test_a_plot_is_an_svg(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.svg"
    run(capsys, "Qwen/Qwen3-VL-8B", "--slo-ttft-ms", "300", "--plot", str(file))
    root = ET.fromstring(file.read_text("utf-8"))
    curves = [part for part in root if part.tag.endswith("polyline")]
    assert len(curves) == 3 and all(curve.attrib["points"] for curve in curves)
    assert "service level, first token: 300 ms" in [part.text for part in root]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["Qwen/Qwen3-VL-8B", "--gpu", "tpu9"], "--gpu tpu9 is not known; known are l4, a10"),
        (["./nowhere"], "there is no folder ./nowhere"),
        (["Qwen/Qwen3-VL-8B", "--plot", "plan.png"], "--plot plan.png is not an .svg file"),
        (["Qwen/Qwen3-VL-8B", "--calibration", "/nowhere.json"], "--calibration /nowhere.json cannot be read"),
        (["Qwen/Qwen3-VL-8B", "--dtype", "int3"], "dtype must be one of float32, bfloat16, float16, not 'int3'"),
        (["Qwen/Qwen3-VL-8B", "--max-pixels", "0"], "max_pixels must be a whole number of 1 or more, not 0"),
        (["llava-1.5-7b", "--images", "9"], "a request of 5376 tokens does not fit the context of 4096"),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    status, out, err = run(capsys, *args)
    assert status == 2 and not out
    assert message in err and err.count("\n") == 1


def test_where_no_request_fits_no_number_of_gpus_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "Qwen/Qwen3-VL-8B", "--kv-gb", "0.1", "--rate", "3")
    assert status == 0 and "fit at once     0 requests" in out
    row = next(line for line in out.splitlines() if line.startswith("the plan"))
    assert row.split()[-1] == "-"


@pytest.mark.parametrize("hardware", [{"tflops": 1}, {"name": "x", "memory_gib": 0, "bandwidth_gb_s": 1}, "h200"])
def test_a_machine_that_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, hardware: object
) -> None:
    known = json.loads((DOCS.parent / "saccade" / "apps" / "plan" / "calibrations.json").read_text("utf-8"))["h200"]
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({**known, "hardware": hardware}))
    status, _, err = run(capsys, "Qwen/Qwen3-VL-8B", "--calibration", str(file))
    assert status == 2
    assert "hardware has name, memory_gib, bandwidth_gb_s, tflops" in err


@pytest.mark.parametrize(
    "args", [["--image", "big"], ["--repeated", "2"], ["--images", "-1"], ["--rate", "0"], ["--rate", "1e300"]]
)
def test_arguments_of_a_wrong_form_are_status_2(capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "Qwen/Qwen3-VL-8B", *args])
    assert ended.value.code == 2
    assert args[0] in capsys.readouterr().err
