"""Interfaces of step parts: frontend, engine and worker hooks, and speculators."""

from hardpoint.plugins.model.forward import Forward as Forward
from hardpoint.plugins.model.forward import ForwardStep as ForwardStep
from hardpoint.plugins.model.forward import PackedInputs as PackedInputs

from .components import ComponentCalls as ComponentCalls
from .components import (
    ComponentFactory,
)
from .components import FaultCounter as FaultCounter
from .engine import REQUEST_FIELDS as REQUEST_FIELDS
from .engine import (
    EngineHalf,
    EngineHalfContext,
)
from .part import (
    FrontendHalf,
    FrontendHalfContext,
    GivenPrompt,
    StepPart,
    StepPartContext,
)
from .part import PromptReader as PromptReader
from .part import ToolCalls as ToolCalls
from .speculator import (
    DraftRequest,
    Speculator,
    SpeculatorContext,
)
from .worker import AllocatedCache as AllocatedCache
from .worker import KVBlocks as KVBlocks
from .worker import LoadedModel as LoadedModel
from .worker import ModelOpener as ModelOpener
from .worker import SequenceModel as SequenceModel
from .worker import StepModel as StepModel
from .worker import (
    StepRows,
    WorkerHalf,
    WorkerHalfContext,
)

__all__ = [
    "ComponentFactory",
    "DraftRequest",
    "EngineHalf",
    "EngineHalfContext",
    "FrontendHalf",
    "FrontendHalfContext",
    "GivenPrompt",
    "Speculator",
    "SpeculatorContext",
    "StepPart",
    "StepPartContext",
    "StepRows",
    "WorkerHalf",
    "WorkerHalfContext",
]
