"""Attribution of an error to a rank: the failed one, not the ranks that noticed it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest

from hardpoint.errors import CommunicationAbortedError
from hardpoint.host.system.memory import is_out_of_memory
from hardpoint.plugins import ModelError
from hardpoint.toolkit.workers import joining
from hardpoint.toolkit.workers.calls import decode_result, encode_failure
from hardpoint.toolkit.workers.joining import failed_rank, first_error_or, results_of

ABORTED = CommunicationAbortedError("rank 1 failed: out of memory")
OWN = ModelError("model: not enough memory")


def futures_of(*outcomes):
    """Return futures; an outcome is an error, a result, or None for a pending future."""
    futures = [Future() for _ in outcomes]
    for future, outcome in zip(futures, outcomes, strict=True):
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        elif outcome is not None:
            future.set_result(outcome)
    return futures


def first_of(futures):
    return first_error_or(futures, 0).result(60)


SETTLE_S = 60.0


@pytest.fixture
def patient(monkeypatch):
    """Wait long for the failed rank."""
    monkeypatch.setattr(joining, "_SETTLE_SECONDS", SETTLE_S)


@pytest.mark.parametrize("call", [results_of, first_of])
def test_an_abort_waits_a_moment_for_the_rank_that_failed(patient, call):
    futures = futures_of(ABORTED, None, ABORTED)
    threading.Timer(0.05, futures[1].set_exception, [OWN]).start()
    with pytest.raises(ModelError, match="not enough memory"):
        call(futures)


@pytest.mark.parametrize("call", [results_of, first_of])
@pytest.mark.parametrize("others", [(ABORTED, "result"), ("result", ABORTED), (None, ABORTED)])
def test_an_abort_alone_is_the_error(monkeypatch, call, others):
    monkeypatch.setattr(joining, "_SETTLE_SECONDS", 0.02)
    with pytest.raises(CommunicationAbortedError, match="rank 1 failed: out of memory"):
        call(futures_of(*others))


@pytest.mark.parametrize("call", [results_of, first_of])
def test_another_error_is_raised_at_once(patient, call):
    began = time.monotonic()
    with pytest.raises(ModelError):
        call(futures_of(ABORTED, None, OWN))
    assert time.monotonic() - began < SETTLE_S / 2


def test_the_rank_that_failed():
    assert failed_rank(futures_of("result", None)) is None
    assert failed_rank(futures_of(ABORTED, "result", OWN)) == 2
    assert failed_rank(futures_of("result", ABORTED)) == 1


def test_an_abort_keeps_its_class_between_processes_and_is_no_lack_of_memory():
    error = CommunicationAbortedError("rank 1 failed: DefaultCPUAllocator: not enough memory")
    assert is_out_of_memory(RuntimeError(str(error)))
    assert not is_out_of_memory(error)
    with pytest.raises(CommunicationAbortedError, match="rank 1 failed"):
        decode_result("load_model", encode_failure(error), "rank 0")
