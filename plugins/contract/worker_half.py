"""The half of a step part in a worker, and what it gets of the worker's model and KV cache."""

from .model.forward import (
    Forward,
    ForwardStep,
    PackedInputs,
)
from .step_part.halves import WorkerHalf
from .step_part.worker import (
    AllocatedCache,
    KVBlocks,
    LoadedModel,
    ModelOpener,
    SequenceModel,
    StepModel,
    StepRows,
    WorkerHalfContext,
)

__all__ = [
    "AllocatedCache",
    "Forward",
    "ForwardStep",
    "KVBlocks",
    "LoadedModel",
    "ModelOpener",
    "PackedInputs",
    "SequenceModel",
    "StepModel",
    "StepRows",
    "WorkerHalf",
    "WorkerHalfContext",
]
