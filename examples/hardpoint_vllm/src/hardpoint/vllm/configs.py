"""vLLM's configuration objects, which hold the values that arguments of engines take."""

from __future__ import annotations

import json
from enum import IntEnum, StrEnum
from typing import Any, Self

from hardpoint.errors import ConfigError


class GivenValues:
    """Values by keyword; attributes that were not given are None.

    Attributes:
        given: the values.
    """

    given: dict[str, Any]

    def __init__(self, *positional: Any, **values: Any) -> None:
        if positional:
            raise TypeError(f"{type(self).__name__}: expected keyword arguments")
        object.__setattr__(self, "given", dict(values))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "given":
            raise AttributeError(name)
        return self.given.get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.given[name] = value

    @classmethod
    def from_cli(cls, cli_value: str) -> Self:
        """Return the values of a JSON object."""
        return cls(**json.loads(cli_value))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.given == self.given

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self.given.items())
        return f"{type(self).__name__}({values})"


def _config(name: str, text: str) -> type[GivenValues]:
    return type(name, (GivenValues,), {"__doc__": text, "__module__": __name__})


AttentionConfig = _config("AttentionConfig", "Values of `attention_config`.")
CacheConfig = _config("CacheConfig", "Values of the KV cache.")
CompilationConfig = _config("CompilationConfig", "Values of `compilation_config`.")
DecodingConfig = _config("DecodingConfig", "Values of structured outputs, before vLLM 0.11.")
DeviceConfig = _config("DeviceConfig", "Values of the device.")
DynamicShapesConfig = _config("DynamicShapesConfig", "Values of the compiler.")
ECTransferConfig = _config("ECTransferConfig", "Values of `ec_transfer_config`.")
EPLBConfig = _config("EPLBConfig", "Values of `eplb_config`.")
KernelConfig = _config("KernelConfig", "Values of `kernel_config`.")
KVEventsConfig = _config("KVEventsConfig", "Values of `kv_events_config`.")
KVTransferConfig = _config("KVTransferConfig", "Values of `kv_transfer_config`.")
LoadConfig = _config("LoadConfig", "Values of the loader.")
LoRAConfig = _config("LoRAConfig", "Values of adapters.")
ModelConfig = _config("ModelConfig", "Values of the model.")
MultiModalConfig = _config("MultiModalConfig", "Values of images.")
ObservabilityConfig = _config("ObservabilityConfig", "Values of metrics and traces.")
ParallelConfig = _config("ParallelConfig", "Values of ranks and engines.")
PassConfig = _config("PassConfig", "Values of the compiler.")
PoolerConfig = _config("PoolerConfig", "Values of `pooler_config`.")
ProfilerConfig = _config("ProfilerConfig", "Values of `profiler_config`.")
PromptAdapterConfig = _config("PromptAdapterConfig", "Values of prompt adapters.")
ReasoningConfig = _config("ReasoningConfig", "Values of `reasoning_config`.")
SchedulerConfig = _config("SchedulerConfig", "Values of the scheduler.")
SpeculativeConfig = _config("SpeculativeConfig", "Values of `speculative_config`.")
StructuredOutputsConfig = _config("StructuredOutputsConfig", "Values of structured outputs.")
TokenizerPoolConfig = _config("TokenizerPoolConfig", "Values of vLLM V0's pool of tokenizers.")
WeightTransferConfig = _config("WeightTransferConfig", "Values of `weight_transfer_config`.")


class VllmConfig(GivenValues):
    """All values of an engine."""


BlockSize = int
HfOverrides = dict[str, Any]
CacheDType = ConvertOption = Device = DistributedExecutorBackend = GuidedDecodingBackend = str
LogprobsMode = ModelDType = PoolingTypeStr = QuantizationMethods = RunnerOption = str
SchedulerPolicy = TaskOption = TokenizerMode = str


class CompilationMode(IntEnum):
    """How vLLM compiles a model; nothing here."""

    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    VLLM_COMPILE = 3


class CompilationLevel(IntEnum):
    """The name of CompilationMode before vLLM 0.12."""

    NO_COMPILATION = 0
    DYNAMO_AS_IS = 1
    DYNAMO_ONCE = 2
    PIECEWISE = 3


class CUDAGraphMode(IntEnum):
    """How vLLM records graphs; Hardpoint records decode steps unless `enforce_eager` is set."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = 3
    FULL_AND_PIECEWISE = 4


class DynamicShapesType(StrEnum):
    """The sizes that vLLM compiles for, which nothing reads here."""

    BACKED = "backed"
    UNBACKED = "unbacked"
    BACKED_SIZE_OBLIVIOUS = "backed_size_oblivious"


class ModelRegistry:
    """vLLM's registry of models; Hardpoint's models are plugins."""

    @staticmethod
    def register_model(architecture: str, model: Any) -> None:
        """Refuse a model.

        Raises:
            ConfigError: always, with the way to add a model.
        """
        raise ConfigError(
            f"ModelRegistry: a model is a plugin of the kind `models` (docs/write-a-model.md), got "
            f"{model!r} for {architecture!r}"
        )

    @staticmethod
    def get_supported_archs() -> list[str]:
        """Return the architectures that installed models support."""
        from hardpoint.host.registry.discovery import discover  # noqa: PLC0415

        return sorted({plugin.name for plugin in discover() if plugin.kind == "models"})
