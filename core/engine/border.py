"""The border between two steps, as step parts use it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from hardpoint.host.boundary.parts.engine_halves import EngineHalves
from hardpoint.plugins import Request, Scheduler, WeightLoader

from .pause import PauseController


class EngineBorder:
    """Runs actions of step parts between two steps; see `StepBorder`.

    Attributes:
        loader: loader of the weights that the engine started with.
        moves_blocks: the setting that makes a part move KV blocks; None if none does.
    """

    def __init__(self, loader: WeightLoader) -> None:
        """Know no engine yet, which is built after its step parts."""
        self.loader = loader
        self.moves_blocks: str | None = None

    def use(self, pause: PauseController, scheduler: Scheduler, step_parts: EngineHalves) -> None:
        """Pause this engine, and notify these parts."""
        self._pause, self._scheduler, self._step_parts = pause, scheduler, step_parts
        self.moves_blocks = step_parts.moves_blocks

    def check(self, mode: str) -> None:
        """Check that `run` can pause the engine.

        Raises:
            RequestError: an unknown mode, or one that this engine cannot do.
            HardpointError: the engine is asleep, or is about to be.
        """
        self._pause.check(mode)

    def run(self, part: str, mode: str, action: Callable[[], Any]) -> Future[Any]:
        """Pause the engine, run an action once no step is under way, and continue.

        Raises:
            RequestError, HardpointError: as `check`.
        """
        self.check(mode)
        self.give_up(part, f"{part}: another action came before the next step")
        return self._pause.run_paused(part, mode, action)

    def give_up(self, part: str, why: str) -> None:
        """Fail the future of an action that has not run, and end its pause."""
        self._pause.give_up(part, why)

    def live_requests(self) -> Iterable[Request[Any]]:
        """Return the live requests."""
        return self._scheduler.live_requests()

    def change_weights(
        self, change: Callable[[], object], loader: Callable[[], WeightLoader], *, recompute: bool
    ) -> None:
        """Change the weights of all workers; notify step parts, and start those that move blocks.

        Args:
            change: gives the workers other weights.
            loader: returns a loader of these weights, for parts that move KV blocks.
            recompute: whether requests that have begun compute their keys and values again.
        """
        parts = self._step_parts
        if parts.moves_blocks is not None:
            parts.blocks.weights_load(loader())
        self._scheduler.reset_prefix_cache(recompute_running=recompute)
        change()
        parts.weights_changed()
        parts.blocks.restart()
