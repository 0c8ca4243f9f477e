"""Collections of garbage that take long are logged."""

from __future__ import annotations

import gc
import logging

import pytest

from hardpoint.process.engine.garbage import LongCollections, settle_heap


@pytest.mark.parametrize(("seconds", "is_logged"), [(0.3, True), (0.2, False)])
def test_one_that_takes_long_is_logged(caplog, seconds, is_logged):
    times = iter([1.0, 1.0 + seconds])
    collections = LongCollections(0.25, clock=lambda: next(times))
    with caplog.at_level(logging.WARNING, "hardpoint"):
        collections("stop", {"generation": 0, "collected": 0})  # of one that began before
        collections("start", {"generation": 2, "collected": 0})
        collections("stop", {"generation": 2, "collected": 7})
    expected = (
        "a garbage collection of generation 2 took 0.300 s, and found 7 objects "
        "(engine.long_collection_seconds)"
    )
    assert caplog.messages == [expected] * is_logged


@pytest.fixture
def heap():
    callbacks, threshold = list(gc.callbacks), gc.get_threshold()
    yield
    gc.set_threshold(*threshold)
    gc.callbacks[:] = callbacks


@pytest.mark.parametrize("seconds", [0.0, 1e-9])
def test_it_is_called_only_where_it_is_asked_for(heap, caplog, seconds):
    before, frozen = len(gc.callbacks), gc.get_freeze_count()
    settle_heap(seconds)
    assert gc.get_freeze_count() > frozen
    assert len(gc.callbacks) == before + (seconds > 0)
    with caplog.at_level(logging.WARNING, "hardpoint"):
        gc.collect()
    assert bool(caplog.messages) is (seconds > 0)
