"""The conformance suite for executors; the built-in ones pass it too."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st

from hardpoint.plugins import ConfigError, Executor, ModelError, ModelRunnerOutput, SchedulerOutput
from hardpoint.plugins.component import Component
from hardpoint.plugins.config.engine import ParallelConfig
from hardpoint.testing.component_suite import ComponentSuite
from hardpoint.testing.engine_access import executor_tokens
from hardpoint.testing.suite import Rule, Violation, checks, short_repr
from hardpoint.testing.threads import in_thread, until

from . import executor_rules as rules
from . import executor_session
from .executor_session import ExecutorSession, wait
from .scripted_worker import Does, Order

_CLOSE_SECONDS = 1.0
_AGAIN_SECONDS = 0.1  # in which a callback may be called once more
_SLOW_SECONDS = 2.0  # of a call that takes long, unless the suite ends it
_TIMEOUT_SECONDS = 0.125
_LATE_SECONDS = 0.05
_STEPS = st.lists(
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 5), max_size=4), min_size=1, max_size=8
)


class ExecutorSuite(ComponentSuite):
    """Base class of a test class, which sets `executor`, and `options` if it has some.

    Attributes:
        executor: the class under test.
        importable: whether the engine can import the class; if not, `test_tokens` is skipped.
        parallel: numbers of tensor ranks and of stages to try. Numbers that the executor rejects
            are left out, if its ConfigError names `parallel`.
        communicator: `parallel.communicator` of the engines of `test_tokens`.
        failure_seconds: maximum time until the loss of a worker is reported.
    """

    kind = "executors"
    executor: ClassVar[type[Executor]]
    importable: ClassVar[bool] = True
    parallel: ClassVar[Sequence[tuple[int, int]]] = ((1, 1), (2, 1), (1, 2), (2, 2))
    communicator: ClassVar[str] = "auto"
    failure_seconds: ClassVar[float] = 1.0

    _open: ClassVar[dict[tuple[int, int], ExecutorSession]] = {}
    """Sessions that tests share, since processes take long to start."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Give each class its own sessions."""
        super().__init_subclass__(**kwargs)
        cls._open = {}

    @classmethod
    def teardown_class(cls) -> None:
        """Close the executors that the tests have shared."""
        while cls._open:
            cls._open.popitem()[1].close()

    def lose_worker(self, executor: Executor, rank: int) -> None:
        """End a worker as a crash would; by default its process is killed.

        Override it if workers have no process of their own and can be lost all the same.
        """
        del executor, rank
        raise NotImplementedError

    def _component(self) -> type[Component]:
        return self.executor

    def _check_construction(self) -> None:
        """Leave it to test_sizes and test_start."""

    @checks(rules.SIZES)
    def test_sizes(self) -> None:
        """Numbers of ranks are served, or refused by a `ConfigError` that names `parallel`."""
        self._sizes()

    def test_start(self) -> None:
        """`start` opens a worker per rank, loads all models side by side and returns their infos in
        rank order. The error of a worker that cannot be opened or loaded is raised at once, though
        others wait for it.
        """
        self._run_checks(rules.START.text, self._check_start, *self._start_errors())

    def test_results(self) -> None:
        """Every call returns a future, which ends. The tokens of any steps, several under way too,
        are the same as of a worker that runs each step once and in order: none is dropped, doubled
        or changed. Every rank gets every call once, in order; the result is the output rank's.
        """
        self._search(rules.RESULTS.text, 25, self._check_results, steps=_STEPS)
        self._run_checks(rules.RESULTS.text, self._check_every_call)

    @checks(rules.REPORTS)
    def test_reports(self) -> None:
        """With `context.all_report`, the result of a step has the report of every rank, once."""
        with self._shared(self._size()) as session:
            in_pipeline = _depth(session.executor) > 1
            for counts in ({"a": 3}, {}, {"a": 1, "b": 2}):
                plan = session.plan(counts)
                result = session.begin(plan, in_pipeline=in_pipeline)
                session.check_reports(plan, session.compare(plan, result))

    @checks(rules.CALLS)
    def test_calls(self) -> None:
        """`collective_rpc` calls the method once on every worker, with its arguments; results are
        in rank order.
        """
        with self._shared(self._size()) as session:
            count = session.parallel.world_size
            results = session.rpc("stop_profile")
            if not isinstance(results, list):
                raise rules.CALLS.violation(f"it returned {short_repr(results)}, no list")
            _check_levels(results, count, 0, rules.CALLS, "stop_profile")
            session.rpc("sleep", (2,))
            _check_levels(
                session.rpc("stop_profile"), count, 2, rules.CALLS, "stop_profile after sleep(2)"
            )
            session.rpc("sleep", (0,))
            session.check_calls()

    @checks(rules.TIMEOUT)
    def test_timeout(self) -> None:
        """`collective_rpc` raises `TimeoutError` in time, and a late result is not returned by a
        later call. Workers that run in the caller's own thread are not interrupted.
        """
        with self._shared(self._size()) as session:
            ranks = tuple(range(session.parallel.world_size))
            session.rpc("stop_profile")
            call = session.script.calls(ranks[-1])[-1]
            is_mine = (call.process, call.thread) == (os.getpid(), threading.get_ident())
            slow = 0.0 if is_mine else _SLOW_SECONDS
            order = Order("start_parts", Does.TAKE_LONG, ranks[-1:], seconds=slow)
            with session.script.ordered(order):
                began = time.monotonic()
                try:
                    session.rpc("start_parts", ("weights",), timeout=_TIMEOUT_SECONDS)
                    error = False
                except TimeoutError:
                    error = True
                passed = time.monotonic() - began
                if not is_mine and (not error or passed > slow):
                    outcome = "raised TimeoutError" if error else "returned"
                    raise rules.TIMEOUT.violation(
                        f"collective_rpc with timeout={_TIMEOUT_SECONDS:g} {outcome} after "
                        f"{passed:.2g} s"
                    )
            results = session.rpc("stop_profile")
            _check_levels(results, len(ranks), 0, rules.TIMEOUT, "stop_profile after the late call")

    def test_errors(self) -> None:
        """An error of any rank in `initialize_cache`, `execute_model`, `sample_tokens` or a call is
        raised, of the same class, without waiting for ranks that wait for the failed one.
        """
        self._run_checks(rules.ERRORS.text, self._check_call_error, *self._step_errors())

    @checks(rules.SLEEP)
    def test_sleep(self) -> None:
        """`sleep` and `wake_up` reach every worker."""
        with self._shared(self._size()) as session:
            for method, args, level in (("sleep", (1,), 1), ("wake_up", (["kv_cache"],), 0)):
                session.rpc(method, args)
                results = session.rpc("stop_profile")
                if not all(result.endswith(f" {level}") for result in results):
                    raise rules.SLEEP.violation(
                        f"after {method}{args} a worker is not at level {level}"
                    )

    @checks(rules.PIPELINE)
    def test_pipeline(self) -> None:
        """With `max_concurrent_batches` above 1, `execute_model` returns before its step is
        done.
        """
        for size in self._sizes():
            with self._shared(size) as session:
                if (depth := _depth(session.executor)) == 1:
                    continue
                ranks = tuple(range(session.parallel.world_size))
                order = Order("execute_model", Does.TAKE_LONG, ranks, seconds=_SLOW_SECONDS)
                steps = []
                with session.script.ordered(order):
                    for number in range(depth):
                        plan = session.plan({"a": 1})
                        forward = session.execute(plan)
                        sampled = session.sample(plan)
                        if number == 0 and forward.done():
                            raise rules.PIPELINE.violation(
                                f"max_concurrent_batches is {depth}, but execute_model returned "
                                f"only when its step was done"
                            )
                        steps.append((plan, sampled))
                for plan, sampled in steps:
                    session.compare(plan, lambda s=sampled: wait(s, "sample_tokens"))  # type: ignore[misc]

    def test_failure(self) -> None:
        """The loss of a worker while idle, in a call or during loading fails all waiting calls. It
        is reported to the callback of `on_failure` once, with an error that names the rank; later
        calls raise it, too. A close is not reported. If one rank fails in `sleep`, the others are
        aborted.
        """
        points = [self._check_loss_idle, self._check_loss_in_call, self._check_loss_at_load]
        points = [self._check_no_failure, *self._chosen(points), self._check_out_of_step]
        self._run_checks(rules.FAILURE.text, *points)

    @checks(rules.CLOSE)
    def test_close(self) -> None:
        """After `close` no worker, thread, process, open file or shared memory is left; it may be
        called twice.
        """
        before = _holdings()
        with self._fresh(self._size()) as session:
            _depth(session.executor)
            session.begin(session.plan({"a": 1}))()
            session.executor.close()  # and then again
            if not until(lambda: not session.open_workers(), _CLOSE_SECONDS):
                raise rules.CLOSE.violation(
                    f"the workers of ranks {session.open_workers()} are not closed"
                )
        if not until(lambda: not _more(before, _holdings()), _CLOSE_SECONDS):
            raise rules.CLOSE.violation(
                f"after close there are more {', '.join(_more(before, _holdings()))}"
            )

    def test_tokens(self) -> None:
        """In an engine with the scripted model, with chunked prompts, preemption and an abort,
        requests get the tokens that they get with `uniproc` and one rank.
        """
        if not self.importable or "<locals>" in self.executor.__qualname__:
            pytest.skip("the engine cannot import the class")
        self._run_checks(rules.TOKENS.text, self._check_tokens)

    # Sessions.

    def _new(
        self, size: tuple[int, int], order: Order | None = None, *, all_report: bool = False
    ) -> ExecutorSession:
        tensor, pipeline = size
        config = ParallelConfig(tensor=tensor, pipeline=pipeline, communicator=self.communicator)
        return ExecutorSession(config, self._build, order, all_report=all_report)

    @contextmanager
    def _fresh(self, size: tuple[int, int]) -> Iterator[ExecutorSession]:
        session = self._new(size)
        try:
            try:
                session.start()
                yield session
            finally:
                session.check_workers()
        finally:
            session.close()

    @contextmanager
    def _shared(self, size: tuple[int, int]) -> Iterator[ExecutorSession]:
        """Use an executor that other tests use too, unless one of them fails; all ranks report."""
        try:
            is_new = size not in self._open
            session = self._open.get(size) or self._new(size, all_report=True)
            self._open[size] = session
            try:
                if is_new:
                    session.start()
                yield session
            finally:
                session.check_workers()
        except BaseException:
            self.teardown_class()
            raise

    def _sizes(self) -> list[tuple[int, int]]:
        """Return the numbers of ranks that the executor serves.

        Raises:
            Violation: it refuses some without naming `parallel`, or all.
        """
        served = []
        for size in self.parallel:
            try:
                session = self._new(size)
            except ConfigError as error:
                if "parallel" in str(error):
                    continue
                raise rules.SIZES.violation(
                    f"with parallel.tensor = {size[0]} and parallel.pipeline = {size[1]} its "
                    f"constructor raised ConfigError: {error}"
                ) from error
            session.close()
            served.append(size)
        if not served:
            raise rules.SIZES.violation(f"it refuses all of {list(self.parallel)}")
        return served

    def _size(self) -> tuple[int, int]:
        sizes = self._sizes()
        return next((size for size in sizes if size != (1, 1)), sizes[0])

    def _chosen(self, checks: Sequence[Callable[[], None]]) -> Sequence[Callable[[], None]]:
        """Return which of some checks to run that start an executor each: with few examples one."""
        return checks if self.examples >= 1 else checks[-1:]

    # Checks.

    def _check_start(self) -> None:
        session = self._new(self._size())
        ranks = range(session.parallel.world_size)
        loaded = [rank for rank in ranks if session.script.was_called(rank, "load_model")]
        session.close()
        if loaded:
            raise rules.START.violation(f"the constructor has loaded the models of ranks {loaded}")
        with self._shared(self._size()) as session:
            session.check_calls()

    def _start_errors(self) -> Sequence[Callable[[], None]]:
        return self._chosen(
            [
                lambda: self._check_start_error("open"),
                lambda: self._check_start_error("load_model"),
            ]
        )

    def _check_start_error(self, method: str) -> None:
        size = self._size()
        rank = size[0] * size[1] - 1
        order = Order(method, Does.FAIL, (rank,), others_wait=method != "open")
        made: list[ExecutorSession] = []

        def call() -> None:
            made.append(self._new(size, order))  # the constructor may open workers already
            made[0].start()

        try:
            _expect_error(call, order, rank, "start", executor_session.START_SECONDS)
        finally:
            for session in made:
                session.close()

    def _check_results(self, steps: Sequence[Mapping[str, int]]) -> None:
        for size in self._sizes():
            with self._shared(size) as session:
                depth = _depth(session.executor)
                under_way: list[tuple[SchedulerOutput, Callable[[], ModelRunnerOutput]]] = []
                for counts in steps:
                    plan = session.plan(counts)
                    under_way.append((plan, session.begin(plan, in_pipeline=depth > 1)))
                    if len(under_way) == depth:
                        session.compare(*under_way.pop(0))
                for plan, result in under_way:
                    session.compare(plan, result)

    def _check_every_call(self) -> None:
        for size in self._sizes():
            with self._shared(size) as session:
                session.rpc("start_profile")  # after all that was started
                session.check_calls()

    def _check_call_error(self) -> None:
        with self._shared(self._size()) as session:
            for rank in range(session.parallel.world_size):
                order = Order("start_parts", Does.FAIL, (rank,))
                with session.script.ordered(order):
                    _expect_error(
                        lambda: session.rpc("start_parts", ("weights",)),
                        order,
                        rank,
                        "collective_rpc",
                    )
            results = session.rpc("stop_profile")
            count = session.parallel.world_size
            _check_levels(results, count, 0, rules.ERRORS, "stop_profile after calls that failed")

    def _step_errors(self) -> Sequence[Callable[[], None]]:
        def check(method: str, index: int, *, others_wait: bool) -> Callable[[], None]:
            return lambda: self._check_step_error(method, index, others_wait=others_wait)

        return self._chosen(
            [
                check("initialize_cache", -1, others_wait=True),
                check("execute_model", 0, others_wait=True),
                check("sample_tokens", -1, others_wait=False),
                check("sample_tokens", 0, others_wait=False),
                check("execute_model", -1, others_wait=True),
            ]
        )

    def _check_step_error(self, method: str, index: int, *, others_wait: bool) -> None:
        size = self._size()
        rank = range(size[0] * size[1])[index]
        order = Order(
            method, Does.FAIL, (rank,), others_wait, 0.0 if others_wait else _LATE_SECONDS
        )
        reported: list[BaseException] = []
        with self._fresh(size) as session:
            session.executor.on_failure(reported.append)
            with session.script.ordered(order):

                def call() -> None:
                    if method == "initialize_cache":
                        session.executor.initialize_cache(4)
                        return
                    session.begin(session.plan({"a": 1}))()
                    if until(lambda: bool(reported), self.failure_seconds):
                        raise reported[0]

                _expect_error(call, order, rank, method)

    def _check_no_failure(self) -> None:
        called: list[BaseException] = []
        with self._fresh(self._sizes()[0]) as session:
            session.executor.on_failure(called.append)
        if called:
            raise rules.FAILURE.violation(f"close called the callback with {short_repr(called[0])}")

    def _check_out_of_step(self) -> None:
        """Check that a rank which fails a joint call alone ends all."""
        called: list[BaseException] = []
        size = self._size()
        if size == (1, 1):
            return
        with self._fresh(size) as session:
            rank = session.parallel.world_size - 1
            session.executor.on_failure(called.append)
            order = Order("sleep", Does.FAIL, (rank,), others_wait=True)
            with session.script.ordered(order):
                _expect_error(
                    lambda: session.executor.collective_rpc("sleep", (1,)), order, rank, "sleep"
                )
                call = f"sleep was failed by rank {rank} while others waited"
                self._check_reported(called, call, rank)
                self._check_later(session, called[0])
                if not until(lambda: session.script.was_called(0, "abort"), self.failure_seconds):
                    raise rules.FAILURE.violation(f"{call}, and rank 0 was not aborted")

    def _check_loss_idle(self) -> None:
        called: list[BaseException] = []
        with self._fresh(self._size()) as session:
            rank = session.parallel.world_size - 1
            session.executor.on_failure(called.append)
            self._lose(session, rank)
            self._check_reported(called, "an idle worker was lost", rank)
            self._check_later(session, called[0])

    def _check_loss_in_call(self) -> None:
        called: list[BaseException] = []
        with self._fresh(self._size()) as session:
            session.executor.on_failure(called.append)
            ranks = tuple(range(session.parallel.world_size))
            with session.script.ordered(Order("execute_model", Does.WAIT, ranks)):
                result = in_thread(session.begin(session.plan({"a": 1})))
                self._until_called(session, 0, "execute_model")
                self._lose(session, 0)
                self._check_ended(result, "a step with a lost worker")
            self._check_reported(called, "a worker was lost in a step", 0)

    def _check_loss_at_load(self) -> None:
        session = self._new(self._size())
        rank = session.parallel.world_size - 1
        try:
            with session.script.ordered(Order("load_model", Does.WAIT, (rank,), others_wait=True)):
                started = in_thread(session.start)
                self._until_called(session, rank, "load_model")
                self._lose(session, rank)
                self._check_ended(started, "start, with a lost worker,")
        finally:
            session.close()

    def _until_called(self, session: ExecutorSession, rank: int, method: str) -> None:
        if not until(
            lambda: session.script.was_called(rank, method), executor_session.START_SECONDS
        ):
            raise rules.RESULTS.violation(f"{method} was not called in rank {rank}")

    def _lose(self, session: ExecutorSession, rank: int) -> None:
        process = session.process_of(rank)
        if type(self).lose_worker is not ExecutorSuite.lose_worker:
            self.lose_worker(session.executor, rank)
        elif process != os.getpid():
            os.kill(process, signal.SIGKILL)
        else:
            pytest.skip(
                f"the workers of {session.executor.name} are in this process, and "
                f"{type(self).__name__} does not override lose_worker()"
            )

    def _check_reported(self, called: Sequence[BaseException], call: str, rank: int) -> None:
        if not until(lambda: bool(called), self.failure_seconds):
            raise rules.FAILURE.violation(
                f"{call}, and the callback was not called within {self.failure_seconds:g} s"
            )
        time.sleep(_AGAIN_SECONDS)
        if len(called) > 1:
            raise rules.FAILURE.violation(
                f"{call}, and the callback was called {len(called)} times"
            )
        if not isinstance(called[0], BaseException) or f"rank {rank}" not in str(called[0]):
            raise rules.FAILURE.violation(
                f"{call}: the callback was called with {short_repr(called[0])}, which does not "
                f"name 'rank {rank}'"
            )

    def _check_later(self, session: ExecutorSession, lost: BaseException) -> None:
        later = in_thread(lambda: session.executor.collective_rpc("stop_profile"))
        call = "a collective_rpc after the loss of a worker"
        self._check_ended(later, call)
        if str(later.exception()) != str(lost):
            raise rules.FAILURE.violation(
                f"{call} raised {short_repr(later.exception())}, the loss was {short_repr(lost)}"
            )

    def _check_ended(self, future: Any, call: str) -> None:
        """Check that a call of this suite's thread ends with an error in time."""
        if not until(future.done, self.failure_seconds):
            raise rules.FAILURE.violation(f"{call} had not ended after {self.failure_seconds:g} s")
        if future.exception() is None:
            raise rules.FAILURE.violation(f"{call} gave {short_repr(future.result())}, no error")

    def _check_tokens(self) -> None:
        cls, name = self.executor, self._name()
        expected = executor_tokens({})
        for tensor, pipeline in self._sizes():
            settings: dict[str, Any] = {
                "executor": {"use": f"{cls.__module__}:{cls.__qualname__}"},
                "parallel": {
                    "tensor": tensor,
                    "pipeline": pipeline,
                    "communicator": self.communicator,
                },
            }
            if self.options:
                settings["plugin"] = {name: dict(self.options)}
            got = executor_tokens(settings, crowded=True)
            for request_id, tokens in expected.items():
                mine = got.get(request_id)
                wanted = tokens if request_id != "r3" else tokens[: len(mine or ())]
                if mine != wanted:
                    raise rules.TOKENS.violation(
                        f"with {tensor} x {pipeline} ranks request {request_id!r} got {mine}, with "
                        f"uniproc it gets {wanted}"
                    )


