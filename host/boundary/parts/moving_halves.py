"""The engine halves of step parts that move KV blocks, as their start needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hardpoint.errors import PluginFaultError
from hardpoint.host.registry.blame import faults_as

from .bound_half import BoundPart


class MovingHalves:
    """The halves of the parts that move blocks, which no live change replaces.

    Attributes:
        moves_blocks: the setting that makes a part move blocks; None if none does.
    """

    def __init__(self, parts: Sequence[BoundPart]) -> None:
        """Find them among all parts."""
        self._parts = [part for part in parts if part.moves_blocks]
        self.moves_blocks = self._parts[0].moves_blocks if self._parts else None

    def started(self, handshakes: Sequence[Mapping[str, bytes]]) -> None:
        """Give the parts the handshakes of their worker halves, of each rank."""
        for part in self._parts:
            if part.overrides("started"):
                own = [handshake.get(part.name) for handshake in handshakes]
                with faults_as(PluginFaultError, f"{part.source}: its started()"):
                    part.run("started", own)

    def start_failed(self, cause: BaseException) -> None:
        """Let the parts go on without their worker halves.

        Raises:
            BaseException: one cannot.
        """
        for part in self._parts:
            part.run("start_failed", cause)
