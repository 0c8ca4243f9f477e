"""Load balancers: which of several engines runs a request."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, ClassVar, Protocol

from hardpoint.plugins.component.base import Component, Context
from hardpoint.plugins.component.behaviour import Default, Returned, returns, unusable
from hardpoint.plugins.requests.params import EngineCoreRequest

__all__ = ["BalancerContext", "EngineView", "LoadBalancer"]


class EngineView(Protocol):
    """An engine that a request may be sent to, as the client of several engines sees it.

    Counts of the client itself are exact. Figures of the engine's last report are up to 100 ms
    old, and older while the engine hangs.
    """

    @property
    def rank(self) -> int:
        """The number of the engine, from 0.

        It stays the same; the place in `engines` does not, for engines that start, drain or have
        died are left out.
        """

    @property
    def in_flight(self) -> int:
        """The requests that this client has sent and that have not ended; exact."""

    @property
    def pending_prompt_tokens(self) -> int:
        """Tokens to compute of the engine's requests that have no output yet; exact.

        Tokens of their prompts, and of outputs from another engine, minus cached ones.
        """

    @property
    def num_waiting(self) -> int:
        """Waiting requests of all clients by the last report, and requests on their way."""

    @property
    def num_running(self) -> int:
        """The requests that run, of all clients, by its last report."""

    @property
    def kv_cache_usage(self) -> float:
        """The share of KV blocks that requests reference, from 0 to 1, by its last report."""

    def cached_prefix_tokens(self, request: EngineCoreRequest) -> int:
        """Return the length of the longest prefix of a prompt that the engine has cached.

        By its KV events, so without a request to it; the same look-up serves all engines. 0 unless
        the balancer declares `uses_cached_prefixes`.
        """

    def has_session(self, request: EngineCoreRequest) -> bool:
        """Return whether the last request of the same session (`retention.session`) ran there."""

    def has_adapter(self, request: EngineCoreRequest) -> bool:
        """Return whether the request's adapter is loaded there; true for a request without one."""


@dataclass(frozen=True, kw_only=True)
class BalancerContext(Context["LoadBalancer"]):
    """Context of a balancer, in the frontend.

    Attributes:
        num_engines: engines at the start; there may be more or fewer later.
        clock: seconds.
    """

    num_engines: int
    clock: Callable[[], float]


def _engine_index(value: Any, args: Sequence[Any], originals: Sequence[Any]) -> int:  # noqa: ARG001
    engines = originals[1]
    try:
        position = -1 if isinstance(value, bool) else index(value)
    except TypeError:
        raise unusable(value, ", expected an index of engines") from None
    if not 0 <= position < len(engines):
        raise unusable(value, f", expected an index of engines, from 0 to {len(engines) - 1}")
    return position


def _fewest_in_flight(request: EngineCoreRequest, engines: Sequence[EngineView]) -> int:  # noqa: ARG001
    return min(range(len(engines)), key=lambda place: engines[place].in_flight)


ENGINE_INDEX = Returned("an index of `engines`", _engine_index)
FEWEST_IN_FLIGHT = Default(
    "the engine with the fewest requests in flight is taken", _fewest_in_flight
)


class LoadBalancer(Component):
    """Chooses the engine that runs a request, where there are several (`parallel.data`).

    It is asked once per request, before it is sent, and again if its engine is lost and it goes on
    at another one. A request that names its engine (`data_parallel_rank`) is not asked about. Where
    one engine serves, no balancer is asked.

    If `choose` raises or returns something else, the engine with the fewest requests in flight is
    taken, and `LLM.plugins.health()` counts the fault.

    Attributes:
        uses_cached_prefixes: whether it calls `EngineView.cached_prefix_tokens`; the engines then
            send their KV events to the client.
    """

    context: BalancerContext
    uses_cached_prefixes: ClassVar[bool] = False

    @returns(ENGINE_INDEX, otherwise=FEWEST_IN_FLIGHT)
    @abstractmethod
    def choose(self, request: EngineCoreRequest, engines: Sequence[EngineView]) -> int:
        """Return the index in `engines` of the engine for a request.

        Called by one thread at a time. A call that takes longer than some microseconds delays all
        requests; look at a few engines rather than at all, where there may be many.

        Args:
            request: to be sent; it must not be changed.
            engines: engines that accept requests, at least two, in the order of their ranks.
        """
