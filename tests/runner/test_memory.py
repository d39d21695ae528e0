from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade import costs
from saccade.apps.plan.model_cards import read_card
from saccade.checkpoint.config import ModelConfig, model_config
from saccade.errors import ConfigError, UsageError
from saccade.models import is_native, load_model
from saccade.models.layers.decoder import Decoder
from saccade.options.engine import Options
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.runner import device_memory
from saccade.runner.device_memory import GpuMemory, MemoryPlan, _free_bytes, dtype_of, plan_memory
from saccade.runner.embedding_cache import EmbeddingSlab
from saccade.runner.encoder.encoder_runner import LocalEncoder
from saccade.runner.memory import Encoders
from saccade.types.media import Geometry, Grid, Size
from tests.helpers.fakes.fake_tower import FakeTower, picture
from tests.helpers.families.bridged import transformers_layers
from tests.helpers.families.published import PUBLISHED

GIB = costs.GIB
IMAGE = Geometry(Size(1288, 952), Grid(1, 68, 92), 1564, 1564)


def small() -> ModelConfig:
    return model_config({**PUBLISHED, "num_hidden_layers": 4, "torch_dtype": "float32"})


def plan(largest: Geometry | None = IMAGE, free: int = 16 * GIB, **given: Any) -> MemoryPlan:
    return plan_memory(Options(**{"device": "cpu", **given}), small(), largest, free)


def test_the_context_is_the_models_own_when_the_kv_cache_holds_it() -> None:
    assert plan().scheduler.max_model_len == 32768


def test_the_context_shrinks_to_the_kv_cache_and_says_so() -> None:
    made = plan(kv_cache_gb=0.01)
    assert made.scheduler.max_model_len == made.scheduler.num_blocks * 16 < 32768
    assert any("all the KV cache holds" in reason for reason in made.reasons)


def test_a_context_longer_than_the_kv_cache_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=9000 needs 563 KV blocks but only \d+ fit"):
        plan(kv_cache_gb=0.01, max_model_len=9000)


def test_a_context_beyond_the_models_own_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=40000 is beyond the 32768"):
        plan(max_model_len=40000)


def test_kv_blocks_fill_the_asked_size() -> None:
    made = plan(kv_cache_gb=1.0)
    per_block = costs.kv_bytes_per_block(small().text, "float32")
    assert made.scheduler.num_blocks == GIB // per_block


def test_a_kv_cache_beyond_the_free_memory_is_refused_since_a_cpu_takes_it_only_as_it_is_used() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_gb=20 does not fit: 1\d\.\d\d GiB of memory are free"):
        plan(kv_cache_gb=20)


def test_budget_and_cache_hold_the_largest_image_by_themselves() -> None:
    huge = Geometry(Size(3584, 3584), Grid(1, 256, 256), 16384, 16384)
    made = plan(huge, encoder_cache_gb=None)
    assert made.scheduler.encoder_budget >= 16384
    assert made.scheduler.encoder_cache_slots >= 16384


def test_the_caches_of_a_cpu_fit_the_memory_that_is_free() -> None:
    made = plan(free=3 * GIB, dtype="bfloat16")
    taken = made.scheduler.encoder_cache_slots * costs.embedding_bytes_per_slot(small().text, "bfloat16")
    assert 0.44 * GIB < taken <= 0.45 * GIB
    assert any("0.45 GiB: 15% of the free memory" in reason for reason in made.reasons)


def test_a_budget_below_the_largest_image_stops_the_start_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"encoder_budget=100 .*1564"):
        plan(encoder_budget=100)


def test_a_cache_below_the_largest_image_stops_the_start_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"encoder_cache_gb=0.001 holds \d+ embeddings .*1564"):
        plan(encoder_cache_gb=0.001)


def test_a_cache_of_zero_keeps_no_idle_embedding_but_can_work_on_a_full_budget() -> None:
    made = plan(encoder_cache_gb=0.0)
    assert not made.scheduler.keep_idle_embeddings
    assert made.scheduler.encoder_cache_slots == made.scheduler.encoder_budget


def test_no_memory_for_a_single_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="no room for KV blocks"):
        plan(free=0)


def test_float32_checkpoints_stay_float32() -> None:
    assert plan().dtype == torch.float32


def test_a_checkpoint_in_a_type_that_no_device_computes_in_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"not 'float8_e4m3fn'; config.json says so .*choose with --dtype"):
        dtype_of("auto", "float8_e4m3fn", torch.device("cuda"))


def test_an_unknown_device_or_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="tpu9"):
        plan(device="tpu9")
    with pytest.raises(ConfigError, match="int3"):
        plan(dtype="int3")


