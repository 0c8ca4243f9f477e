"""Communicators with one mistake each fail their rule; a correct one passes, also in processes."""

from __future__ import annotations

import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from support.broken import communicators
from support.kit_suites import assert_fails, each_broken, shorten, suite_tests
from support.searching import kit_examples

from hardpoint.builtin_plugins.communicators.torch import TorchCommunicator
from hardpoint.testing import CommunicatorSuite

pytest_plugins = ["hardpoint.testing"]

# component, test that it fails, rule, pattern of the message
COMMUNICATORS = [
    (communicators.NoContract, "contract", "contract", "add `contract = 1` to its class body"),
    (communicators.Mute, "contract", "results", "describe returned ''"),
    (communicators.Flattens, "results", "results", r"got \[\d+\] of torch.\w+, expected \["),
    (communicators.Transposes, "results", "results", "all_to_all of .*got wrong values"),
    (communicators.Widens, "results", "results", "of torch.float64, expected .* of torch"),
    (communicators.NoTensor, "results", "results", "rank 0 (got|raised) "),
    (communicators.RoundsEachTime, "sums", "sums", r"256.0, not 258.0"),
    (communicators.SumsFromItself, "sums", "sums", "ranks 0 and 1 got different sums"),
    (communicators.SumsBackwards, "sums", "sums", r"element 0: .*, not .*"),
    (communicators.NoCopy, "messages", "messages", "x was changed after send had returned"),
    (communicators.Rendezvous, "messages", "messages", r"waits in recv .* in send to rank \d"),
    (communicators.NewestFirst, "messages", "messages", r"raised ValueError: x: rank \d has sent "),
    (communicators.Mixes, "messages", "messages", "arrived as|message . of rank|of 3 raised"),
    (communicators.OneForAll, "groups", "groups", "(group (one|two) got|raised|still waited)"),
    (communicators.AbortsLate, "abort", "abort", r"ended \d+.\d s after rank 0 called abort"),
    (communicators.NeverWakes, "abort", "abort", r"had not ended|still waited after 0.5 s: rank"),
    (communicators.ForgetsAbort, "abort", "abort", "in rank 0, a later send returned"),
    (communicators.HidesAborts, "abort", "abort", "recv raised OSError: connection reset by peer"),
    (communicators.TakesAnyRank, "refused", "refused", "broadcast with -1 (was not|raised)"),
    (communicators.TakesItself, "refused", "refused", "send with 0 was not refused"),
    (communicators.RaisesAnother, "refused", "refused", "3 rows raised IndexError: too many rows"),
    (communicators.NeverWaits, "missing", "missing", "was built although there was no rank 1"),
    (communicators.NamesNobody, "missing", "missing", "somebody did not come, which names no rank"),
    (communicators.WaitsLonger, "missing", "missing", r"0.3 s were given, it took \d"),
    (communicators.LeaksThread, "close", "close", r"there are more threads \(\d+, before \d+\)"),
    (communicators.LeaksFile, "close", "close", r"there are more open files \(\d+, before \d+\)"),
    (communicators.CloseFails, "close", "close", "raised OSError: closed already in close"),
]  # fmt: skip


class TestRight(CommunicatorSuite):
    """A rank's program can be pickled, and its result."""

    communicator = communicators.Right
    examples = kit_examples()

    def run_in_ranks(self, size, run):
        outcomes = super().run_in_ranks(size, pickle.loads(pickle.dumps(run)))
        return pickle.loads(pickle.dumps(outcomes))


class InProcesses(CommunicatorSuite):
    """Each rank has a process."""

    communicator = TorchCommunicator

    def run_in_ranks(self, size, run):
        context = get_context("forkserver")
        context.set_forkserver_preload(["hardpoint.testing.running.rank_programs"])
        with ProcessPoolExecutor(size, mp_context=context) as pool:
            return list(pool.map(run, range(size)))


@pytest.mark.nightly
@pytest.mark.parametrize("test", ["contract", "messages", "abort"])
def test_ranks_may_be_processes(test):
    getattr(InProcesses(), f"test_{test}")()


_SUITE = "running.communicator_suite."
LIMITS = {
    communicators.AbortsLate: {"running.rank_programs.ABORT_SECONDS": 0.2},
    communicators.NeverWakes: {f"{_SUITE}_SECONDS": 0.5, f"{_SUITE}_SLACK_SECONDS": 0.2},
    communicators.WaitsLonger: {f"{_SUITE}_SLACK_SECONDS": 0.2},
    communicators.LeaksThread: {f"{_SUITE}_CLOSE_SECONDS": 0.05},
    communicators.LeaksFile: {f"{_SUITE}_CLOSE_SECONDS": 0.05},
}


@each_broken(COMMUNICATORS)
def test_a_broken_communicator_fails_its_rule(cls, test, rule, pattern, monkeypatch):
    shorten(monkeypatch, LIMITS.get(cls, {}))
    assert_fails(CommunicatorSuite, {"communicator": cls}, test, rule, pattern)


def test_every_test_catches_a_component():
    assert {test for _, test, _, _ in COMMUNICATORS} == suite_tests(CommunicatorSuite)
