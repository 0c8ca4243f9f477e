"""Building an engine in the caller's process, from its configuration."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from hardpoint.plugins import (
    EngineConfig,
    ModelFiles,
    Origins,
    PluginSet,
    Progress,
    ReasoningContext,
    ReasoningParser,
    SamplingParams,
    Tokenizer,
    TokenizerContext,
    resolve_plugins,
)
from hardpoint.plugins.hook_set import HookSet

from .build_core import build_core
from .client import EngineCoreClient, InprocClient
from .frontend.llm_engine import EngineParts, LLMEngine
from .kv_cache import CacheSize
from .model_source import find_files
from .prepare import prepare_worker
from .process_client import EngineStart, ProcessClient
from .worker.worker import WorkerSpec

__all__ = ["build_engine", "no_progress"]

_log = logging.getLogger("hardpoint")


def no_progress(what: str, done: int, total: int) -> None:
    """Show nothing."""


def build_engine(
    config: EngineConfig,
    origins: Origins | None = None,
    *,
    progress: Progress = no_progress,
    clock: Callable[[], float] = time.monotonic,
) -> LLMEngine:
    """Resolve the plugins, find the model, check everything cheap, then load.

    Raises:
        ConfigError, PluginError: before any weight is read.
        ModelError: the model is missing, damaged or unsupported.
    """
    began = time.perf_counter()
    origins = origins or Origins()
    plugins = resolve_plugins(config, origins)
    _announce(plugins)
    hooks = plugins.hooks()
    spec = prepare_worker(config, plugins, origins, progress)
    tokenizer = _tokenizer(config, plugins, spec.loader.context.files)
    reasoning = _reasoning(config, plugins, tokenizer)
    client, size = _client(spec, hooks, origins, clock)
    config = msgspec.structs.replace(
        config,
        max_model_len=size.max_model_len,
        kv_cache=msgspec.structs.replace(config.kv_cache, num_blocks=size.num_blocks),
    )
    engine = LLMEngine(
        EngineParts(
            config=config,
            origins=origins,
            plugins=plugins,
            hooks=hooks,
            model_config=spec.model_config,
            tokenizer=tokenizer,
            reasoning=reasoning,
            client=client,
            components=[c for c in (spec.loader, tokenizer, reasoning) if c is not None],
            clock=clock,
        )
    )
    _start_hooks(
        engine,
        model=config.model,
        dtype=str(spec.dtype).removeprefix("torch."),
        max_model_len=size.max_model_len,
        num_blocks=size.num_blocks,
        load_seconds=time.perf_counter() - began,
    )
    return engine


def _client(
    spec: WorkerSpec, hooks: HookSet, origins: Origins, clock: Callable[[], float]
) -> tuple[EngineCoreClient, CacheSize]:
    """Start the engine core, here or in a process of its own."""
    if spec.config.engine.in_process:
        built = build_core(spec, hooks, origins, clock)
        return InprocClient(built.core), built.size
    client = ProcessClient(EngineStart(spec.config, origins, spec.plugins.manifest))
    return client, CacheSize(client.ready.num_gpu_blocks, client.ready.max_model_len)


def _start_hooks(engine: LLMEngine, **info: object) -> None:
    """Tell the hooks that the engine is ready; close it if one of them fails."""
    try:
        engine.parts.hooks.call("engine_started", info=info)
    except BaseException:
        engine.close()
        raise


def _announce(plugins: PluginSet) -> None:
    """Say what an operator may not expect: idle plugins, and those that every request uses."""
    if idle := plugins.not_enabled():
        _log.info("found but not enabled: %s", ", ".join(found.label for found in idle))
    for entry, cls in plugins.logits_processors():
        if cls.uses(SamplingParams()):
            _log.info("requests use it without asking: %s", entry.source)


def _tokenizer(config: EngineConfig, plugins: PluginSet, model_files: ModelFiles) -> Tokenizer:
    path = config.tokenizer.path
    files = find_files(path) if path else model_files
    tokenizer: Tokenizer = plugins.create(plugins.one("tokenizers"), TokenizerContext, files=files)
    return tokenizer


def _reasoning(
    config: EngineConfig, plugins: PluginSet, tokenizer: Tokenizer
) -> ReasoningParser | None:
    if config.reasoning.parser is None:
        return None
    entry = plugins.get("reasoning_parsers", config.reasoning.parser)
    parser: ReasoningParser = plugins.create(entry, ReasoningContext, tokenizer=tokenizer)
    return parser
