"""The engine core that steps together with others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Self

import torch

from hardpoint.core.engine.core import EngineCore
from hardpoint.core.engine.step import EngineCoreParts, Outputs
from hardpoint.core.weights.worker_spec import WorkerSpec
from hardpoint.host.system.arrivals import count_arrivals
from hardpoint.host.system.control_calls import utility
from hardpoint.plugins import EngineCoreOutputs, HardpointError
from hardpoint.plugins.parallel import Communicator, CommunicatorContext, SingleRank

AGREEMENT_INTERVAL = 32
"""Steps of a wave from one agreement to the next."""

COORDINATED_BY = 0
"""The client that notifies the other engines of a wave; it has the engines' coordinator."""


class WaveCore(EngineCore):
    """An engine core in lock step with other engines, which have experts of its model.

    While a wave runs, every engine steps; one without work runs the model on a token that no
    request has. Every 32nd step they agree whether any has work, or waits for a pause; if none has,
    the wave ends in all of them after the same step. A pause is complete where a wave has ended in
    which all engines wait for one, so that no engine stops while another needs it.
    """

    def __init__(self, parts: EngineCoreParts, engines: Communicator) -> None:
        """`engines`: the engines, each a rank."""
        super().__init__(parts)
        self._plain_step, self.step = self.step, self._step_together
        self._engines = engines
        self._wave = 0
        self._is_running = False
        self._is_called = False  # by another engine, which has started the wave
        self._num_steps = 0  # of this wave

    @classmethod
    def of(cls, parts: EngineCoreParts, spec: WorkerSpec) -> Self:
        """Return the core of an engine, once all engines have met, if it is not the only one.

        Raises:
            ModelError: they do not.
        """
        place = spec.place
        if place.engines is None:
            return cls(parts, SingleRank())
        engines = spec.plugins.create(
            spec.plugins.one("communicators"),
            CommunicatorContext,
            group="waves",
            rank=place.rank,
            size=len(place.engines.hosts),
            device=torch.device("cpu"),
            placement=place.engines,
            timeout_seconds=spec.config.parallel.start_seconds,
        )
        count_arrivals(engines)
        return cls(parts, engines)

    @utility()
    def start_wave(self, wave: int) -> None:
        """Join a wave that another engine has started; a paused engine does once it is resumed.

        Args:
            wave: its number; one that has ended here is not started again.
        """
        if wave >= self._wave and not self._is_running:
            self._wave, self._is_called = wave, True

    def has_requests(self) -> bool:
        """Return whether a step has any work, of this engine or of others."""
        return self._is_running or self._needs_wave or super().has_requests()

    @property
    def _needs_wave(self) -> bool:
        """Whether a wave has to run without own requests: for others, or to agree on a pause."""
        pause = self._pause
        is_called = self._is_called and not pause.is_paused
        # While it sleeps, all do, and can run no step: there is nothing to agree on.
        return is_called or (pause.is_pending and not pause.is_sleeping)

    def _step_together(
        self, late_aborts: Callable[[], Sequence[str]] = tuple
    ) -> tuple[Outputs, bool]:
        if not self._is_running:
            if not (self._scheduler.has_requests() or self._needs_wave):
                return self._plain_step(late_aborts)  # has outputs alone
            return self._start(), True
        try:
            outputs, executed = self._plain_step(late_aborts)
            if not executed:
                self._executor.collective_rpc("execute_dummy_batch")
            self._num_steps += 1
            if self._num_steps % AGREEMENT_INTERVAL == 0 and self._agree_to_end():
                self._end(outputs)
        except BaseException:
            self._is_running = False  # this engine is out of step, and ends
            raise
        return outputs, True

    def _start(self) -> Outputs:
        is_first = not self._is_called
        self._is_running, self._is_called, self._num_steps = True, False, 0
        return {COORDINATED_BY: EngineCoreOutputs(start_wave=self._wave)} if is_first else {}

    def _agree_to_end(self) -> bool:
        flags = [super().has_requests(), self._pause.is_pending]
        counts = self._engines.all_reduce(torch.tensor(flags, dtype=torch.float32))
        num_working, num_pausing = counts.tolist()
        return not num_working and num_pausing in (0, self._engines.size)

    def _end(self, outputs: Outputs) -> None:
        if self._engines.rank == 0:
            message = outputs.setdefault(COORDINATED_BY, EngineCoreOutputs())
            message.wave_complete = self._wave
        self._wave += 1
        self._is_running = False
        self.went_idle()

    def leave_loop(self, message: str) -> None:
        """Fail the pauses that are not complete, after the wave, which others may be leaving too.

        If they are not, they have to be started again, since this engine ends.
        """
        with contextlib.suppress(HardpointError):
            for _ in range(2 * AGREEMENT_INTERVAL):
                if not self._is_running:
                    break
                self.step()
        super().leave_loop(message)

    def close(self) -> None:
        """Release workers, model, cache and the communicator."""
        try:
            super().close()
        finally:
            self._engines.close()
