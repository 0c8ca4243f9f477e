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
    LogitsContext,
    LogitsProcessor,
    Reads,
    SparseLogitsProcessor,
)
from .logits import FollowsBatch as FollowsBatch
from .logits import LogitsPlugin as LogitsPlugin
from .phases import LogitsStage
from .pooler import (
    Pooler,
    PoolerContext,
    PromptPooler,
)
from .rows import Added as Added
from .rows import (
    BatchUpdate,
    LogitsRequest,
    Move,
    RowMap,
    Rows,
)
from .rows import Moved as Moved
from .sampler import (
    Sampler,
    SamplerContext,
)
from .sampler import SamplingRows as SamplingRows

__all__ = [
    "ActivationTap",
    "ActivationTapContext",
    "BatchLogitsProcessor",
    "BatchUpdate",
    "Edits",
    "LogitsContext",
    "LogitsProcessor",
    "LogitsRequest",
    "LogitsStage",
    "Move",
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
