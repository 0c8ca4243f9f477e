"""Interfaces of models: architectures, operations, attention, weight loaders and quantization."""

from .attention import (
    AttentionBackend,
    AttentionContext,
    AttentionStep,
    KVSpec,
)
from .cuts import (
    Cut,
    join,
    needed_part,
)
from .exponential_race import (
    advantages,
    mixed_seed,
    token_noise,
)
from .files import (
    ModelConfig,
    ModelFiles,
)
from .forward import (
    Advance,
    Attend,
    ForwardBatch,
    LayerHooks,
    LinearMatrix,
    Recur,
    TensorSpec,
)
from .forward import Branch as Branch
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
from .ops import (
    ClampedSwiGLU,
    Ops,
    OpsContext,
    Recorded,
)
from .quantization import (
    Quantization,
    QuantizationContext,
    QuantizedWeight,
)

__all__ = [
    "Advance",
    "AffineCodes",
    "Attend",
    "AttentionBackend",
    "AttentionContext",
    "AttentionStep",
    "ClampedSwiGLU",
    "Cut",
    "DenseMatrix",
    "ForwardBatch",
    "KVSpec",
    "LayerHooks",
    "LinearMatrix",
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
    "Recorded",
    "Recur",
    "TensorSpec",
    "WeightFormat",
    "WeightLoader",
    "advantages",
    "join",
    "mixed_seed",
    "needed_part",
    "token_noise",
]
