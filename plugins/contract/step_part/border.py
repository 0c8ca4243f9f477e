"""The border between two steps: where a step part changes what later steps depend on.

A step part does not make these objects; it gets them by the contexts of its halves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Protocol

from hardpoint.plugins.requests.request import Request


class StepBorder(Protocol):
    """Runs actions of step parts between two steps, while no step is under way."""

    @property
    def loader(self) -> Any:
        """The `WeightLoader` of the weights that the engine started with."""

    @property
    def moves_blocks(self) -> str | None:
        """The setting that makes a part move KV blocks, for messages; None if none does."""

    def check(self, mode: str) -> None:
        """Check that `run` can pause the engine.

        Args:
            mode: what happens to requests in flight, as in `LLM.pause`.

        Raises:
            RequestError: an unknown mode, or one that this engine cannot do.
            HardpointError: the engine is asleep, or is about to be.
        """

    def run(self, part: str, mode: str, action: Callable[[], Any]) -> Future[Any]:
        """Pause the engine, run an action once no step is under way, and continue.

        The engine continues as the user's pauses have it by then.

        Args:
            part: name of the part. One of its actions that waits from before is given up.
            mode: as for `check`.
            action: its result, or exception, is that of the future.

        Raises:
            RequestError, HardpointError: as `check`.
        """

    def give_up(self, part: str, why: str) -> None:
        """Fail the future of an action that has not run, and end its pause.

        Args:
            part: name of the part.
            why: message of the future's HardpointError.
        """

    def live_requests(self) -> Iterable[Request[Any]]:
        """Return the live requests, which may be kept until they end."""

    def change_weights(
        self,
        change: Callable[[], object],
        loader: Callable[[], Any],
        *,
        recompute: bool,
    ) -> None:
        """Change the weights of all workers; call it in an action of `run`.

        The prefix cache is cleared before, and step parts are notified afterwards.

        Args:
            change: gives the workers other weights.
            loader: returns a `WeightLoader` of these weights, for parts that move KV blocks.
            recompute: whether requests that have begun compute their keys and values again.
        """
