"""Arguments of vLLM's engine and server, and the keys of the configuration that they become."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hardpoint.errors import ConfigError

from .former_arguments import FORMER_NEEDLESS, FORMER_REFUSED

Effect = Literal["key", "needless", "refused"]
_OFF: tuple[Any, ...] = (None, False, "", "auto", 0, (), [], {})
"""Values that mean that an argument is not given."""


class UnknownArgumentError(ConfigError, TypeError):
    """An argument that vLLM does not have: a TypeError, as there."""


@dataclass
class Translated:
    """A configuration made of vLLM's arguments.

    Attributes:
        values: by dotted key.
        notes: what has no effect here, and why.
        neutral: whether parameters that the model's files recommend are left out.
        overrides: sampling parameters that take the place of those.
        pooling: parameters of pooling requests that state none.
        processors: names of logits processors of vLLM, which read `extra_args`.
        api_keys: keys of the server.
    """

    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    neutral: bool = False
    overrides: dict[str, Any] = field(default_factory=dict)
    processors: list[str] = field(default_factory=list)
    pooling: dict[str, Any] = field(default_factory=dict)
    api_keys: list[str] = field(default_factory=list)

    def config(self) -> dict[str, Any]:
        """Return the values as nested tables."""
        tables: dict[str, Any] = {}
        for key, value in self.values.items():
            *path, last = key.split(".")
            table = tables
            for name in path:
                table = table.setdefault(name, {})
            table[last] = value
        return tables


@dataclass(frozen=True)
class Argument:
    """An argument.

    Attributes:
        name: vLLM's.
        effect: whether it becomes a key, cannot change results, or is refused.
        target: the key; why it is needless; or what to use instead.
        convert: returns the key's value; None leaves it out.
        default: vLLM's default, which is accepted everywhere.
        server: whether only `vllm serve` has it.
    """

    name: str
    effect: Effect
    target: str
    convert: Callable[[Any], Any] | None = None
    default: Any = None
    server: bool = False

    def apply(self, value: Any, to: Translated) -> None:
        """Add an argument to a configuration.

        Raises:
            ConfigError: it is refused, or its value is wrong.
        """
        if value is None or (value == self.default and type(value) is type(self.default)):
            return
        if self.effect == "key":
            try:
                value = value if self.convert is None else self.convert(value)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{self.name}: {error}") from None
            if value is not None:
                to.values[self.target] = value
        elif self.target and value not in _OFF:
            if self.effect == "refused":
                raise ConfigError(f"{self.name}: expected none, got {value!r}; {self.target}")
            to.notes.append(f"{self.name}={value!r} has no effect: {self.target}")


def size(value: Any) -> Any:
    """Return a number of tokens or bytes: 4k is 4,000, 4K is 4,096; -1 and "auto" are "auto".

    Raises:
        ValueError: it has no number.
    """
    if not isinstance(value, str):
        return "auto" if value == -1 else int(value)
    if value in ("auto", "-1"):
        return "auto"
    units = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
    if value and value[-1] in units:
        return int(float(value[:-1]) * units[value[-1]])
    return int(value)


def one_of(names: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Return a converter of names; an unknown one stays as it is."""
    return lambda value: names.get(str(value), value)


def only(names: Mapping[str, Any], hint: str) -> Callable[[Any], Any]:
    """Return a converter of these names alone."""

    def convert(value: Any) -> Any:
        if str(value) not in names:
            raise ValueError(f"expected one of {', '.join(names)}, got {value!r}; {hint}")
        return names[str(value)]

    return convert


def table(value: Any) -> dict[str, Any]:
    """Return an argument that is a table: a mapping, JSON, or one of vLLM's configuration objects.

    Raises:
        ValueError: it is another type.
    """
    if isinstance(value, str):
        value = json.loads(value)
    if hasattr(value, "given") and not isinstance(value, Mapping):
        value = value.given
    if not isinstance(value, Mapping):
        raise ValueError(f"expected a table, got {value!r}")
    return {name: item for name, item in value.items() if item is not None}


def texts(value: Any) -> list[str]:
    """Return a list of texts, which may be one or JSON."""
    if isinstance(value, str):
        value = json.loads(value) if value.startswith("[") else [value]
    return [str(item) for item in value]


