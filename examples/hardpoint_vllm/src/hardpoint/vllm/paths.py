"""The module paths of vLLM with names that this package has."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

PACKAGE = "hardpoint.vllm"

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
    "PromptType",
    "TextPrompt",
    "TokensPrompt",
    "EmbedsPrompt",
    "ExplicitEncoderDecoderPrompt",
    "tokens_input",
)
_CONFIGS = (
    "AttentionConfig",
    "CacheConfig",
    "CompilationConfig",
    "CompilationLevel",
    "CompilationMode",
    "CUDAGraphMode",
    "DeviceConfig",
    "ECTransferConfig",
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
    "ReasoningConfig",
    "SchedulerConfig",
    "SpeculativeConfig",
    "StructuredOutputsConfig",
    "VllmConfig",
    "WeightTransferConfig",
)
_METRICS = ("Counter", "Gauge", "Histogram", "Metric", "Vector")

PATHS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "": {
        "llm": ("LLM",),
        "engine_args": ("EngineArgs", "AsyncEngineArgs"),
        "engines": ("LLMEngine", "AsyncLLMEngine", "AsyncLLM"),
        "params": (*_PARAMS, "PoolingParams", "LoRARequest"),
        "outputs": _OUTPUTS,
        "inputs": ("PromptType", "TextPrompt", "TokensPrompt"),
        "configs": ("ModelRegistry",),
    },
    "assets": {},
    "beam_search": {"beams": ("BeamSearchOutput", "BeamSearchSequence")},
    "config": {"configs": _CONFIGS},
    "config.compilation": {"configs": ("CompilationConfig", "CompilationMode", "CUDAGraphMode")},
    "config.kv_transfer": {"configs": ("KVTransferConfig",)},
    "config.kv_events": {"configs": ("KVEventsConfig",)},
    "config.pooler": {"configs": ("PoolerConfig",)},
    "config.structured_outputs": {"configs": ("StructuredOutputsConfig",)},
    "config.speculative": {"configs": ("SpeculativeConfig",)},
    "config.profiler": {"configs": ("ProfilerConfig",)},
    "distributed": {"helpers": ("cleanup_dist_env_and_memory",)},
    "distributed.parallel_state": {
        "helpers": (
            "cleanup_dist_env_and_memory",
            "destroy_distributed_environment",
            "destroy_model_parallel",
            "get_world_group",
        ),
    },
    "engine": {},
    "engine.arg_utils": {"engine_args": ("EngineArgs", "AsyncEngineArgs")},
    "engine.async_llm_engine": {"engines": ("AsyncLLMEngine", "AsyncEngineDeadError")},
    "engine.llm_engine": {"engines": ("LLMEngine",)},
    "engine.protocol": {"engines": ("EngineClient",)},
    "entrypoints": {},
    "entrypoints.llm": {"llm": ("LLM",)},
    "entrypoints.chat_utils": {"inputs": ("ChatCompletionMessageParam", "load_chat_template")},
    "envs": {},
    "exceptions": {"helpers": ("VLLMValidationError", "GenerationError")},
    "logger": {"helpers": ("init_logger",)},
    "inputs.data": {"inputs": _INPUTS},
    "logprobs": {"outputs": ("Logprob", "PromptLogprobs", "SampleLogprobs")},
    "lora": {},
    "lora.request": {"params": ("LoRARequest",)},
    "model_executor": {},
    "model_executor.guided_decoding": {"params": ("GuidedDecodingParams",)},
    "model_executor.models": {"configs": ("ModelRegistry",)},
    "model_executor.utils": {"helpers": ("set_random_seed",)},
    "multimodal": {},
    "multimodal.utils": {"helpers": ("encode_image_base64", "encode_image_url", "fetch_image")},
    "platforms": {"helpers": ("current_platform",)},
    "pooling_params": {"params": ("PoolingParams",)},
    "renderers": {},
    "renderers.chat_utils": {"inputs": ("ChatCompletionMessageParam", "load_chat_template")},
    "sampling_params": {"params": _PARAMS},
    "sequence": {"outputs": ("Logprob", "RequestMetrics", "SampleLogprobs")},
    "tokenizers": {
        "tokenizer": (
            "AnyTokenizer",
            "TokenizerLike",
            "cached_tokenizer_from_config",
            "get_tokenizer",
        ),
    },
    "transformers_utils": {},
    "transformers_utils.tokenizer": {"tokenizer": ("AnyTokenizer", "get_tokenizer")},
    "usage": {},
    "usage.usage_lib": {"helpers": ("UsageContext",)},
    "utils": {
        "engine_args": ("FlexibleArgumentParser",),
        "helpers": ("Counter", "get_ip", "get_open_port", "random_uuid"),
    },
    "utils.argparse_utils": {"engine_args": ("FlexibleArgumentParser",)},
    "utils.network_utils": {"helpers": ("get_ip", "get_open_port")},
    "utils.torch_utils": {"helpers": ("set_random_seed",)},
    "v1": {},
    "v1.engine": {},
    "v1.engine.async_llm": {"engines": ("AsyncLLM",)},
    "v1.engine.exceptions": {"engines": ("EngineDeadError", "EngineGenerateError")},
    "v1.engine.llm_engine": {"engines": ("LLMEngine",)},
    "v1.metrics": {},
    "v1.metrics.reader": {"metrics": _METRICS},
    "utils.print_utils": {"helpers": ("print_embeddings",)},
    "version": {"": ("__version__", "__version_tuple__")},
}
"""By module of vLLM, "" for `vllm` itself: names by the module here that has them."""

_ELSEWHERE = {
    "model_executor.models.interfaces": "models: docs/write-a-model.md",
    "plugins": "plugins: docs/first-plugin.md",
    "distributed.kv_transfer": "KV connectors: docs/write-a-kv-connector.md",
    "v1.metrics": "stat sinks: docs/metrics.md",
    "reasoning": "reasoning parsers: docs/write-an-output-parser.md",
    "tool_parsers": "tool parsers: docs/write-an-output-parser.md",
    "entrypoints.openai": "the HTTP server is `hardpoint serve`; docs/serving.md",
    "assets": "vLLM's sample files are in its own package; open images with PIL",
    "benchmarks": "load generators: docs/benchmarks.md",
}


def names_of(path: str) -> dict[str, str]:
    """Return the names that a module of vLLM has here, each with the module that defines it."""
    modules = PATHS.get(path, {})
    return {name: module for module, names in modules.items() for name in names}


class _Loader(importlib.abc.Loader):
    def __init__(self, path: str) -> None:
        self._path = path

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        del spec  # a plain module will do
        return None

    def exec_module(self, module: ModuleType) -> None:
        if self._path == "envs":
            module.__getattr__ = _environment_variable  # type: ignore[method-assign]
            return
        sources = names_of(self._path)
        others = _plugin_modules().get(f"vllm.{self._path}", {})
        vars(module).update({name: value for name, value in others.items() if name not in sources})

        def get(name: str) -> Any:
            if (source := sources.get(name)) is not None:
                return getattr(import_module(f"{PACKAGE}.{source}".rstrip(".")), name)
            raise AttributeError(missing(f"{self._path}.{name}"))

        module.__getattr__ = get  # type: ignore[method-assign]
        module.__all__ = [*sources, *others]  # type: ignore[attr-defined]


class PathFinder(importlib.abc.MetaPathFinder):
    """Finds the modules of `PATHS`; the error of others names the nearest thing."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module of vLLM's path.

        Raises:
            ModuleNotFoundError: vLLM may have it, and this package does not.
        """
        del path, target  # the name is enough
        prefix = PACKAGE + "."
        if not fullname.startswith(prefix):
            return None
        name = fullname.removeprefix(prefix)
        if name not in PATHS and f"vllm.{name}" not in _plugin_modules():
            if name.rpartition(".")[2].startswith("__"):
                return None
            raise ModuleNotFoundError(missing(name), name=fullname)
        spec = importlib.machinery.ModuleSpec(fullname, _Loader(name), is_package=True)
        spec.submodule_search_locations = []
        return spec


def _plugin_modules() -> Mapping[str, Mapping[str, Any]]:
    """Return the names that modules of vLLM have for authors of plugins, by module."""
    from hardpoint_vllm.stand_ins import MODULES  # noqa: PLC0415

    return MODULES


def missing(name: str) -> str:
    """Return the error for a name of vLLM that is not here, with the nearest thing."""
    hints = [hint for start, hint in _ELSEWHERE.items() if f"{name}.".startswith(f"{start}.")]
    hint = hints[0] if hints else "docs/migrate-from-vllm.md lists its replacement"
    return f"hardpoint.vllm has no counterpart of vllm.{name} ({hint})"


def _environment_variable(name: str) -> Any:
    """Return the value of a variable VLLM_...; None if it is not set."""
    import os  # noqa: PLC0415

    if not name.startswith("VLLM_"):
        raise AttributeError(missing(f"envs.{name}"))
    return os.environ.get(name)
