"""Layers of models: weights under Hugging Face names, fused and cut as the ranks need them.

Importing this package loads torch. `hardpoint.toolkit.layers.rotary` has rotary embeddings.
"""

from .embedding import Embedding
from .engines import over_engines
from .layer import (
    Layer,
    PackedLayer,
    QuantizableLayer,
    RMSNorm,
    Vector,
    load_packed,
    load_weights,
    packed_weights,
    quantizable,
    weight_cuts,
    weight_shapes,
)
from .linear import Linear, LMHead
from .mlp import MLP, Experts, ExpertsConfig, GatedMLP, MixtureOfExperts
from .rotary import RotaryEmbedding
from .routing import SigmoidRouting, SoftmaxRouting

__all__ = [
    "MLP",
    "Embedding",
    "Experts",
    "ExpertsConfig",
    "GatedMLP",
    "LMHead",
    "Layer",
    "Linear",
    "MixtureOfExperts",
    "PackedLayer",
    "QuantizableLayer",
    "RMSNorm",
    "RotaryEmbedding",
    "SigmoidRouting",
    "SoftmaxRouting",
    "Vector",
    "load_packed",
    "load_weights",
    "over_engines",
    "packed_weights",
    "quantizable",
    "weight_cuts",
    "weight_shapes",
]
