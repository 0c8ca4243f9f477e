"""Starts the worker halves of step parts that move blocks, whenever workers have loaded weights."""

from __future__ import annotations

from hardpoint.core.weights.weight_hash import WeightsHash
from hardpoint.host.boundary.parts.engine_halves import EngineHalves
from hardpoint.host.registry.blame import raise_unless_fault
from hardpoint.plugins import EngineConfig, Executor, WeightLoader


class PartsStart:
    """Starts the halves in the workers, with the hash of the weights that they have."""

    def __init__(
        self, config: EngineConfig, loader: WeightLoader, executor: Executor, parts: EngineHalves
    ) -> None:
        """Store what starts them; `weights_load` comes first."""
        self._config, self._loader, self._executor = config, loader, executor
        self._parts = parts
        self._weights: WeightsHash | None = None

    def weights_load(self, loader: WeightLoader | None = None) -> None:
        """Begin to hash the weights, which the workers are about to load.

        Args:
            loader: loader of other weights than before.

        Raises:
            ConfigError: the loader cannot identify them.
        """
        self.close()
        self._loader = loader or self._loader
        user = self._parts.moves_blocks
        assert user is not None, "no part moves blocks"
        self._weights = WeightsHash(self._loader, self._config.weight_cache, user)

    def start(self) -> None:
        """Start the worker halves; the KV cache is allocated.

        Raises:
            ConfigError: the model, its loader or its attention backend cannot identify blocks.
            PluginFaultError: a plugin failed.
        """
        assert self._weights is not None
        weights = self._weights.result()
        self._weights = None
        self._parts.started(self._executor.collective_rpc("start_parts", (weights,)))

    def restart(self) -> None:
        """Start them after a sleep in which the weights were released; else go on without."""
        try:
            self.start()
        except BaseException as cause:
            raise_unless_fault(cause)
            self._parts.start_failed(cause)
            self._executor.collective_rpc("start_parts", (None,))  # other ranks may have started

    def close(self) -> None:
        """Stop hashing."""
        if self._weights is not None:
            self._weights.close()
            self._weights = None
