"""vLLM's arguments of `LLM(...)`, `serve`, `generate` and `chat`, and what becomes of each here. Data only.

In the lists of names `enable_lora!` is a switch, and `lora_modules+` a flag with several values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

Fate = Literal["supported", "renamed", "inert", "refused"]
Scope = Literal["engine", "server", "call"]
"""Of `LLM(...)` and `serve`; of `serve` alone; of `generate` and `chat`."""


class Keyword(NamedTuple):
    name: str  # the flag has dashes instead
    scope: Scope
    fate: Fate
    what: str  # renamed: our name; inert: why; refused: why, and what to use instead
    is_switch: bool = False
    takes_several: bool = False


def _rows(scope: Scope, groups: Iterable[tuple[Fate, str, str]]) -> Iterable[Keyword]:
    for fate, what, names in groups:
        for name in names.split():
            yield Keyword(name.rstrip("!+"), scope, fate, what, name.endswith("!"), name.endswith("+"))


_ONE_MODEL = "a model runs on one GPU"
_REPLICAS = f"{_ONE_MODEL}; for more requests use saccade serve --replicas"
_LORA = "adapters are not supported; merge the adapter into the checkpoint's weights"
_SPECULATIVE = "speculative decoding is not supported; leave it out"
_POOLING = "the last token is pooled, and embeddings have length 1; leave it out"
_EXPERTS = f"{_ONE_MODEL}, with all its experts; leave it out"
_CODE = "no code from outside the package is loaded; leave it out"
_QUANTIZED = "a checkpoint's own config.json says how it is quantised; use one that is, or leave it out"
_OFFLOAD = "weights stay on the device; --kv-offload-gb moves KV blocks to host memory"
_STATE = "recurrent states have one form, chosen for the model"
_MEASURED = "chosen for the GPU at start; the log says how"
_LOADING = "weights are read from safetensors files, memory-mapped"
_METRICS = "/metrics has what is counted (docs/metrics.md)"
_NOT_LOGGED = "the text of requests and outputs is never logged"
_PROXY = "the server does not do it; use a proxy before it"

_ENGINE: tuple[tuple[Fate, str, str], ...] = (
    (
        "supported",
        "the same",
        "model dtype seed max_model_len max_num_batched_tokens max_num_seqs block_size "
        "gpu_memory_utilization enable_prefix_caching! limit_mm_per_prompt load_format generation_config "
        "override_generation_config attention_backend kv_cache_dtype device revision "
        "download_dir tokenizer tokenizer_revision hf_overrides chat_template task "
        "disable_chunked_mm_input! quantization",
    ),
    ("renamed", "min_pixels, max_pixels, video_fps ...", "mm_processor_kwargs"),
    ("renamed", "video_fps and max_video_frames", "media_io_kwargs"),
    ("renamed", "video_pruning", "video_pruning_rate"),
    ("renamed", "limit_mm_per_prompt with 0 for each kind", "language_model_only!"),
    ("renamed", "kv_cache_gb", "kv_cache_memory_bytes"),
    ("renamed", "profile_dir", "profiler_config"),
    ("inert", "an engine can always sleep", "enable_sleep_mode!"),
    ("renamed", "kv_offload_gb", "kv_offloading_size"),
    ("inert", "a preempted request is computed again; --kv-offload-gb keeps its blocks", "swap_space"),
    ("inert", "no code of a checkpoint is ever run", "trust_remote_code! code_revision"),
    ("inert", "prefill is always chunked, by what the device was measured to do", "enable_chunked_prefill! "
     "long_prefill_token_threshold max_num_partial_prefills max_long_partial_prefills "
     "max_num_scheduled_tokens prefill_schedule_interval num_scheduler_steps multi_step_stream_outputs! "
     "scheduler_delay_factor"),
    ("inert", "steps overlap by themselves beside a GPU", "async_scheduling! disable_async_output_proc!"),
    ("inert", "requests run in order of arrival, and by `priority` where they set it", "scheduling_policy"),
    ("inert", "admission reserves what a request needs to finish alone", "scheduler_reserve_full_isl! "
     "watermark preemption_mode"),
    ("inert", _MEASURED, "enforce_eager! compilation_config cudagraph_capture_sizes+ cuda_graph_sizes+ "
     "max_cudagraph_capture_size max_seq_len_to_capture optimization_level performance_mode kernel_config "
     "ir_op_priority enable_flashinfer_autotune! enable_bf16x3_router_gemm! moe_backend linear_backend "
     "attention_config mm_encoder_attn_backend mm_encoder_attn_dtype gdn_prefill_backend kda_prefill_backend "
     "disable_cascade_attn! use_v2_block_manager! enable_cumem_allocator! use_fp64_gumbel!"),
    ("inert", _LOADING, "safetensors_load_strategy safetensors_prefetch_num_threads "
     "safetensors_prefetch_block_size model_loader_extra_config ignore_patterns+ use_tqdm_on_load! "
     "pt_load_map_location max_parallel_loading_workers"),
    ("inert", "the files of the checkpoint tell", "config_format model_impl"),
    ("renamed", "task", "runner convert"),
    ("inert", "an image is hashed and cached by its bytes (--encoder-cache-gb)", "mm_processor_cache_gb "
     "mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_tensor_ipc "
     "mm_ipc_gpu_memory_gb mm_processor_device mm_device_do_normalize! disable_mm_preprocessor_cache! "
     "renderer_num_workers interleave_mm_strings! skip_mm_profiling! mm_encoder_tp_mode "
     "ec_manager_config"),
    ("inert", "blocks are found by SHA-256 and go by least recent use", "prefix_caching_hash_algo "
     "prefix_cache_retention_interval prefix_match_unit"),
    ("inert", _STATE, "mamba_config mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size "
     "mamba_cache_mode mamba_backend mamba_ssu_algorithm enable_mamba_cache_stochastic_rounding! "
     "mamba_cache_philox_rounds replayssm_buffer_len use_replayssm! disable_hybrid_kv_cache_manager! "
     "kv_sharing_fast_prefill!"),
    ("inert", _METRICS, "disable_log_stats! aggregate_engine_logging! show_hidden_metrics_for_version "
     "collect_detailed_traces+ per_request_spec_decode_metrics kv_cache_metrics! kv_cache_metrics_sample "
     "cudagraph_metrics! enable_layerwise_nvtx_tracing! enable_mfu_metrics! "
     "enable_logging_iteration_details! jit_monitor_mode jit_monitor_verbose! enable_mm_processor_stats! "
     "fail_on_environ_validation!"),
    ("inert", _NOT_LOGGED, "enable_log_requests! disable_log_requests!"),
    ("inert", "one GPU needs no exchange", "disable_custom_all_reduce! distributed_timeout_seconds "
     "cpu_distributed_timeout_seconds disable_nccl_for_dp_synchronization! master_addr master_port "
     "dcp_comm_backend dcp_q_replicate! dcp_kv_cache_interleave_size cp_kv_cache_interleave_size "
     "ray_workers_use_nsight! all2all_backend"),
    ("inert", "grammars are made by llguidance", "structured_outputs_config guided_decoding_backend "
     "guided_decoding_disable_fallback! guided_decoding_disable_any_whitespace! "
     "guided_decoding_disable_additional_properties!"),
    ("inert", "tokens are sent as they come", "stream_interval"),
    ("refused", _REPLICAS, "tensor_parallel_size pipeline_parallel_size prefill_context_parallel_size "
     "decode_context_parallel_size nnodes node_rank data_parallel_rank data_parallel_start_rank "
     "data_parallel_size_local data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb! "
     "data_parallel_external_lb! data_parallel_multi_port_external_lb! data_parallel_backend enable_dbo! "
     "ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold"),
    ("refused", f"{_ONE_MODEL}; on other machines use saccade serve --ray-address",
     "distributed_executor_backend"),
    ("refused", "choose with --device cuda:1, or CUDA_VISIBLE_DEVICES", "device_ids+"),
    ("refused", "bind the process with numactl", "numa_bind! numa_bind_nodes+ numa_bind_cpus+"),
    ("refused", _EXPERTS, "enable_expert_parallel! enable_ep_weight_filter! enable_elastic_ep! enable_eplb! "
     "eplb_config expert_placement_strategy enable_return_routed_experts!"),
    ("refused", _LORA, "enable_lora! max_loras max_lora_rank default_mm_loras fully_sharded_loras! "
     "max_cpu_loras lora_dtype lora_target_modules+ enable_tower_connector_lora! specialize_active_lora! "
     "enable_mixed_moe_lora_format! enable_moe_shared_loras! lora_extra_vocab_size "
     "qlora_adapter_name_or_path enable_prompt_adapter!"),
    ("refused", _SPECULATIVE, "speculative_config spec_method spec_model spec_tokens speculative_model "
     "num_speculative_tokens diffusion_config"),
    ("refused", "a model's marks of thinking are known; leave it out", "reasoning_config"),
    ("refused", _POOLING, "pooler_config override_pooler_config"),
    ("refused", _CODE, "worker_cls worker_extension_cls scheduler_cls logits_processors+ io_processor_plugin "
     "reasoning_parser_plugin model_class_overrides logits_processor_pattern additional_config"),
    ("refused", _QUANTIZED, "quantization_config allow_deprecated_quantization! "
     "kv_cache_dtype_skip_layers+ calculate_kv_scales! mm_encoder_fp8_scale_path "
     "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin"),
    ("refused", _OFFLOAD, "cpu_offload_gb cpu_offload_params+ offload_backend offload_group_size "
     "offload_num_in_group offload_prefetch_step offload_params+ kv_offloading_backend"),
    ("refused", "each replica computes its own KV; --kv-events tells routers what is cached",
     "kv_transfer_config kv_events_config ec_transfer_config weight_transfer_config"),
    ("refused", "the KV cache is sized in bytes; use --kv-cache-gb", "num_gpu_blocks_override"),
    ("refused", "set HF_TOKEN in the environment, which ps does not show", "hf_token"),
    ("refused", "single values are changed with --hf-overrides", "hf_config_path rope_scaling rope_theta"),
    ("refused", "tokenizer.json is read; use a checkpoint that has one", "tokenizer_mode "
     "skip_tokenizer_init!"),
    ("refused", "prompts are text, token ids and media; leave it out", "enable_prompt_embeds! "
     "enable_mm_embeds! mm_encoder_only! return_sampling_mask! enable_trace_replay! tokens_only!"),
    ("refused", "20 alternatives are the most; ask for at most 20", "max_logprobs"),
    ("refused", "log probabilities are those of the unchanged logits; leave it out", "logprobs_mode"),
    ("refused", "a window's length is the checkpoint's; lower --max-model-len instead",
     "disable_sliding_window!"),
    ("refused", "one rule drops tokens, by change between frames; leave it out", "video_pruning_method"),
    ("refused", "an engine that dies is started again; leave it out", "enable_fault_tolerance! "
     "fault_tolerance_config"),
    ("refused", "weights are the checkpoint's own; give their folder as MODEL", "model_weights"),
)  # fmt: skip

_SERVER: tuple[tuple[Fate, str, str], ...] = (
    ("supported", "the same", "host port ssl_keyfile ssl_certfile ssl_ca_certs root_path served_model_name+ "
     "api_key+ allowed_origins allowed_local_media_path allowed_media_domains+ config "
     "default_chat_template_kwargs otlp_traces_endpoint reasoning_parser tool_call_parser"),
    ("renamed", "replicas", "data_parallel_size"),
    ("renamed", "drain_timeout", "shutdown_timeout"),
    ("renamed", "no-access-log", "disable_uvicorn_access_log!"),
    ("inert", "tools work where the chat template has them", "enable_auto_tool_choice! "
     "exclude_tools_when_tool_choice_none!"),
    ("inert", "the template is tried with both forms at start", "chat_template_content_format"),
    ("inert", "responses always have it", "enable_prompt_tokens_details! enable_request_id_headers!"),
    ("inert", _METRICS, "enable_server_load_tracking! enable_per_request_metrics!"),
    ("inert", _NOT_LOGGED, "max_log_len enable_log_outputs! enable_log_deltas! log_error_stack!"),
    ("inert", "there is no such page; /openapi.json has the schema", "disable_fastapi_docs! "
     "enable_offline_docs!"),
    ("inert", "the routes need GET and POST and a few headers; others are not sent", "allowed_methods "
     "allowed_headers"),
    ("inert", "headers have limits of their own (docs/serving.md, Limits)", "h11_max_incomplete_event_size "
     "h11_max_header_count"),
    ("inert", "probes and polled routes are never logged; --no-access-log stops the rest",
     "disable_access_log_for_endpoints"),
    ("inert", "the engine always has a process of its own", "disable_frontend_multiprocessing!"),
    ("inert", "--log-level sets how much is logged", "uvicorn_log_level"),
    ("inert", "no such model is served", "cohere_is_reasoning_model! cohere_format "
     "enable_flash_late_interaction! enable_reasoning!"),
    ("refused", "one API process serves all replicas; use --replicas", "api_server_count headless! "
     "data_parallel_supervisor_port dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s "
     "dp_supervisor_probe_failure_threshold"),
    ("refused", _LORA, "lora_modules+ prompt_adapters+"),
    ("refused", _CODE, "middleware+ tool_parser_plugin tool_server"),
    ("refused", _PROXY, "uds ssl_cert_reqs ssl_ciphers enable_ssl_refresh! grpc!"),
    ("refused", "browsers send no credentials to other origins here; use keys", "allow_credentials!"),
    ("refused", "templates of clients are not run; use --chat-template", "trust_request_chat_template!"),
    ("refused", "answers have the role assistant; leave it out", "response_role"),
    ("refused", "requests ask for it: return_tokens_as_token_ids", "return_tokens_as_token_ids!"),
    ("refused", "requests ask for it: stream_options.include_usage", "enable_force_include_usage!"),
    ("refused", "use /tokenize and /detokenize", "enable_tokenizer_info_endpoint!"),
    ("refused", "use --log-level and --log-format", "log_config_file"),
    ("refused", "responses have no fingerprint; leave it out", "fingerprint_mode fingerprint_value"),
)  # fmt: skip

_CALL: tuple[tuple[Fate, str, str], ...] = (
    ("supported", "the same", "sampling_params use_tqdm priority tools add_generation_prompt "
     "continue_final_message chat_template_kwargs mm_processor_kwargs"),
    ("inert", "the template is tried with both forms", "chat_template_content_format"),
    ("refused", _LORA, "lora_request prompt_adapter_request"),
    ("refused", "give it once, as LLM(chat_template=...)", "chat_template"),
    ("refused", "give prompt_token_ids, tokenized as you like", "tokenization_kwargs"),
    ("refused", 'give {"prompt_token_ids": [...]} as the prompt', "prompt_token_ids"),
    ("refused", "use SamplingParams", "guided_options_request"),
)  # fmt: skip

TABLE: Mapping[str, Keyword] = {
    row.name: row for row in (*_rows("engine", _ENGINE), *_rows("server", _SERVER))
}
CALLS: Mapping[str, Keyword] = {row.name: row for row in _rows("call", _CALL)}

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "data_parallel_backend": ("mp",),
    "distributed_executor_backend": ("mp", "uni"),
    "tokenizer_mode": ("auto", "hf", "slow", "fast"),
    "worker_cls": ("auto",),
    "quantization": (
        "awq",
        "awq_marlin",
        "gptq",
        "gptq_marlin",
        "compressed-tensors",
        "modelopt",
        "fbgemm_fp8",
    ),
    "logprobs_mode": ("raw_logprobs",),
    "max_logprobs": tuple(range(21)),
    "offload_backend": ("auto",),
    "kv_offloading_backend": ("native",),
    "response_role": ("assistant",),
    "fingerprint_mode": ("none",),
    "hf_token": (True,),
    "expert_placement_strategy": ("linear",),
    **dict.fromkeys(
        (
            *("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size", "nnodes"),
            *("decode_context_parallel_size", "data_parallel_size_local", "api_server_count"),
            *("offload_num_in_group", "offload_prefetch_step"),
        ),
        (1,),
    ),
}
"""Values with which a refused argument asks for nothing, beside None, False, 0 and empty ones."""

OFFLINE: Mapping[str, str] = {
    "served_model_name": "names are for the clients of a server",
    "allowed_local_media_path": "offline, every local file may be named",
    "allowed_media_domains": "offline, nothing is fetched",
    "otlp_traces_endpoint": "only a server sends traces",
    "reasoning_parser": "offline, the chat template tells how a model thinks; see the outputs' reasoning",
}
"""Options of the server that vLLM's `LLM(...)` takes, too, and why they change nothing there."""

SHORT: Mapping[str, str] = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-dpn": "data_parallel_rank",
    "-dpr": "data_parallel_start_rank",
    "-dpl": "data_parallel_size_local",
    "-dpa": "data_parallel_address",
    "-dpp": "data_parallel_rpc_port",
    "-dpb": "data_parallel_backend",
    "-dph": "data_parallel_hybrid_lb",
    "-dpe": "data_parallel_external_lb",
    "-dpm": "data_parallel_multi_port_external_lb",
    "-dcp": "decode_context_parallel_size",
    "-pcp": "prefill_context_parallel_size",
    "-ep": "enable_expert_parallel",
    "-asc": "api_server_count",
    "-n": "nnodes",
    "-r": "node_rank",
    "-q": "quantization",
    "-sc": "speculative_config",
    "-cc": "compilation_config",
    "-ac": "attention_config",
    "-dc": "diffusion_config",
    "-O": "optimization_level",
}
