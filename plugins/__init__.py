"""The contract: what a plugin author imports, and nothing else.

Besides these names, some modules are public: `commands` (of the command line), `quantization` (for
weights of few bits), `executor` and `parallel`, and more for single kinds, which
docs/reference/types.md lists. Below the contract are `hardpoint.errors` and `hardpoint.typed`
(options and arguments); the libraries for authors are in `hardpoint.toolkit`.

Start with the interface of your kind (`LogitsProcessor`, `SchedulingPolicy`, ...), state the
kind's `contract` in your class, and register it under the entry-point group `hardpoint.<kind>`.
"""

from typing import Annotated

from msgspec import Meta

from hardpoint.errors import ConfigError, HardpointError, ModelError, OverloadedError, RequestError
from hardpoint.typed import Arguments, Options, State

from . import moved
from .activation_tap import ActivationTap, ActivationTapContext, TapRows, TapSite
from .adapter_resolver import AdapterResolver, AdapterResolverContext
from .arguments import PrepareContext
from .attention import AttentionBackend, AttentionContext, AttentionStep, KVSpec
from .balancer import BalancerContext, EngineView, LoadBalancer
from .commands import Command, CommandContext
from .config import EngineConfig
from .executor import Executor, ExecutorContext, WorkerInfo
from .frontend_half import FrontendHalf
from .grammars import GrammarBackend, GrammarContext
from .hooks import HookContext, hookimpl
from .io_processor import IOProcessor, IOProcessorContext
from .kv_cache import (
    AllBlocksCleared,
    BlockHistory,
    BlockIds,
    BlockRemoved,
    BlockStored,
    CachedBlocks,
    CachedPrefix,
    EvictionContext,
    EvictionPolicy,
    KVEventBatch,
    KVEventPublisher,
    PublisherContext,
)
from .kv_connector import KVConnector, KVConnectorContext
from .kv_store import KVStore, KVStoreContext
from .loader import LoaderContext, ModelConfig, ModelFiles, WeightFormat, WeightLoader
from .logits import (
    Added,
    BatchLogitsProcessor,
    BatchUpdate,
    Edits,
    LogitsContext,
    LogitsProcessor,
    LogitsRequest,
    Move,
    Moved,
    Phase,
    Reads,
    RowMap,
    Rows,
    SparseLogitsProcessor,
    TensorSpec,
)
from .logits_ops import LogitsOps, Op
from .markers import ReasoningMarkers, ReasoningPosition, ReasoningTracker
from .model import ForwardBatch, Model, ModelContext
from .ops import ClampedSwiGLU, Ops, OpsContext, Recorded
from .output_parser import OutputParser, OutputParserContext, ParserRequest
from .parallel import Communicator, CommunicatorContext
from .params import RepetitionDetection, RequestOutputKind, SamplingParams
from .plan import (
    CachedRequests,
    GrammarBitmask,
    ModelRunnerOutput,
    NewRequest,
    RequestFault,
    SchedulerOutput,
)
from .pooler import Pooler, PoolerContext, PromptPooler
from .quantization import Quantization, QuantizationContext
from .request import Request, RequestStatus
from .requests import (
    CompletionOutput,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    Logprob,
    LoRARequest,
    RequestOutput,
)
from .sampler import Sampler, SamplerContext, SamplingRows
from .scheduler import EncoderCache, PauseState, Scheduler, SchedulerContext
from .scheduling_policy import Load, PolicyContext, SchedulingPolicy
from .speculator import DraftRequest, Speculator, SpeculatorContext
from .stats import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineReport,
    FinishedRequest,
    IterationStats,
    KVTierStats,
    PluginReport,
    PrefillStats,
    PrefixCacheStats,
    SchedulerStats,
    StatSink,
    StatSinkContext,
)
from .step_cost import StepCost
from .step_part import EngineHalf, StepPart, StepPartContext
from .step_record import StepRecord, WaitingFor, WaitReason
from .tokenizer import DecodeStream, EncodedPair, Tokenizer, TokenizerContext
from .worker_half import WorkerHalf
from .wrapper import Wrapper

