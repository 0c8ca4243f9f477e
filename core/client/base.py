"""How a frontend reaches an engine core."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from hardpoint.boundary.activity import Activity
from hardpoint.boundary.errors import engine_dead
from hardpoint.core.engine.core import EngineCore
from hardpoint.core.engine.utility_calls import failure_of, run_utility
from hardpoint.plugins import (
    EngineConfig,
    EngineCoreOutputs,
    EngineCoreRequest,
    HardpointError,
)
from hardpoint.plugins.manifest import Manifest
from hardpoint.registry.blame import raise_unless_fault


class EngineCoreClient(Protocol):
    """The interface of an engine core to its frontend, in this process or another one.

    Attributes:
        in_process: whether the core runs in this process.
        ranks: numbers of the engines that a request may name.
        activity: what the core is doing, or was doing when it ended.
        is_serving: false while no engine accepts requests, as while one is restarted.
        num_restarts: how often engines were restarted.
    """

    in_process: bool
    ranks: Collection[int]
    activity: Activity
    is_serving: bool
    num_restarts: int

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

    def call_utility(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """Call one of the engine's utilities and wait for its result.

        Args:
            method: one of `utility_calls.UTILITIES`.
            args: its positional arguments.
            timeout: seconds to wait for an engine process; None is the utility's own.

        Raises:
            HardpointError: the error that the utility raised.
        """

    def restart_with(self, config: EngineConfig, manifest: Manifest) -> None:
        """Start engines with other parameters from now on, where dead ones are restarted."""

    def close(self) -> None:
        """End the engine."""


class InprocClient:
    """Calls a core in this process; `get_output` runs a step."""

    in_process = True
    ranks = (0,)
    is_serving = True
    num_restarts = 0

    def __init__(self, core: EngineCore) -> None:
        """Take over the core.

        Raises:
            PluginFaultError: the executor takes no callback for its failures.
        """
        self._core = core
        self.activity = core.activity
        self._failures: list[HardpointError] = []
        core.on_executor_failure(self._failures.append)

    def _check(self) -> None:
        """Raise the error of an executor that failed since the last call."""
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

    def call_utility(self, method: str, *args: Any, timeout: float | None = None) -> Any:  # noqa: ARG002
        """Call a method of the core; its future, if it gives one, is done at once."""
        self._check()
        try:
            result = run_utility(self._core, method, args)
            return result.result(0) if isinstance(result, Future) else result
        except BaseException as error:
            raise_unless_fault(error)
            reported = failure_of(method, error)
            raise reported from reported.__cause__

    def restart_with(self, config: EngineConfig, manifest: Manifest) -> None:
        """Do nothing: no core is restarted."""

    def close(self) -> None:
        """Close the core and release it."""
        core = self._core
        del self._core
        try:
            core.close()
        finally:
            del core
            from hardpoint.system.memory import trim_memory  # noqa: PLC0415 - needs torch

            trim_memory()
