"""Start of worker halves that move KV blocks, whenever workers have loaded weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from hardpoint.plugins import Executor, WeightLoader
from hardpoint.plugins.config_tables import WeightCacheConfig

from .weight_hash import WeightsHash

__all__ = ["BlockStart"]


class MovingParts(Protocol):
    """The engine halves of step parts."""

    @property
    def moves_blocks(self) -> str | None:
        """The setting that makes a part move blocks, for messages; None if none does."""

    def started(self, handshakes: Sequence[Mapping[str, bytes]]) -> None:
        """Take the handshakes of the worker halves, of each rank."""

    def start_failed(self, cause: BaseException) -> None:
        """Go on without the worker halves."""


class BlockStart:
    """Starts worker halves that move blocks, with the hash of the weights.

    `weights_load` comes before the workers load weights, `start` or `restart` after it, once the KV
    cache is allocated. Without parts that move blocks, they do nothing.
    """

    def __init__(self, parts: MovingParts, describe_fault: Callable[[BaseException], str]) -> None:
        """Store the engine halves; `describe_fault` is that of `EngineHalfContext`."""
        self._parts, self._describe_fault = parts, describe_fault
        self._executor: Executor | None = None
        self._loader: WeightLoader | None = None
        self._cache = WeightCacheConfig()
        self._weights: WeightsHash | None = None

    def use(self, executor: Executor, cache: WeightCacheConfig) -> None:
        """Start the halves of these workers; the folder of the cache keeps hashes of files."""
        self._executor, self._cache = executor, cache

    def weights_load(self, loader: WeightLoader | None = None) -> None:
        """Begin to hash the weights that the workers are about to load.

        Args:
            loader: loader of the weights; None is the one of the last call.

        Raises:
            ConfigError: the loader cannot identify them.
        """
        self.close()
        self._loader = loader or self._loader
        if (user := self._parts.moves_blocks) is not None:
            assert self._loader is not None, "no weights are loaded yet"
            self._weights = WeightsHash(self._loader, self._cache, user, self._describe_fault)

    def start(self) -> None:
        """Start the worker halves.

        Raises:
            ConfigError: the model, its loader or its attention backend cannot identify blocks.
            PluginFaultError: a plugin failed.
        """
        if self._weights is None:
            return
        weights = self._weights.result()
        self._weights = None
        self._parts.started(self._start_parts(weights))

    def restart(self) -> None:
        """Start the worker halves again; if that fails, let the parts go on without them."""
        try:
            self.start()
        except BaseException as cause:
            self._describe_fault(cause)  # an interrupt is raised again
            self._parts.start_failed(cause)
            self._start_parts(None)  # other ranks may have started

    def _start_parts(self, weights: str | None) -> Sequence[Mapping[str, bytes]]:
        assert self._executor is not None, "no workers run yet"
        return self._executor.collective_rpc("start_parts", (weights,))

    def close(self) -> None:
        """Stop hashing."""
        if self._weights is not None:
            self._weights.close()
            self._weights = None
