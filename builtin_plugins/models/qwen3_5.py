"""Qwen3.5: the layers of Qwen3-Next with their projections apart, dense or with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .qwen3_next import DeltaLayers, Qwen3Next


class Qwen35(DeltaLayers):
    """Qwen3.5 with dense layers, 0.8B to 27B (Qwen team, 2026): the text model."""

    contract = 1
    has_own_gates = True
    config_defaults: ClassVar[Mapping[str, Any]] = {
        **Qwen3Next.config_defaults,
        "num_key_value_heads": 4,
    }


class Qwen35Moe(Qwen3Next):
    """Qwen3.5 with experts, 35B-A3B to 397B-A17B: the text model."""

    contract = 1
    has_own_gates = True
    config_defaults: ClassVar[Mapping[str, Any]] = {
        **Qwen3Next.config_defaults,
        "intermediate_size": 512,  # of a dense layer, which it does not have
        "num_experts": 256,
        "num_experts_per_tok": 8,
    }