# --- a device -----------------------------------------------------------------------------------------------------


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning asks nothing of a device but whether there is one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.usefixtures("on_cuda")
def test_the_parts_of_a_device_fill_what_it_may_take_and_no_more() -> None:
    made = plan(device="cuda", free=24 * GIB, dtype="bfloat16")
    assert made.parts.total <= 24 * GIB
    assert made.parts.total > 24 * GIB - costs.kv_bytes_per_block(small().text, "bfloat16")


@pytest.mark.usefixtures("on_cuda")
def test_every_part_of_a_device_is_planned_and_said() -> None:
    made = plan(device="cuda", free=24 * GIB)
    assert [field.name for field in fields(made.parts) if not getattr(made.parts, field.name)] in (
        ["states", "staging", "jpegs"],
        ["staging", "jpegs"],
    )
    assert any("GiB of the device in all: weights" in reason for reason in made.reasons)


@pytest.mark.usefixtures("on_cuda")
def test_jpegs_decoded_on_a_gpu_have_memory_planned_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[None] = []
    monkeypatch.setattr(device_memory, "load_library", lambda: loaded.append(None))
    without, made = (plan(device="cuda", free=24 * GIB, gpu_jpeg=asked) for asked in (False, True))
    assert len(loaded) == 1 and without.parts.jpegs == 0
    assert made.parts.jpegs == costs.gpu_jpeg_bytes() == 6 * 50_000_000
    assert 24 * GIB - costs.kv_bytes_per_block(small().text, "float32") < made.parts.total <= 24 * GIB
    assert made.parts.images == without.parts.images
    with pytest.raises(ConfigError, match=r"gpu_jpeg needs an NVIDIA GPU, and the engine runs on cpu"):
        plan(gpu_jpeg=True)


@pytest.mark.usefixtures("on_cuda")
def test_a_kv_cache_that_does_not_fit_beside_the_rest_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_gb=23 does not fit: .* leaves \d+\.\d+ GiB"):
        plan(device="cuda", free=24 * GIB, kv_cache_gb=23)


@pytest.mark.usefixtures("on_cuda")
def test_work_on_images_grows_with_the_budget() -> None:
    vision = small().vision
    assert vision is not None
    one, two = (plan(device="cuda", free=64 * GIB, encoder_budget=budget).parts for budget in (2000, 4000))
    per_patch = costs.encode_bytes_per_patch(vision, small().text, "float32")
    assert two.work - one.work == 2000 * 4 * per_patch
    assert two.images - one.images == 3 * 2000 * 4 * costs.prepared_bytes_per_patch(vision, "float32")


@pytest.mark.usefixtures("on_cuda")
def test_graphs_around_transformers_layers_are_planned_for_their_larger_activations() -> None:
    config = model_config({**PUBLISHED, "num_hidden_layers": 4})
    plain = replace(config, model_type="unknown", vision=None)
    fused, other = (
        plan_memory(Options(device="cuda"), made, None, 24 * GIB).parts
        for made in (replace(config, vision=None), plain)
    )
    assert other.graphs > fused.graphs > 0


@pytest.mark.usefixtures("on_cuda")
def test_graphs_of_short_steps_take_what_the_largest_pass_for_prompts_and_answers_does() -> None:
    """Beside 8 answers: steps of 96 tokens have a pass of 128 rows, those of 128 one of 256."""
    less, more = (
        plan(device="cuda", max_num_batched_tokens=maximum, max_num_seqs=8).parts.graphs for maximum in (96, 128)
    )
    assert more - less == 128 * costs.fused_prompt_bytes_per_token(small().text, "float32")


def test_it_is_known_before_a_model_is_built_whether_its_layers_are_ours(family_folder: Path) -> None:
    opened = open_checkpoint(str(family_folder))
    with transformers_layers():  # a bridged model's may become ours, but not as the checkpoint stores them
        made = load_model(
            family_folder, opened.config, dtype=torch.float32, device=torch.device("cpu"),
            load_format="dummy", image_processor=opened.image_processor,
        )  # fmt: skip
    assert is_native(opened.config) == isinstance(made.decoder, Decoder)


def test_a_host_plans_weights_kv_and_embeddings_alone() -> None:
    parts = plan().parts
    assert parts.total == parts.weights + parts.kv + parts.embeddings


# --- resident embeddings ------------------------------------------------------------------------------------------


@pytest.fixture
def slab() -> EmbeddingSlab:
    return EmbeddingSlab(8, 2, torch.float32, torch.device("cpu"))


def rows(value: float, count: int) -> torch.Tensor:
    return torch.full((count, 2), float(value))


def test_what_was_kept_is_read_again_after_others_came_and_went(slab: EmbeddingSlab) -> None:
    slab.update({b"a": rows(1, 3), b"b": rows(2, 2), b"c": rows(3, 3)})
    del slab[b"a"], slab[b"c"]
    slab[b"d"] = torch.arange(12.0).view(6, 2)  # in the gaps that a and c left
    assert torch.equal(slab[b"d"], torch.arange(12.0).view(6, 2))
    assert torch.equal(slab[b"b"], rows(2, 2))
    assert set(slab) == {b"b", b"d"}


