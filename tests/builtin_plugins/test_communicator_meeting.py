"""Meetings of ranks: an abort ends the waiting, and the cause of absence is reported to all."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from support.communicator_rank import join
from support.waiting import wait_until

from hardpoint.builtin_plugins.communicators.shared_memory import SharedMemoryCommunicator
from hardpoint.builtin_plugins.communicators.torch import TorchCommunicator
from hardpoint.errors import CommunicationAbortedError
from hardpoint.host.system import rank_store
from hardpoint.host.system.rank_store import served_store
from hardpoint.plugins import ModelError
from hardpoint.plugins.parallel import CommunicatorContext, Placement


@pytest.fixture
def store(free_port):
    return f"127.0.0.1:{free_port()}"


@pytest.mark.parametrize("where", ["a folder", "a store", "a store that nobody serves"])
@pytest.mark.parametrize("cls", [SharedMemoryCommunicator, TorchCommunicator])
def test_an_abort_ends_the_waiting_for_a_rank_that_does_not_come(cls, where, tmp_path, store):
    placement = Placement(hosts=("", ""), store=store)
    if where == "a folder":
        placement = Placement(hosts=("", ""), folder=str(tmp_path))
    reasons = []
    context = CommunicatorContext(
        name="x",
        options=cls.Options() if hasattr(cls, "Options") else None,
        group="tensor-0",
        rank=0,
        size=2,
        device=torch.device("cpu"),
        placement=placement,
        timeout_seconds=300.0,
        abort_reason=lambda: reasons[0] if reasons else None,
    )
    threading.Timer(0.1, reasons.append, ["rank 1 has ended"]).start()
    began = time.monotonic()
    served = 0 if where == "a store" else 1
    with (
        pytest.raises(CommunicationAbortedError, match=r"group 'tensor-0': rank 1 has ended$"),
        served_store(served, placement),
    ):
        cls(context)
    assert time.monotonic() - began < 60


def test_what_keeps_rank_0_away_is_reported_to_the_ranks_of_other_hosts(store, monkeypatch):
    placement = Placement(
        hosts=("left", "right"), addresses=("192.0.2.1", "127.0.0.1"), store=store
    )
    errors = {}

    def wait_for_the_other(_seconds):
        wait_until(lambda: 1 in errors)

    def meet(rank):
        with pytest.raises(ModelError) as raised, served_store(rank, placement):
            join(rank, placement)
        errors[rank] = str(raised.value)

    monkeypatch.setattr(rank_store, "time", SimpleNamespace(sleep=wait_for_the_other))

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "rank 0: " in errors[1]
    assert errors[0] == errors[1]
