"""The description of an open model, which LLM and AsyncLLM share besides the control calls."""

from __future__ import annotations

from typing import Generic, TypeVar

from hardpoint.core.frontend.async_engine import AsyncEngine
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.plugins import EngineConfig, SamplingParams, Tokenizer
from hardpoint.plugins.manifest import Manifest

__all__ = ["OpenModel"]

Engine = TypeVar("Engine", LLMEngine, AsyncEngine)


class OpenModel(Generic[Engine]):
    """A model with an engine that runs it; base of LLM and AsyncLLM."""

    _engine: Engine

    @property
    def config(self) -> EngineConfig:
        """The configuration, with the values that the engine chose filled in."""
        return self._engine.parts.config

    @property
    def manifest(self) -> Manifest:
        """The enabled plugins."""
        return self._engine.parts.plugins.manifest

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.parts.tokenizer

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """The model's tasks, such as "generate", as the engine reported them at start."""
        return self._engine.parts.supported_tasks

    def default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a prompt without any: those that the model's files recommend."""
        return self._engine.default_sampling_params()
