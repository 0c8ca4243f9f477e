"""A change of plugins and settings in one process: prepared, then committed, kept or undone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec

from hardpoint.errors import BusyError, HardpointError
from hardpoint.host.registry.blame import raise_unless_fault
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins import EngineConfig
from hardpoint.plugins.component.manifest import Manifest

from .settings import ChangeRequest

_log = logging.getLogger("hardpoint")

Action = Literal["prepare", "state", "commit", "keep", "undo"]
"""What a process does about a change. Each change is prepared, then `state` is asked for until it
is; then it is committed, and kept once all processes have committed it. It is undone if one of them
fails, whether it was prepared or committed.
"""


class LiveChange(msgspec.Struct, frozen=True, kw_only=True):
    """Other plugins and settings, as the processes of an engine get them.

    Attributes:
        asked: the caller's request.
        manifest: the next generation of the plugins.
        config: the configuration, without tables of plugins.
        lingers: whether frontends may send requests of the generation before for a moment after
            the change, so that what those use stays open until the next change.
    """

    asked: ChangeRequest
    manifest: Manifest
    config: EngineConfig
    lingers: bool = False


class PreparedChange:
    """The result of a slot for a change. An implementation has the methods that it needs.

    They run between two steps; `commit` is to take no time, and to fail for no foreseeable reason.
    """

    def commit(self) -> None:
        """Use the new components, from the next step on."""

    def undo(self) -> None:
        """Use the earlier components again, if it was committed; close the new ones."""

    def keep(self) -> None:
        """Close the replaced components: the change is committed in all processes."""


class Switch(PreparedChange):
    """Functions in the place of a change's methods.

    Attributes:
        switch: called with True to use the change from now on, False for the earlier state.
        close_old, close_new: close the replaced, or the new components.
    """

    def __init__(
        self,
        switch: Callable[[bool], None],
        close_old: Callable[[], None] = lambda: None,
        close_new: Callable[[], None] = lambda: None,
    ) -> None:
        self.switch, self.close_old, self.close_new = switch, close_old, close_new
        self._committed = False

    def commit(self) -> None:
        """Use the change."""
        self._committed = True
        self.switch(True)

    def undo(self) -> None:
        """Use the earlier components."""
        if self._committed:
            self.switch(False)
        self.close_new()

    def keep(self) -> None:
        """Close the replaced components."""
        self.close_old()


class Slot(Protocol):
    """A slot of a process for live changes, such as the scheduling policy."""

    def prepare(self, change: LiveChange, plugins: PluginSet) -> PreparedChange | None:
        """Build the new components here, while the engine works; called in another thread.

        Args:
            plugins: its plugins, loaded in this process.

        Returns:
            The prepared change; None if the change does not concern this slot.

        Raises:
            HardpointError: it cannot be built; nothing is left of it.
        """


class _Pending:
    """A change that a thread prepares, or has prepared."""

    def __init__(
        self, change: LiveChange, slots: Sequence[Slot], plugins: PluginSet | None
    ) -> None:
        self.change, self._plugins = change, plugins
        self._slots = slots
        self._prepared: list[PreparedChange] = []
        self._error: BaseException | None = None
        self._dropped = self._done = False
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="hardpoint-change", daemon=True).start()

    def _run(self) -> None:
        try:
            plugins = self._plugins or PluginSet(self.change.manifest)
            for slot in self._slots:
                prepared = slot.prepare(self.change, plugins)
                with self._lock:
                    if prepared is not None:
                        self._prepared.append(prepared)
                    if self._dropped:
                        break
        except BaseException as error:
            self._error = error
        with self._lock:
            try:
                if self._dropped or self._error is not None:
                    _undo(self._prepared)
            finally:
                self._done = True

    def is_prepared(self) -> bool:
        """Return whether it is prepared.

        Raises:
            HardpointError: it cannot be; the preparation is undone.
        """
        if not self._done:
            return False
        if self._error is not None:
            raise_unless_fault(self._error)
            raise self._error
        return True

    def commit(self) -> None:
        """Use the prepared components; on an error, all of it is undone."""
        if not self.is_prepared():
            raise HardpointError("the change is still being prepared")
        for prepared in self._prepared:
            prepared.commit()

    def keep(self) -> None:
        for prepared in self._prepared:
            try:
                prepared.keep()
            except BaseException as error:
                raise_unless_fault(error)
                _log.warning("a live change: %s", error)

    def undo(self) -> None:
        """Undo all, the last first; a thread that prepares still does so itself, at its end."""
        with self._lock:
            self._dropped = True
            if self._done:
                _undo(self._prepared)


def _undo(prepared: list[PreparedChange]) -> None:
    while prepared:
        try:
            prepared.pop().undo()
        except BaseException as error:
            raise_unless_fault(error)
            _log.exception("a live change could not be undone in one place; the others are")


class Changes:
    """The live changes of one process, one at a time."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        """Begin without a change; `slots` are in the order of commits."""
        self._slots = slots
        self._pending: _Pending | None = None

    def prepare(self, change: LiveChange, plugins: PluginSet | None = None) -> None:
        """Begin to prepare a change.

        Args:
            plugins: its plugins; None are the plugins of its manifest.

        Raises:
            BusyError: another one is under way.
        """
        if self._pending is not None:
            raise BusyError("another live change is under way; try again once it is done")
        self._pending = _Pending(change, self._slots, plugins)

    def is_prepared(self) -> bool:
        """Return whether the change is prepared.

        Raises:
            HardpointError: it cannot be.
        """
        return self._under_way().is_prepared()

    def commit(self) -> None:
        """Commit the change; if one slot fails, `undo` is to follow."""
        self._under_way().commit()

    def keep(self) -> LiveChange:
        """End the change, which is committed everywhere; return it."""
        pending, self._pending = self._under_way(), None
        pending.keep()
        return pending.change

    def undo(self) -> None:
        """Undo the change; without one, do nothing."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.undo()

    def _under_way(self) -> _Pending:
        if self._pending is None:
            raise HardpointError(
                "no live change is under way here: the engine was started again in the meantime"
            )
        return self._pending
