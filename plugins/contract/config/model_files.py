"""Files and configuration of a model's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["ModelConfig", "ModelFiles"]


@dataclass(frozen=True)
class ModelFiles:
    """Location of a model.

    Attributes:
        name: as configured.
        path: a directory, or a single file.
    """

    name: str
    path: Path


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Configuration of a model, known before its weights are read.

    Attributes:
        architecture: for example "LlamaForCausalLM"; the name of a `models` plugin.
        hf: fields of a Hugging Face `config.json`, possibly translated from another format.
        vocab_size: width of a row of logits.
        max_position_embeddings: maximum context length that the model was trained for, or to which
                its scaling of RoPE extends it.
        eos_token_ids: end-of-sequence tokens that the model's files name.
        dtype: dtype of the weights on disk, "bfloat16" for example; None if mixed or unknown.
        quantization: name of the scheme (kind `quantizations`) without which weights cannot be
                read; None if each weight has its own.
        default_sampling: fields of SamplingParams that the model's files recommend, checked.
        implementation: name of the `models` plugin that computes it; empty is the architecture's.
    """

    architecture: str
    hf: Mapping[str, Any]
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None
    quantization: str | None = None
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    implementation: str = ""

    @property
    def model_plugin(self) -> str:
        """Name of the `models` plugin that computes it."""
        return self.implementation or self.architecture
