"""Hosts of the engines of a head: local ones, and places of engines that join."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from hardpoint.errors import ConfigError
from hardpoint.plugins import EngineConfig
from hardpoint.process.child_processes.launch import Interpreter
from hardpoint.process.engine_process import EngineHost
from hardpoint.replicas.hosts import EngineHosts
from hardpoint.toolkit.curve_keys import KeyFolder

from .admission import Admission, Keys
from .comparison import hello_of
from .joined_host import JoinedHost
from .listener import JoinListener


class JoinedHosts:
    """Runs the engines of the lowest ranks on this machine; the other engines join.

    Attributes:
        join_address: address where they join, with the port that the system chose.
    """

    join_address: str

    def __init__(self, config: EngineConfig, local: EngineHosts, keys: Keys | None = None) -> None:
        """Listen for engines.

        Args:
            config: has `parallel.join_address`.
            local: runs those that are local; closed with this.
            keys: whose owners may join; None is those of `parallel.keys`.

        Raises:
            ConfigError: the address cannot be used, or the keys.
        """
        parallel = config.parallel
        if keys is None and parallel.keys is not None:
            keys = KeyFolder(parallel.keys, "parallel.keys")
        admission = Admission(
            hello_of(config), parallel, needs_equal_bits=config.engine.resume == "exact"
        )
        self._listener = JoinListener(parallel, keys, admission)
        self.join_address = self._listener.address
        self._local, self._parallel = local, parallel
        try:
            self._write_address()
        except BaseException:
            self._listener.close()
            raise
        if parallel.num_local == 0:
            local.close()

    def _write_address(self) -> None:
        """Write the address to the file that the settings name.

        Raises:
            ConfigError: it cannot be written.
        """
        if (name := self._parallel.join_address_file) is None:
            return
        file = Path(name)
        written = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            written.write_text(f"{self.join_address}\n", encoding="utf-8")
            written.replace(file)
        except OSError as cause:
            raise ConfigError(
                f"parallel.join_address_file: expected a file that can be written, got {name!r}: "
                f"{cause.strerror}"
            ) from None

    def open(self, rank: int, interpreter: Interpreter) -> EngineHost:
        """Return the host of a local engine, or the place of an engine that is to join."""
        if rank < self._parallel.num_local:
            return self._local.open(rank, interpreter)
        return self.place(rank)

    def place(self, rank: int) -> JoinedHost:
        """Return the place of an engine that is to join."""
        limit_s = self._parallel.join_seconds
        return JoinedHost(self._listener.order, rank, self._listener.address, limit_s)

    def on_leave(self, leave: Callable[[int], None]) -> None:
        """Call a function with the rank of each engine that its machine wants to end."""
        self._listener.leave = leave

    def close(self) -> None:
        """Stop listening."""
        if self._parallel.join_address_file is not None:
            Path(self._parallel.join_address_file).unlink(missing_ok=True)
        self._listener.close()
        self._local.close()
