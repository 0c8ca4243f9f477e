"""Interfaces of step parts: frontend, engine and worker hooks, and speculators."""

from hardpoint.plugins.model.forward import (
    Forward,
    ForwardStep,
    PackedInputs,
)

from .components import (
    ComponentCalls,
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
    PromptReader,
    StepPart,
    StepPartContext,
    ToolCalls,
)
from .speculator import (
    DraftRequest,
    Speculator,
    SpeculatorContext,
)
from .worker import (
    AllocatedCache,
    KVBlocks,
    LoadedModel,
    ModelOpener,
    SequenceModel,
    StepModel,
    StepRows,
    WorkerHalf,
    WorkerHalfContext,
)

__all__ = [
    "AllocatedCache",
    "ComponentCalls",
    "ComponentFactory",
    "DraftRequest",
    "EngineHalf",
    "EngineHalfContext",
    "Forward",
    "ForwardStep",
    "FrontendHalf",
    "FrontendHalfContext",
    "GivenPrompt",
    "KVBlocks",
    "LoadedModel",
    "ModelOpener",
    "PackedInputs",
    "PromptReader",
    "SequenceModel",
    "Speculator",
    "SpeculatorContext",
    "StepModel",
    "StepPart",
    "StepPartContext",
    "StepRows",
    "ToolCalls",
    "WorkerHalf",
    "WorkerHalfContext",
]
