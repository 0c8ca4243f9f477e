"""A live change in all processes: the order of its steps, for callers that wait or await."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Generic, Protocol, Self, TypeVar

from hardpoint.errors import BusyError, HardpointError
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins import EngineConfig
from hardpoint.plugins.config_tables import LoadConfig

from .change import Action, Changes, LiveChange, Slot, Switch
from .settings import ChangeRequest, Settings

_log = logging.getLogger("hardpoint")

_POLL_SECONDS = (0.002, 0.05)
"""The shortest and the longest time between two questions whether a change is prepared."""

Steps = Generator[Action | float, list[str], None]
"""Yields what the engines are to do next, or seconds to wait for; gets the engines' answer."""


def steps(
    change: LiveChange, frontend: Changes, restarts: Switch, plugins: PluginSet, seconds: float
) -> Steps:
    """Run a change: prepared everywhere, then committed everywhere, or undone everywhere.

    Args:
        frontend: the changes of the frontend, which switches last.
        restarts: switches what engines are started with, which comes first: one whose start ends
            during the commit has the change.
        seconds: time to prepare it in all processes.

    Raises:
        BusyError: another change is under way.
        HardpointError: a process failed, or took too long; nothing has changed.
    """
    frontend.prepare(change, plugins)
    try:
        yield "prepare"
        yield from _prepared(frontend, seconds)
        restarts.commit()
        yield "commit"
        frontend.commit()
    except BaseException as error:
        frontend.undo()
        restarts.undo()
        if not isinstance(error, BusyError):  # the change of another frontend stays
            with contextlib.suppress(HardpointError):
                yield "undo"
        raise
    try:
        yield "keep"
    except HardpointError as error:  # it was started again in the meantime, with the new plugins
        _log.warning("a live change is committed, but: %s", error)
    frontend.keep()


def next_of(running: Steps, answer: list[str] | BaseException | None) -> Action | float | None:
    """Return the next step of a change, given the answer to the last one; None at its end.

    Raises:
        BaseException: the change was undone.
    """
    try:
        if isinstance(answer, BaseException):
            return running.throw(answer)
        return next(running) if answer is None else running.send(answer)
    except StopIteration:
        return None


def _prepared(frontend: Changes, seconds: float) -> Steps:
    ends, (pause, longest) = time.monotonic() + seconds, _POLL_SECONDS
    while True:
        waiting = yield "state"
        if not frontend.is_prepared():
            waiting = [*waiting, "the frontend"]
        if not waiting:
            return
        if time.monotonic() >= ends:
            raise HardpointError(
                f"the change was not prepared within {seconds:g} s (plugins.change_seconds) by "
                f"{', '.join(dict.fromkeys(waiting))}; nothing has changed"
            )
        yield pause
        pause = min(pause * 1.5, longest)


class Parts(Protocol):
    """The parts of an engine, as far as live changes concern them."""

    @property
    def config(self) -> EngineConfig:
        """The configuration."""

    @property
    def settings(self) -> Settings:
        """Configuration and plugins, as live changes replace them."""

    def with_settings(self, settings: Settings) -> Self:
        """Return the parts with other settings."""

    def with_load(self, load: LoadConfig) -> Self:
        """Return the parts of an engine with another load configuration."""


P = TypeVar("P", bound=Parts)


class Owner(Protocol[P]):
    """Owns the parts of an engine; engines that are restarted have the latest ones.

    Attributes:
        parts: the latest ones.
    """

    parts: P

    def use(self, change: Callable[[P], P]) -> None:
        """Replace the parts by the result of `change` for the latest ones."""


def _switch(of: weakref.ref[Owner[P]], before: P, after: P) -> Switch:
    """Return the switch between the parts of an owner before and after a change.

    Other changes in between stay: weights, and the quarantine of plugins.
    """

    def switch(is_new: bool) -> None:
        known, wanted = (before, after) if is_new else (after, before)

        def switched(latest: P) -> P:
            if latest.settings.plugins is known.settings.plugins:
                return wanted.with_load(latest.config.load)
            if is_new:
                raise HardpointError(
                    "a plugin was quarantined while the change was prepared; nothing has changed"
                )
            return latest

        owner = of()
        assert owner is not None, "it runs the change"
        owner.use(switched)

    return Switch(switch)


class ChangeOwner(Generic[P]):
    """The live changes of a frontend, one at a time: its own ones, with its engines, or others'.

    Args:
        owner: the owner, which keeps this; it closes as soon as no one keeps it.
        lingers: as in `LiveChange`.
    """

    def __init__(self, owner: Owner[P], slots: Sequence[Slot], *, lingers: bool) -> None:
        self._owner = weakref.ref(owner)
        self._changes, self._lingers = Changes(slots), lingers
        self._restarts = Switch(lambda _: None)
        self._is_following = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def begin(self, request: ChangeRequest) -> Iterator[tuple[Steps, LiveChange]]:
        """Yield the steps of a change, which the body runs, and the change.

        Raises:
            BusyError: another change is under way.
            ConfigError, PluginError: it cannot be made.
        """
        change, plugins = self._begin(request)
        try:
            seconds = change.config.plugins.change_seconds
            yield steps(change, self._changes, self._restarts, plugins, seconds), change
        except BaseException as error:
            _log.warning("live change by %s failed: %s: %s", request.origin, request, error)
            raise
        else:
            generation = change.manifest.generation
            _log.info("live change by %s, generation %d: %s", request.origin, generation, request)
        finally:
            self._lock.release()

    def _begin(self, request: ChangeRequest) -> tuple[LiveChange, PluginSet]:
        if not self._lock.acquire(blocking=False):
            raise BusyError("another live change is under way; try again once it is done")
        try:
            owner = self._owner()
            assert owner is not None, "it keeps this"
            settings = request.settings((before := owner.parts).settings)
            self._restarts = _switch(self._owner, before, before.with_settings(settings))
        except BaseException:
            self._lock.release()
            raise
        change = LiveChange(
            asked=request,
            manifest=settings.plugins.manifest,
            config=settings.config.without_tables(),
            lingers=self._lingers,
        )
        return change, settings.plugins

    def follow(self, request: ChangeRequest) -> None:
        """Begin to prepare a change that another process runs.

        Raises:
            BusyError, ConfigError, PluginError: as `begin`.
        """
        change, plugins = self._begin(request)
        self._is_following = True
        self._changes.prepare(change, plugins)

    def is_prepared(self) -> bool:
        """Return whether the change is prepared that another process runs.

        Raises:
            HardpointError: it cannot be.
        """
        return self._changes.is_prepared()

    def finish(self, action: Action) -> None:
        """Commit, keep or undo the change that another process runs; without one, do nothing."""
        if not self._is_following:
            return
        match action:
            case "commit":
                self._restarts.commit()
                self._changes.commit()
            case "keep":
                self._changes.keep()
            case "undo":
                self._changes.undo()
                self._restarts.undo()
        if action != "commit":
            self._is_following = False
            self._lock.release()
