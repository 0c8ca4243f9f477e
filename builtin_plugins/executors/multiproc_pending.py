"""Calls of the executor "multiproc" that are under way, and their answers."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future, InvalidStateError
from typing import Any

from hardpoint.errors import CommunicationAbortedError
from hardpoint.toolkit.workers.calls import decode_result
from hardpoint.toolkit.workers.joining import is_joint, join_outputs


class PendingCall:
    """A call that was sent to all ranks.

    Attributes:
        method: name of the method of Worker.
        began: when it was sent, in seconds.
        future: the results in rank order, or the result of the one rank that answers.
        failures: exceptions of ranks, in the order of receipt.
    """

    def __init__(
        self, method: str, world_size: int, output_rank: int | None, *, all_answer: bool = True
    ) -> None:
        """Wait for answers.

        Args:
            world_size: number of ranks.
            output_rank: the rank that samples, in a step; None for other calls.
            all_answer: whether the other ranks answer a step, too, and not only if they fail.
        """
        self.method = method
        self.began = time.monotonic()
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()
        self.failures: dict[int, Exception] = {}
        self._results: dict[int, Any] = {}
        self._world_size = world_size
        self._output_rank = output_rank
        self._all_answer = all_answer or output_rank is None

    @property
    def is_step(self) -> bool:
        """Whether one rank answers it for all."""
        return self._output_rank is not None

    @property
    def missing(self) -> list[int]:
        """The ranks that have not answered."""
        return [
            rank
            for rank in range(self._world_size)
            if rank not in self._results and rank not in self.failures
        ]

    @property
    def left_in_step(self) -> bool:
        """Whether all ranks have answered, and go on together.

        So they do where all have raised the same error, since they refused the call, and in calls
        in which no rank waits for another.
        """
        if not is_joint(self.method):
            return not self.missing
        kinds = {(type(error), str(error)) for error in self.failures.values()}
        return len(self.failures) == self._world_size and len(kinds) == 1

    def process_answer(self, rank: int, label: str, data: bytes) -> None:
        """Decode the answer of a rank, which `label` names in the note of its error."""
        try:
            self._results[rank] = decode_result(self.method, data, label)
        except Exception as error:
            self.failures[rank] = error

    @property
    def is_answered(self) -> bool:
        """Whether no rank has failed, and all results are there that are awaited."""
        if self.failures:
            return False
        if not self._all_answer:
            return self._output_rank in self._results
        return len(self._results) == self._world_size

    def succeed(self) -> None:
        """Set the result, unless it has one."""
        result: Any = [self._results.get(rank) for rank in range(self._world_size)]
        if self._output_rank is not None:
            result = join_outputs(result, self._output_rank)
        with contextlib.suppress(InvalidStateError):
            self.future.set_result(result)

    def failure(self) -> Exception:
        """Return the first error raised by a rank itself, with the other errors in a note."""
        (_, error), *others = sorted(
            self.failures.items(), key=lambda item: isinstance(item[1], CommunicationAbortedError)
        )
        for rank, other in others:
            if str(other) != str(error) and not isinstance(other, CommunicationAbortedError):
                error.add_note(f"Rank {rank} also failed: {type(other).__name__}: {other}")
        return error

    def fail(self, error: BaseException) -> None:
        """Set an error as the result, unless it has one.

        Args:
            error: to raise to the caller.
        """
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)
