"""Every argument of vLLM is supported, renamed, inert or refused by name: the table is whole and behaves as it says."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from saccade.cli import main as cli
from saccade.errors import RequestError, UsageError
from saccade.options.engine import Options, options
from saccade.options.fields import defaults_of
from saccade.options.server import ServerOptions
from saccade.options.vllm.keywords import checked_call, translated
from saccade.options.vllm.table import CALLS, NEUTRAL, OFFLINE, SHORT, TABLE, Keyword
from saccade.server import serve as serving
from saccade.server.config import Settings, load_settings

ENGINE = defaults_of(Options)
SERVER = {**ENGINE, **defaults_of(ServerOptions)}

# Written down from vLLM 0.26 (EngineArgs, LLM, serve) and its last versions before, by group as there.
VLLM_ENGINE = """
model model_weights tokenizer hf_config_path runner convert task skip_tokenizer_init enable_prompt_embeds tokenizer_mode
trust_remote_code allowed_local_media_path allowed_media_domains served_model_name revision code_revision
hf_token hf_overrides model_class_overrides tokenizer_revision dtype seed max_model_len quantization
quantization_config allow_deprecated_quantization enforce_eager enable_return_routed_experts return_sampling_mask
max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay disable_sliding_window disable_cascade_attn
config_format pooler_config override_pooler_config generation_config override_generation_config enable_sleep_mode
enable_cumem_allocator model_impl logits_processors io_processor_plugin renderer_num_workers rope_scaling rope_theta
max_seq_len_to_capture chat_template
load_format download_dir safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size
model_loader_extra_config ignore_patterns use_tqdm_on_load pt_load_map_location max_parallel_loading_workers
attention_backend attention_config mamba_config mamba_backend mamba_ssu_algorithm
enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds
reasoning_parser_plugin reasoning_config structured_outputs_config guided_decoding_backend
guided_decoding_disable_fallback guided_decoding_disable_any_whitespace guided_decoding_disable_additional_properties
distributed_executor_backend pipeline_parallel_size master_addr master_port nnodes node_rank
distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind numa_bind_nodes numa_bind_cpus device_ids
tensor_parallel_size prefill_context_parallel_size decode_context_parallel_size dcp_comm_backend dcp_q_replicate
dcp_kv_cache_interleave_size cp_kv_cache_interleave_size data_parallel_size data_parallel_rank
data_parallel_start_rank data_parallel_size_local data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb
data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend enable_expert_parallel
enable_ep_weight_filter moe_backend linear_backend all2all_backend enable_elastic_ep enable_dbo ubatch_size
dbo_decode_token_threshold dbo_prefill_token_threshold disable_nccl_for_dp_synchronization eplb_config enable_eplb
expert_placement_strategy ray_workers_use_nsight disable_custom_all_reduce worker_cls worker_extension_cls
enable_fault_tolerance fault_tolerance_config
block_size gpu_memory_utilization kv_cache_memory_bytes kv_cache_dtype num_gpu_blocks_override enable_prefix_caching
prefix_caching_hash_algo prefix_cache_retention_interval kv_cache_dtype_skip_layers kv_sharing_fast_prefill
mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size prefix_match_unit mamba_cache_mode replayssm_buffer_len
use_replayssm kv_offloading_size kv_offloading_backend swap_space calculate_kv_scales
offload_backend cpu_offload_gb cpu_offload_params offload_group_size offload_num_in_group offload_prefetch_step
offload_params
language_model_only limit_mm_per_prompt enable_mm_embeds media_io_kwargs mm_processor_kwargs mm_processor_cache_gb
mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode
mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path
mm_encoder_fp8_scale_save_margin interleave_mm_strings skip_mm_profiling video_pruning_rate video_pruning_method
mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize disable_mm_preprocessor_cache
enable_lora max_loras max_lora_rank lora_dtype enable_tower_connector_lora max_cpu_loras fully_sharded_loras
lora_target_modules default_mm_loras specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras
lora_extra_vocab_size qlora_adapter_name_or_path enable_prompt_adapter
otlp_traces_endpoint reasoning_parser tool_call_parser
show_hidden_metrics_for_version collect_detailed_traces per_request_spec_decode_metrics kv_cache_metrics
kv_cache_metrics_sample cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics
enable_logging_iteration_details jit_monitor_mode jit_monitor_verbose enable_mm_processor_stats
max_num_batched_tokens max_num_scheduled_tokens max_num_seqs long_prefill_token_threshold max_num_partial_prefills
max_long_partial_prefills scheduling_policy enable_chunked_prefill disable_chunked_mm_input scheduler_cls
scheduler_reserve_full_isl watermark prefill_schedule_interval disable_hybrid_kv_cache_manager async_scheduling
stream_interval num_scheduler_steps multi_step_stream_outputs scheduler_delay_factor preemption_mode
use_v2_block_manager disable_async_output_proc
cudagraph_capture_sizes cuda_graph_sizes max_cudagraph_capture_size compilation_config optimization_level
performance_mode kernel_config ir_op_priority enable_flashinfer_autotune enable_bf16x3_router_gemm gdn_prefill_backend
kda_prefill_backend
speculative_config spec_method spec_model spec_tokens speculative_model num_speculative_tokens diffusion_config
kv_transfer_config kv_events_config ec_transfer_config ec_manager_config additional_config profiler_config
weight_transfer_config disable_log_stats aggregate_engine_logging fail_on_environ_validation enable_log_requests
disable_log_requests tokens_only device logits_processor_pattern
"""
VLLM_SERVER = """
host port uds disable_uvicorn_access_log disable_access_log_for_endpoints allow_credentials allowed_origins
allowed_methods allowed_headers api_key ssl_keyfile ssl_certfile ssl_ca_certs root_path
enable_ssl_refresh ssl_cert_reqs ssl_ciphers middleware
enable_request_id_headers disable_fastapi_docs h11_max_incomplete_event_size h11_max_header_count enable_offline_docs
enable_flash_late_interaction data_parallel_supervisor_port dp_supervisor_probe_interval_s
dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold
lora_modules prompt_adapters chat_template_content_format trust_request_chat_template default_chat_template_kwargs
response_role return_tokens_as_token_ids enable_auto_tool_choice exclude_tools_when_tool_choice_none
tool_parser_plugin tool_server log_config_file max_log_len enable_prompt_tokens_details enable_per_request_metrics
enable_server_load_tracking enable_force_include_usage enable_tokenizer_info_endpoint enable_log_outputs
enable_log_deltas cohere_is_reasoning_model cohere_format log_error_stack fingerprint_mode fingerprint_value
enable_reasoning uvicorn_log_level disable_frontend_multiprocessing headless api_server_count config grpc
shutdown_timeout
"""
VLLM_CALLS = """
sampling_params use_tqdm lora_request priority tokenization_kwargs mm_processor_kwargs prompt_token_ids
prompt_adapter_request guided_options_request chat_template chat_template_content_format add_generation_prompt
continue_final_message tools chat_template_kwargs
"""


def rows(*fates: str) -> list[Keyword]:
    return [row for row in TABLE.values() if row.fate in fates]


def name_of(row: Keyword) -> str:
    return row.name


# --- the table ----------------------------------------------------------------------------------------------------


def test_every_argument_of_vllm_has_a_row() -> None:
    listed = {*VLLM_ENGINE.split(), *VLLM_SERVER.split()}
    assert listed - set(TABLE) == set()
    assert set(TABLE) - listed == set()
    assert set(VLLM_CALLS.split()) == set(CALLS)


def test_supported_ones_are_options_of_ours_and_no_other_is() -> None:
    assert {row.name for row in rows("supported")} - set(SERVER) == {"config"}
    assert {row.name for row in rows("renamed", "inert", "refused")} & set(SERVER) == set()


def test_the_lists_beside_the_table_name_its_rows() -> None:
    assert {*NEUTRAL, *OFFLINE, *SHORT.values()} <= set(TABLE)


def test_what_is_refused_says_why_and_what_to_do() -> None:
    for row in [*rows("refused"), *CALLS.values()]:
        if row.fate == "refused":
            assert row.what[0].islower() or row.what[0].isdigit() or row.what.startswith("HF")
            assert not row.what.endswith("."), row.name


@pytest.mark.parametrize("row", rows("inert"), ids=name_of)
def test_an_inert_argument_is_one_log_line(row: Keyword, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert translated({row.name: "asked"}, SERVER, is_server=True) == {}
    assert len(caplog.messages) == 1
    assert caplog.messages[0] == f"{row.name}='asked' changes nothing here: {row.what}"


def test_a_refused_argument_is_named_unless_it_asks_for_nothing() -> None:
    for row in rows("refused"):
        with pytest.raises(UsageError, match=f"^{row.name}='asked' is not supported: "):
            translated({row.name: "asked"}, SERVER, is_server=True)
        for value in (None, False, [], *NEUTRAL.get(row.name, ())):
            assert translated({row.name: value}, SERVER, is_server=True) == {}, row.name


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"mm_processor_kwargs": {"max_pixels": 9, "fps": 1.0}}, {"max_pixels": 9, "video_fps": 1.0}),
        ({"mm_processor_kwargs": {"max_pixels": 9}, "max_pixels": 4}, {"max_pixels": 4}),
        ({"mm_processor_kwargs": None}, {}),
        ({"media_io_kwargs": {"video": {"num_frames": 8}, "image": {}}}, {"max_video_frames": 8}),
        ({"media_io_kwargs": {"video": {"num_frames": -1}}}, {}),
        ({"video_pruning_rate": 0.5}, {"video_pruning": 0.5}),
        ({"language_model_only": True}, {"limit_mm_per_prompt": {"image": 0, "video": 0}}),
        ({"language_model_only": False}, {}),
        ({"kv_cache_memory_bytes": 1 << 31}, {"kv_cache_gb": 2.0}),
        ({"profiler_config": {"profiler": "torch", "torch_profiler_dir": "d"}}, {"profile_dir": "d"}),
        ({"kv_offloading_size": 4}, {"kv_offload_gb": 4.0}),
        ({"data_parallel_size": 2}, {"replicas": 2}),
        ({"shutdown_timeout": 5}, {"drain_timeout": 5.0}),
        ({"disable_uvicorn_access_log": True}, {"enable_access_log": False}),
    ],
)  # fmt: skip
def test_a_renamed_argument_becomes_our_option(given: dict[str, Any], ours: dict[str, Any]) -> None:
    assert translated(given, SERVER, is_server=True) == ours


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"dtype": "float"}, {"dtype": "float32"}),
        ({"dtype": "torch.bfloat16"}, {"dtype": "bfloat16"}),
        ({"model": Path("folder")}, {"model": "folder"}),
        ({"max_model_len": -1}, {"max_model_len": None}),
        ({"max_model_len": "auto"}, {"max_model_len": None}),
        ({"max_num_batched_tokens": None, "block_size": None, "enable_prefix_caching": None}, {}),
        ({"limit_mm_per_prompt": {"image": {"count": 2, "width": 64}}}, {"limit_mm_per_prompt": {"image": 2}}),
        ({"limit_mm_per_prompt": {"image": 2, "audio": 0}}, {"limit_mm_per_prompt": {"image": 2}}),
        ({"generation_config": "vllm"}, {"generation_config": "none"}),
        ({"attention_backend": "FLASHINFER"}, {"attention_backend": "flashinfer"}),
        ({"attention_backend": "TRITON_ATTN"}, {"attention_backend": "triton"}),
    ],
)  # fmt: skip
def test_values_may_be_spelled_as_in_vllm(given: dict[str, Any], ours: dict[str, Any]) -> None:
    assert translated(given, SERVER, is_server=True) == ours


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mm_processor_kwargs": {"num_crops": 4}}, "mm_processor_kwargs takes min_pixels.* not num_crops"),
        ({"mm_processor_kwargs": 3}, "mm_processor_kwargs must be an object of names and values, not 3"),
        ({"media_io_kwargs": {"audio": {"x": 1}}}, "fps and num_frames under video, not audio"),
        ({"kv_cache_memory_bytes": "lots"}, "must be a number of bytes, not 'lots'"),
        ({"max_modle_len": 3}, "do you mean max_model_len"),
        ({"enforce_eagr": True}, "do you mean enforce_eager"),
        ({"qqq": 1}, "unknown argument qqq; docs"),
        ({"api_server_count": 2}, "api_server_count is an argument of saccade serve, not of LLM"),
        ({"data_parallel_size": 2}, "data_parallel_size is an argument of saccade serve"),
        ({"tensor_parallel_size": 2}, "a model runs on one GPU; for more requests use saccade serve --replicas"),
    ],
)  # fmt: skip
def test_what_llm_cannot_take_is_one_short_sentence(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        options(**given)
    assert len(str(caught.value)) < 200


def test_llm_takes_what_vllm_scripts_pass(caplog: pytest.LogCaptureFixture) -> None:
    made = options(
        model="folder",
        trust_remote_code=True,
        tensor_parallel_size=1,
        enforce_eager=True,
        dtype="half",
        quantization=None,
        swap_space=4,
        max_num_batched_tokens=None,
        served_model_name="name",
        disable_log_stats=True,
    )
    assert made == Options(model="folder", dtype="float16")
    assert len(caplog.messages) == 5


@pytest.mark.parametrize("row", CALLS.values(), ids=name_of)
def test_a_call_knows_every_argument_of_vllms(row: Keyword, caplog: pytest.LogCaptureFixture) -> None:
    known = [name for name, other in CALLS.items() if other.fate == "supported"]
    if row.fate == "refused":
        with pytest.raises(RequestError, match=f"^{row.name}='asked' is not supported: ") as caught:
            checked_call({row.name: "asked"}, known)
        assert caught.value.param == row.name
    else:
        assert checked_call({row.name: "asked"}, known) == ({row.name: "asked"} if row.fate == "supported" else {})
        assert len(caplog.messages) == (row.fate == "inert")
    assert row.name in known or checked_call({row.name: None}, known) == {}


# --- the command line ---------------------------------------------------------------------------------------------


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """What `saccade serve` would have started with."""
    found: list[Settings] = []
    monkeypatch.setattr(serving, "serve", lambda settings: found.append(settings) or 0)
    return found


@pytest.mark.parametrize(
    ("line", "engine", "server"),
    [
        ("--model folder", {"model": "folder"}, {}),
        ("folder --model folder", {"model": "folder"}, {}),
        ("folder --served-model-name a b", {"model": "folder"}, {"served_model_name": ("a", "b")}),
        ("--api-key k org/model", {"model": "org/model"}, {"api_key": ("k",)}),
        ("folder --allowed-media-domains a.b c.d", {"model": "folder"}, {"allowed_media_domains": ("a.b", "c.d")}),
        ('--allowed-origins ["*"]', {}, {"allowed_origins": ("*",)}),
        ('--limit-mm-per-prompt {"image":2}', {"limit_mm_per_prompt": {"image": 2}}, {}),
        ("--limit-mm-per-prompt.image 2", {"limit_mm_per_prompt": {"image": 2}}, {}),
        ('--mm-processor-kwargs {"max_pixels":9}', {"max_pixels": 9}, {}),
        ("--mm_processor_kwargs.max_pixels=9", {"max_pixels": 9}, {}),
        ("--dtype half --max_model_len 32k", {"dtype": "float16", "max_model_len": 32000}, {}),
        ("--max-model-len auto", {}, {}),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}, {}),
        ("--enable-prefix-caching", {"enable_prefix_caching": True}, {}),
        ("--no-prefix-caching --no-enable-access-log", {"enable_prefix_caching": False}, {"enable_access_log": False}),
        ("--disable-log-requests -tp 1 --trust-remote-code -O3", {}, {}),
        ("-dp 2 --disable-uvicorn-access-log", {}, {"replicas": 2, "enable_access_log": False}),
        ("--cudagraph-capture-sizes 1 2 4 --no-enable-lora --port 1", {}, {"port": 1}),
        ("--compilation-config.mode 3", {}, {}),
    ],
)  # fmt: skip
def test_serve_takes_vllms_flags(
    line: str, engine: dict[str, Any], server: dict[str, Any], served: list[Settings]
) -> None:
    assert cli.main(["serve", *line.split()]) == 0
    assert served == [Settings(Options(**engine), ServerOptions(**server))]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a --model b", "MODEL is a and --model is b; give one of them"),
        ("--quantization-config x", "quantization_config='x' is not supported: a checkpoint's own config"),
        ("-tp 2", "tensor_parallel_size=2 is not supported: a model runs on one GPU"),
        ("--enable-lora", "enable_lora=True is not supported: adapters"),
        ("--uds /tmp/x", "uds='/tmp/x' is not supported: the server does not do it; use a proxy before it"),
    ],
)
def test_serve_refuses_a_flag_by_name_in_one_line(
    line: str, message: str, served: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", *line.split()]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and not served


def test_help_shows_our_flags_only(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    shown = capsys.readouterr().out
    assert "--no-prefix-caching" in shown and "--served-model-name" in shown
    assert "--tensor-parallel-size" not in shown and "--enable-prefix-caching" not in shown


def test_a_config_file_may_have_vllms_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("model: folder\nmm-processor-kwargs: {max_pixels: 9}\ntrust-remote-code: true\ndtype: half\n")
    made = load_settings({}, {}, str(file)).engine
    assert made == Options(model="folder", max_pixels=9, dtype="float16")
    assert load_settings({"mm_processor_kwargs": {"max_pixels": 4}}, {}, str(file)).engine.max_pixels == 4
    file.write_text("tensor-parallel-size: 2\n")
    with pytest.raises(UsageError, match="tensor_parallel_size=2 is not supported"):
        load_settings({}, {}, str(file))
