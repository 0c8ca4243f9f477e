"""The contract: everything that a plugin author imports, and nothing else.

Start with the interface of your kind (`LogitsProcessor`, `SchedulingPolicy`, ...), state
`contract = 1` in your class, and register it under the entry-point group `hardpoint.<kind>`.
"""

from typing import Annotated

from msgspec import Meta

from .batch_update import Added, BatchUpdate, Move, Moved, RowMap
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
from .execution import (
    Executor,
    ExecutorContext,
    ModelRunnerOutput,
    PluginMeter,
    RequestFault,
    Worker,
    WorkerInfo,
)
from .hooks import hookimpl
from .kinds import KINDS, Kind
from .logits import (
    BatchLogitsProcessor,
    Edits,
    LogitsContext,
    LogitsProcessor,
    LogitsRequest,
    Op,
    Phase,
    PrepareContext,
    Reads,
    Rows,
    SparseLogitsProcessor,
    TensorSpec,
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
from .params import RepetitionDetection, RequestOutputKind, SamplingParams
from .reasoning import ReasoningContext, ReasoningMarkers, ReasoningParser
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
    "Added",
    "Annotated",
    "Arguments",
    "AttentionBackend",
    "AttentionContext",
    "AttentionStep",
    "BatchLogitsProcessor",
    "BatchUpdate",
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
    "Move",
    "Moved",
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
    "PluginMeter",
    "PluginNotFoundError",
    "PluginSet",
    "PolicyContext",
    "PrepareContext",
    "Progress",
    "Reads",
    "ReasoningContext",
    "ReasoningMarkers",
    "ReasoningParser",
    "RepetitionDetection",
    "Request",
    "RequestError",
    "RequestFault",
    "RequestOutput",
    "RequestOutputKind",
    "RequestStatus",
    "RowMap",
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
    "TensorSpec",
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
