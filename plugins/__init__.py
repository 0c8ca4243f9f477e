"""The contract: everything that a plugin author imports, and nothing else.

Start with the interface of your kind (`LogitsProcessor`, `SchedulingPolicy`, ...), state
`contract = 1` in your class, and register it under the entry-point group `hardpoint.<kind>`.
"""

from typing import Annotated

from msgspec import Meta

from .commands import Command, CommandContext
from .component import Component, Context, Progress
from .config import EngineConfig, Origins
from .discovery import Found, discover
from .errors import (
    ConfigError,
    EngineClosedError,
    HardpointError,
    ModelError,
    PluginConflictError,
    PluginContractError,
    PluginError,
    PluginFaultError,
    PluginLoadError,
    PluginNotFoundError,
    RequestError,
)
from .execution import Executor, ExecutorContext, ModelRunnerOutput, Worker, WorkerInfo
from .hooks import hookimpl
from .kinds import KINDS, Kind
from .logits import (
    Edits,
    LogitsContext,
    LogitsProcessor,
    LogitsRequest,
    Op,
    Phase,
    PrepareContext,
    Rows,
    SparseLogitsProcessor,
)
from .manifest import Manifest, PluginEntry
from .modeling import (
    AttentionBackend,
    AttentionContext,
    AttentionStep,
    ForwardBatch,
    KVSpec,
    LoaderContext,
    Model,
    ModelConfig,
    ModelContext,
    ModelFiles,
    WeightLoader,
)
from .params import RequestOutputKind, SamplingParams
from .registry import PluginSet, resolve_plugins
from .requests import (
    CompletionOutput,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    Logprob,
    RequestOutput,
    TokenLogprobs,
)
from .sampling import Sampler, SamplerContext, SamplingRows
from .scheduling import (
    CachedRequest,
    KVCacheManager,
    NewRequest,
    PolicyContext,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerContext,
    SchedulerLimits,
    SchedulerOutput,
    SchedulingPolicy,
)
from .tokenizing import DecodeStream, Tokenizer, TokenizerContext
from .typed import Arguments, Options

__all__ = [
    "KINDS",
    "Annotated",
    "Arguments",
    "AttentionBackend",
    "AttentionContext",
    "AttentionStep",
    "CachedRequest",
    "Command",
    "CommandContext",
    "CompletionOutput",
    "Component",
    "ConfigError",
    "Context",
    "DecodeStream",
    "Edits",
    "EngineClosedError",
    "EngineConfig",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "Executor",
    "ExecutorContext",
    "FinishReason",
    "ForwardBatch",
    "Found",
    "HardpointError",
    "KVCacheManager",
    "KVSpec",
    "Kind",
    "LoaderContext",
    "LogitsContext",
    "LogitsProcessor",
    "LogitsRequest",
    "Logprob",
    "Manifest",
    "Meta",
    "Model",
    "ModelConfig",
    "ModelContext",
    "ModelError",
    "ModelFiles",
    "ModelRunnerOutput",
    "NewRequest",
    "Op",
    "Options",
    "Origins",
    "Phase",
    "PluginConflictError",
    "PluginContractError",
    "PluginEntry",
    "PluginError",
    "PluginFaultError",
    "PluginLoadError",
    "PluginNotFoundError",
    "PluginSet",
    "PolicyContext",
    "PrepareContext",
    "Progress",
    "Request",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "RequestStatus",
    "Rows",
    "Sampler",
    "SamplerContext",
    "SamplingParams",
    "SamplingRows",
    "Scheduler",
    "SchedulerContext",
    "SchedulerLimits",
    "SchedulerOutput",
    "SchedulingPolicy",
    "SparseLogitsProcessor",
    "TokenLogprobs",
    "Tokenizer",
    "TokenizerContext",
    "WeightLoader",
    "Worker",
    "WorkerInfo",
    "discover",
    "hookimpl",
    "resolve_plugins",
]
