"""The contract: the names that a plugin author imports.

Besides these names, some modules are public: `commands` (of the command line), `quantization`,
`executor` and `parallel`, and more for single kinds, which `scripts/reference` lists. They only
re-export: the definitions are in folders by reader, `sampling`, `scheduling`, `kv_cache`, `model`,
`text`, `process`, `step_part` and `server`, above `component`, `config` and `requests`. Each of
these packages exports the public names of its modules. Below the contract are `hardpoint.errors`
and `hardpoint.typed` (options and arguments); the libraries for authors are in `hardpoint.toolkit`.

Start with the interface of your kind (`LogitsProcessor`, `SchedulingPolicy`, ...), state the
kind's `contract` in your class, and register it under the entry-point group `hardpoint.<kind>`.
"""

from typing import Annotated

from msgspec import Meta

from hardpoint.errors import ConfigError, HardpointError, ModelError, OverloadedError, RequestError
from hardpoint.typed import Arguments, Options, State

from .component.adapter import AdaptedComponent, ComponentAdapter
from .component.wrapper import Wrapper
from .config.engine import EngineConfig
from .config.model_files import ModelConfig, ModelFiles
from .kv_cache.connector import KVConnector, KVConnectorContext
from .kv_cache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    KVEventPublisher,
    PublisherContext,
)
from .kv_cache.eviction import EvictionContext, EvictionPolicy
from .kv_cache.manager import CachedPrefix
from .kv_cache.store import KVStore, KVStoreContext
from .model.attention import AttentionBackend, AttentionContext
from .model.attention_step import AttentionStep, KVSpec
from .model.forward import ForwardBatch, TensorSpec
from .model.loader import LoaderContext, WeightFormat, WeightLoader
from .model.logits_ops import LogitsOps, Op
from .model.model import Model, ModelContext
from .model.ops import ClampedSwiGLU, Ops, OpsContext
from .model.ops import Recorded as Recorded
from .model.quantization import Quantization, QuantizationContext
from .process.balancer import BalancerContext, EngineView, LoadBalancer
from .process.executor import Executor, ExecutorContext
from .process.executor import WorkerInfo as WorkerInfo
from .process.parallel import Communicator, CommunicatorContext
from .requests.lora import LoRARequest
from .requests.markers import ReasoningMarkers, ReasoningTracker
from .requests.outputs import (
    CompletionOutput,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    Logprob,
    RequestOutput,
)
from .requests.params import (
    EngineCoreRequest,
    RepetitionDetection,
    RequestOutputKind,
    SamplingParams,
)
from .requests.plan import BlockIds as BlockIds
from .requests.plan import (
    CachedRequests,
    Finish,
    GrammarBitmask,
    ModelRunnerOutput,
    NewRequest,
    RequestFault,
    SchedulerOutput,
)
from .requests.request import Request, RequestStatus
from .requests.stats import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineReport,
    FinishedRequest,
    IterationStats,
    KVTierStats,
    PrefillStats,
    PrefixCacheStats,
    SchedulerStats,
)
from .requests.stats import PluginReport as PluginReport
from .sampling.activation_tap import ActivationTap, ActivationTapContext, TapRows, TapSite
from .sampling.logits import (
    BatchLogitsProcessor,
    Edits,
    LogitsContext,
    LogitsProcessor,
    Reads,
    SparseLogitsProcessor,
)
from .sampling.phases import Phase
from .sampling.pooler import Pooler, PoolerContext, PromptPooler
from .sampling.rows import BatchUpdate, LogitsRequest, Move, RowMap, Rows
from .sampling.sampler import Sampler, SamplerContext
from .sampling.sampler import SamplingRows as SamplingRows
from .scheduling.policy import Load, PolicyContext, SchedulingPolicy
from .scheduling.scheduler import PauseState, Scheduler, SchedulerContext
from .scheduling.step_cost import StepCost
from .scheduling.step_record import StepRecord, WaitingFor, WaitReason
from .server.adapter_resolver import AdapterResolver, AdapterResolverContext
from .server.commands import Command, CommandContext
from .server.hooks import HookContext, hookimpl
from .server.stat_sink import StatSink, StatSinkContext
from .step_part.engine_hooks import AdmissionGate as AdmissionGate
from .step_part.engine_hooks import BlockKey as BlockKey
from .step_part.engine_hooks import BlockTransfer as BlockTransfer
from .step_part.engine_hooks import DraftTokens as DraftTokens
from .step_part.engine_hooks import EncoderBudget as EncoderBudget
from .step_part.engine_hooks import OutputFigures as OutputFigures
from .step_part.engine_hooks import PlanData as PlanData
from .step_part.engine_hooks import ProgramCalls as ProgramCalls
from .step_part.engine_hooks import RequestFilter as RequestFilter
from .step_part.engine_hooks import RequestLifecycle as RequestLifecycle
from .step_part.engine_hooks import ResourceCost as ResourceCost
from .step_part.engine_hooks import StepObserver as StepObserver
from .step_part.engine_hooks import TokenMask as TokenMask
from .step_part.engine_hooks import WorkerSetup as WorkerSetup
from .step_part.halves import EngineHalf, WorkerHalf
from .step_part.part import FrontendHalf, StepPart, StepPartContext
from .step_part.speculator import DraftRequest, Speculator, SpeculatorContext
from .step_part.worker_hooks import BlockAccess as BlockAccess
from .step_part.worker_hooks import CacheObserver as CacheObserver
from .step_part.worker_hooks import ForwardWrapper as ForwardWrapper
from .step_part.worker_hooks import HiddenStates as HiddenStates
from .step_part.worker_hooks import InputEmbeddings as InputEmbeddings
from .step_part.worker_hooks import LayerWrapper as LayerWrapper
from .step_part.worker_hooks import LinearProducts as LinearProducts
from .step_part.worker_hooks import ModelLogits as ModelLogits
from .step_part.worker_hooks import ResidualStream as ResidualStream
from .step_part.worker_hooks import WorkerCalls as WorkerCalls
from .step_part.worker_hooks import WorkerMemory as WorkerMemory
from .step_part.worker_hooks import WorkerStep as WorkerStep
from .text.arguments import PrepareContext
from .text.grammars import GrammarBackend, GrammarContext
from .text.io_processor import IOProcessor, IOProcessorContext
from .text.output_parser import OutputParser, OutputParserContext
from .text.output_parser import ParserRequest as ParserRequest
from .text.tokenizer import DecodeStream as DecodeStream
from .text.tokenizer import EncodedPair, Tokenizer, TokenizerContext

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
    # Adapters of components: provisional
    "AdaptedComponent",
    "ComponentAdapter",
    # Errors: stable
    "ConfigError",
    "HardpointError",
    "ModelError",
    "OverloadedError",
    "RequestError",
    # Requests and outputs: stable
    "CompletionOutput",
    "Finish",
    "FinishReason",
    "Logprob",
    "RepetitionDetection",
    "Request",
    "RequestOutput",
    "RequestOutputKind",
    "RequestStatus",
    "SamplingParams",
    # Logits processors: stable
    "BatchLogitsProcessor",
    "BatchUpdate",
    "Edits",
    "EncodedPair",
    "LogitsContext",
    "LogitsOps",
    "LogitsProcessor",
    "LogitsRequest",
    "Move",
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
    # Models, loaders and attention backends: provisional
    "AttentionBackend",
    "AttentionContext",
    "AttentionStep",
    "ForwardBatch",
    "KVSpec",
    "Model",
    "ModelConfig",
    "ModelContext",
    "ModelFiles",
    "ClampedSwiGLU",
    "Ops",
    "OpsContext",
    "Quantization",
    "QuantizationContext",
    "LoaderContext",
    "WeightFormat",
    "WeightLoader",
    # Tokenizers: provisional
    "Tokenizer",
    "TokenizerContext",
    # Grammar backends: provisional
    "GrammarBackend",
    "GrammarContext",
    # Output parsers: provisional
    "OutputParser",
    "OutputParserContext",
    "ReasoningMarkers",
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
