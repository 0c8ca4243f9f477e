"""Engine cores that step together: scripted engines under busy loops, with a real coordinator."""

from __future__ import annotations

import itertools
import threading
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import torch
from support.core.engine_harness import LoopRig, MidStep, ScriptedExecutor, request
from support.waiting import PATIENCE_S

from hardpoint.process.protocol import UtilityCall
from hardpoint.replicas.waves.coordinator import Coordinator
from hardpoint.replicas.waves.core import AGREEMENT_INTERVAL, WaveCore

IDS = itertools.count(100)


class Meeting:
    """Sums the tensors of engines, once all have come."""

    def __init__(self, size):
        self.size, self.brought, self.sums = size, {}, []
        self._barrier = threading.Barrier(size, self._add)

    def _add(self):
        self.sums.append(sum(self.brought.values()))

    def of(self, rank):
        return Rank(self, rank)

    def all_reduce(self, rank, x):
        self.brought[rank] = x
        self._barrier.wait(PATIENCE_S)
        return self.sums[-1]  # nobody adds another before all have come again

    def close(self):
        self._barrier.abort()


class Rank:
    def __init__(self, meeting, rank):
        self.meeting, self.rank, self.size, self.num_calls = meeting, rank, meeting.size, 0

    def all_reduce(self, x):
        self.num_calls += 1
        return self.meeting.all_reduce(self.rank, x.clone())

    def close(self):
        self.meeting.close()


class Engines:
    """Some engines, and the client that coordinates them."""

    def __init__(self, size):
        self.meeting, self.coordinator = Meeting(size), Coordinator()
        self.rigs, self.read = [], [0] * size
        for rank in range(size):
            make = partial(WaveCore, engines=self.meeting.of(rank))
            self.rigs.append(LoopRig(ScriptedExecutor(), make_core=make))
        self._messages = self.rigs[0].record_unmerged()

    @property
    def waves(self):
        """The number of each wave that ended, read before messages are merged."""
        ends = [getattr(message, "wave_complete", None) for message in self._messages]
        return [wave for wave in ends if wave is not None]

    def collect(self):
        for rank, rig in enumerate(self.rigs):
            rig.collect()
            new, self.read[rank] = rig.messages[self.read[rank] :], len(rig.messages)
            for _, message in new:
                if (wave := getattr(message, "wave_complete", None)) is not None:
                    assert rank == 0
                    self.coordinator.completed(wave)
                wave = getattr(message, "start_wave", None)
                if wave is not None and self.coordinator.started(wave):
                    self.call("start_wave", wave, but=rank)

    def call(self, method, *args, but=None):
        """Call a utility of all engines; return the ids of the calls."""
        ids = []
        for rank, rig in enumerate(self.rigs):
            if rank != but:
                ids.append((rank, next(IDS)))
                rig.send(UtilityCall(0, ids[-1][1], method, list(args)))
        return ids

    def answered(self, ids):
        return all(number in self.rigs[rank].answers for rank, number in ids)

    def until(self, condition):
        def holds():
            self.collect()
            return condition()

        self.rigs[0].until(holds)

    def finish(self, rank, *names):
        self.until(lambda: all(name in self.rigs[rank].ends for name in names))

    def end(self):
        """Let all leave at once, also in the midst of a wave."""
        for rig in self.rigs:
            rig.loop.request_shutdown()
            rig.loop.request_shutdown()

    def forwards(self, rank):
        """How many steps an engine has run with tokens, and how many with a dummy batch."""
        calls = [call[0] for call in self.rigs[rank].executor.calls]
        return calls.count("sample"), calls.count("execute_dummy_batch")


@contextmanager
def engines(size=2):
    group = Engines(size)
    with ExitStack() as stack:
        stack.callback(group.meeting.close)
        for rig in group.rigs:
            stack.enter_context(rig)
        yield group
        group.end()
    assert [rig.error for rig in group.rigs] == [None] * size


def alone(*names, **fields):
    """The tokens of requests at an engine that needs no other."""
    with LoopRig(ScriptedExecutor()) as rig:
        rig.send(*(request(name, **fields) for name in names))
        rig.until(lambda: rig.ends.keys() == set(names))
        return rig.tokens


def held(some, rank):
    """Keep an engine in the first of its steps in which a request goes on, until it is let go."""
    return MidStep(some.rigs[rank].executor, of=lambda plan: plan.cached_requests.request_ids)


@pytest.mark.parametrize("size", [2, 3])
def test_all_step_as_often_while_one_has_requests(size):
    with engines(size) as some:
        step = MidStep(some.rigs[1].executor)
        some.rigs[1].send(*(request(f"r{i}", max_tokens=40) for i in range(3)))
        step.go_on.set()
        some.finish(1, "r0", "r1", "r2")
        some.until(lambda: some.waves == [0])
        assert some.rigs[1].tokens == alone("r0", "r1", "r2", max_tokens=40)
        counts = [some.forwards(rank) for rank in range(size)]
        assert {sum(count) for count in counts} == {2 * AGREEMENT_INTERVAL}
        assert counts[0] == (0, 2 * AGREEMENT_INTERVAL)
        assert counts[1][0] >= 40
        assert len(some.meeting.sums) == 2


