"""Names of the package that are light to import: parameters, outputs, errors."""

from hardpoint.errors import (
    ConversationEndedError,
    EngineClosedError,
    EngineDeadError,
    EnginePausedError,
    EngineTimeoutError,
    PluginError,
)
from hardpoint.plugins import (
    CompletionOutput,
    ConfigError,
    EngineConfig,
    HardpointError,
    Logprob,
    LoRARequest,
    ModelError,
    OverloadedError,
    RequestError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.requests import PoolingRequestOutput

__all__ = [
    "CompletionOutput",
    "ConfigError",
    "ConversationEndedError",
    "EngineClosedError",
    "EngineConfig",
    "EngineDeadError",
    "EnginePausedError",
    "EngineTimeoutError",
    "HardpointError",
    "LoRARequest",
    "Logprob",
    "ModelError",
    "OverloadedError",
    "PluginError",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
]
