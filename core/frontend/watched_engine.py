"""An engine process behind an event loop: bound to it, watched, and restarted when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import weakref
from collections.abc import Callable

from hardpoint.boundary.activity import PluginCall
from hardpoint.boundary.errors import attribute_error, engine_dead
from hardpoint.core.client.engine_group import EngineGroup
from hardpoint.core.client.event_loop import EventLoopBridge, Item
from hardpoint.core.client.process_client import ProcessClient
from hardpoint.core.client.restarts import DEADLY, WINDOW_S
from hardpoint.errors import EngineClosedError, EngineDeadError
from hardpoint.plugins import (
    EngineCoreOutputs,
    FinishReason,
    HardpointError,
)
from hardpoint.registry.blame import raise_unless_fault
from hardpoint.registry.discovery import is_third_party
from hardpoint.system.engine_lock import OwnerProcess

from .engine_parts import EngineParts
from .frontend import Frontend
from .lifecycle import EngineLifecycle, EngineState, Restarter
from .requests.input_processor import AsyncTokenizer

_log = logging.getLogger("hardpoint")

# How long a send that found the engine dead waits for the client to report its end.
_DEATH_NOTICE_S = 20.0
_POLL_INTERVAL_S = 0.01


class WatchedEngine:
    """A frontend and its engine process in an event loop; base of AsyncEngine, which has the calls.

    Everything but the constructor and `close` is for one loop: that of the first use. In a fork of
    the process, every call raises HardpointError, and `close` does nothing. The states are in
    `lifecycle`.
    """

    def __init__(self, parts: EngineParts, bridge: EventLoopBridge, restarter: Restarter) -> None:
        """Own the parts; `close` closes them.

        Args:
            parts: with a ProcessClient.
            bridge: passes that client's outputs to the event loop.
            restarter: decides whether a dead engine is restarted, and restarts it.
        """
        self.parts = parts
        self._bridge = bridge
        self._restarter = restarter
        self._frontend = Frontend(parts)
        self._tokenizer = AsyncTokenizer(self._frontend.input)
        self._lifecycle = EngineLifecycle()
        self._owner = OwnerProcess()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._restart_task: asyncio.Task[None] | None = None
        self._closing_thread: threading.Thread | None = None

    @property
    def engine_pid(self) -> int:
        """The engine's process id."""
        return self._client.pid

    @property
    def is_running(self) -> bool:
        """True while the engine serves, as far as is known."""
        return self._lifecycle.state is EngineState.SERVING and self._bridge.failure is None

    @property
    def errored(self) -> bool:
        """True once the engine is dead and is not restarted; `dead_error` is the reason."""
        return self.dead_error is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """The error that ended the engine, if it is dead and is not restarted."""
        failure = self._bridge.failure
        ended = self._lifecycle.dead_error
        if ended is None and failure is not None and not self._restarter.enabled:
            return engine_dead(failure)  # it died before its first use
        return ended

    def close(self) -> None:
        """End the engine; every caller that waits gets an error. In any thread, once or twice."""
        if self._owner.is_other or not self._lifecycle.move(EngineState.CLOSED):
            return
        self._restarter.close()
        self._tokenizer.close()
        loop = self._loop
        if loop is not None and not loop.is_closed():
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(
                    self._frontend.fail_all, lambda _: _closed(), FinishReason.ABORT
                )
        if self._closing_thread is not None:
            self._closing_thread.join()
        self._frontend.close(self.parts.client.close)

    def _send_aborts(self, ids: list[str]) -> None:
        if ids and self._lifecycle.state is EngineState.SERVING:
            self._client.abort_requests(ids)

    @property
    def _client(self) -> ProcessClient | EngineGroup:
        client = self.parts.client
        assert isinstance(client, ProcessClient | EngineGroup)
        return client

    async def _ready(self) -> None:
        """Wait until the engine serves.

        Raises:
            EngineClosedError: it was closed.
            EngineDeadError: it is dead and is not restarted.
        """
        self._bind()
        while True:
            match self._lifecycle.state:
                case EngineState.SERVING:
                    return
                case EngineState.DRAINING:
                    await self._drained()
                case EngineState.RESTARTING:
                    assert self._restart_task is not None
                    await asyncio.wait([self._restart_task])
                case EngineState.DEAD:
                    assert self._lifecycle.dead_error is not None
                    raise engine_dead(self._lifecycle.dead_error)
                case EngineState.CLOSED:
                    raise _closed()

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
            if (statistics := self._frontend.statistics) is not None and statistics.has_sinks:
                _report_every(loop, statistics.interval_seconds, weakref.WeakMethod(self._report))
        elif self._loop is not loop:
            raise HardpointError(
                "this engine belongs to the event loop in which it was used first, which is "
                f"{'closed' if self._loop.is_closed() else 'another one'}; "
                "open one engine per event loop"
            )

    def _receive(self, item: Item) -> None:
        """Process outputs, or the error that ended them, from the client's threads."""
        if isinstance(item, Exception):
            self._engine_died(item)
        elif item.outputs and self._lifecycle.takes_outputs:
            self._process_outputs(item)

    def _process_outputs(self, batch: EngineCoreOutputs) -> None:
        try:
            self._send_aborts(self._frontend.process_outputs(batch).aborts)
            if self._frontend.statistics is not None:
                self._frontend.statistics.record()
        except BaseException as error:  # no caller would get it
            raise_unless_fault(error)
            self._engine_died(attribute_error(error, self.parts.plugins), final=True)

    def _report(self) -> bool:
        """Call the sinks' `report`; return whether there will be more to report."""
        is_open = self._lifecycle.state is not EngineState.CLOSED
        try:
            if self._frontend.statistics is not None and is_open:
                self._frontend.statistics.report()
        except BaseException as error:  # of a sink whose faults end the engine
            raise_unless_fault(error)
            self._engine_died(error, final=True)
        return is_open

    def _engine_died(self, error: BaseException, *, final: bool = False) -> None:
        """Fail all requests; restart the engine, or be dead.

        Args:
            final: the frontend failed: whether its process is well or not, the engine is dead.
        """
        if not self._lifecycle.takes_outputs:
            return
        self._bridge.disconnect()
        last = self._client.activity.snapshot()
        error = self._frontend.named(error, last.in_step)
        self._frontend.fail_all(
            lambda in_step: engine_dead(error) if final else _for_request(error, in_step=in_step),
            in_step=last.in_step,
        )
        if not final and last.call is not None and not self._client.was_killed:
            self._suspect(last.call)
        if not final and self._restarter.may_restart():
            if self._lifecycle.move(EngineState.RESTARTING):
                loop = asyncio.get_running_loop()
                self._restart_task = loop.create_task(self._restart_engine())
            return
        reported = engine_dead(error)
        if not final:
            self._restarter.give_up(reported)
        if self._lifecycle.die(reported):
            # Its process may live, and would hold its memory until the engine is closed.
            self._closing_thread = threading.Thread(
                target=self._client.close, name="hardpoint-close"
            )
            self._closing_thread.start()

    def _suspect(self, call: PluginCall) -> None:
        """Quarantine a third-party plugin that ran when the engine died, and died before."""
        entry = self.parts.plugins.find(call.kind, call.name)
        if entry is None or not is_third_party(entry) or not self._restarter.budget.died_in(call):
            return
        if (parts := self.parts.without(call)) is None:
            return
        message = f"the engine died {DEADLY} times within {WINDOW_S:g} s in {call}"
        _log.error("quarantined: %s", message)
        self.parts = parts
        self._frontend.quarantine(call, message)
        if call.kind == "scheduling_policies":  # requests may still name another one, to be refused
            self._frontend.submitter.use_plugins(parts.plugins)

    async def _restart_engine(self) -> None:
        """Start another engine process, with the same configuration."""
        try:
            await asyncio.to_thread(self._client.close)
            client, self._bridge = await self._restarter.restart(self.parts)
            self.parts = dataclasses.replace(self.parts, client=client)
            if self._lifecycle.move(EngineState.SERVING):
                self._bridge.connect(asyncio.get_running_loop(), self._receive)
            else:  # closed in another thread, just now
                await asyncio.to_thread(client.close)
        except Exception as error:
            self._lifecycle.die(engine_dead(error))
        except BaseException:  # the event loop ends
            self._lifecycle.die(EngineDeadError("the engine died, and its restart was cancelled"))
            raise

    async def _drained(self) -> None:
        """Wait until the end of the engine was delivered, after its last outputs."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _DEATH_NOTICE_S
        while self._lifecycle.state is EngineState.DRAINING:
            if loop.time() > deadline:
                self._lifecycle.move(EngineState.SERVING)
                return
            await asyncio.sleep(_POLL_INTERVAL_S)


def _report_every(
    loop: asyncio.AbstractEventLoop,
    seconds: float,
    report: weakref.WeakMethod[Callable[[], bool]],
) -> None:
    """Call a bound method regularly while it returns true. Does not keep its object alive."""

    def tick() -> None:
        method = report()
        if method is not None and method():
            loop.call_later(seconds, tick)

    loop.call_later(seconds, tick)


def _closed() -> EngineClosedError:
    return EngineClosedError("the engine is closed")


def _for_request(error: BaseException, *, in_step: bool) -> EngineDeadError:
    """Return the error for a request in flight when the engine died.

    Args:
        error: error that ended the engine.
        in_step: whether the request was in the step in which it died, and so may be responsible.
    """
    reported = engine_dead(error)
    advice = "was in the step in which it died" if in_step else "may be sent again"
    reported.args = (f"{error}; the request {advice}",)
    return reported
