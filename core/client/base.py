"""How a frontend reaches an engine core."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from hardpoint.core.engine.core import EngineCore
from hardpoint.core.engine.utility_calls import failure_of, run_utility
from hardpoint.errors import EngineDeadError
from hardpoint.host.boundary.activity import Activity, PluginCall
from hardpoint.host.boundary.errors import engine_dead
from hardpoint.host.live.change import Slot
from hardpoint.host.registry.blame import raise_unless_fault
from hardpoint.plugins import EngineConfig, EngineCoreOutputs, EngineCoreRequest, HardpointError
from hardpoint.plugins.component.manifest import Manifest


@dataclass(frozen=True)
class Death:
    """The death of one of several engines.

    Attributes:
        error: the reason.
        in_step: ids of the requests of the step in which it died; None is all.
        call: the plugin method that ran; None if none did, or a signal ended the engine.
        repeated: how often engines have died in methods of that plugin, if that is too often, such
            as "2 times within 60 s"; else empty.
    """

    error: Exception
    in_step: Collection[str] | None
    call: PluginCall | None = None
    repeated: str = ""


DeathWatcher = Callable[[Death], EngineDeadError]
"""Called for a death, in another thread; returns the error that users get."""


class EngineCoreClient(Protocol):
    """The interface of an engine core to its frontend, in this process or another one.

    Attributes:
        in_process: whether the core and its workers run in this process.
        change_slots: slots of live changes in the client.
        shares_engines: whether frontends in other processes use the same engines.
    """

    in_process: bool
    change_slots: Sequence[Slot] = ()
    shares_engines: bool = False

    @property
    def activity(self) -> Activity:
        """The record of the core's current activity, or of its last one."""

    @property
    def ranks(self) -> Collection[int]:
        """The numbers of the engines, for requests and calls that name one."""

    @property
    def pids(self) -> Mapping[int, int]:
        """The process ids of the engines that serve in processes of their own, by rank."""

    @property
    def num_restarts(self) -> int:
        """How often engines were restarted."""

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request."""

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Send the requests of one call in one message: all are added, or none.

        Raises:
            RefusedInCallError: one was refused.
        """

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests; they give no more outputs."""

    def get_output(self, *, wait: bool, timeout: float | None = None) -> EngineCoreOutputs | None:
        """Return the next batch of outputs; may be empty.

        Args:
            wait: whether outputs are expected.
            timeout: seconds to wait for an engine process; None is without limit.

        Returns:
            None if nothing came in time.

        Raises:
            EngineDeadError: the engine is gone.
            EngineClosedError: `end_waiting` was called.
        """

    def end_waiting(self) -> None:
        """Let a thread that waits in `get_output` raise EngineClosedError, before `close`."""

    def call_utility(
        self, method: str, *args: Any, timeout: float | None = None, rank: int | None = None
    ) -> Any:
        """Call one of the engine's utilities and wait for its result.

        Args:
            method: one of `utility_calls.UTILITIES`.
            args: its positional arguments.
            timeout: seconds to wait for an engine process; None is the utility's own.
            rank: one of `ranks`, the engine to call; None is all of them.

        Raises:
            HardpointError: the error that the utility raised.
        """

    def restart_with(self, config: EngineConfig, manifest: Manifest) -> None:
        """Start engines with other parameters from now on, where dead ones are restarted."""

    def watch_deaths(self, watcher: DeathWatcher) -> None:
        """Register a bound method to call after the death of an engine; it is held weakly."""

    def close(self) -> None:
        """End the engine."""


class OneEngine:
    """Base of clients of one engine, which ends with its client."""

    ranks: Collection[int] = (0,)
    change_slots: Sequence[Slot] = ()
    shares_engines: bool = False
    num_restarts = 0

    def watch_deaths(self, watcher: DeathWatcher) -> None:
        """Do nothing: the client ends with its engine."""

    def restart_with(self, config: EngineConfig, manifest: Manifest) -> None:
        """Do nothing: no engine is restarted."""


class InprocClient(OneEngine):
    """Calls a core in this process; `get_output` runs a step."""

    pids: Mapping[int, int] = MappingProxyType({})

    def __init__(self, core: EngineCore, worker_pid: int | None = None) -> None:
        """Take over the core; `worker_pid` is the process of its workers, None is this one.

        Raises:
            PluginFaultError: the executor takes no callback for its failures.
        """
        self._core, self.in_process = core, worker_pid in (None, os.getpid())
        self.activity = core.activity
        self._failures: list[HardpointError] = []
        core.on_executor_failure(self._failures.append)

    def _check(self) -> None:
        if self._failures:
            raise engine_dead(self._failures[0])

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request."""
        self._check()
        self._core.add_request(request)

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Queue the requests of one call, or none.

        Raises:
            RefusedInCallError: one was refused.
        """
        self._check()
        self._core.add_requests([(request, None, None) for request in requests])

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests; they give no more outputs."""
        self._core.abort_requests(request_ids)

    def get_output(self, *, wait: bool, timeout: float | None = None) -> EngineCoreOutputs:  # noqa: ARG002
        """Run one step, however long it takes."""
        self._check()
        outputs, _ = self._core.step()
        return outputs.get(0) or EngineCoreOutputs()

    def end_waiting(self) -> None:
        """Do nothing: a step ends by itself."""

    def call_utility(
        self,
        method: str,
        *args: Any,
        timeout: float | None = None,  # noqa: ARG002
        rank: int | None = None,  # noqa: ARG002
    ) -> Any:
        """Call a method of the core; its future, if it gives one, is done at once."""
        self._check()
        try:
            result = run_utility(self._core, method, args)
            return result.result(0) if isinstance(result, Future) else result
        except BaseException as error:
            raise_unless_fault(error)
            reported = failure_of(method, error)
            raise reported from reported.__cause__

    def close(self) -> None:
        """Close the core and release it."""
        core = self._core
        del self._core
        try:
            core.close()
        finally:
            del core
            from hardpoint.host.system.memory import trim_memory  # noqa: PLC0415 - needs torch

            trim_memory()
