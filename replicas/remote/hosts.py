"""Where the engines of a head run: local processes, and engines that have joined."""

from __future__ import annotations

from hardpoint.core.client.process_client import EngineStart
from hardpoint.core.engine_process.process import EngineHost, EngineHosts, LocalHosts
from hardpoint.system.process.launch import Interpreter
from hardpoint.toolkit.curve_keys import KeyFolder

from .admission import Admission
from .comparison import hello_of
from .joined_host import JoinedHost
from .listener import JoinListener


def open_hosts(start: EngineStart) -> EngineHosts:
    """Return where engines are to run; listens, if any may join.

    Raises:
        ConfigError: the address cannot be used, or the keys.
    """
    parallel = start.config.parallel
    if parallel.join_address is None:
        return LocalHosts()
    keys = None if parallel.keys is None else KeyFolder(parallel.keys, "parallel.keys")
    admission = Admission(hello_of(start.config), parallel)
    listener = JoinListener(parallel, keys, admission)
    return _LocalAndJoined(listener, parallel.num_local, parallel.join_seconds)


class _LocalAndJoined(LocalHosts):
    """Starts the engines of the lowest ranks here; those of the others join."""

    def __init__(self, listener: JoinListener, num_local: int, join_seconds: float) -> None:
        self._listener = listener
        self._num_local, self._join_seconds = num_local, join_seconds
        self._opened: set[int] = set()

    def open(self, rank: int, interpreter: Interpreter) -> EngineHost:
        """Spawn a process, or return the place of an engine that is to join."""
        if rank < self._num_local:
            return super().open(rank, interpreter)
        # An engine in the place of one that died comes when it comes.
        limit_s = None if rank in self._opened else self._join_seconds
        self._opened.add(rank)
        return JoinedHost(self._listener.order, rank, self._listener.address, limit_s)

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()
