"""Communication by torch: listeners, missing ranks, and the end of a rank."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from support import communicator_rank
from support.communicator_rank import join
from support.process.forked_python import forked_python
from support.waiting import wait_until

from hardpoint.builtin_plugins.communicators.gloo import GlooGroup
from hardpoint.core.worker.ranks import Ranks
from hardpoint.errors import CommunicationAbortedError, ModelError
from hardpoint.host.system.rank_store import served_store
from hardpoint.plugins import HardpointError
from hardpoint.plugins.config.engine import ParallelConfig
from hardpoint.plugins.parallel import Placement


def in_ranks(size, function):
    """Return the result or error of a function of the rank, by rank."""

    def run(rank):
        try:
            return function(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def listening(pid=None):
    """Return the addresses that a process listens on."""
    connections = psutil.Process(pid).net_connections()
    return [c.laddr for c in connections if c.status == psutil.CONN_LISTEN]


def held():
    """Return the threads, descriptors and listening sockets of this process."""
    return {*threading.enumerate(), *os.listdir("/proc/self/fd"), *listening()}


def two_hosts(port, size=2):
    half = size // 2
    return Placement(
        hosts=("left",) * half + ("right",) * half,
        addresses=("127.0.0.1",) * half + ("127.0.0.2",) * half,
        store=f"127.0.0.1:{port}",
    )


def test_all_groups_of_two_hosts_meet_and_listen_on_the_named_addresses_only(free_port):
    placement, config = two_hosts(free_port(), 4), ParallelConfig(tensor=2, pipeline=2)
    before, seen = set(listening()), []

    def meet(rank):
        def connect(group, group_rank, members):
            return join(group_rank, placement.of(members), group)

        if rank == 0:
            time.sleep(0.1)  # the others find no store at first
        with served_store(rank, placement):
            if rank == 0:
                seen.extend(listening())
            ranks = Ranks(config, rank, placement)
            ranks.meet(connect)
        return ranks

    all_ranks = in_ranks(4, meet)
    store = int(placement.store.rpartition(":")[2])
    assert ("127.0.0.1", store) in seen
    after = set(listening()) - before
    assert len(after) == 8  # two groups in each of four ranks; the store is closed
    assert {address.ip for address in {*after, *seen} - before} == {"127.0.0.1", "127.0.0.2"}
    assert all_ranks[0].describe() == "gloo over 127.0.0.1"
    assert all_ranks[2].describe() == "gloo over 127.0.0.1, gloo over 127.0.0.2"  # on its host
    in_ranks(4, lambda rank: all_ranks[rank].wait_for_all())
    for ranks in all_ranks:
        ranks.close()
    wait_until(lambda: set(listening()) == before)


def test_a_rank_that_is_killed_ends_a_waiting_call(tmp_path):
    child = forked_python().popen([communicator_rank.__file__, "1", str(tmp_path)])
    try:
        communicator = join(0, Placement(hosts=("", ""), folder=str(tmp_path)))
        communicator.all_reduce(torch.zeros(1))
        assert {address.ip for address in listening(child.pid)} == {"127.0.0.1"}
        killed = []
        threading.Timer(0.1, lambda: (killed.append(time.monotonic()), child.kill())).start()
        with pytest.raises(
            CommunicationAbortedError, match=r"recv of rank 0 in group 'group': .* by peer"
        ):
            communicator.recv(torch.zeros(1), 1)
        assert time.monotonic() - killed[0] < 60
        with pytest.raises(
            CommunicationAbortedError, match=r"send of rank 0 in group 'group': .* by peer"
        ):
            communicator.send(torch.zeros(1), 1)
        communicator.close()
    finally:
        child.kill()
        child.wait()


def test_what_fails_in_a_rank_alone_keeps_its_class(tmp_path, monkeypatch):
    def fail(self, x):
        raise torch.OutOfMemoryError("no memory for a copy")

    def run(rank):
        communicator = join(rank, Placement(hosts=("", ""), folder=str(tmp_path)))
        communicator.all_reduce(torch.zeros(1))
        if rank == 0:
            monkeypatch.setattr(GlooGroup, "all_gather", fail)
            with pytest.raises(torch.OutOfMemoryError, match="^no memory for a copy"):
                communicator.all_gather(torch.zeros(1))
        return communicator.recv(torch.zeros(1), 1 - rank)

    here, there = in_ranks(2, run)
    assert isinstance(here, CommunicationAbortedError)
    assert "recv of rank 0 in group 'group': no memory for a copy" in str(here)
    assert isinstance(there, CommunicationAbortedError)


def test_an_abort_has_its_reason_and_ends_ranks_one_after_the_other(tmp_path):
    placement = Placement(hosts=("",) * 3, folder=str(tmp_path))

    def run(rank):
        communicator = join(rank, placement)
        communicator.all_reduce(torch.zeros(1))
        if rank == 2:
            threading.Timer(0.05, communicator.abort, ["rank 7 has ended"]).start()
            return communicator.recv(torch.zeros(1), 0)  # rank 0 waits for rank 1, that for rank 2
        return communicator.recv(torch.zeros(1), rank + 1)

    began = time.monotonic()
    errors = in_ranks(3, run)
    assert "recv of rank 2 in group 'group': rank 7 has ended" in str(errors[2])
    assert all("by peer" in str(error) for error in errors[:2])
    assert time.monotonic() - began < 60


def test_a_send_waits_for_what_was_sent_long_before(tmp_path):
    placement = Placement(hosts=("", ""), folder=str(tmp_path))
    sent = []

    def run(rank):
        communicator = join(rank, placement)
        communicator.all_reduce(torch.zeros(1))
        if rank == 0:
            for number in range(6):
                communicator.send(torch.full((1,), float(number)), 1)
                sent.append(number)
        else:
            wait_until(lambda: len(sent) == 4)
            time.sleep(0.05)
            early = len(sent)
            got = [float(communicator.recv(torch.zeros(1), 0)) for _ in range(6)]
            communicator.all_reduce(torch.zeros(1))
            return early, got
        communicator.all_reduce(torch.zeros(1))
        return None

    assert in_ranks(2, run)[1] == (4, [0, 1, 2, 3, 4, 5])


def test_what_cannot_be_sent_as_it_is_is_refused(tmp_path):
    placement = Placement(hosts=("", ""), folder=str(tmp_path))

    def run(rank):
        communicator = join(rank, placement)
        with pytest.raises(
            ValueError, match=r"contiguous tensor on cpu, got one with strides \(1, "
        ):
            communicator.all_reduce(torch.zeros(2, 3).t())
        with pytest.raises(ValueError, match="expected 2 rows, one per rank, got the shape"):
            communicator.all_to_all(torch.zeros(()))
        return float(communicator.all_reduce(torch.ones(())))

    assert in_ranks(2, run) == [2.0, 2.0]


class TestErrors:
    def test_a_rank_that_does_not_come_is_named_with_its_host(self, free_port):
        placement = two_hosts(free_port())
        with (
            served_store(0, placement),
            pytest.raises(ModelError, match=r"group 'tensor-0': rank 1 \(right, 127.0.0.2\) did n"),
        ):
            join(0, placement, "tensor-0", 0.2)

    def test_a_store_that_does_not_answer_is_named(self, capfd, free_port):
        placement = two_hosts(free_port())
        with pytest.raises(
            ModelError, match=rf"rank 1 could not reach .* {placement.store} within"
        ):
            join(1, placement, seconds=0.2)
        assert not capfd.readouterr().err

    def test_all_ranks_fail_when_one_cannot_listen(self, free_port):
        placement = Placement(
            hosts=("left", "right"),
            addresses=("127.0.0.1", "203.0.113.1"),
            store=f"127.0.0.1:{free_port()}",
        )

        def meet(rank):
            return join(rank, placement)

        with served_store(0, placement):
            errors = in_ranks(2, meet)
        for error in errors:
            assert isinstance(error, ModelError)
            assert "rank 1: Cannot resolve 203.0.113.1 to a (local) address" in str(error)

    def test_the_store_listens_on_the_named_address_or_not_at_all(self):
        placement = Placement(hosts=("left", "right"), store="203.0.113.1:9")
        with (
            pytest.raises(HardpointError, match=r"rank 0 cannot listen on '203.0.113.1:9'"),
            served_store(0, placement),
        ):
            pass

    @pytest.mark.parametrize(
        ("placement", "message"),
        [
            (Placement(hosts=("", ""), folder="/no/such"), "there is no folder '/no/such'"),
            (Placement(hosts=("", "")), "placement.store: expected host:port where there is no f"),
            (Placement(hosts=("a", "b"), store="x:1"), "placement.addresses: expected an IP addr"),
            (
                Placement(hosts=("a", "b"), addresses=("127.0.0.1", "127.0.0.2"), store="host"),
                "placement.store: expected host:port where there is no folder, got 'host'",
            ),
        ],
    )
    def test_a_placement_that_lacks_something_is_refused(self, placement, message):
        with pytest.raises(ModelError, match=message):
            join(0, placement, seconds=0.2)


def test_nothing_is_left_of_a_group(tmp_path):
    placement = Placement(hosts=("", ""), folder=str(tmp_path))
    in_ranks(2, lambda rank: join(rank, placement).close())  # what is left of the first may stay
    before = held()
    in_ranks(2, lambda rank: join(rank, placement, "other").close())
    wait_until(lambda: held() <= before, what="the end of the group")