def test_a_key_that_comes_again_takes_no_second_place(slab: EmbeddingSlab) -> None:
    for value in range(5):
        slab[b"a"] = rows(value, 6)
    assert torch.equal(slab[b"a"], rows(4, 6))
    assert not slab._outside


def test_what_does_not_fit_is_kept_outside(slab: EmbeddingSlab) -> None:
    slab[b"a"] = rows(1, 6)
    slab[b"b"] = rows(2, 4)
    assert torch.equal(slab[b"b"], rows(2, 4)) and len(slab) == 2
    del slab[b"b"], slab[b"a"]
    slab[b"c"] = rows(3, 8)
    assert not slab._outside


def test_a_rehearsal_leaves_the_slab_as_it_was(slab: EmbeddingSlab) -> None:
    slab[b"a"] = rows(1, 3)
    slab.warm_up()
    slab[b"b"] = rows(2, 5)
    assert set(slab) == {b"a", b"b"} and not slab._outside
    assert torch.equal(slab[b"a"], rows(1, 3)) and torch.equal(slab[b"b"], rows(2, 5))


def test_rows_of_a_slab_may_be_states_of_several_slots() -> None:
    slab = EmbeddingSlab(12, 2, torch.float32, torch.device("cpu"), slots_per_row=3)
    first, second = torch.arange(12.0).view(6, 2), torch.arange(12.0, 24.0).view(6, 2)
    slab.update({b"a": first, b"b": second})
    assert torch.equal(slab[b"a"], first) and torch.equal(slab[b"b"], second)
    assert torch.equal(slab.memory[slab.rows(b"b")], second.view(2, 6))


def test_what_was_kept_outside_moves_in_when_its_rows_are_asked_for(slab: EmbeddingSlab) -> None:
    slab[b"a"] = rows(1, 6)
    slab[b"b"] = rows(2, 4)
    with pytest.raises(AssertionError, match="room"):
        slab.rows(b"b")
    del slab[b"a"]
    assert torch.equal(slab.memory[slab.rows(b"b")], rows(2, 4)) and not slab._outside


# --- faults while encoding ----------------------------------------------------------------------------------------


def breaking(tower: FakeTower, patches: int, error: Exception) -> LocalEncoder:
    """A stage whose tower fails on pictures of so many patches."""
    encode = tower.encode

    def broken(packed: torch.Tensor, grids: Sequence[Grid]) -> Iterator[None]:
        if patches in [grid.patches for grid in grids]:
            raise error
        return (yield from encode(packed, grids))

    tower.encode = broken  # type: ignore[method-assign, assignment]
    return LocalEncoder(tower, 1000, 2)  # type: ignore[arg-type]


def test_a_image_without_room_ends_alone_with_its_size_in_the_error() -> None:
    encoder = breaking(FakeTower(), 64, torch.OutOfMemoryError("no room"))
    encoder.submit([picture("a"), picture("huge", 8), picture("b")])
    encoder.advance(None)
    done = encoder.poll()
    assert set(done.embeddings) == {b"a", b"b"}
    assert "8x8 pixels" in str(done.errors[b"huge"]) and "OutOfMemoryError" in str(done.errors[b"huge"])


@pytest.mark.parametrize(
    "error", [torch.AcceleratorError("illegal access"), RuntimeError("CUDA error: launch failure")]
)
def test_a_dead_device_is_not_blamed_on_a_image(error: Exception) -> None:
    encoder = breaking(FakeTower(), 16, error)
    encoder.submit([picture("a")])
    with pytest.raises(RuntimeError, match=str(error)):
        encoder.advance(None)
    assert not encoder.poll().errors


def test_a_device_that_dies_while_a_image_is_prepared_fails_the_step() -> None:
    tower = FakeTower()

    def dead(image: Any, geometry: Geometry) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    tower.prepare = dead  # type: ignore[method-assign]
    encoder = LocalEncoder(tower, 1000, 2)  # type: ignore[arg-type]
    encoder.submit([picture("a")])
    with pytest.raises(RuntimeError, match="illegal memory access"):
        encoder.advance(None)
    assert not encoder.poll().errors


@pytest.mark.usefixtures("on_cuda")
def test_host_blocks_fill_the_asked_size_and_staging_is_counted_on_the_device() -> None:
    made = plan(device="cuda", free=24 * GIB, kv_offload_gb=0.5, dtype="float32")
    per_block = costs.kv_bytes_per_block(small().text, "float32")
    assert made.scheduler.host_blocks == GIB // 2 // per_block
    assert made.parts.staging == 6 * ((32 << 20) // per_block) * per_block
    assert any(f"KV offload {made.scheduler.host_blocks} blocks" in reason for reason in made.reasons)
    assert plan(device="cuda", free=24 * GIB).parts.staging == 0


def test_more_host_memory_than_is_free_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"kv_offload_gb=40 does not fit: \d+\.\d+ GiB of host memory are free"):
        plan(kv_offload_gb=40)


