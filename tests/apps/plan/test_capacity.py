"""Memory of a plan is the engine's own: by the same code, for every card."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from saccade import costs
from saccade.apps.plan.hardware import PRESETS, find_hardware
from saccade.apps.plan.model_cards import card_names, read_card
from saccade.apps.plan.planner import Deployment, make_plan
from saccade.apps.plan.report import as_json, table
from saccade.apps.plan.workload import largest_image
from saccade.errors import ConfigError
from saccade.models import _build
from saccade.models.fp8_weights import FP8, Fp8Weights
from saccade.models.layers.moe import MoE
from saccade.options.engine import MediaPolicy, Options
from saccade.processor.images import Images
from saccade.runner.device_memory import plan_memory
from saccade.runner.memory import Machine, size_memory
from tests.helpers.engine.plans import deployment, planned


@pytest.mark.parametrize("name", card_names())
def test_parts_and_blocks_are_those_that_an_engine_plans(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    checkpoint = read_card(name)
    plan = planned(name, images=0)
    free = find_hardware("h200").free_bytes(0.9) * plan.capacity.gpus
    largest = largest_image(checkpoint, Options())
    engine = plan_memory(Options(device="cuda"), checkpoint.config, largest, free)
    assert plan.capacity.parts == engine.parts
    assert plan.capacity.scheduler == engine.scheduler


def test_requests_fit_in_whole_blocks() -> None:
    plan = planned(output_tokens=1, input_tokens=63)
    assert plan.cost.tokens == 880 + 64
    assert plan.capacity.kv_blocks_per_request == 59
    assert plan.capacity.concurrent == plan.capacity.scheduler.num_blocks // 59


def test_what_an_idle_h200_leaves_an_engine_is_what_one_was_measured_to_have() -> None:
    """docs/experiments/023: 0.6 of it are 83.9 GiB, before what the driver takes."""
    assert find_hardware("h200").free_bytes(0.6) / costs.GIB + 527 / 1024 == pytest.approx(83.9, abs=0.05)


def test_a_model_too_large_for_a_gpu_is_planned_over_several() -> None:
    plan = planned("llama-3.2-90b-vision", "h100", images=0)
    assert plan.capacity.gpus == 3
    weights = costs.weight_bytes(plan.deployment.checkpoint.config, "bfloat16")
    assert plan.capacity.parts.weights == weights > 2 * 80e9
    assert plan.gpus == 3


def test_images_that_are_cross_attended_take_the_encoder_cache_and_one_kv_token() -> None:
    plan = planned("llama-3.2-11b-vision")
    images = Images(plan.deployment.checkpoint, MediaPolicy.of(Options()))
    assert plan.cost.image_tokens == 1
    assert plan.capacity.bound_by == "encoder cache"
    largest = images.largest()
    assert largest and plan.capacity.concurrent == plan.capacity.scheduler.encoder_cache_slots // largest.slots == 8


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}


def quantised(given: Deployment, how: dict[str, object]) -> Deployment:
    """The same with a quantization_config in config.json."""
    config = given.checkpoint.config
    raw = {**config.raw, "quantization_config": how}
    return replace(given, checkpoint=replace(given.checkpoint, config=replace(config, raw=raw)))


@pytest.mark.parametrize("name", ["Qwen/Qwen3-VL-8B", "Qwen/Qwen3-VL-30B-A3B"])
def test_fp8_weights_are_those_that_an_engine_plans(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    given = deployment(name, images=0)
    asked = make_plan(replace(given, options=Options(quantization="fp8")))
    stored = make_plan(quantised(given, BLOCKS))
    largest = largest_image(given.checkpoint, Options())
    options = Options(device="cuda", quantization="fp8")
    engine = plan_memory(options, given.checkpoint.config, largest, find_hardware("h200").free_bytes(0.9))
    assert asked.capacity.parts == stored.capacity.parts == engine.parts
    assert asked.capacity.scheduler == stored.capacity.scheduler == engine.scheduler
    assert as_json(stored, [])["fp8_weights"] and not as_json(make_plan(given), [])["fp8_weights"]
    assert table(stored, []).splitlines()[0].endswith("bfloat16, FP8 weights")


def test_int4_weights_are_those_that_an_engine_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    given = quantised(deployment("Qwen/Qwen3-VL-8B", images=0, gpu="a100-80"), AWQ)
    made, plain = make_plan(given), make_plan(deployment("Qwen/Qwen3-VL-8B", images=0, gpu="a100-80"))
    config = given.checkpoint.config
    largest, free = largest_image(given.checkpoint, Options()), find_hardware("a100-80").free_bytes(0.9)
    engine = plan_memory(Options(device="cuda"), config, largest, free, quantization=given.stored)
    assert made.capacity.parts == engine.parts
    saved = plain.capacity.parts.weights - made.capacity.parts.weights
    assert saved == pytest.approx(costs.active_layer_params(config.text) * (2 - 0.5 - 3 / 128), rel=1e-6)
    scratch = made.capacity.parts.work - plain.capacity.parts.work
    assert scratch == 2 * 2 * 12288 * 4096  # gate and up, unpacked
    assert table(made, []).splitlines()[0].endswith("bfloat16, INT4 weights")
    assert as_json(made, [])["int4_weights"] and not as_json(plain, [])["int4_weights"]


@pytest.mark.parametrize("has_order", [True, False])
def test_int4_experts_are_planned_unless_they_have_an_order(has_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr("saccade.runner.device_memory.reads_int4_experts", lambda *case: True)
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": has_order}
    plain = deployment("Qwen/Qwen3-VL-30B-A3B", images=0)
    given = quantised(plain, gptq)
    config, text = given.checkpoint.config, given.checkpoint.config.text
    made = make_plan(given)
    largest, free = largest_image(given.checkpoint, Options()), find_hardware("h200").free_bytes(0.9)
    assert made.capacity.parts == plan_memory(
        Options(device="cuda"), config, largest, free, quantization=given.stored
    ).parts  # fmt: skip
    saved = make_plan(plain).capacity.parts.weights - made.capacity.parts.weights
    experts = 48 * 128 * 3 * 768 * 2048
    attention = costs.dense_params(text) - 48 * 128 * 2048  # routers are not quantised
    packed = attention if has_order else attention + experts
    assert saved == pytest.approx(packed * (2 - 0.5 - 3 / 128), rel=1e-6)


@pytest.mark.parametrize("in_blocks", [True, False])
@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-VL-2B", "Qwen/Qwen3.5-9B", "meta-llama/Llama-3.2-11B-Vision", "deepseek-ai/deepseek-vl2-tiny"]
)
def test_fp8_weights_are_counted_by_the_rule_that_a_model_is_built_by(name: str, in_blocks: bool) -> None:
    config = read_card(name).config
    model = _build(config, torch.bfloat16, torch.device("meta"), {}, quantized=Fp8Weights(in_blocks))
    weights = [linear.weight for linear in model.params.linears]
    for layer in model.decoder.layers:
        weights += [layer.mlp.gate_up, layer.mlp.down] if isinstance(layer.mlp, MoE) else []
    kept = sum(weight.numel() for weight in weights if weight.dtype == FP8)
    assert costs.fp8_params(config.text, in_blocks=in_blocks) == kept > 0


def test_an_fp8_checkpoint_is_dequantised_where_a_gpu_multiplies_no_fp8() -> None:
    given = deployment(gpu="a100-80")
    assert make_plan(quantised(given, BLOCKS)).capacity == make_plan(given).capacity


def test_what_an_engine_would_not_quantise_has_no_plan() -> None:
    given = deployment(options={"quantization": "fp8"})
    with pytest.raises(ConfigError, match="quantization=fp8 is for checkpoints that are not quantised; this one is"):
        make_plan(quantised(given, AWQ))


def test_fp8_weights_leave_their_bytes_to_the_kv_cache() -> None:
    given = deployment()
    full, fp8 = make_plan(given), make_plan(replace(given, options=Options(quantization="fp8")))
    saved = full.capacity.parts.weights - fp8.capacity.parts.weights
    text = given.checkpoint.config.text
    assert saved == costs.active_layer_params(text)
    inputs = given.options.max_num_batched_tokens * costs.fp8_input_bytes_per_token(text)
    assert fp8.capacity.kv_bytes - full.capacity.kv_bytes == pytest.approx(saved - inputs, abs=16 * 147456)


def test_an_fp8_kv_cache_holds_twice_the_requests() -> None:
    given = deployment()
    plan, fp8 = make_plan(given), make_plan(replace(given, options=Options(kv_cache_dtype="fp8")))
    assert fp8.capacity.concurrent == pytest.approx(2 * plan.capacity.concurrent, abs=1)
    assert fp8.capacity.kv_bytes_per_token * 2 == plan.capacity.kv_bytes_per_token
    assert as_json(fp8, [])["kv_cache_dtype"] == "float8_e4m3fn"


def test_a_gpu_that_does_not_convert_fp8_has_no_plan_with_an_fp8_kv_cache() -> None:
    given = deployment(gpu="a100-80")
    with pytest.raises(ConfigError, match="kv_cache_dtype=fp8 needs a GPU that converts FP8, which A100 80GB"):
        make_plan(replace(given, options=Options(kv_cache_dtype="fp8")))


def test_a_model_that_no_number_of_gpus_holds_is_refused_with_values() -> None:
    given = deployment("Qwen/Qwen3-VL-235B-A22B", "cpu")
    with pytest.raises(ConfigError, match="no room for KV blocks"):
        make_plan(given)


def test_sizes_of_a_machine_follow_from_what_it_has_free() -> None:
    config = read_card("Qwen/Qwen2-VL-2B").config
    machine = Machine("cuda", "bfloat16", 20 * costs.GIB, 0)
    sizes = size_memory(Options(), config, None, machine)
    assert 20 * costs.GIB - costs.kv_bytes_per_block(config.text, "bfloat16") < sizes.parts.total <= 20 * costs.GIB


@pytest.mark.parametrize("name", PRESETS)
def test_every_gpu_has_a_plan_for_a_small_model(name: str) -> None:
    plan = planned("qwen2-vl-2b", name)
    assert plan.capacity.gpus == 1
    assert plan.capacity.parts.total <= PRESETS[name].memory_gib * costs.GIB
    assert plan.rate > 0
