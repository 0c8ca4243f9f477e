"""Interfaces of models: architectures, operations, attention, weight loaders and quantization."""

from hardpoint.plugins.config.model_files import (
    ModelConfig,
    ModelFiles,
)

from .attention import (
    AttentionBackend,
    AttentionContext,
)
from .attention_step import AttentionStep, KVSpec
from .cuts import (
    Cut,
    needed_part,
)
from .cuts import join as join
from .exponential_race import (
    mixed_seed,
    token_noise,
)
from .forward import Advance as Advance
from .forward import Attend as Attend
from .forward import Branch as Branch
from .forward import (
    ForwardBatch,
    TensorSpec,
)
from .forward import LayerHooks as LayerHooks
from .forward import LinearMatrix as LinearMatrix
from .forward import Recur as Recur
from .forward import no_states as no_states
from .loader import (
    LoaderContext,
    WeightFormat,
    WeightLoader,
)
from .logits_ops import (
    LogitsOps,
    Op,
)
from .matrices import (
    AffineCodes,
    DenseMatrix,
    QuantizedMatrix,
)
from .model import (
    Model,
    ModelContext,
)
from .ops import ClampedSwiGLU, Ops, OpsContext
from .ops import Recorded as Recorded
from .quantization import (
    Quantization,
    QuantizationContext,
    QuantizedWeight,
)

__all__ = [
    "AffineCodes",
    "AttentionBackend",
    "AttentionContext",
    "AttentionStep",
    "ClampedSwiGLU",
    "Cut",
    "DenseMatrix",
    "ForwardBatch",
    "KVSpec",
    "LoaderContext",
    "LogitsOps",
    "Model",
    "ModelConfig",
    "ModelContext",
    "ModelFiles",
    "Op",
    "Ops",
    "OpsContext",
    "Quantization",
    "QuantizationContext",
    "QuantizedMatrix",
    "QuantizedWeight",
    "TensorSpec",
    "WeightFormat",
    "WeightLoader",
    "mixed_seed",
    "needed_part",
    "token_noise",
]
