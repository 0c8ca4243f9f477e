"""Ranks that load a model together: one that cannot lets no other wait, or read weights."""

from __future__ import annotations

import time

import pytest
import torch
from support.waiting import PATIENCE_S

from hardpoint.core.worker import worker
from hardpoint.core.worker.ranks import Ranks
from hardpoint.host.system.memory import MemoryEstimate
from hardpoint.plugins import ModelError
from hardpoint.plugins.config.engine import ParallelConfig
from hardpoint.plugins.parallel import Placement, SingleRank
from hardpoint.testing import scripted_engine

TWO_BY_TWO = ParallelConfig(tensor=2, pipeline=2)
FOUR = Placement(hosts=("here",) * 4)


class Group(SingleRank):
    """Of two ranks, of which the other one does nothing."""

    size = 2

    class context:  # noqa: N801
        device = torch.device("cpu")

    def __init__(self):
        self.reasons = []

    def abort(self, reason):
        self.reasons.append(reason)

    def close(self):
        self.reasons.append("closed")


def start(folder):
    """Start two ranks that are threads."""
    extra = {
        "executor": {"use": "support.broken.executors:Threaded"},
        "parallel": {"tensor": 2, "start_seconds": 600.0},
    }
    return scripted_engine(folder, extra)


def test_a_rank_that_fails_before_it_comes_lets_no_other_wait(scripted, monkeypatch):
    came = []

    def broken(*_):
        came.append(True)
        if len(came) == 2:
            raise OSError("the device is broken")

    monkeypatch.setattr(worker, "check_parallelism", broken)
    began = time.monotonic()
    with pytest.raises(OSError, match="the device is broken"):
        start(scripted)
    assert time.monotonic() - began < PATIENCE_S


def test_no_rank_reads_weights_before_the_memory_of_all_is_enough(scripted, monkeypatch):
    checked, loaded, check = [], [], MemoryEstimate.check

    def last(self, *args):
        checked.append(self)
        if len(checked) == 2:
            time.sleep(0.1)
            raise ModelError("not enough memory")
        check(self, *args)

    monkeypatch.setattr(MemoryEstimate, "check", last)
    monkeypatch.setattr(
        "hardpoint.core.worker.worker.load_weights", lambda *args: loaded.append(args)
    )
    with pytest.raises(ModelError, match="^not enough memory"):
        start(scripted)
    assert not loaded


def test_an_abort_reaches_ranks_that_meet():
    ranks, made = Ranks(TWO_BY_TWO, 0, FOUR), []

    def connect(group, rank, members):
        assert ranks.abort_reason() == (None if not made else "why")
        made.append(Group())
        if len(made) == 1:
            ranks.abort("why")
        return made[-1]

    ranks.meet(connect)
    assert [group.reasons for group in made] == [["why"], ["why"]]


def test_groups_that_were_made_are_left_if_a_later_one_cannot_be():
    made = []

    def connect(group, rank, members):
        if made:
            raise ModelError("no second group")
        made.append(Group())
        return made[-1]

    ranks = Ranks(TWO_BY_TWO, 0, FOUR)
    with pytest.raises(ModelError, match="no second group"):
        ranks.meet(connect)
    assert [group.reasons for group in made] == [["rank 0 failed: no second group", "closed"]]
    assert not ranks.have_met


def test_ranks_that_wait_read_the_result():
    """On a GPU, a call returns before the other ranks have come."""
    read = []

    class Late(Group):
        def all_reduce(self, x):
            class Unread:
                def item(self):
                    read.append(True)

            return Unread()

    ranks = Ranks(TWO_BY_TWO, 0, FOUR)
    ranks.meet(lambda *_: Late())
    assert len(read) == 3
