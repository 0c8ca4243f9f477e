"""One result of the calls of all ranks, for executors that call several workers.

An executor has a future per rank and call; these functions wait for them, choose the error that
counts, and join the reports of ranks. Ranks wait for each other inside of most calls, so that one
error leads to others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, InvalidStateError, wait
from contextlib import suppress
from typing import Any

from hardpoint.errors import CommunicationAbortedError, HardpointError
from hardpoint.plugins import ModelRunnerOutput
from hardpoint.plugins.executor import Worker

__all__ = [
    "are_out_of_step",
    "failed_rank",
    "first_error_or",
    "is_joint",
    "join_outputs",
    "results_of",
    "worker_method",
]

_ALONE = frozenset(
    {
        "abort",
        "close",
        "plugin_meters",
        "start_parts",
        "start_profile",
        "stop_profile",
    }
)
_SETTLE_SECONDS = 0.25  # for the answers of other ranks, once one has failed


def worker_method(worker: Worker | type[Worker], name: str) -> Callable[..., Any]:
    """Return a method of a worker, for `Executor.collective_rpc`.

    Raises:
        HardpointError: `Worker` has no such method.
    """
    if name.startswith("_") or name not in vars(Worker):
        raise HardpointError(f"method: {name!r} is none of Worker")
    method: Callable[..., Any] = getattr(worker, name)
    return method


def is_joint(method: str) -> bool:
    """Return whether ranks wait for each other in a method of `Worker`."""
    return method not in _ALONE


def results_of(futures: Sequence[Future[Any]], timeout: float | None = None) -> list[Any]:
    """Return the results of all ranks, or raise at once the first error of any.

    A CommunicationAbortedError follows from another rank's exception, which is awaited for a
    moment.

    Args:
        futures: futures of one call, in rank order.
        timeout: seconds for all together; None is no limit.

    Raises:
        TimeoutError: naming the ranks that did not answer in time.
    """
    _, waiting = wait(futures, timeout, FIRST_EXCEPTION)
    if (failed := failed_rank(futures)) is not None:
        futures[failed].result()
    if waiting:
        ranks = ", ".join(str(rank) for rank, future in enumerate(futures) if future in waiting)
        raise TimeoutError(f"no answer within {timeout:g} s from rank {ranks}")
    return [future.result() for future in futures]


def failed_rank(futures: Sequence[Future[Any]]) -> int | None:
    """Return the rank that caused the failure of a call; None if no rank has failed so far.

    If ranks have only raised CommunicationAbortedError, it waits a moment for the rank that
    failed by itself.

    Args:
        futures: futures of one call, in rank order.
    """
    deadline = time.monotonic() + _SETTLE_SECONDS
    while True:
        waiting = [future for future in futures if not future.done()]
        failed = [rank for rank, future in enumerate(futures) if _error_of(future) is not None]
        if not failed:
            return None
        for rank in failed:
            if not isinstance(_error_of(futures[rank]), CommunicationAbortedError):
                return rank
        if not wait(waiting, max(deadline - time.monotonic(), 0), FIRST_COMPLETED).done:
            return failed[0]


def _error_of(future: Future[Any]) -> BaseException | None:
    return future.exception() if future.done() else None


def are_out_of_step(method: str, futures: Sequence[Future[Any]]) -> bool:
    """Return whether a call has left ranks out of step: some failed it, and not all alike.

    Such ranks are lost, since others wait for them, or are ahead of them. An error that all ranks
    raise leaves them in step, and so do errors of methods in which no rank waits for another. Once
    a rank has failed, it waits a moment for the others.

    Args:
        method: the method of `Worker` that was called.
        futures: futures of the call, one for each rank.
    """
    if not is_joint(method) or not any(f.done() and f.exception() for f in futures):
        return False
    _, waiting = wait(futures, _SETTLE_SECONDS)
    if waiting:
        return True
    errors = [future.exception() for future in futures]
    return len({(type(error), str(error)) for error in errors}) > 1


def join_outputs(
    outputs: Sequence[ModelRunnerOutput | None], output_rank: int
) -> ModelRunnerOutput | None:
    """Return the result of a step: the output rank's, with the reports of other ranks.

    Args:
        outputs: result of `execute_model` or `sample_tokens` in each rank.
        output_rank: the rank that samples.
    """
    output = outputs[output_rank]
    if output is not None:
        for rank, other in enumerate(outputs):
            if other is not None and rank != output_rank:
                for name, reports in other.part_reports.items():
                    output.part_reports.setdefault(name, {}).update(reports)
    return output


def first_error_or(futures: Sequence[Future[Any]], output_rank: int) -> Future[Any]:
    """Return a step's result once all ranks are done, or at once the first error of any.

    A CommunicationAbortedError follows from another rank's exception, which is awaited for a
    moment.

    Args:
        futures: futures of one call, in rank order. Other ranks may wait for a failed one, so
                that their futures end only with `Worker.abort` or `Worker.close`.
        output_rank: the rank with the result, see `join_outputs`.
    """
    result: Future[Any] = Future()
    result.set_running_or_notify_cancel()
    lock = threading.Lock()
    waiting = len(futures)
    aborted: BaseException | None = None

    def fail(error: BaseException) -> None:
        with suppress(InvalidStateError):  # another rank was quicker
            result.set_exception(error)

    def ended(future: Future[Any]) -> None:
        nonlocal waiting, aborted
        error = future.exception()
        with lock:
            waiting -= 1
            is_last, is_first_aborted = not waiting, False
            if isinstance(error, CommunicationAbortedError):
                is_first_aborted, aborted = aborted is None, aborted or error
                error = None
        if error is not None:
            fail(error)
        elif is_last and aborted is not None:
            fail(aborted)
        elif is_last:
            with suppress(InvalidStateError):
                result.set_result(join_outputs([f.result() for f in futures], output_rank))
        elif is_first_aborted and not result.done():
            assert aborted is not None
            timer = threading.Timer(_SETTLE_SECONDS, fail, [aborted])
            timer.daemon = True
            result.add_done_callback(lambda _: timer.cancel())
            timer.start()

    for future in futures:
        future.add_done_callback(ended)
    return result
