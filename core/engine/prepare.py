"""What workers are made from, found out before anything heavy is loaded."""

from __future__ import annotations

import torch

from hardpoint.core.worker.worker import WorkerSpec
from hardpoint.plugins import (
    ConfigError,
    EngineConfig,
    ModelConfig,
    ModelError,
    Origins,
    PluginNotFoundError,
    PluginSet,
    Progress,
)

from .build import limits_of
from .model_source import find_files, open_loader

__all__ = ["prepare_worker"]


def prepare_worker(
    config: EngineConfig, plugins: PluginSet, origins: Origins, progress: Progress
) -> WorkerSpec:
    """Find the model, read its configuration, and check what can be checked cheaply.

    Raises:
        ConfigError: limits that cannot work, or a device that is not there.
        ModelError: the model is missing, damaged or unsupported.
    """
    loader = open_loader(config, plugins, find_files(config.model))
    model_config = loader.config()
    _check_architecture(model_config, plugins)
    max_model_len = _max_model_len(config, model_config, origins)
    _check_limits(config, max_model_len, origins)
    return WorkerSpec(
        config=config,
        plugins=plugins,
        loader=loader,
        model_config=model_config,
        dtype=_dtype(config, model_config),
        device=_device(config),
        max_model_len=max_model_len,
        progress=progress,
    )


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
