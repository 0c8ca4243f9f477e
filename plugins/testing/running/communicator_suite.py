"""The conformance suite for communicators; the built-in ones pass it too."""

from __future__ import annotations

import functools
import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st

from hardpoint.plugins import HardpointError
from hardpoint.plugins.component import Component
from hardpoint.plugins.parallel import Communicator, CommunicatorContext, Placement
from hardpoint.testing.component_suite import ComponentSuite, first_device
from hardpoint.testing.suite import Rule, Violation, checks

from . import rank_programs as programs
from .rank_programs import Outcome, Program, RankRun

RESULTS = Rule(
    "results: every operation returns the result in its docstring, in every rank",
    "return a tensor of the stated shape and of the dtype of x, on its device",
)
SUMS = Rule(
    "sums: all_reduce adds in float32 at least, in rank order, rounds once, alike in all ranks",
    "gather the x of all ranks, add them in float32 from rank 0 on, and convert the sum",
)
MESSAGES = Rule(
    "messages: a tensor arrives once, in order, and send does not wait for x to be received",
    "copy x, and keep the messages between each two ranks apart from all others",
)
GROUPS = Rule(
    "groups: groups of other names, between the same ranks, are apart",
    "make the names of files, segments and keys from context.group",
)
ABORT = Rule(
    "abort: calls that wait raise CommunicationAbortedError in a second, later ones at once",
    "let each wait end when a flag is set, and look at it first in every call",
)
REFUSED = Rule(
    "refused: ranks that do not exist, and this one in send and recv, are a ValueError",
    "compare source and destination with 0, size and rank before anything is sent",
)
MISSING = Rule(
    "missing: where a rank does not come, the constructor raises ModelError in time",
    "wait until context.timeout_seconds have passed, then name the missing ranks",
)
CLOSE = Rule(
    "close: it releases connections, threads, files and shared memory",
    "close all handles of the constructor, and unlink all names",
)

_SECONDS = 10.0
_MISSING_SECONDS = 0.3
_SLACK_SECONDS = 2.0
_CLOSE_SECONDS = 1.0


def _sizes(suite: CommunicatorSuite) -> Iterator[tuple[int]]:
    return ((size,) for size in suite.sizes)


