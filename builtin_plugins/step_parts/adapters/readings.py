"""Readings of adapters by all workers, which go on while steps run."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Sequence

import msgspec

from hardpoint.plugins import HardpointError, LoRARequest, ModelError, RequestError

from .identity import without_layers
from .messages import Ask, Drop, Keep, Progress, Read


class Reading(msgspec.Struct):
    """A reading under way.

    Attributes:
        asked: when its progress was asked for last, on the engine's clock.
        path: folder of the files.
        lora: adapter that a program adds by it; None if a request waits for it.
    """

    asked: float
    path: str
    lora: LoRARequest | None


class Readings:
    """The readings under way, by their tickets."""

    def __init__(
        self, call_workers: Callable[[bytes], Sequence[bytes]], clock: Callable[[], float]
    ) -> None:
        """Begin none yet.

        Args:
            call_workers: see `EngineHalfContext.call_workers`.
            clock: returns seconds.
        """
        self._call_workers, self._clock = call_workers, clock
        self._readings: dict[int, Reading] = {}
        self._tickets = itertools.count(1)

    @property
    def paths(self) -> Collection[str]:
        """The folders that are read."""
        return {reading.path for reading in self._readings.values()}

    def get(self, ticket: int) -> Reading | None:
        """Return a reading; None if there is none with this ticket."""
        return self._readings.get(ticket)

    def begin(self, path: str, lora: LoRARequest | None, ticket: int | None = None) -> int:
        """Let all workers begin to read a folder; return the ticket: the given one, or a new one.

        Raises:
            RequestError: another reading has it.
        """
        if ticket in self._readings:
            raise RequestError(f"ticket: expected an unused ticket, got {ticket}")
        if ticket is None:
            ticket = next(self._tickets)
        self._readings[ticket] = Reading(self._clock(), path, lora)
        self._send(Read(ticket, path))
        return ticket

    def progress(self, ticket: int) -> str | None:
        """Return the content of a reading that all ranks have ended; None until then.

        Raises:
            ModelError: one of them failed, or they have read different files; all forget it.
        """
        answers = [
            msgspec.msgpack.decode(answer, type=Progress) for answer in self._send(Ask(ticket))
        ]
        if any(a.is_lost for a in answers):
            self._send(Read(ticket, self._readings[ticket].path))
            return None
        error = next((a.error for a in answers if a.error is not None), None)
        if error is None:
            if not all(a.is_done for a in answers):
                return None
            error = _defect(answers, self._readings[ticket])
        if error is not None:
            self.drop(ticket)
            raise ModelError(error)
        return answers[0].content

    def keep(self, ticket: int, forgotten: list[str]) -> None:
        """Let workers keep the adapters read, and forget other contents."""
        del self._readings[ticket]
        self._send(Keep(ticket, forgotten))

    def drop(self, ticket: int) -> None:
        """Forget a reading."""
        del self._readings[ticket]
        self._drop(Drop(ticket))

    def drop_unasked(self, seconds: float) -> None:
        """Forget readings that a program has not polled for so many seconds."""
        now = self._clock()
        for ticket, reading in list(self._readings.items()):
            if reading.lora is not None and now - reading.asked > seconds:
                self.drop(ticket)

    def forget(self, contents: list[str]) -> None:
        """Let workers forget contents."""
        self._drop(Drop(0, contents))

    def _drop(self, call: Drop) -> None:
        with contextlib.suppress(HardpointError):  # asleep: the workers have nothing
            self._send(call)

    def _send(self, call: Read | Ask | Keep | Drop) -> Sequence[bytes]:
        return self._call_workers(msgspec.msgpack.encode(call))


def _defect(answers: Sequence[Progress], reading: Reading) -> str | None:
    where = f"{reading.path if reading.lora is None else repr(reading.lora.name)}: "
    if len({answer.content for answer in answers}) > 1:
        return f"{where}its files changed while they were read, or ranks have different ones"
    unknown = set.intersection(*(set(answer.unknown) for answer in answers))
    return where + without_layers(sorted(unknown)) if unknown else None
