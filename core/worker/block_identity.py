"""The identity of a rank's KV blocks: all that their bytes depend on, besides tokens.

The worker makes it for step parts that move blocks, which put it into the keys of blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from hardpoint.core.weights.worker_spec import WorkerSpec
from hardpoint.host.boundary.checked_attention import CheckedAttention
from hardpoint.plugins import ConfigError
from hardpoint.plugins.kv_connector import BlockIdentity
from hardpoint.plugins.model.files import ModelConfig
from hardpoint.plugins.parallel import Parallel
from hardpoint.typed import stable_bytes


def block_identity(
    spec: WorkerSpec,
    parallel: Parallel,
    attention: CheckedAttention,
    *,
    kv_variant: str,
    weights: str,
    user: str,
) -> BlockIdentity:
    """Return the identity of the blocks of a rank.

    Args:
        spec: specification of the worker.
        parallel: its place among the ranks.
        attention: attention of the model's layers.
        kv_variant: the model's `kv_variant`.
        weights: hash of the weights' content.
        user: the setting that needs it, for messages.

    Raises:
        ConfigError: there is no KV cache, or one whose blocks cannot be moved or distinguished.
    """
    if not attention.specs:
        raise ConfigError(
            f"{user} moves blocks of the KV cache, and stage {parallel.stage} of "
            f"{spec.model_config.architecture} has none"
        )
    moves = f"{user} moves blocks that are kept, and {spec.model_config.architecture}"
    if attention.states is not None:
        raise ConfigError(f"{moves} keeps states in some layers, of which most blocks have none")
    windows = [group.window for group in attention.groups if group.window is not None]
    if windows:
        raise ConfigError(
            f"{moves} has KV cache groups that release those which a sliding window of "
            f"{windows[0]} tokens has passed; expected kv_cache.window_groups = false"
        )
    if not attention.kv_layout[0]:
        raise ConfigError(
            f"{user} has to distinguish blocks from those of other layouts, and "
            f"{spec.plugins.one('attention_backends').source} has no kv_layout"
        )
    stored = spec.config.kv_cache.dtype
    return BlockIdentity(
        weights=weights,
        config=config_hash(
            spec.model_config, kv_variant, [layer.window for layer in attention.specs]
        ),
        architecture=spec.model_config.architecture,
        dtype=str(spec.dtype) if stored == "auto" else f"{stored} of {spec.dtype}",
        kv_layout=attention.kv_layout[0],
        kv_layout_version=attention.kv_layout[1],
        block_size=spec.config.kv_cache.block_size,
        layer_bytes=attention.layer_bytes,
        tensor_rank=parallel.tensor.rank,
        tensor_size=parallel.tensor.size,
        stage=parallel.stage,
        num_stages=parallel.num_stages,
        hash_algorithm=spec.config.kv_cache.hash_algorithm,
        quantization=_quantization(spec),
    )


def _quantization(spec: WorkerSpec) -> str:
    use = spec.config.quantization.use
    entry = spec.plugins.find("quantizations", use)
    options = spec.config.plugin.get(use if entry is None else entry.name, {})
    return stable_bytes((spec.config.quantization, options)).decode(errors="backslashreplace")


def config_hash(config: ModelConfig, variant: str = "", windows: Sequence[int | None] = ()) -> str:
    """Return a hash of the fields of a model's configuration, and of what it has made of them.

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
