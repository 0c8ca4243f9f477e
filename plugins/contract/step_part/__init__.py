"""Interfaces of step parts: frontend, engine and worker hooks, and speculators."""

from hardpoint.plugins.model.forward import Forward as Forward
from hardpoint.plugins.model.forward import ForwardStep as ForwardStep
from hardpoint.plugins.model.forward import PackedInputs as PackedInputs
from hardpoint.plugins.sampling.rows import DraftedStep as DraftedStep

from .components import ComponentCalls as ComponentCalls
from .components import ComponentFactory as ComponentFactory
from .components import FaultCounter as FaultCounter
from .engine import REQUEST_FIELDS as REQUEST_FIELDS
from .engine import (
    EngineHalfContext,
)
from .engine_hooks import (
    AdmissionGate,
    BlockKey,
    BlockTransfer,
    DraftTokens,
    EncoderBudget,
    OutputFigures,
    PlanData,
    ProgramCalls,
    RequestFilter,
    RequestLifecycle,
    ResourceCost,
    StepObserver,
    TokenMask,
    WorkerSetup,
)
from .halves import EngineHalf, WorkerHalf
from .observer import OutputObserver, PreparedPartChange
from .part import (
    FrontendHalf,
    FrontendHalfContext,
    GivenPrompt,
    StepPart,
    StepPartContext,
)
from .part import PromptReader as PromptReader
from .speculator import (
    DraftRequest,
    Speculator,
    SpeculatorContext,
)
from .worker import LoadedModel as LoadedModel
from .worker import ModelOpener as ModelOpener
from .worker import SequenceModel as SequenceModel
from .worker import StepModel as StepModel
from .worker import WorkerHalfContext
from .worker_data import AllocatedCache as AllocatedCache
from .worker_data import KVBlocks as KVBlocks
from .worker_data import StepRows as StepRows
from .worker_hooks import (
    BlockAccess,
    CacheObserver,
    ForwardWrapper,
    HiddenStates,
    InputEmbeddings,
    LayerWrapper,
    LinearProducts,
    ModelLogits,
    ResidualStream,
    WorkerCalls,
    WorkerMemory,
    WorkerStep,
)
from .worker_hooks import DraftVerifier as DraftVerifier

__all__ = [
    "AdmissionGate",
    "BlockAccess",
    "BlockKey",
    "BlockTransfer",
    "CacheObserver",
    "DraftRequest",
    "DraftTokens",
    "EncoderBudget",
    "EngineHalf",
    "EngineHalfContext",
    "ForwardWrapper",
    "FrontendHalf",
    "FrontendHalfContext",
    "GivenPrompt",
    "HiddenStates",
    "InputEmbeddings",
    "LayerWrapper",
    "LinearProducts",
    "ModelLogits",
    "OutputFigures",
    "OutputObserver",
    "PlanData",
    "PreparedPartChange",
    "ProgramCalls",
    "RequestFilter",
    "RequestLifecycle",
    "ResidualStream",
    "ResourceCost",
    "Speculator",
    "SpeculatorContext",
    "StepObserver",
    "StepPart",
    "StepPartContext",
    "TokenMask",
    "WorkerCalls",
    "WorkerHalf",
    "WorkerHalfContext",
    "WorkerMemory",
    "WorkerSetup",
    "WorkerStep",
]
