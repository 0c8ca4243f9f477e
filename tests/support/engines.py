"""Engines in this process or in one of their own, as their configuration has it."""

from __future__ import annotations

from typing import Any

from hardpoint.core import build
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.plugins import EngineConfig
from hardpoint.process.build import build_process_engine
from hardpoint.process.worker_process import LaunchedWorker


def build_engine(config: EngineConfig, *args: Any, **options: Any) -> LLMEngine:
    """Build an engine where `engine.in_process` puts it."""
    if config.engine.in_process:
        return build.build_engine(config, *args, start_worker=LaunchedWorker, **options)
    return build_process_engine(config, *args, **options)