def _messages(suite: CommunicatorSuite) -> Iterator[tuple[Program, int]]:
    long = functools.partial(programs.ring, width=suite.buffered_bytes // 4)
    return itertools.product((programs.ring, long, programs.in_order, programs.apart), suite.sizes)


def _aborts(suite: CommunicatorSuite) -> Iterator[tuple[str, int]]:
    return itertools.product(programs.WAITS, suite.sizes)


class CommunicatorSuite(ComponentSuite):
    """Base class of a test class, which sets `communicator`, and `options` if it has some.

    Attributes:
        communicator: the class under test.
        sizes: numbers of ranks.
        device: type of the tensors; None is the first of its `devices` that this machine has.
        dtypes: dtypes of tensors.
        buffered_bytes: size of a tensor for which `send` does not wait if nothing was sent before.
    """

    kind = "communicators"
    communicator: ClassVar[type[Communicator]]
    sizes: ClassVar[Sequence[int]] = (2, 3)
    device: ClassVar[str | None] = None
    dtypes: ClassVar[Sequence[torch.dtype]] = (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
    )
    buffered_bytes: ClassVar[int] = 1 << 18

    def run_in_ranks(self, size: int, run: Callable[[int], Any]) -> list[Any]:
        """Call `run(rank)` for all ranks at the same time; return the results in rank order.

        Runs them in threads of this process. Override it if each rank needs a process: `run` can be
        pickled if the test class can be imported there, and its results too.
        """
        results: dict[int, Any] = {}
        threads = [
            threading.Thread(
                target=lambda rank=rank: results.update({rank: run(rank)}), daemon=True
            )
            for rank in range(size)
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + _SECONDS + _SLACK_SECONDS
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0))
        return [results.get(rank) for rank in range(size)]

    def placement(self, size: int, folder: str) -> Placement:
        """Return where the ranks are; override it for ranks on several hosts.

        Args:
            size: number of ranks.
            folder: private, and empty at first.
        """
        return Placement(hosts=("",) * size, folder=folder)

    def _component(self) -> type[Component]:
        return self.communicator

    def _check_construction(self) -> None:
        for size in self.sizes:
            for outcome in self._run(size, programs.describe, RESULTS):
                if not isinstance(outcome.value, str) or not outcome.value.strip():
                    raise RESULTS.violation(
                        f"describe returned {outcome.value!r}", "return a line for the log"
                    )

    def test_results(self) -> None:
        """Any operations one after the other return the right tensors in every rank, for all
        dtypes, empty, small and large ones.
        """
        operations = st.lists(programs.operations(self.dtypes), min_size=1, max_size=6)
        sizes = st.sampled_from(list(self.sizes))
        self._search(RESULTS.text, 20, self._check_results, size=sizes, operations=operations)

    @checks(SUMS, cases=_sizes)
    def test_sums(self, size: int) -> None:
        """Floats are summed in float32 at least, in rank order, and rounded once: in all ranks the
        same bits. On a GPU only the latter.
        """
        for dtype in self.dtypes:
            if dtype.is_floating_point:
                self._check_results(size, programs.sums(dtype))

    @checks(MESSAGES, cases=_messages)
    def test_messages(self, program: Program, size: int) -> None:
        """Messages arrive once and in order, collectives in between. Ranks that all send first do
        not wait for ever; x may be changed when `send` has returned.
        """
        for outcome in self._run(size, program, MESSAGES):
            if outcome.value:
                raise MESSAGES.violation(f"with {size} ranks, {outcome.value}")

    @checks(GROUPS, cases=_sizes)
    def test_groups(self, size: int) -> None:
        """Two groups of the same ranks do not get each other's tensors."""
        for outcome in self._run(size, programs.two_groups, GROUPS, ("one", "two")):
            if outcome.value:
                raise GROUPS.violation(
                    f"with {size} ranks and the groups one and two, {outcome.value}"
                )

    @checks(ABORT, cases=_aborts)
    def test_abort(self, call: str, size: int) -> None:
        """Calls that wait raise `CommunicationAbortedError` within a second, in the rank that
        aborts and in the others; later calls at once.
        """
        outcomes = self._run(size, functools.partial(programs.abort, call), ABORT)
        began = outcomes[0].value.ended
        for rank, outcome in enumerate(outcomes):
            end = outcome.value
            if end.wrong:
                raise ABORT.violation(f"after an abort, in rank {rank}, {end.wrong}")
            if end.ended - began > programs.ABORT_SECONDS:
                raise ABORT.violation(
                    f"of {size} ranks, {call} of rank {rank} ended {end.ended - began:.1f} s after "
                    f"rank 0 called abort"
                )
            if end.later > programs.ABORT_SECONDS:
                raise ABORT.violation(
                    f"a call of rank {rank} after the abort took {end.later:.1f} s to fail"
                )

    @checks(REFUSED, cases=_sizes)
    def test_refused(self, size: int) -> None:
        """Wrong ranks and rows are a ValueError, and nothing is lost by that."""
        for rank, outcome in enumerate(self._run(size, programs.refusals, REFUSED)):
            if outcome.value:
                raise REFUSED.violation(f"rank {rank} of {size}: {outcome.value}")

    @checks(MISSING)
    def test_missing(self) -> None:
        """Where a rank does not come, the constructor raises a ModelError in time, which names
        it.
        """
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="hardpoint-suite-") as folder:
            try:
                communicator = self.make(0, 2, folder, seconds=_MISSING_SECONDS)
            except HardpointError as error:
                if "1" not in str(error):
                    raise MISSING.violation(f"it raised {error}, which names no rank") from error
            else:
                communicator.close()
                raise MISSING.violation("rank 0 of 2 was built although there was no rank 1")
        if (seconds := time.monotonic() - began) > _MISSING_SECONDS + _SLACK_SECONDS:
            raise MISSING.violation(f"{_MISSING_SECONDS} s were given, it took {seconds:.1f} s")

    @checks(CLOSE, cases=_sizes)
    def test_close(self, size: int) -> None:
        """After close there are no more threads, files and segments than before."""
        self._run(size, programs.one_of_each, CLOSE)  # what stays after the first use may stay
        before = programs.holdings()
        self._run(size, programs.one_of_each, CLOSE)
        deadline = time.monotonic() + _CLOSE_SECONDS
        while (more := programs.more_than(before)) and time.monotonic() < deadline:
            time.sleep(0.01)
        if more:
            raise CLOSE.violation(f"after close of {size} ranks there are more {', '.join(more)}")

    def make(
        self, rank: int, size: int, folder: str, group: str = "group", seconds: float = _SECONDS
    ) -> Communicator:
        """Return the communicator of a rank.

        Raises:
            Violation: it cannot be built.
        """
        communicator: Communicator = self._build(
            CommunicatorContext,
            group=group,
            rank=rank,
            size=size,
            device=first_device(self.communicator, self.device),
            placement=self.placement(size, folder),
            timeout_seconds=seconds,
        )
        return communicator

    def _run(
        self, size: int, program: Program, rule: Rule, groups: Sequence[str] = ("group",)
    ) -> list[Outcome]:
        """Run a program in all ranks.

        Raises:
            Violation: a rank did not end, or raised an exception.
        """
        first_device(self.communicator, self.device)  # skips the test in this thread if it must
        with tempfile.TemporaryDirectory(prefix="hardpoint-suite-") as folder:
            run = RankRun(type(self), size, folder, program, tuple(groups), _SECONDS)
            outcomes = self.run_in_ranks(size, run)
        for rank, outcome in enumerate(outcomes):
            if not isinstance(outcome, Outcome):
                raise rule.violation(
                    f"rank {rank} of {size} had not ended after {_SECONDS + _SLACK_SECONDS:g} s"
                )
        _check_ends(outcomes, rule)
        return outcomes

    def _check_results(self, size: int, operations: Sequence[programs.Operation]) -> None:
        program = functools.partial(programs.run_operations, operations)
        outcomes = self._run(size, program, RESULTS)
        exact_sums = first_device(self.communicator, self.device).type == "cpu"
        for index, operation in enumerate(operations):
            results = [outcome.value[index] for outcome in outcomes]
            if problem := programs.wrong_shape(operation, results):
                raise RESULTS.violation(f"with {size} ranks, {operation}: {problem}")
            if problem := programs.wrong_values(operation, results, exact_sums=exact_sums):
                rule = SUMS if operation.name == "all_reduce" else RESULTS
                raise rule.violation(f"with {size} ranks, {operation}: {problem}")


def _check_ends(outcomes: Sequence[Outcome], rule: Rule) -> None:
    """Check that all ranks ended by themselves; report the first that did not.

    Raises:
        Violation: a rank raised an exception, or waited for too long.
    """
    size = len(outcomes)
    for outcome in sorted((o for o in outcomes if not o.is_late), key=lambda o: o.ended):
        if outcome.violation is not None:
            raise Violation(*outcome.violation)
        if outcome.error is not None:
            raise rule.violation(
                f"rank {outcomes.index(outcome)} of {size} raised {outcome.error} in "
                f"{outcome.where}"
            )
    if late := [f"rank {rank} ({o.where})" for rank, o in enumerate(outcomes) if o.is_late]:
        raise rule.violation(
            f"of {size} ranks, these still waited after {_SECONDS:g} s: {', '.join(late)}"
        )