def test_host_memory_for_less_than_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_offload_gb=1e-06 holds no KV block of \d+ bytes"):
        plan(kv_offload_gb=1e-6)


def test_engines_that_share_a_cpu_divide_its_memory() -> None:
    parts = [plan_memory(Options(device="cpu", max_num_seqs=64), small(), IMAGE, 24 * GIB, count) for count in (1, 2)]
    blocks = [part.scheduler.num_blocks for part in parts]
    slots = [part.scheduler.encoder_cache_slots for part in parts]
    assert blocks[1] == blocks[0] // 2 and slots[1] == slots[0] // 2
    assert any("at most 2 GiB on a CPU" in reason for reason in parts[1].reasons)
    asked = [
        plan_memory(Options(device="cpu", kv_cache_gb=0.5, encoder_cache_gb=0.1), small(), IMAGE, 24 * GIB, count)
        for count in (1, 2)
    ]
    assert asked[0].scheduler == asked[1].scheduler  # of each engine


@pytest.mark.parametrize("taken", [0, 20])
def test_an_engine_leaves_encoder_workers_on_its_gpu_their_memory(monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    """Whether they have taken it already or not."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 - taken, 100))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    options = Options(gpu_memory_utilization=0.9)
    assert _free_bytes(torch.device("cuda"), options, Encoders(1, 20)) == 70
    assert _free_bytes(torch.device("cuda"), options, Encoders()) == 90 - taken


@pytest.mark.parametrize(("is_native", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_a_cpu_that_only_emulates_bfloat16_computes_in_float32(
    is_native: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "multiplies_bfloat16", lambda: is_native)
    dtype, reason = device_memory.dtype_of("auto", "bfloat16", torch.device("cpu"))
    assert dtype == expected and ("natively" in reason) == is_native
    assert device_memory.dtype_of("bfloat16", "bfloat16", torch.device("cpu"))[0] == "bfloat16", "as asked"


def test_how_full_a_gpu_is_is_asked_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(device_memory.time, "monotonic", lambda: 17.0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: asked.append(device) or (3, 8))
    gpu = GpuMemory(torch.device("cuda:1"))
    assert gpu.stats() == gpu.stats() == {"used": 5, "total": 8}
    assert asked == [torch.device("cuda:1")]
    assert GpuMemory(torch.device("cpu")).stats() == {}


def test_an_fp8_kv_cache_holds_four_times_the_tokens_of_float32_and_says_so() -> None:
    plain, fp8 = plan(kv_cache_gb=1.0), plan(kv_cache_gb=1.0, kv_cache_dtype="fp8_e4m3")
    assert fp8.scheduler.num_blocks == 4 * plain.scheduler.num_blocks
    assert (fp8.dtype, fp8.kv_dtype) == (torch.float32, torch.float8_e4m3fn)
    assert any("1.00 GiB in FP8: as asked" in reason for reason in fp8.reasons)
    offload = plan(kv_offload_gb=1.0, kv_cache_dtype="fp8")
    assert offload.scheduler.host_blocks == 4 * plain.scheduler.num_blocks


def test_a_kv_cache_in_another_half_precision_than_the_models_is_refused() -> None:
    assert plan(dtype="bfloat16", kv_cache_dtype="bfloat16").kv_dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="kv_cache_dtype=float16 cannot be used: the model computes in float32"):
        plan(kv_cache_dtype="float16")


def test_latent_vectors_are_not_stored_in_fp8() -> None:
    model = read_card("deepseek-ai/deepseek-vl2-small").config
    with pytest.raises(ConfigError, match="kv_cache_dtype=fp8 cannot be used with deepseek_vl_v2: it caches"):
        plan_memory(Options(device="cpu", kv_cache_dtype="fp8"), model, None, 16 * GIB)


def test_gpus_that_convert_no_fp8_are_refused_by_their_capability() -> None:
    device_memory._check_fp8("fp8", (8, 9))
    with pytest.raises(ConfigError, match=r"kv_cache_dtype=fp8 needs a GPU .* and this one has 8\.0"):
        device_memory._check_fp8("fp8", (8, 0))


def test_unknown_kv_dtypes_are_refused_with_those_that_are_known() -> None:
    with pytest.raises(UsageError, match="kv_cache_dtype must be auto, bfloat16, float16, fp8 or fp8_e4m3"):
        Options(kv_cache_dtype="fp8_e5m2")
