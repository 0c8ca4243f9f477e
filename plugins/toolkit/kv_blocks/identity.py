"""The identity of a rank's KV blocks: all that their bytes depend on, besides tokens.

The worker makes it for step parts that move blocks, which put it into the keys of blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from hardpoint.plugins import ConfigError, EngineConfig
from hardpoint.plugins.component import Source
from hardpoint.plugins.config.model_files import ModelConfig
from hardpoint.plugins.kv_connector import BlockIdentity
from hardpoint.plugins.parallel import Parallel
from hardpoint.typed import stable_bytes

__all__ = ["AttentionBlocks", "BlockSettings", "block_identity", "config_hash"]


class BlockSettings(Protocol):
    """The settings of a worker."""

    @property
    def config(self) -> EngineConfig:
        """Configuration of the engine."""

    @property
    def model_config(self) -> ModelConfig:
        """Configuration of the model."""

    @property
    def dtype(self) -> Any:
        """Resolved dtype of the model."""


class AttentionBlocks(Protocol):
    """The blocks of an attention backend.

    Attributes:
        source: names the backend in messages.
        specs: one per attention layer, with its `window`.
        states: states of other layers; None if the model has none.
        kv_layout: name and version of the layout.
    """

    source: Source
    specs: Sequence[Any]
    states: Any
    kv_layout: tuple[str, int]

    @property
    def groups(self) -> Sequence[Any]:
        """KV cache groups of the layers, with their `window`."""

    @property
    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes of a block of each layer."""


def block_identity(
    settings: BlockSettings,
    parallel: Parallel,
    attention: AttentionBlocks,
    *,
    kv_variant: str,
    quantization: dict[str, Any],
    weights: str,
    user: str,
) -> BlockIdentity:
    """Return the identity of the blocks of a rank.

    Args:
        settings: settings of the worker.
        parallel: its place among the ranks.
        attention: attention of the model's layers.
        kv_variant: the model's `kv_variant`.
        quantization: options of the quantization of its weights.
        weights: hash of the weights' content.
        user: the setting that needs it, for messages.

    Raises:
        ConfigError: there is no KV cache, or its blocks cannot be moved or distinguished.
    """
    _check(settings.model_config.architecture, parallel.stage, attention, user)
    stored = settings.config.kv_cache.dtype
    return BlockIdentity(
        weights=weights,
        config=config_hash(
            settings.model_config, kv_variant, [layer.window for layer in attention.specs]
        ),
        architecture=settings.model_config.architecture,
        dtype=str(settings.dtype) if stored == "auto" else f"{stored} of {settings.dtype}",
        kv_layout=attention.kv_layout[0],
        kv_layout_version=attention.kv_layout[1],
        block_size=settings.config.kv_cache.block_size,
        layer_bytes=attention.layer_bytes,
        tensor_rank=parallel.tensor.rank,
        tensor_size=parallel.tensor.size,
        stage=parallel.stage,
        num_stages=parallel.num_stages,
        hash_algorithm=settings.config.kv_cache.hash_algorithm,
        quantization=stable_bytes((settings.config.quantization, quantization)).decode(
            errors="backslashreplace"
        ),
    )


def _check(architecture: str, stage: int, attention: AttentionBlocks, user: str) -> None:
    if not attention.specs:
        raise ConfigError(
            f"{user} moves blocks of the KV cache, and stage {stage} of {architecture} has none"
        )
    moves = f"{user} moves blocks that are kept, and {architecture}"
    if attention.states is not None:
        raise ConfigError(f"{moves} keeps states in some layers; most blocks have no state")
    windows = [group.window for group in attention.groups if group.window is not None]
    if windows:
        raise ConfigError(
            f"{moves} has KV cache groups that release blocks outside of a sliding window "
            f"of {windows[0]} tokens; expected kv_cache.window_groups = false"
        )
    if not attention.kv_layout[0]:
        raise ConfigError(
            f"{user} has to distinguish blocks of different layouts, and "
            f"{attention.source} has no kv_layout"
        )


def config_hash(config: ModelConfig, variant: str = "", windows: Sequence[int | None] = ()) -> str:
    """Return a hash of a model's configuration, KV variant and sliding windows.

    Args:
        config: configuration of the model.
        variant: its `kv_variant`.
        windows: sliding windows of its layers.
    """
    made: list[object] = [variant] if variant else []
    if any(window is not None for window in windows):
        made.append(windows)
    encoded = msgspec.json.encode(
        (config.model_plugin, config.vocab_size, config.hf, *made),
        enc_hook=repr,
        order="deterministic",
    )
    return hashlib.sha256(encoded).hexdigest()