_DTYPES = {
    "auto": "auto", "half": "float16", "float16": "float16", "torch.float16": "float16",
    "bfloat16": "bfloat16", "torch.bfloat16": "bfloat16", "float": "float32",
    "float32": "float32", "torch.float32": "float32",
}  # fmt: skip
_KV_DTYPES = {"auto": "auto", "fp8": "fp8", "fp8_e4m3": "fp8", "int8": "int8",
              "int8_per_token_head": "int8", "bfloat16": "auto", "float16": "auto"}  # fmt: skip
_HASHES = {"sha256": "sha256", "sha256_cbor": "sha256", "builtin": "sha256",
           "xxhash": "blake2b", "xxhash_cbor": "blake2b"}  # fmt: skip
_FORMATS = {"auto": "auto", "hf": "auto", "safetensors": "safetensors", "dummy": "dummy",
            "gguf": "gguf", "fastsafetensors": "safetensors",
            "runai_streamer": "safetensors", "mistral": None}  # fmt: skip
_SCHEMES = {"compressed-tensors": "compressed_tensors", "gptq_marlin": "gptq", "awq_marlin": "awq",
            "auto-round": "auto_round", "auto_awq": "awq", "auto_gptq": "gptq", "gguf": None,
             "modelopt": "compressed_tensors"}  # fmt: skip
_REASONING = {
    "deepseek_r1": "think_tags", "deepseek_v3": "think_tags", "qwen3": "think_tags",
    "glm45": "think_tags", "holo2": "think_tags", "kimi_k2": "think_tags",
    "minimax_m2": "think_tags", "nemotron_v3": "think_tags", "olmo3": "think_tags",
    "step3": "think_tags", "ernie45": "ernie45", "granite": "granite", "mistral": "mistral",
    "openai_gptoss": "harmony", "gptoss": "harmony", "hunyuan_a13b": "hunyuan_a13b",
    "seed_oss": "seed_oss", "gemma4": "gemma",
}  # fmt: skip
_TOOLS = {
    "deepseek_v31": "deepseek_v3_1", "deepseek_v32": "deepseek_v3_2", "granite-20b-fc": "granite",
    "llama4_json": "llama3_json", "internlm": "hermes", "openai": "harmony", "qwen3_xml":
    "qwen3_coder", "xlam": "json", "phi4_mini_json": "phi4_mini", "gemma4": "gemma",
    "glm47": "glm45", "functiongemma": "gemma",
}  # fmt: skip
_LOGPROBS = {"raw_logprobs": "raw", "processed_logprobs": "processed"}


def _names(text: str) -> list[str]:
    return text.split()


def _no_tokenizer(on: Any) -> str | None:
    return "none" if on else None


def _not(off: Any) -> bool:
    return not off


def _off(off: Any) -> str | None:
    return "off" if off else None


def _assistant(role: Any) -> None:
    if role != "assistant":
        raise ValueError(f"expected assistant, the role of the model's messages, got {role!r}")


_SPEED = "it only changes speed or memory"
_CHOSEN = "Hardpoint selects it by the model and the device"

