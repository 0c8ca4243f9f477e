"""The live changes of a worker: of its logits processors and its halves of step parts."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from hardpoint.errors import HardpointError
from hardpoint.host.boundary.errors import kind_of
from hardpoint.host.boundary.parts.bound_half import BoundWorkerHalf
from hardpoint.host.boundary.parts.states import States, states_of, states_of_parts
from hardpoint.host.boundary.parts.worker_parts import WorkerParts
from hardpoint.host.registry.blame import describe, raise_unless_fault
from hardpoint.host.registry.plugin_set import PluginSet

from .change import Changes, LiveChange, Slot
from .engine import WorkerAnswer
from .generations import GenerationChanges
from .parts import part_changes


class WorkerSlot(Slot, Protocol):
    """A slot of a worker."""

    def release(self, oldest: int) -> None:
        """Close the components that no request of plugin generation `oldest` or later uses."""


class WorkerChanges:
    """The live changes of a worker; its errors are data, since each rank answers for itself.

    It closes the logits processors; the halves of parts are closed with the runner of the model.

    Attributes:
        plugins: the latest plugins, of which a model that is loaded again is; None before one was
            released.
    """

    def __init__(self) -> None:
        self._slots: list[WorkerSlot] | None = None  # None while the worker has no model
        self._changes = Changes(())
        self._processors: GenerationChanges[Any] | None = None
        self._parts: GenerationChanges[BoundWorkerHalf] | None = None
        self._since: dict[str, int] = {}  # of parts of a model that was released
        self.plugins: PluginSet | None = None

    def open(
        self, processors: GenerationChanges[Any] | None, parts: WorkerParts, plugins: PluginSet
    ) -> None:
        """Let changes concern the components of a loaded model.

        Args:
            processors: changes of the logits processors; None on a rank that does not sample.
            parts: the halves of step parts. Of a model that is loaded again, they take the places
                of the latest ones before it.
        """
        for half in parts.halves:
            if generation := self._since.get(half.name):
                half.begin_with(generation)
        self._processors, self._parts = processors, part_changes(parts, parts.use, plugins)
        self._use([self._parts, *([] if processors is None else [processors])])

    def _use(self, slots: list[WorkerSlot] | None) -> None:
        self._changes.undo()
        self._slots, self._changes = slots, Changes(slots or ())

    def states(self) -> States:
        """Return the states of processors and parts of the latest generation."""
        runners = [] if self._processors is None else self._processors.latest.values()
        halves = [] if self._parts is None else self._parts.latest.values()
        latest = [runner.processor for runner in runners]
        return states_of(latest) | states_of_parts(halves, "worker")

    def close(self) -> None:
        """Close the processors, and keep nothing that refers to the model, which is released."""
        if self._parts is not None:
            self.plugins = self._parts.plugins
            self._since = {half.name: half.since for half in self._parts.latest.values()}
        processors, self._processors, self._parts = self._processors, None, None
        self._use(None)
        if processors is not None:
            processors.close()

    def run(self, action: str, data: bytes) -> WorkerAnswer:
        """Do something about a change.

        Args:
            data: the change for "prepare", the oldest generation that is in use for "keep".
        """
        is_prepared = True
        try:
            match action:
                case "prepare":
                    if self._slots is None:
                        raise HardpointError("the engine is asleep: wake it up before a change")
                    self._changes.prepare(msgspec.msgpack.decode(data, type=LiveChange))
                case "state":
                    is_prepared = self._changes.is_prepared()
                case "commit":
                    self._changes.commit()
                case "keep":
                    self._changes.keep()
                    for slot in self._slots or ():
                        slot.release(int(data))
                case "undo":
                    self._changes.undo()
        except BaseException as error:
            raise_unless_fault(error)
            text = str(error) if isinstance(error, HardpointError) else describe(error)
            return kind_of(error), text, False
        return None, "", is_prepared
