"""Building an engine in the caller's process, from its configuration."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec
import torch

from hardpoint.plugins import (
    ConfigError,
    EngineConfig,
    ModelConfig,
    ModelError,
    ModelFiles,
    Origins,
    PluginNotFoundError,
    PluginSet,
    Progress,
    ReasoningContext,
    ReasoningParser,
    SamplingParams,
    Tokenizer,
    TokenizerContext,
    resolve_plugins,
)

from .build_core import build_core, limits_of
from .client import InprocClient
from .frontend.llm_engine import EngineParts, LLMEngine
from .model_source import find_files, open_loader
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
    files = find_files(config.model)
    loader = open_loader(config, plugins, files)
    model_config = loader.config()
    _check_architecture(model_config, plugins)
    max_model_len = _max_model_len(config, model_config, origins)
    _check_limits(config, max_model_len, origins)
    tokenizer = _tokenizer(config, plugins, files)
    reasoning = _reasoning(config, plugins, tokenizer)
    spec = WorkerSpec(
        config=config,
        plugins=plugins,
        loader=loader,
        model_config=model_config,
        dtype=_dtype(config, model_config),
        device=_device(config),
        max_model_len=max_model_len,
        progress=progress,
    )
    built = build_core(spec, hooks, origins, clock)
    config = msgspec.structs.replace(
        config,
        max_model_len=built.size.max_model_len,
        kv_cache=msgspec.structs.replace(config.kv_cache, num_blocks=built.size.num_blocks),
    )
    engine = LLMEngine(
        EngineParts(
            config=config,
            origins=origins,
            plugins=plugins,
            hooks=hooks,
            model_config=model_config,
            tokenizer=tokenizer,
            reasoning=reasoning,
            client=InprocClient(built.core),
            components=[c for c in (loader, tokenizer, reasoning) if c is not None],
            clock=clock,
        )
    )
    _start_hooks(
        engine,
        model=config.model,
        dtype=str(spec.dtype).removeprefix("torch."),
        max_model_len=built.size.max_model_len,
        num_blocks=built.size.num_blocks,
        load_seconds=time.perf_counter() - began,
    )
    return engine


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


def _check_architecture(model_config: ModelConfig, plugins: PluginSet) -> None:
    try:
        plugins.get("models", model_config.architecture)
    except PluginNotFoundError as cause:
        raise ModelError(
            f"model: architecture {model_config.architecture!r} is not supported: {cause}"
        ) from cause


def _max_model_len(config: EngineConfig, model_config: ModelConfig, origins: Origins) -> int:
    longest = model_config.max_position_embeddings
    if config.max_model_len is None or config.max_model_len == "auto":
        return longest
    if config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len: expected at most {longest}, what the model was made for, "
            f"got {config.max_model_len} (from {origins.of('max_model_len')})"
        )
    return config.max_model_len


def _check_limits(config: EngineConfig, max_model_len: int, origins: Origins) -> None:
    """Refuse limits that cannot work together, before anything is loaded."""
    size = config.kv_cache.block_size
    try:
        if size & (size - 1):
            lower = 1 << (size.bit_length() - 1)
            raise ConfigError(
                f"kv_cache.block_size: expected a power of two, {lower} or {2 * lower}, got {size}"
            )
        if config.max_model_len != "auto":
            limits_of(config, max_model_len)
    except ConfigError as error:
        raise ConfigError(origins.locate(str(error))) from None


def _dtype(config: EngineConfig, model_config: ModelConfig) -> torch.dtype:
    name = config.dtype if config.dtype != "auto" else model_config.dtype or "bfloat16"
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ModelError(f"model: its dtype {name!r} is unknown; set dtype")
    return dtype


def _device(config: EngineConfig) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("device: 'cuda' was asked for, but torch finds no CUDA device")
    return torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")
