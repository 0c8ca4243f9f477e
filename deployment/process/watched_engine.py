"""Engine processes behind an event loop: bound to it, and watched."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from typing import cast

from hardpoint.core.frontend.engine_owner import EngineOwner
from hardpoint.core.frontend.engine_parts import EngineParts
from hardpoint.errors import EngineClosedError, EngineDeadError
from hardpoint.host.boundary.errors import attribute_error, death_of, engine_dead
from hardpoint.host.registry.blame import raise_unless_fault
from hardpoint.host.system.engine_lock import OwnerProcess
from hardpoint.plugins import (
    EngineCoreOutputs,
    FinishReason,
    HardpointError,
)

from .async_tokenizer import AsyncTokenizer
from .client.base import RemoteClient
from .client.event_loop import EventLoopBridge, Item

_POLL_INTERVAL_S = 0.01


class EngineState(Enum):
    """States of an AsyncEngine: how it treats requests.

    Attributes:
        SERVING: it sends them to the engine.
        DEAD: it refuses them with the error that ended the engine.
        CLOSED: it refuses them, since it was closed.
    """

    SERVING = "serving"
    DEAD = "dead"
    CLOSED = "closed"


class EngineLifecycle:
    """The state of an AsyncEngine. `close` may be called in any thread, so all of it may.

    Attributes:
        state: the current one.
        dead_error: the error that ended the engine for good; None if it has not died.
        release: the thread, started, that releases what the dead engine holds.
    """

    def __init__(self) -> None:
        self.state = EngineState.SERVING
        self.dead_error: EngineDeadError | None = None
        self.release: threading.Thread | None = None
        self._lock = threading.Lock()

    def close(self) -> bool:
        """Enter CLOSED; return whether it was not closed before."""
        with self._lock:
            was_open = self.state is not EngineState.CLOSED
            self.state = EngineState.CLOSED
            return was_open

    def die(self, error: EngineDeadError, release: threading.Thread) -> None:
        """Enter DEAD because of an error and start `release`, unless it is dead or closed."""
        with self._lock:  # so that who closes finds no thread that has not started
            if self.state is EngineState.SERVING:
                self.dead_error, self.state = error, EngineState.DEAD
                release.start()
                self.release = release


class WatchedEngine(EngineOwner):
    """A frontend and its engine in an event loop; base of AsyncEngine, which has the calls.

    Everything but the constructor and `close` is for one loop: that of the first use. In a fork of
    the process, every call raises HardpointError, and `close` does nothing.
    """

    def __init__(self, parts: EngineParts, bridge: EventLoopBridge) -> None:
        """Own the parts; `close` closes them.

        Args:
            parts: with a client of one or several engine processes.
            bridge: passes that client's outputs to the event loop.
        """
        super().__init__(parts)
        self._bridge = bridge
        self._tokenizer = AsyncTokenizer(self._frontend.input)
        self._lifecycle = EngineLifecycle()
        self._owner = OwnerProcess()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deadline_timer: asyncio.TimerHandle | None = None

    @property
    def engine_pid(self) -> int:
        """The engine's process id."""
        return self._client.pid

    @property
    def ranks(self) -> Collection[int]:
        """The numbers of the engines."""
        return self._client.ranks

    @property
    def pids(self) -> Mapping[int, int]:
        """The process ids of the engines that serve, by rank."""
        return self._client.pids

    @property
    def is_running(self) -> bool:
        """True while the engine serves, as far as is known; false while it is restarted."""
        is_open = self._lifecycle.state is EngineState.SERVING and self._bridge.failure is None
        return is_open and self._client.is_serving

    @property
    def errored(self) -> bool:
        """True once the engine is dead and is not restarted; `dead_error` is the reason."""
        return self.dead_error is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """The error that ended the engine, if it is dead and is not restarted."""
        failure = self._bridge.failure
        ended = self._lifecycle.dead_error
        if ended is None and failure is not None:
            return engine_dead(failure)  # it died before its first use
        return ended

    def check_open(self) -> None:
        """Check that the engine is open, in any thread.

        Raises:
            EngineClosedError: it was closed.
            EngineDeadError: it is dead.
        """
        if self._lifecycle.state is EngineState.CLOSED:
            raise _closed()
        if (error := self.dead_error) is not None:
            raise engine_dead(error)

    def close(self) -> None:
        """End the engine; every caller that waits gets an error. In any thread, once or twice."""
        if self._owner.is_other or not self._lifecycle.close():
            return
        self._tokenizer.close()
        loop = self._loop
        if loop is not None and not loop.is_closed():
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(
                    self._frontend.fail_all, lambda _: _closed(), FinishReason.ABORT
                )
        if (release := self._lifecycle.release) is not None:
            release.join()
        self._frontend.close(self.parts.client.close)

    def _send_aborts(self, ids: list[str]) -> None:
        if ids and self._lifecycle.state is EngineState.SERVING:
            self._client.abort_requests(ids)

    @property
    def _client(self) -> RemoteClient:
        assert not self.parts.client.in_process
        return cast(RemoteClient, self.parts.client)

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that it belongs to; None before the first use."""
        return self._loop

    async def _ready(self, *, serving: bool = False) -> None:
        """Check that the engine runs.

        Args:
            serving: also wait while its processes are restarted.

        Raises:
            EngineClosedError: it was closed.
            EngineDeadError: it is dead.
        """
        self._bind()
        while True:
            if self._lifecycle.state is EngineState.CLOSED:
                raise _closed()
            if (error := self._lifecycle.dead_error) is not None:
                raise engine_dead(error)
            if not serving or self._client.is_serving or self._bridge.failure is not None:
                return
            await asyncio.sleep(_POLL_INTERVAL_S)

    def _bind(self) -> None:
        """Belong to the running loop, from the first use on.

        Raises:
            HardpointError: it belongs to another one, or to another process.
        """
        self._owner.check()
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self._bridge.connect(loop, self._receive)
            if (seconds := self._frontend.observers.interval_seconds) is not None:
                _report_every(loop, seconds, weakref.WeakMethod(self._report))
        elif self._loop is not loop:
            raise HardpointError(
                "this engine belongs to the event loop in which it was used first, which is "
                f"{'closed' if self._loop.is_closed() else 'another one'}; "
                "open one engine per event loop"
            )

    def _receive(self, item: Item) -> None:
        if isinstance(item, Exception):
            self._engine_died(item)
        elif self._lifecycle.state is EngineState.SERVING and (
            item.outputs or item.scheduler_stats is not None
        ):
            self._process_outputs(item)

    def _process_outputs(self, batch: EngineCoreOutputs) -> None:
        try:
            self._send_aborts(self._frontend.process_outputs(batch).aborts)
            if self._frontend.observers:
                self._frontend.observers.flush()
        except BaseException as error:
            self._frontend_failed(error)

    def _frontend_failed(self, error: BaseException) -> None:
        """Be dead because of an error that no caller would get."""
        raise_unless_fault(error)
        self._engine_died(attribute_error(error, self.parts.plugins), final=True)

    def _watch_deadlines(self) -> None:
        left = self._frontend.deadlines.seconds_left()
        if left is None or self._loop is None:
            return
        when, timer = self._loop.time() + left, self._deadline_timer
        if timer is not None:
            if timer.when() <= when:
                return
            timer.cancel()
        method = weakref.WeakMethod(self._end_expired)
        self._deadline_timer = self._loop.call_at(when, _call_if_alive, method)

    def _end_expired(self) -> None:
        self._deadline_timer = None
        if self._lifecycle.state is not EngineState.SERVING:
            return
        try:
            self._send_aborts(self._frontend.end_expired().aborts)
        except BaseException as error:
            self._frontend_failed(error)
        self._watch_deadlines()

    def _report(self) -> bool:
        is_open = self._lifecycle.state is not EngineState.CLOSED
        try:
            if is_open:
                self._frontend.observers.report()
        except BaseException as error:  # of a component whose faults end the engine
            raise_unless_fault(error)
            self._engine_died(error, final=True)
        return is_open

    def _engine_died(self, error: BaseException, *, final: bool = False) -> None:
        """Fail all requests; be dead.

        Args:
            final: the frontend failed, whether its processes are well or not.
        """
        if self._lifecycle.state is not EngineState.SERVING:
            return
        self._bridge.disconnect()
        last = self._client.activity.snapshot()
        error = self._frontend.named(error, last.in_step)
        self._frontend.fail_all(
            lambda in_step: engine_dead(error) if final else death_of(error, in_step=in_step),
            in_step=last.in_step,
        )
        # Its process may live, and would hold its memory until the engine is closed.
        release = threading.Thread(target=self._client.close, name="hardpoint-close")
        self._lifecycle.die(engine_dead(error), release)


def _report_every(
    loop: asyncio.AbstractEventLoop,
    seconds: float,
    report: weakref.WeakMethod[Callable[[], bool]],
) -> None:
    def tick() -> None:
        method = report()
        if method is not None and method():
            loop.call_later(seconds, tick)

    loop.call_later(seconds, tick)


def _call_if_alive(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    if (call := method()) is not None:
        call()


def _closed() -> EngineClosedError:
    return EngineClosedError("the engine is closed")