def _expect_error(
    call: Callable[[], Any], order: Order, rank: int, method: str, seconds: float | None = None
) -> None:
    """Check that a call raises the exception of a worker.

    Raises:
        Violation: it does not.
    """
    expected = f"{order.method} of rank {rank} failed"
    future = in_thread(call)
    seconds = executor_session.CALL_SECONDS if seconds is None else seconds
    if not until(future.done, seconds):
        raise rules.ERRORS.violation(
            f"{order.method} of rank {rank} raised ModelError, {method} had not ended after "
            f"{seconds:g} s"
        )
    error = future.exception()
    if isinstance(error, Violation) and error.rule == rules.FUTURES.text:
        raise error
    if error is None or isinstance(error, Violation):
        got = error.observed if error is not None else f"{method} gave no error"
        raise rules.ERRORS.violation(f"{order.method} of rank {rank} raised ModelError, but {got}")
    if not isinstance(error, ModelError) or expected not in str(error):
        raise rules.ERRORS.violation(
            f"a worker raised ModelError: {expected}; {method} raised "
            f"{type(error).__name__}: {error}"
        )


def _check_levels(results: Any, count: int, level: int, rule: Rule, call: str) -> None:
    expected = [f"rank {rank} at level {level}" for rank in range(count)]
    if results != expected:
        raise rule.violation(
            f"{call}: {count} workers returned {expected}, collective_rpc returned "
            f"{short_repr(results)}"
        )


