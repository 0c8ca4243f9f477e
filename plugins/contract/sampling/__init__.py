"""Interfaces of model outputs: logits processors, samplers, poolers and activation taps."""

from .activation_tap import (
    ActivationTap,
    ActivationTapContext,
    TapRows,
    TapSite,
)
from .logits import (
    BatchLogitsProcessor,
    Edits,
    FollowsBatch,
    LogitsContext,
    LogitsProcessor,
    Reads,
    SparseLogitsProcessor,
)
from .logits import LogitsPlugin as LogitsPlugin
from .phases import LogitsStage
from .pooler import (
    Pooler,
    PoolerContext,
    PromptPooler,
)
from .rows import (
    Added,
    BatchUpdate,
    LogitsRequest,
    Move,
    Moved,
    RowMap,
    Rows,
)
from .sampler import (
    Sampler,
    SamplerContext,
)
from .sampler import SamplingRows as SamplingRows
from .states import Distribution as Distribution
from .states import RequestStates as RequestStates

__all__ = [
    "ActivationTap",
    "ActivationTapContext",
    "Added",
    "BatchLogitsProcessor",
    "BatchUpdate",
    "Edits",
    "FollowsBatch",
    "LogitsContext",
    "LogitsProcessor",
    "LogitsRequest",
    "LogitsStage",
    "Move",
    "Moved",
    "Pooler",
    "PoolerContext",
    "PromptPooler",
    "Reads",
    "RowMap",
    "Rows",
    "Sampler",
    "SamplerContext",
    "SparseLogitsProcessor",
    "TapRows",
    "TapSite",
]
