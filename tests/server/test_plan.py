"""/v1/plan: the plan of the served model, what it refuses, and what the server says of its last hour."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from saccade.cli.main import main
from saccade.server.request.fields import FieldReader
from saccade.server.request.plan import read_plan
from tests.helpers.servers.serving import MODEL, RunningServer, error_of, photo_part, text_part, until

ASKED = {
    "gpu": "l4",
    "image": ["640x480:3", "1280x720:1"],
    "images": 2,
    "input_tokens": 100,
    "output_tokens": 50,
    "rate": 40,
    "slo_ttft_ms": 500,
    "repeated": 0.25,
}


def plan(server: RunningServer, **fields: Any) -> dict[str, Any]:
    response = server.post("/v1/plan", fields)
    assert response.status_code == 200, response.text
    return dict(response.json())


def refused(server: RunningServer, **fields: Any) -> dict[str, Any]:
    response = server.post("/v1/plan", fields)
    assert response.status_code == 400, response.text
    return error_of(response)


def test_it_is_the_plan_of_the_command(
    server: RunningServer, qwen2_vl_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--gpu", "l4", "--image", "640x480:3", "1280x720:1", "--images", "2", "--input-tokens", "100"]
    flags += ["--output-tokens", "50", "--rate", "40", "--slo-ttft-ms", "500", "--repeated", "0.25"]
    assert main(["plan", str(qwen2_vl_folder), *flags, "--limit-mm-per-prompt", "image=4", "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    assert plan(server, **ASKED) == {**expected, "model": MODEL}


def test_tokens_are_those_of_the_bill(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": [photo_part(640, 480)]}]}
    assert plan(server, image=["640x480"])["image_tokens"] == server.post("/v1/bill", body).json()["image_tokens"]


def test_an_empty_body_is_planned_with_the_commands_defaults(server: RunningServer) -> None:
    found = plan(server)
    assert found["gpu"]["name"] == "H200" and [image["width"] for image in found["images"]] == [1280]
    assert found["request_tokens"] - found["prompt_tokens"] == 128


def test_numbers_stand_in_for_those_of_the_gpu(server: RunningServer) -> None:
    found = plan(server, gpu="l4", gpu_memory_gib=40, gpu_bandwidth=500, gpu_tflops=200)["gpu"]
    assert (found["memory_gib"], found["bandwidth_gb_s"], found["tflops"]) == (40, 500, 200)


def test_the_folder_of_the_model_is_not_shown(server: RunningServer, qwen2_vl_folder: Path) -> None:
    assert str(qwen2_vl_folder) not in server.post("/v1/plan", {}).text


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("gpu", "h900", "gpu h900 is not known; known are l4"),
        ("rate", 0, "rate is 0; give a value from 0.001"),
        ("rate", "fast", "rate must be a number, not 'fast'"),
        ("images", 5, "images 5 is above limit_mm_per_prompt image=4"),
        ("images", -1, "images is -1; give a value from 0"),
        ("output_tokens", 10**12, "output_tokens is 1e+12; give a value from 0 to 10,000,000"),
        ("input_tokens", 9_000_000, "does not fit the context"),
        ("repeated", 2, "repeated is 2; give a value from 0 to 1"),
        ("gpu_memory_gib", -3, "gpu_memory_gib is -3"),
        ("image", ["640x480"] * 65, "image has 65 sizes and may have 64"),
        ("image", ["20000x20000"], "image 20000x20000 has 400000000 pixels; at most"),
    ],
)
def test_a_bad_value_is_named_with_what_to_change(server: RunningServer, field: str, value: Any, words: str) -> None:
    assert words in refused(server, **{field: value})["message"]


@pytest.mark.parametrize("size", ["640", "640x", "0x4", "640x480:0", "-1x5", "640x480:3:4", "٣x٣", "640x480\n"])
def test_a_size_that_is_none_is_named_by_its_place(server: RunningServer, size: str) -> None:
    error = refused(server, image=["640x480", size])
    assert error["param"] == "image[1]" and "give WIDTHxHEIGHT" in error["message"]


def test_a_refusal_names_the_field_at_fault(server: RunningServer) -> None:
    assert refused(server, gpu="h900")["param"] == "gpu"
    assert refused(server, rate=-1)["param"] == "rate"
    assert refused(server, images=5)["param"] == "images"


def test_requests_without_images_have_no_image_tokens(server: RunningServer) -> None:
    found = plan(server, images=0)
    assert found["images"] == [] and found["image_tokens"] == 0 and found["prompt_tokens"] == 64


@pytest.mark.parametrize("usual", [0, 1])
def test_a_body_that_does_not_count_its_images_has_the_models_usual_number(usual: int) -> None:
    assert read_plan({}, FieldReader(strict=False), usual).workload.images == usual


def test_another_model_is_not_planned(server: RunningServer) -> None:
    response = server.post("/v1/plan", {"model": "other"})
    assert response.status_code == 404 and error_of(response)["code"] == "model_not_found"


def test_a_client_with_many_plans_is_told_to_wait(server: RunningServer) -> None:
    async def ask_all() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120, verify=False) as client:
            return await asyncio.gather(*(client.post("/v1/plan", json=ASKED) for _ in range(40)))

    found = asyncio.run(ask_all())
    assert {response.status_code for response in found} == {200, 429}
    late = next(response for response in found if response.status_code == 429)
    assert (
        error_of(late)["code"] == "overloaded" and "wait for their plans" in late.text and late.headers["retry-after"]
    )
    assert plan(server)["gpus"] == 1


def test_the_options_name_every_gpu_and_the_limits(server: RunningServer) -> None:
    found = server.get("/v1/plan/options").json()
    assert found["model"] == MODEL and found["max_images"] == 4 and found["max_sizes"] == 64
    ids = [gpu["id"] for gpu in found["gpus"]]
    assert found["default_gpu"] in ids and {"l4", "h200", "cpu"} <= set(ids)


def test_a_request_is_in_the_measured_hour(server: RunningServer) -> None:
    before = server.get("/v1/plan/measured").json()
    server.chat([photo_part(seed=80), text_part("?")], max_tokens=5, ignore_eos=True)
    found = server.get("/v1/plan/measured").json()
    assert found["requests"] == before["requests"] + 1 and found["max_requests_per_s"] > 0
    assert found["ttft_ms"]["p99"] >= found["ttft_ms"]["p50"] > 0 and found["itl_ms"]["p50"] > 0
    assert found["per_request"]["images"] > 0 and found["per_request"]["output_tokens"] > 0


def test_asking_for_the_hour_again_and_again_does_not_fill_the_log(server: RunningServer) -> None:
    server.get("/v1/plan/measured")
    server.get("/v1/plan/options")
    assert until(lambda: any(" GET /v1/plan/options 200" in line for line in server.log))
    assert not any("/v1/plan/measured 200" in line for line in server.log)
