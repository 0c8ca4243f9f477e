"""Builds the worker halves of the KV connector, whenever workers have loaded weights."""

from __future__ import annotations

from hardpoint.core.kv_cache.connector import EngineConnector
from hardpoint.core.weights.weight_hash import WeightsHash
from hardpoint.plugins import EngineConfig, Executor, WeightLoader
from hardpoint.registry.blame import raise_unless_fault


class ConnectorStart:
    """Starts the connector in the workers, with the hash of the weights that they have."""

    def __init__(self, config: EngineConfig, loader: WeightLoader, executor: Executor) -> None:
        """Store what builds them; `weights_load` comes first."""
        self._config, self._loader, self._executor = config, loader, executor
        self._weights: WeightsHash | None = None

    def weights_load(self) -> None:
        """Begin to hash the weights, which the workers are about to load.

        Raises:
            ConfigError: the loader cannot say what they are.
        """
        self.close()
        connector = str(self._config.kv_connector.use)
        self._weights = WeightsHash(self._loader, self._config.weight_cache, connector)

    def start(self, connector: EngineConnector) -> None:
        """Build the worker halves; the KV cache is allocated.

        Raises:
            ConfigError: the model, its loader or its attention backend cannot have a connector.
            PluginFaultError: a plugin failed.
        """
        assert self._weights is not None
        weights = self._weights.result()
        self._weights = None
        said = self._executor.collective_rpc("start_kv_connector", (weights,))
        connector.set_handshakes(said)

    def restart(self, connector: EngineConnector) -> None:
        """Build them after a sleep in which the weights were released; else leave them out."""
        try:
            self.start(connector)
        except BaseException as cause:
            raise_unless_fault(cause)
            connector.leave_out("it cannot be started again", cause)
            self._executor.collective_rpc("start_kv_connector", (None,))  # other ranks may have

    def close(self) -> None:
        """Stop hashing."""
        if self._weights is not None:
            self._weights.close()
            self._weights = None
