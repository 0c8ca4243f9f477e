"""Clients of engine cores in other processes: their interface, and calls that wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from hardpoint.core.client.base import EngineCoreClient
from hardpoint.errors import EngineTimeoutError
from hardpoint.host.live.change import Slot
from hardpoint.plugins import EngineCoreRequest
from hardpoint.process.protocol import EngineCoreReadyResponse
from hardpoint.process.utility_calls import NO_TIMEOUT

Attempt = Callable[[], bool]
"""Tries to send one message without waiting; returns whether it was sent. It may be called again
until it returns true, and not after that.
"""


class RemoteClient(EngineCoreClient, Protocol):
    """The interface of one or several engine cores in processes of their own.

    Attributes:
        ready: the ready response; of several, the first one's.
    """

    ready: EngineCoreReadyResponse

    @property
    def pid(self) -> int:
        """The process id; of several engines, the id of the first that serves."""

    @property
    def is_serving(self) -> bool:
        """Whether an engine accepts requests: not while the only one is restarted."""

    def offer_requests(self, requests: Sequence[EngineCoreRequest]) -> Attempt:
        """Return a function that tries to send the requests of one call without waiting.

        Raises:
            RequestError: one cannot be encoded.
            EngineDeadError: the engine is gone; the returned function raises it too.
        """

    def call(self, method: str, *args: Any, rank: int | None = None) -> Future[Any]:
        """Call one of the engine's utilities without waiting, as `call_utility` does."""

    def utility_timeout(self, method: str) -> float | None:
        """Return the timeout of a utility call in seconds; None is without limit."""

    def no_answer(self, method: str, timeout: float | None = None) -> EngineTimeoutError:
        """Return the error for a utility call that was not answered in time."""


class UtilityCalls:
    """Calls of utilities of engines in other processes that wait for the answer."""

    change_slots: Sequence[Slot] = ()
    shares_engines: bool = False

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s` is the timeout of most utilities, `engine.call_timeout_seconds`."""
        self._timeout_s = timeout_s

    def call(self, method: str, *args: Any, rank: int | None = None) -> Future[Any]:
        """Call one of the engine's utilities without waiting."""
        raise NotImplementedError

    def _wait_until_serving(self, timeout_s: float | None) -> None:
        """Wait for an engine that is being started; return at once for any other."""

    def call_utility(
        self, method: str, *args: Any, timeout: float | None = None, rank: int | None = None
    ) -> Any:
        """Call one of the engine's utilities and wait for its result.

        Args:
            timeout: seconds to wait; None is the utility's own.
            rank: one of `ranks`, the engine to call; None is all of them.

        Raises:
            EngineDeadError: the engine is gone.
            EngineTimeoutError: it did not answer in time.
            HardpointError: what the utility raised.
        """
        self._wait_until_serving(self.utility_timeout(method) if timeout is None else timeout)
        future = self.call(method, *args, rank=rank)
        try:
            return future.result(self.utility_timeout(method) if timeout is None else timeout)
        except TimeoutError:
            if future.done():  # the utility itself raised it
                raise
            future.cancel()
            raise self.no_answer(method, timeout) from None

    def utility_timeout(self, method: str) -> float | None:
        """Return the timeout of a utility call in seconds; None is without limit."""
        return None if method in NO_TIMEOUT else self._timeout_s

    def no_answer(self, method: str, timeout: float | None = None) -> EngineTimeoutError:
        """Return the error for a utility call that was not answered in time.

        Args:
            timeout: timeout of the call in seconds; None is the configured one.
        """
        limit = f"{self._timeout_s:g} s (engine.call_timeout_seconds)"
        return EngineTimeoutError(
            f"the engine did not answer {method} within "
            f"{limit if timeout is None else f'{timeout:g} s'}"
        )
