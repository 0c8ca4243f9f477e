"""Calls of programs to step parts, and of parts to their worker halves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hardpoint.errors import HardpointError, PluginFaultError, RequestError
from hardpoint.host.boundary.errors import error_of
from hardpoint.host.registry.blame import faults_as
from hardpoint.plugins import StepPart

from .bound_half import BoundPart

CallWorkers = Callable[[str, tuple[Any, ...]], list[Any]]
"""Calls a method in all workers, see `Executor.collective_rpc`."""


class PartCalls:
    """The calls to parts, and the calls by parts."""

    def __init__(self) -> None:
        """Know no parts yet, and no workers, which start after the parts."""
        self._parts: Sequence[BoundPart] = ()
        self._keys: dict[int, str] = {}  # of their worker halves, by the identity of the part
        self._call_workers: CallWorkers | None = None

    def answer_by(self, parts: Sequence[BoundPart]) -> None:
        """Let these parts answer calls; of several generations, the latest ones."""
        self._parts = [part for part in parts if part.overrides("call") and part.until is None]
        self._keys = {id(part.part): part.key for part in parts}

    def use(self, call_workers: CallWorkers) -> None:
        """Call workers by this function."""
        self._call_workers = call_workers

    def to_workers(self, part: StepPart, message: bytes) -> Sequence[bytes]:
        """Return the answers of the worker halves of a part, in rank order.

        Raises:
            HardpointError: the first one of them.
        """
        assert self._call_workers is not None, "the engine is being built"
        answers = self._call_workers("call_part", (self._keys.get(id(part), part.name), message))
        for kind, answer in answers:
            if kind is not None:
                raise error_of(kind, answer.decode())
        return [answer for _, answer in answers]

    def to_part(self, name: str, method: str, arguments: Mapping[str, Any]) -> Any:
        """Return the answer of a part to a call of a program; perhaps a future.

        Raises:
            RequestError: there is no such part, or it refuses.
            HardpointError: the part raised it, or failed.
        """
        parts = {part.name: part for part in self._parts}
        if (part := parts.get(name)) is None:
            known = ", ".join(sorted(parts)) or "none: no enabled part answers calls"
            raise RequestError(f"part: expected one of {known}, got {name!r}")
        label = f"{part.source}: its call() of {method!r}"
        with faults_as(PluginFaultError, label, passing=(HardpointError,)):
            return part.run("call", method, arguments)
