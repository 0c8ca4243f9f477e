"""Engines in this process or in one of their own, as their configuration has it."""

from __future__ import annotations

from typing import Any

from hardpoint.core import build
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.plugins import EngineConfig
from hardpoint.process.build import build_process_engine


def build_engine(config: EngineConfig, *args: Any, **options: Any) -> LLMEngine:
    """Build an engine where `engine.in_process` puts it."""
    builder = build.build_engine if config.engine.in_process else build_process_engine
    return builder(config, *args, **options)