_KEYS: Sequence[tuple[Any, ...]] = (
    ("model", "model"),
    ("served_model_name", "server.served_names", texts),
    ("tokenizer", "tokenizer.path"),
    ("skip_tokenizer_init", "tokenizer.use", _no_tokenizer),
    ("chat_template", "plugin.transformers.chat_template"),
    ("dtype", "dtype", only(_DTYPES, "weights of other types are quantizations")),
    ("seed", "seed"),
    ("max_model_len", "max_model_len", size),
    ("device", "device"),
    ("max_num_seqs", "scheduler.max_num_seqs", int),
    ("max_num_batched_tokens", "scheduler.max_num_batched_tokens", size),
    ("enable_chunked_prefill", "scheduler.chunked_prefill", bool),
    ("long_prefill_token_threshold", "scheduler.long_prefill_token_threshold", int, 0),
    ("max_num_queued_reqs", "scheduler.max_waiting"),
    ("max_num_queued_tokens", "scheduler.max_waiting_tokens"),
    ("scheduling_policy", "scheduler.policy"),
    ("async_scheduling", "scheduler.asynchronous", bool),
    ("block_size", "kv_cache.block_size", int),
    ("kv_cache_dtype", "kv_cache.dtype", only(_KV_DTYPES, "write it as kv_cache.dtype")),
    ("kv_cache_memory_bytes", "kv_cache.memory_bytes", size),
    ("num_gpu_blocks_override", "kv_cache.num_blocks"),
    ("enable_prefix_caching", "kv_cache.prefix_caching", bool),
    ("prefix_caching_hash_algo", "kv_cache.hash_algorithm", one_of(_HASHES)),
    ("watermark", "kv_cache.watermark", None, 0.0),
    ("disable_hybrid_kv_cache_manager", "kv_cache.window_groups", _not),
    ("tensor_parallel_size", "parallel.tensor", int, 1),
    ("pipeline_parallel_size", "parallel.pipeline", int, 1),
    ("data_parallel_size", "parallel.data", int, 1),
    ("enable_expert_parallel", "parallel.expert", bool, False),
    ("enforce_eager", "executor.enforce_eager", bool, False),
    ("quantization", "quantization.use", one_of(_SCHEMES)),
    ("load_format", "load.use",
     only(_FORMATS, "loaders of packages are named by load.use"), "auto"),
    ("model_impl", "models.use", one_of({"auto": None, "vllm": None, "terratorch": None}), "auto"),
    ("logprobs_mode", "sampler.logprobs",
     only(_LOGPROBS, "an activation tap reads logits (docs/write-an-activation-tap.md)"),
     "raw_logprobs"),
    ("max_lora_rank", "adapters.max_lora_rank", int),
    ("max_cpu_loras", "adapters.max_cpu_loras", int),
    ("reasoning_parser", "reasoning.parser", one_of(_REASONING)),
    ("enable_prompt_embeds", "plugin.prompt_embeddings.enabled", bool, False),
    ("allowed_local_media_path", "images.folders", texts, ""),
    ("allowed_media_domains", "images.remote.hosts", texts),
    ("stream_interval", "engine.stream_interval", int, 1),
    ("shutdown_timeout", "engine.drain_seconds", float, 0),
)  # fmt: skip
_NEEDLESS: Mapping[str, str] = {
    **dict.fromkeys(
        _names(
            """
trust_remote_code enable_sleep_mode disable_log_stats use_tqdm_on_load
disable_log_requests enable_log_requests
"""
        ),
        "",
    ),
    **dict.fromkeys(
        _names(
            """
disable_custom_all_reduce max_parallel_loading_workers compilation_config
optimization_level performance_mode cudagraph_capture_sizes kernel_config
max_cudagraph_capture_size disable_cascade_attn attention_config mamba_config
enable_flashinfer_autotune safetensors_load_strategy safetensors_prefetch_num_threads
safetensors_prefetch_block_size model_loader_extra_config pt_load_map_location
enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold
enable_eplb eplb_config expert_placement_strategy
disable_nccl_for_dp_synchronization enable_shm_tensor_arena kv_sharing_fast_prefill
numa_bind numa_bind_nodes numa_bind_cpus cpu_offload_params offload_backend
offload_group_size offload_num_in_group offload_prefetch_step offload_params
kv_offloading_size kv_offloading_backend max_num_partial_prefills
max_long_partial_prefills mm_processor_cache_gb mm_processor_cache_type
mm_shm_cache_max_object_size_mb mm_hasher_algorithm mm_tensor_ipc skip_mm_profiling
mm_encoder_tp_mode fully_sharded_loras specialize_active_lora long_lora_scaling_factors
data_parallel_backend scheduler_reserve_full_isl prefill_schedule_interval
max_num_scheduled_tokens max_num_active_seqs enable_cumem_allocator monokernel
enable_nccl_comm_suspend renderer_num_workers disable_chunked_mm_input
jit_monitor_mode jit_monitor_verbose async_engine
sleep_mode_backend enable_ep_weight_filter long_prefill_token_threshold_adaptive
cpu_distributed_timeout_seconds distributed_timeout_seconds ir_op_priority
dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size enable_hc_sp
cp_kv_cache_interleave_size enable_batch_sharded_sampling
sparse_indexer_topk_backend dp_sync_interval prefix_cache_retention_interval
use_fp64_gumbel allow_deprecated_quantization mm_encoder_attn_dtype
mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize
enable_mixed_moe_lora_format enable_moe_shared_loras sleep_mode_offload_cudagraph
prefix_match_unit enable_mamba_shared_prefix_checkpoint replayssm_buffer_len
use_replayssm mamba_ssu_algorithm gdn_prefill_backend kda_prefill_backend
kda_decode_backend sse_keep_alive_interval enable_per_request_metrics
enable_flash_late_interaction fail_on_environ_validation max_lora_cls_labels
mamba_cache_philox_rounds
"""
        ),
        _SPEED,
    ),
    **dict.fromkeys(
        _names(
            """
tokenizer_mode config_format runner task convert attention_backend moe_backend
linear_backend all2all_backend mamba_backend mamba_cache_mode mamba_cache_dtype
mamba_ssm_cache_dtype mamba_block_size language_model_only mm_encoder_attn_backend
"""
        ),
        _CHOSEN,
    ),
    **dict.fromkeys(
        _names(
            """
aggregate_engine_logging show_hidden_metrics_for_version collect_detailed_traces
kv_cache_metrics kv_cache_metrics_sample cudagraph_metrics enable_mfu_metrics
enable_layerwise_nvtx_tracing enable_logging_iteration_details log_level
enable_mm_processor_stats logging_config log_config_file watchdog_config
per_request_spec_decode_metrics custom_histogram_buckets
"""
        ),
        "figures and logs of Hardpoint are in docs/metrics.md",
    ),
    "hf_token": "huggingface_hub reads the variable HF_TOKEN",
    "max_logprobs": "the number of log-probabilities is not limited in a program",
    "enable_return_routed_experts": "SamplingParams(routed_experts=True) asks for them",
    "download_dir": "models are in the cache of huggingface_hub, which HF_HUB_CACHE moves",
    "ignore_patterns": "only the files that the loader reads are downloaded",
}
_REFUSED: Mapping[str, str] = {
    "tokenizer_revision": "give tokenizer a folder with the files of that revision",
    "code_revision": "code of a model's repository is not run",
    "hf_config_path": "give model a folder with that config.json",
    "hf_overrides": "edit config.json of the model's folder",
    "rope_scaling": "edit rope_scaling of the model's config.json",
    "rope_theta": "edit rope_theta of the model's config.json",
    "disable_sliding_window": "edit sliding_window of the model's config.json",
    "cpu_offload_gb": "a quantization makes weights smaller (quantization.use)",
    "ec_transfer_config": "embeddings of images stay in their engine",
    "worker_cls": "use executor.use, or a step part (docs/step-parts.md)",
    "worker_extension_cls": "a step part answers calls of a program (docs/step-parts.md)",
    "scheduler_cls": "use scheduler.use (docs/write-a-scheduler.md)",
    "prefill_context_parallel_size": "use parallel.tensor",
    "decode_context_parallel_size": "use parallel.tensor",
    "data_parallel_rank": "engines of other hosts join by parallel.join_address",
    "data_parallel_address": "engines of other hosts join by parallel.join_address",
    "nnodes": "ranks of several hosts: docs/parallelism.md",
    "node_rank": "ranks of several hosts: docs/parallelism.md",
    "mm_processor_kwargs": "sizes of images come from the model's files",
    "media_io_kwargs": "images are decoded by the limits of [images]",
    "interleave_mm_strings": "images are where the message has them",
    "enable_mm_embeds": "give images; prompt embeddings are plugin.prompt_embeddings.enabled",
    "mm_encoder_only": "an engine has the whole model",
    "video_pruning_rate": "videos are not supported",
    "default_mm_loras": "name the adapter in the request",
    "lora_target_modules": "an adapter has the modules of its files",
    "enable_lora_bias": "biases of adapters are not supported",
    "diffusion_config": "diffusion models are not supported",
    "watermark_config": "examples/acme_watermark is a sampler with a watermark",
    "return_sampling_mask": "docs/token-traces.md shows why a token was chosen",
    **dict.fromkeys(_names("spec_method spec_model spec_tokens"), "use speculative_config"),
    "quantization_config": "write it as [quantization]",
    "additional_config": "options of plugins are tables [plugin.NAME]",
    "weight_transfer_config": "use `llm.weights.update` (docs/hot-reconfiguration.md)",
    "reasoning_config": "use [reasoning]",
    "enable_elastic_ep": "use `llm.engines.scale`",
    "enable_trace_replay": "use engine.journal (docs/failures.md)",
    "model_class_overrides": "use models.use (docs/write-a-model.md)",
    "aux_output_config": "activation taps return arrays (docs/write-an-activation-tap.md)",
    "fault_tolerance_config": "use engine.restart",
    "enable_fault_tolerance": "use engine.restart",
    "otlp_traces_endpoint": 'enable the sink "opentelemetry" in stats.sinks',
    "reasoning_parser_plugin": "use reasoning.parser with module:Class "
    "(docs/write-an-output-parser.md)",
    "model_weights": "give model the folder of the weights",
    "master_addr": "ranks of several hosts: docs/parallelism.md",
    "master_port": "ranks of several hosts: docs/parallelism.md",
    "device_ids": "choose GPUs by CUDA_VISIBLE_DEVICES",
    "data_parallel_start_rank": "engines of other hosts join by parallel.join_address",
    "data_parallel_size_local": "use parallel.local",
    "data_parallel_rpc_port": "engines of other hosts join by parallel.join_address",
    "data_parallel_multi_port_external_lb": "use parallel.data and parallel.balancer",
    "elastic_ep_max_dp_size": "use `llm.engines.scale`",
    "mm_encoder_fp8_scale_path": "encoders of images are not quantized",
    "mm_encoder_fp8_scale_save_path": "encoders of images are not quantized",
    "mm_encoder_fp8_scale_save_margin": "encoders of images are not quantized",
    "video_pruning_method": "videos are not supported",
    "enable_tower_connector_lora": "adapters change the text model",
    "engram_config": "engrams are not supported",
    "ec_manager_config": "embeddings of images stay in their engine",
    "sleep_preserve_parameter_names": "use tags of `sleep` and `wake_up`",
    "kv_cache_dtype_skip_layers": "use quantization.skip for weights; the cache has one type",
    "enable_mamba_cache_stochastic_rounding": "states have the type of the model",
    "swa_bounded_replay": "use engine.journal (docs/failures.md)",
    "tokens_only": 'use tokenizer.use = "none"',
}
_SERVER_KEYS: Sequence[tuple[Any, ...]] = (
    ("host", "server.host"),
    ("port", "server.port", int),
    ("uds", "server.uds"),
    ("allowed_origins", "server.allowed_origins", texts),
    ("ssl_certfile", "server.tls_certificate"),
    ("ssl_keyfile", "server.tls_key"),
    ("root_path", "server.root_path", None, ""),
    ("response_role", "", _assistant),
    ("tool_call_parser", "tools.parser", one_of(_TOOLS)),
    ("disable_uvicorn_access_log", "server.access_log", _off),
    ("api_server_count", "server.workers", int),
    ("timeout_keep_alive", "server.keep_alive_seconds", float),
)
_SERVER_NEEDLESS: Mapping[str, str] = {
    **dict.fromkeys(
        _names(
            """
enable_auto_tool_choice enable_prompt_tokens_details
chat_template_content_format enable_request_id_headers
enable_tokenizer_info_endpoint exclude_tools_when_tool_choice_none
"""
        ),
        "",
    ),
    **dict.fromkeys(
        _names(
            """
uvicorn_log_level disable_access_log_for_endpoints enable_server_load_tracking
disable_fastapi_docs enable_offline_docs h11_max_incomplete_event_size
h11_max_header_count disable_frontend_multiprocessing enable_log_requests
allowed_methods allowed_headers log_error_stack enable_ssl_refresh ssl_ciphers
enable_response_messages max_num_log_requests allow_credentials enable_log_outputs
enable_log_deltas max_log_len
"""
        ),
        "the server of Hardpoint has its own rules (docs/serving.md)",
    ),
}
_SERVER_REFUSED: Mapping[str, str] = {
    "middleware": "use the hook server_extensions (docs/components-and-hooks.md)",
    "tool_parser_plugin": "use tools.parser with module:Class",
    "tool_server": "tools run at the client",
    "ssl_ca_certs": "certificates of clients are not checked; use keys (server.keys_file)",
    "ssl_cert_reqs": "certificates of clients are not checked; use keys (server.keys_file)",
    "headless": "engines join a server by `hardpoint engine` (docs/replicas.md)",
    "trust_request_chat_template": "a request chooses among the model's templates",
    "default_chat_template_kwargs": "requests give chat_template_kwargs",
    "grpc": "the server speaks HTTP",
    "grpc_port": "the server speaks HTTP",
    "trust_request_mm_kwargs": "sizes of images come from the model's files",
    "reasoning_effort_map": "requests give reasoning_effort",
    "tool_strict_level": "tools that are strict get arguments of their schemas",
    "cohere_is_reasoning_model": "use reasoning.parser",
    "cohere_format": "use tools.parser",
    "anthropic_disabled_thinking_effort": "requests give thinking",
    "enable_scale_out": "use parallel.data",
    "fingerprint_mode": "responses have the version of the weights",
    "fingerprint_value": "responses have the version of the weights",
    **dict.fromkeys(
        _names(
            """
data_parallel_supervisor_port dp_supervisor_probe_interval_s
dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold
"""
        ),
        "use server.admin",
    ),
    "return_tokens_as_token_ids": "requests give return_tokens_as_token_ids",
    "enable_force_include_usage": "requests give stream_options.include_usage",
    "data_parallel_hybrid_lb": "use parallel.data and parallel.balancer",
    "data_parallel_external_lb": "use parallel.data and parallel.balancer",
}
SWITCHES = frozenset(
    _names(
        """
trust_remote_code skip_tokenizer_init enable_prompt_embeds enforce_eager enable_lora
enable_prefix_caching enable_chunked_prefill enable_expert_parallel
enable_sleep_mode disable_log_stats disable_custom_all_reduce async_scheduling
enable_eplb enable_dbo fully_sharded_loras disable_sliding_window
disable_hybrid_kv_cache_manager disable_cascade_attn enable_auto_tool_choice
disable_uvicorn_access_log enable_log_requests disable_log_requests
allow_credentials enable_request_id_headers disable_fastapi_docs
enable_prompt_tokens_details headless use_tqdm_on_load enable_return_routed_experts
interleave_mm_strings enable_mm_embeds skip_mm_profiling enable_ssl_refresh
disable_frontend_multiprocessing enable_force_include_usage
enable_server_load_tracking enable_tokenizer_info_endpoint enable_log_outputs
return_tokens_as_token_ids kv_sharing_fast_prefill data_parallel_hybrid_lb
data_parallel_external_lb trust_request_chat_template numa_bind
exclude_tools_when_tool_choice_none log_error_stack enable_elastic_ep
use_v2_block_manager disable_chunked_mm_input language_model_only mm_encoder_only
enable_mfu_metrics kv_cache_metrics cudagraph_metrics
enable_logging_iteration_details enable_flashinfer_autotune
enable_layerwise_nvtx_tracing aggregate_engine_logging enable_fault_tolerance
enable_offline_docs enable_log_deltas enable_cumem_allocator ray_workers_use_nsight
disable_nccl_for_dp_synchronization grpc
allow_deprecated_quantization cohere_is_reasoning_model
data_parallel_multi_port_external_lb dcp_q_replicate enable_batch_sharded_sampling
enable_ep_weight_filter enable_flash_late_interaction enable_hc_sp
enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint
enable_mixed_moe_lora_format enable_moe_shared_loras enable_nccl_comm_suspend
enable_per_request_metrics enable_scale_out enable_shm_tensor_arena
enable_tower_connector_lora enable_trace_replay fail_on_environ_validation
jit_monitor_verbose long_prefill_token_threshold_adaptive mm_device_do_normalize
monokernel return_sampling_mask scheduler_reserve_full_isl
sleep_mode_offload_cudagraph specialize_active_lora swa_bounded_replay tokens_only
trust_request_mm_kwargs use_fp64_gumbel use_replayssm
"""
    )
)
"""Arguments without a value on the command line."""


def _arguments() -> dict[str, Argument]:
    rows: list[Argument] = []
    for table, is_server in ((_KEYS, False), (_SERVER_KEYS, True)):
        for name, target, *rest in table:
            convert, default = [*rest, None, None][:2]
            rows.append(Argument(name, "key", target, convert, default, server=is_server))
    tables = (
        (_NEEDLESS, "needless", False),
        (_REFUSED, "refused", False),
        (FORMER_NEEDLESS, "needless", False),
        (FORMER_REFUSED, "refused", False),
        (_SERVER_NEEDLESS, "needless", True),
        (_SERVER_REFUSED, "refused", True),
    )
    for notes, effect, is_server in tables:
        rows += [Argument(n, effect, why, server=is_server) for n, why in notes.items()]  # type: ignore[arg-type]
    return {row.name: row for row in reversed(rows)}


ARGUMENTS: Mapping[str, Argument] = _arguments()
"""The arguments with a rule in a table; `special.py` has those with a rule of their own."""
