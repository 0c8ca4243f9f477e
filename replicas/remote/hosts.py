"""Where the engines of a head run: local processes, and engines that have joined."""

from __future__ import annotations

from hardpoint.core.engine_process.process import EngineHost
from hardpoint.plugins import EngineConfig
from hardpoint.replicas.hosts import EngineHosts
from hardpoint.system.process.launch import Interpreter
from hardpoint.toolkit.curve_keys import KeyFolder

from .admission import Admission
from .comparison import hello_of
from .joined_host import JoinedHost
from .listener import JoinListener


class JoinedHosts:
    """Has the engines of the lowest ranks run on this machine; those of the others join."""

    def __init__(self, config: EngineConfig, local: EngineHosts) -> None:
        """Listen for engines.

        Args:
            config: has `parallel.join_address`.
            local: runs those that are local; closed with this.

        Raises:
            ConfigError: the address cannot be used, or the keys.
        """
        parallel = config.parallel
        keys = None if parallel.keys is None else KeyFolder(parallel.keys, "parallel.keys")
        self._listener = JoinListener(parallel, keys, Admission(hello_of(config), parallel))
        self._local, self._parallel = local, parallel
        if parallel.num_local == 0:
            local.close()

    def open(self, rank: int, interpreter: Interpreter) -> EngineHost:
        """Return the host of a local engine, or the place of one that is to join."""
        if rank < self._parallel.num_local:
            return self._local.open(rank, interpreter)
        limit_s = self._parallel.join_seconds
        return JoinedHost(self._listener.order, rank, self._listener.address, limit_s)

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()
        self._local.close()
