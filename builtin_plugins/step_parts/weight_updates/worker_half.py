"""The worker half of weight updates: reads other weights in a thread, while steps run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from hardpoint.errors import HardpointError
from hardpoint.plugins import WeightLoader, WorkerHalf
from hardpoint.toolkit.updated_weights import UpdatedWeights

from .messages import AskWeights, Call, DropWeights, ReadWeights, UseWeights

if TYPE_CHECKING:
    from hardpoint.plugins.step_part.worker import PreparedModel

NOT_PREPARED = "no weights are prepared: prepare them first"


class _WeightReading:
    """Reads a model in a thread.

    Attributes:
        is_done: whether the thread reads nothing any more.
        error: error of the reading; None without one.
    """

    def __init__(self, model: PreparedModel, earlier: _WeightReading | None) -> None:
        self.is_done = False
        self.error: BaseException | None = None
        self._model: PreparedModel | None = model
        self._is_given_up = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._run, args=[model, earlier], name="hardpoint-weights", daemon=True
        )
        self._thread.start()

    def _run(self, model: PreparedModel, earlier: _WeightReading | None) -> None:
        error: BaseException | None = None
        try:
            if earlier is not None:
                earlier.close()
            if not self._is_given_up:
                model.read()
        except BaseException as cause:
            error = cause
        with self._lock:
            self.is_done, self.error = True, error
        if self._is_given_up:
            self.give_up()

    def pop(self) -> PreparedModel:
        """Return the model, which is read; the caller owns it."""
        model, self._model = self._model, None
        if not self.is_done or self.error is not None or model is None:
            raise HardpointError(NOT_PREPARED)
        return model

    def give_up(self) -> None:
        """Release the model, now or once it is read; wait for nothing."""
        model = None
        with self._lock:
            self._is_given_up = True
            if self.is_done:
                (model, self._model), self.error = (self._model, None), None
        if model is not None:
            model.close()

    def close(self) -> None:
        self.give_up()
        self._thread.join()


class WeightReader(WorkerHalf):
    """Reads weights of files, and lets the worker run with them."""

    def __init__(
        self,
        loader: WeightLoader,
        prepare_again: Callable[[Callable[[], WeightLoader]], PreparedModel],
    ) -> None:
        """`prepare_again`: see `LoadedModel`."""
        self._base = loader.base if isinstance(loader, UpdatedWeights) else loader
        self._prepare_again = prepare_again
        self._reading: _WeightReading | None = None
        self._ticket: int | None = None  # of the prepared weights

    def call(self, message: bytes) -> bytes:
        """Begin to read weights, report whether they are read, use or forget them."""
        match msgspec.msgpack.decode(message, type=Call):
            case ReadWeights(ticket, updates):
                self._drop()
                model = self._prepare_again(lambda: self._loader(updates))
                self._reading, self._ticket = _WeightReading(model, self._reading), ticket
            case AskWeights(ticket):
                return msgspec.msgpack.encode(self._is_read(ticket))
            case UseWeights(ticket):
                self._use(ticket)
            case DropWeights():
                self._drop()
        return b""

    def _loader(self, updates: Sequence[str]) -> WeightLoader:
        return UpdatedWeights(self._base, updates)

    def _prepared(self, ticket: int) -> _WeightReading:
        # The half may have been built again, after a sleep.
        if self._reading is None or self._ticket != ticket:
            raise HardpointError(NOT_PREPARED)
        return self._reading

    def _is_read(self, ticket: int) -> bool:
        """Return whether the weights are read.

        Raises:
            HardpointError: they are not the model's or cannot be read, or memory is short.
        """
        reading = self._prepared(ticket)
        if reading.is_done and reading.error is not None:
            raise reading.error
        return reading.is_done

    def _use(self, ticket: int) -> None:
        model = self._prepared(ticket).pop()
        self._reading = self._ticket = None
        model.use()

    def _drop(self) -> None:
        """Forget the prepared weights; close weights still being read afterwards."""
        self._ticket = None
        if self._reading is not None:
            self._reading.give_up()

    def close(self) -> None:
        """Forget them, and wait until nothing is read."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.close()