def _depth(executor: Executor) -> int:
    depth = executor.max_concurrent_batches
    if type(depth) is not int or depth < 1:
        raise rules.PIPELINE.violation(
            f"max_concurrent_batches is {short_repr(depth)}", "return a whole number from 1"
        )
    return depth


def _holdings() -> dict[str, set[Any]]:
    """Return the threads, child processes, open files and shared memory of this process."""
    holdings: dict[str, set[Any]] = {"threads": set(threading.enumerate())}
    with suppress(OSError):
        # Their numbers are used again, as addresses are, so that only how many there are counts.
        holdings["open files"] = set(range(len(os.listdir("/proc/self/fd"))))
        children = Path("/proc/self/task").glob("*/children")  # those that each thread has started
        holdings["processes"] = {pid for path in children for pid in path.read_text().split()}
        lines = Path("/proc/self/maps").read_text().splitlines()
        shared = [line for line in lines if "/dev/shm/" in line or "/memfd:" in line]
        holdings["pieces of shared memory"] = set(range(len(shared)))
    return holdings


def _more(before: Mapping[str, set[Any]], after: Mapping[str, set[Any]]) -> list[str]:
    return [
        f"{name} ({len(held)}, before {len(before[name])})"
        for name, held in after.items()
        if name in before and held - before[name]
    ]