__all__ = [  # noqa: RUF022 - in groups by kind, which the reference shows
    # Every component: stable
    "Annotated",
    "Arguments",
    "Meta",
    "Options",
    "PrepareContext",
    "State",
    # Wrappers: provisional
    "Wrapper",
    # Errors: stable
    "ConfigError",
    "HardpointError",
    "ModelError",
    "OverloadedError",
    "RequestError",
    # Requests and outputs: stable
    "CompletionOutput",
    "FinishReason",
    "Logprob",
    "RepetitionDetection",
    "Request",
    "RequestOutput",
    "RequestOutputKind",
    "RequestStatus",
    "SamplingParams",
    # Logits processors: stable
    "Added",
    "BatchLogitsProcessor",
    "BatchUpdate",
    "Edits",
    "EncodedPair",
    "LogitsContext",
    "LogitsOps",
    "LogitsProcessor",
    "LogitsRequest",
    "Move",
    "Moved",
    "Op",
    "Phase",
    "Reads",
    "RowMap",
    "Rows",
    "SparseLogitsProcessor",
    "TensorSpec",
    # Samplers: provisional
    "Sampler",
    "SamplerContext",
    "SamplingRows",
    # Balancers: provisional
    "BalancerContext",
    "EngineView",
    "LoadBalancer",
    # Speculators: provisional
    "DraftRequest",
    "Speculator",
    "SpeculatorContext",
    # Activation taps: provisional
    "ActivationTap",
    "ActivationTapContext",
    "TapRows",
    "TapSite",
    # Poolers: provisional
    "Pooler",
    "PoolerContext",
    "PromptPooler",
    # Scheduling policies: stable
    "Load",
    "PolicyContext",
    "SchedulingPolicy",
    # Schedulers, the plan of a step and its outcome: provisional
    "CachedRequests",
    "EncoderCache",
    "EngineCoreEvent",
    "EngineCoreEventType",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "LoRARequest",
    "GrammarBitmask",
    "ModelRunnerOutput",
    "NewRequest",
    "PauseState",
    "PrefillStats",
    "RequestFault",
    "Scheduler",
    "SchedulerContext",
    "SchedulerOutput",
    "StepCost",
    "StepRecord",
    "WaitReason",
    "WaitingFor",
    # Eviction policies: stable
    "BlockHistory",
    "BlockIds",
    "CachedBlocks",
    "CachedPrefix",
    "EvictionContext",
    "EvictionPolicy",
    # KV event publishers: provisional
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "KVEventBatch",
    "KVEventPublisher",
    "PublisherContext",
    # KV connectors and KV stores: provisional
    "KVConnector",
    "KVConnectorContext",
    "KVStore",
    "KVStoreContext",
    "KVTierStats",
    # Communicators: provisional
    "Communicator",
    "CommunicatorContext",
    # Executors: provisional
    "Executor",
    "ExecutorContext",
    "WorkerInfo",
    # Models, loaders and attention backends: provisional
    "AttentionBackend",
    "AttentionContext",
    "AttentionStep",
    "ForwardBatch",
    "KVSpec",
    "LoaderContext",
    "Model",
    "ModelConfig",
    "ModelContext",
    "ModelFiles",
    "ClampedSwiGLU",
    "Ops",
    "OpsContext",
    "Quantization",
    "QuantizationContext",
    "Recorded",
    "WeightFormat",
    "WeightLoader",
    # Tokenizers: provisional
    "DecodeStream",
    "Tokenizer",
    "TokenizerContext",
    # Grammar backends: provisional
    "GrammarBackend",
    "GrammarContext",
    # Output parsers: provisional
    "OutputParser",
    "OutputParserContext",
    "ParserRequest",
    "ReasoningMarkers",
    "ReasoningPosition",
    "ReasoningTracker",
    # Adapter resolvers: provisional
    "AdapterResolver",
    "AdapterResolverContext",
    # IO processors: provisional
    "IOProcessor",
    "IOProcessorContext",
    # Stat sinks: stable
    "EngineReport",
    "FinishedRequest",
    "IterationStats",
    "PluginReport",
    "PrefixCacheStats",
    "SchedulerStats",
    "StatSink",
    "StatSinkContext",
    # Step parts: provisional
    "EngineHalf",
    "FrontendHalf",
    "StepPart",
    "StepPartContext",
    "WorkerHalf",
    # Hooks and commands: provisional
    "Command",
    "CommandContext",
    "EngineConfig",
    "HookContext",
    "hookimpl",
]

moved.register(__name__)