def test_an_engine_without_a_wave_does_not_step():
    with engines() as some:
        some.until(lambda: True)
        assert [some.forwards(rank) for rank in (0, 1)] == [(0, 0), (0, 0)]
        some.rigs[0].send(["unknown"])
        some.collect()
        assert some.coordinator.wave == 0
        assert not some.coordinator.is_running


def test_waves_follow_each_other():
    """Also where an engine gets a request just when a wave ends."""
    with engines() as some:
        for wave in range(6):
            rank = wave % 2
            some.rigs[rank].send(request(f"r{wave}", max_tokens=2 + wave))
            some.finish(rank, f"r{wave}")
            if wave % 3 == 0:  # of the others, the next one comes in the same wave or after it
                some.until(lambda: not some.coordinator.is_running)
        some.until(lambda: not some.coordinator.is_running)
        assert some.waves == list(range(some.coordinator.wave))
        assert sum(some.forwards(0)) == sum(some.forwards(1))


def test_many_requests_at_the_ends_of_waves():
    with engines() as some:
        for number in range(60):
            some.rigs[number % 2].send(request(f"r{number}", max_tokens=AGREEMENT_INTERVAL - 2))
            some.finish(number % 2, f"r{number}")
        some.until(lambda: not some.coordinator.is_running)
        assert sum(some.forwards(0)) == sum(some.forwards(1))


def test_an_abort_ends_a_request_in_a_wave_and_not_the_wave():
    with engines() as some:
        step = held(some, 0)
        some.rigs[0].send(request("long", max_tokens=150), request("gone", max_tokens=150))
        some.until(step.begun.is_set)
        some.rigs[0].send(["gone"])
        step.go_on.set()
        some.finish(0, "gone", "long")
        assert some.rigs[0].ends["gone"] == "abort"
        assert some.rigs[0].tokens["long"] == alone("long", max_tokens=150)["long"]


def test_a_stale_start_changes_nothing():
    with engines() as some:
        some.rigs[0].send(request("r0", max_tokens=2))
        some.finish(0, "r0")
        some.until(lambda: some.waves == [0])
        before = some.forwards(1)
        assert_answered(some, some.call("start_wave", 0))
        assert some.forwards(1) == before
        assert not some.coordinator.is_running


def test_they_leave_in_the_midst_of_a_wave():
    with engines(3) as some:
        steps = [held(some, rank) for rank in (0, 2)]
        some.rigs[0].send(request("r0", max_tokens=180))
        some.rigs[2].send(request("r2", max_tokens=180))
        some.until(lambda: all(step.begun.is_set() for step in steps) and sum(some.forwards(1)))
        some.end()  # the second has joined the wave; others would wait for it otherwise
        for step in steps:
            step.go_on.set()
    assert {rig.ends.get(name) for rig, name in zip(some.rigs[::2], ("r0", "r2"), strict=True)} == {
        "abort"
    }
    assert len({sum(some.forwards(rank)) for rank in range(3)}) == 1


def assert_answered(some, ids):
    some.until(lambda: some.answered(ids))
    for rank, number in ids:
        assert some.rigs[rank].answers[number].failure is None


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_a_pause_is_complete_once_all_have_agreed(mode):
    with engines() as some:
        step = held(some, 0)
        some.rigs[0].send(request("r0", max_tokens=100))
        some.until(step.begun.is_set)
        (first, second) = some.call("pause", mode, False)[:2]
        step.go_on.set()
        assert_answered(some, [first, second])
        assert not some.coordinator.is_running
        before = [some.forwards(rank) for rank in (0, 1)]
        some.rigs[1].send(request("later", max_tokens=3))
        some.until(lambda: some.rigs[1].core.num_unfinished_requests() == 1)
        assert [some.forwards(rank) for rank in (0, 1)] == before
        assert_answered(some, some.call("resume"))
        some.finish(1, "later")
        some.finish(0, "r0")
        ends = {"keep": "length", "abort": "abort", "wait": "length"}
        assert some.rigs[0].ends["r0"] == ends[mode]


def test_a_pause_of_one_engine_waits_for_the_others():
    with engines() as some:
        call = UtilityCall(0, 1, "pause", ["keep", False])
        some.rigs[0].send(call)
        some.until(lambda: len(some.meeting.sums) > 3)  # it is not agreed on
        assert 1 not in some.rigs[0].answers
        some.rigs[1].send(call)
        some.until(lambda: all(1 in rig.answers for rig in some.rigs))
        assert not some.coordinator.is_running


def test_an_engine_that_is_paused_still_joins_when_it_is_resumed():
    with engines() as some:
        assert_answered(some, some.call("pause", "keep", False))
        assert_answered(some, some.call("resume", but=1))
        some.rigs[0].send(request("r0", max_tokens=3))
        some.until(lambda: some.coordinator.is_running)
        assert_answered(some, some.call("resume", but=0))
        some.finish(0, "r0")
        some.until(lambda: not some.coordinator.is_running)
        assert sum(some.forwards(0)) == sum(some.forwards(1))


def test_the_sum_is_of_engines_with_work_and_of_those_that_pause():
    with engines() as some:
        some.rigs[0].send(request("r0", max_tokens=40))
        some.finish(0, "r0")
        some.until(lambda: some.waves == [0])
        assert [tensor.tolist() for tensor in some.meeting.sums] == [[1, 0], [0, 0]]
        assert all(tensor.dtype == torch.float32 for tensor in some.meeting.sums)
