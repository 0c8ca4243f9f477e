"""Tables of vLLM's modules: the names that this package has, and counterparts of other modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def _split(text: str) -> list[str]:
    return text.split()


_PARAMS = (
    "SamplingParams",
    "BeamSearchParams",
    "StructuredOutputsParams",
    "GuidedDecodingParams",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingType",
)
_OUTPUTS = (
    "RequestOutput",
    "CompletionOutput",
    "PoolingOutput",
    "PoolingRequestOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
)
_INPUTS = (
    "DataPrompt",
    "EmbedsPrompt",
    "ExplicitEncoderDecoderPrompt",
    "ProcessorInputs",
    "PromptType",
    "SingletonInputs",
    "SingletonPrompt",
    "TextPrompt",
    "TokenInputs",
    "TokensPrompt",
    "is_embeds_prompt",
    "is_explicit_encoder_decoder_prompt",
    "is_tokens_prompt",
    "token_inputs",
    "tokens_input",
)
_CHAT = (
    "ChatCompletionContentPartParam",
    "ChatCompletionContentPartTextParam",
    "ChatCompletionMessageParam",
    "ChatTemplateContentFormat",
    "ChatTemplateContentFormatOption",
    "ConversationMessage",
    "CustomChatCompletionMessageParam",
    "apply_hf_chat_template",
    "load_chat_template",
    "make_tool_call_id",
    "random_tool_call_id",
)
_CONFIGS = (
    "AttentionConfig",
    "CacheConfig",
    "CompilationConfig",
    "CompilationLevel",
    "CompilationMode",
    "CUDAGraphMode",
    "DecodingConfig",
    "DeviceConfig",
    "DynamicShapesConfig",
    "DynamicShapesType",
    "ECTransferConfig",
    "EPLBConfig",
    "KernelConfig",
    "KVEventsConfig",
    "KVTransferConfig",
    "LoadConfig",
    "LoRAConfig",
    "ModelConfig",
    "MultiModalConfig",
    "ObservabilityConfig",
    "ParallelConfig",
    "PassConfig",
    "PoolerConfig",
    "ProfilerConfig",
    "PromptAdapterConfig",
    "ReasoningConfig",
    "SchedulerConfig",
    "SpeculativeConfig",
    "StructuredOutputsConfig",
    "TokenizerPoolConfig",
    "VllmConfig",
    "WeightTransferConfig",
)
_OPTION_TYPES = (
    "BlockSize",
    "CacheDType",
    "ConvertOption",
    "Device",
    "DistributedExecutorBackend",
    "GuidedDecodingBackend",
    "HfOverrides",
    "LogprobsMode",
    "ModelDType",
    "PoolingTypeStr",
    "QuantizationMethods",
    "RunnerOption",
    "SchedulerPolicy",
    "TaskOption",
    "TokenizerMode",
)
_CONFIG_MODULES = _split("""
attention cache compilation device ec_transfer kv_events kv_transfer load lora model multimodal
observability parallel pooler profiler scheduler speculative structured_outputs vllm
weight_transfer
""")
_UTILITIES = (
    "GB_bytes",
    "GiB_bytes",
    "KiB_bytes",
    "MB_bytes",
    "MiB_bytes",
    "STR_DTYPE_TO_TORCH_DTYPE",
    "as_list",
    "cdiv",
    "chunk_list",
    "collect_from_async_generator",
    "cuda_device_count_stateless",
    "flatten_2d_lists",
    "get_cpu_memory",
    "get_distributed_init_method",
    "get_loopback_ip",
    "get_open_ports_list",
    "get_tcp_uri",
    "import_from_path",
    "is_list_of",
    "is_pin_memory_available",
    "is_valid_ipv6_address",
    "kill_process_tree",
    "make_async",
    "merge_async_iterators",
    "next_power_of_2",
    "resolve_obj_by_qualname",
    "round_down",
    "round_up",
    "run_once",
    "update_environment_variables",
)
_UTILS: Mapping[str, Sequence[str]] = {
    "engine_args": ("FlexibleArgumentParser",),
    "helpers": (
        "Counter",
        "get_ip",
        "get_open_port",
        "print_embeddings",
        "random_uuid",
        "set_random_seed",
    ),
    "utilities": _UTILITIES,
}
_UTIL_MODULES = _split("""
argparse_utils async_utils collection_utils counter func_utils import_utils math_utils
mem_constants network_utils platform_utils print_utils system_utils torch_utils
""")
_PARALLEL_STATE = (
    "cleanup_dist_env_and_memory",
    "destroy_distributed_environment",
    "destroy_model_parallel",
    "get_dp_group",
    "get_ep_group",
    "get_pp_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "get_tp_group",
    "get_world_group",
    "model_parallel_is_initialized",
)
_PLATFORMS = ("CpuArchEnum", "DeviceCapability", "Platform", "PlatformEnum", "current_platform")
_TOKENIZERS = ("AnyTokenizer", "TokenizerLike", "cached_tokenizer_from_config", "get_tokenizer")
_LOGPROBS = ("Logprob", "PromptLogprobs", "SampleLogprobs")
_METRICS = ("Counter", "Gauge", "Histogram", "Metric", "Vector")
_IMAGES = ("encode_image_base64", "encode_image_url", "fetch_image")


def _in_modules(
    prefix: str, modules: Iterable[str], names: Mapping[str, Sequence[str]]
) -> dict[str, Mapping[str, Sequence[str]]]:
    """Return the same names for several modules: versions of vLLM have moved them."""
    return {f"{prefix}.{module}": names for module in modules}


PATHS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "": {
        "llm": ("LLM",),
        "engine_args": ("EngineArgs", "AsyncEngineArgs"),
        "engines": ("LLMEngine",),
        "async_engine": ("AsyncLLMEngine", "AsyncLLM"),
        "params": (*_PARAMS, "PoolingParams", "LoRARequest"),
        "outputs": _OUTPUTS,
        "inputs": ("PromptType", "TextPrompt", "TokensPrompt"),
        "configs": ("ModelRegistry",),
    },
    "assets": {},
    "beam_search": {"beams": ("BeamSearchOutput", "BeamSearchSequence")},
    "config": {"configs": (*_CONFIGS, *_OPTION_TYPES)},
    **_in_modules("config", _CONFIG_MODULES, {"configs": (*_CONFIGS, *_OPTION_TYPES)}),
    "distributed": {"parallel_state": _PARALLEL_STATE},
    "engine": {},
    "engine.arg_utils": {
        "engine_args": ("EngineArgs", "AsyncEngineArgs"),
        "configs": _CONFIGS,
    },
    "engine.async_llm_engine": {"async_engine": ("AsyncLLMEngine", "AsyncEngineDeadError")},
    "engine.llm_engine": {"engines": ("LLMEngine",)},
    "engine.metrics": {},
    "engine.protocol": {"async_engine": ("EngineClient",)},
    "entrypoints": {},
    "entrypoints.llm": {"llm": ("LLM",)},
    "entrypoints.chat_utils": {"inputs": _CHAT},
    "envs": {},
    "exceptions": {"helpers": ("VLLMValidationError", "GenerationError")},
    "logger": {"helpers": ("init_logger", "logger")},
    **_in_modules("inputs", ("data", "llm", "parse"), {"inputs": _INPUTS}),
    "logprobs": {"outputs": _LOGPROBS},
    "lora": {},
    "lora.request": {"params": ("LoRARequest",)},
    "model_executor": {"helpers": ("set_random_seed",)},
    "model_executor.guided_decoding": {"params": ("GuidedDecodingParams",)},
    "model_executor.guided_decoding.guided_fields": {"structured": ("GuidedDecodingRequest",)},
    "model_executor.layers": {},
    "model_executor.layers.quantization": {"configs": ("QuantizationMethods",)},
    "model_executor.models": {"configs": ("ModelRegistry",)},
    "model_executor.models.registry": {"configs": ("ModelRegistry",)},
    "model_executor.parallel_utils": {},
    "model_executor.utils": {"helpers": ("set_random_seed",)},
    "distributed.parallel_state": {"parallel_state": _PARALLEL_STATE},
    "model_executor.parallel_utils.parallel_state": {"parallel_state": _PARALLEL_STATE},
    "multimodal": {},
    "multimodal.image": {"helpers": ("convert_image_mode",)},
    "multimodal.utils": {"helpers": _IMAGES},
    "platforms": {"platform": _PLATFORMS},
    "platforms.interface": {"platform": _PLATFORMS},
    "pooling_params": {"params": ("PoolingParams",)},
    "renderers": {},
    "renderers.chat_utils": {"inputs": _CHAT},
    "sampling_params": {"params": _PARAMS},
    "sequence": {"outputs": (*_LOGPROBS, "RequestMetrics")},
    "tokenizers": {"tokenizer": _TOKENIZERS},
    "transformers_utils": {},
    "transformers_utils.config": {"tokenizer": ("get_config", "get_hf_text_config")},
    "transformers_utils.tokenizer": {"tokenizer": _TOKENIZERS},
    "usage": {},
    "usage.usage_lib": {"helpers": ("UsageContext",)},
    "utils": _UTILS,
    **_in_modules("utils", _UTIL_MODULES, _UTILS),
    "v1": {},
    "v1.engine": {},
    "v1.engine.async_llm": {"async_engine": ("AsyncLLM",)},
    "v1.engine.exceptions": {"async_engine": ("EngineDeadError", "EngineGenerateError")},
    "v1.engine.llm_engine": {"engines": ("LLMEngine",)},
    "v1.metrics": {},
    "v1.metrics.loggers": {"helpers": ("LoggingStatLogger", "PrometheusStatLogger")},
    "v1.metrics.reader": {"metrics": _METRICS},
    "version": {"": ("__version__", "__version_tuple__")},
    "worker": {},
    "worker.worker": {"engine_internals": ("Worker",)},
}
"""By module of vLLM, "" for `vllm` itself: names by the module here that has them."""

_SERVER = 'the HTTP server is `hardpoint serve --from-vllm "<flags>"`; docs/serving.md'
_SCHEDULERS = "schedulers: docs/write-a-scheduler.md"
_KV_CACHE = "the KV cache: docs/write-kv-cache-plugins.md"
_WORKERS = "code in workers is a step part: docs/step-parts.md"
_EXECUTORS = "executors: docs/write-an-executor.md"
_MODELS = "models: docs/write-a-model.md"
_OPERATIONS = "operations and kernels: docs/write-an-operation.md"
_SPECULATION = "speculation: docs/speculative-decoding.md"
_WEIGHTS = (
    "a running engine takes tensors by `llm.native.weights.update`, without a process group of "
    "its own: docs/hot-reconfiguration.md"
)
_ENGINES = "`llm.native` and `llm_engine` are the engine: docs/python-api.md"
_GRAMMARS = "grammar backends: docs/write-a-grammar-backend.md"
_MEDIA = "models take images: docs/multimodal-inputs.md"

COUNTERPARTS: Mapping[str, str] = {
    "_custom_ops": _OPERATIONS,
    "assets": "vLLM's sample files are in its own package; open images with PIL",
    "attention": "attention backends: docs/write-an-attention-backend.md",
    "benchmarks": "load generators: docs/benchmarks.md",
    "beam_search": "beam search: `LLM.beam_search`",
    "collect_env": "`hardpoint --version` and the engine's log name versions: docs/command-line.md",
    "compilation": "models are not compiled; executor.enforce_eager is about CUDA graphs",
    "config": "EngineArgs.create_engine_config and `llm_engine.vllm_config`: docs/configuration.md",
    "connections": "a client of HTTP, such as httpx",
    "core": _SCHEDULERS,
    "core.block_manager": _KV_CACHE,
    "device_allocator": "sleep mode: `LLM.sleep` and `LLM.wake_up`",
    "distributed": "ranks run in processes of the engine: docs/parallelism.md",
    "distributed.device_communicators": _WEIGHTS,
    "distributed.kv_events": "KV events: the option kv_events_config, docs/kv-connectors.md",
    "distributed.kv_transfer": "KV connectors: docs/write-a-kv-connector.md",
    "distributed.utils": _WEIGHTS,
    "distributed.weight_transfer": _WEIGHTS,
    "engine": _ENGINES,
    "engine.metrics": "stat sinks: docs/metrics.md",
    "engine.output_processor": _SCHEDULERS,
    "entrypoints": _SERVER,
    "entrypoints.chat_utils": "`LLM.chat` takes messages, and get_tokenizer().apply_chat_template",
    "entrypoints.llm": "docs/python-api.md",
    "envs": "settings are docs/configuration.md",
    "executor": _EXECUTORS,
    "forward_context": _WORKERS,
    "initialize_ray_cluster": 'distributed_executor_backend="ray" starts workers: docs/ray.md',
    "inputs": "prompts are texts, token ids, embeddings and images: docs/python-api.md",
    "lora": "adapters: docs/lora.md",
    "model_executor": _MODELS,
    "model_executor.custom_op": _OPERATIONS,
    "model_executor.guided_decoding": _GRAMMARS,
    "model_executor.layers": f"{_MODELS}; {_OPERATIONS}",
    "model_executor.layers.quantization": "quantizations: docs/write-a-quantization-scheme.md",
    "model_executor.model_loader": "loaders of weights: load.use, docs/models.md",
    "model_executor.parallel_utils": "ranks: docs/parallelism.md",
    "model_executor.sampling_metadata": "samplers: docs/write-a-sampler.md",
    "multimodal": f"{_MODELS}; {_MEDIA}",
    "multimodal.audio": f"audio is not supported; {_MEDIA}",
    "multimodal.utils": f"videos and audio are not supported; {_MEDIA}",
    "multimodal.video": f"videos are not supported; {_MEDIA}",
    "outputs": "docs/python-api.md",
    "platforms": "devices: the option device, docs/gpu.md",
    "plugins": "plugins: docs/first-plugin.md",
    "profiler": "profiles: `LLM.start_profile` with profiler_config",
    "prompt_adapter": "prompt adapters are not supported; adapters: docs/lora.md",
    "ray": "engines on Ray: docs/ray.md",
    "reasoning": "reasoning parsers: docs/write-an-output-parser.md",
    "scalar_type": _OPERATIONS,
    "scripts": "the command line: docs/command-line.md",
    "sequence": f"sequences of vLLM V0 are in the scheduler, docs/scheduler.md; {_ENGINES}",
    "spec_decode": _SPECULATION,
    "third_party": "import the package itself",
    "tool_parsers": "tool parsers: docs/write-an-output-parser.md",
    "tracing": 'traces: the sink "opentelemetry" of stats.sinks, docs/metrics.md',
    "transformers_utils": "transformers reads files of models: AutoConfig, AutoProcessor",
    "triton_utils": _OPERATIONS,
    "usage": "no usage is collected",
    "utils": "Python's library and torch have it",
    "utils.mem_utils": "memory of a GPU: torch.cuda.mem_get_info",
    "v1": _ENGINES,
    "v1.attention": "attention backends: docs/write-an-attention-backend.md",
    "v1.core": _KV_CACHE,
    "v1.core.sched": _SCHEDULERS,
    "v1.executor": _EXECUTORS,
    "v1.kv_offload": "tiers of the KV cache: docs/kv-connectors.md",
    "v1.metrics": "stat sinks: docs/metrics.md",
    "v1.metrics.reader": "`LLM.get_metrics`; docs/metrics.md",
    "v1.pool": "poolers: docs/write-an-activation-tap.md",
    "v1.sample": "samplers: docs/write-a-sampler.md",
    "v1.spec_decode": _SPECULATION,
    "v1.structured_output": _GRAMMARS,
    "v1.worker": _WORKERS,
    "worker": _WORKERS,
}
"""Counterparts of modules and names of vLLM; the longest path counts."""
