"""The conformance suite for executors; the built-in one passes it too."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st

from hardpoint.plugins import (
    EngineCoreRequest,
    Executor,
    ExecutorContext,
    GrammarBitmask,
    ModelRunnerOutput,
    NewRequest,
    SamplingParams,
    SchedulerOutput,
    WorkerInfo,
)
from hardpoint.plugins.component import Component
from hardpoint.testing.component_suite import ComponentSuite
from hardpoint.testing.engine_access import executor_tokens
from hardpoint.testing.suite import Rule, Violation, reject_replaced_tests, short_repr

RESULTS = Rule(
    "results: each step is run once, in order, and its result is the worker's own",
    "pass the plan and the worker's result on unchanged, one plan after the other",
)
FUTURES = Rule(
    "futures: every call returns a future, which ends",
    "return a concurrent.futures.Future, and set its result or its exception in every case",
)
CALLS = Rule(
    "collective_rpc: the method is called once on every worker; results are in rank order",
    "return one result per worker, that of rank 0 first, and pass on every argument",
)
ERRORS = Rule(
    "errors: what a worker raised is raised, or is the exception of the future",
    "call future.set_exception(error) with the worker's error, and let collective_rpc raise it",
)
SLEEP = Rule(
    "sleep: sleep and wake_up reach the workers",
    "let collective_rpc call any method of Worker, sleep and wake_up too",
)
PIPELINE = Rule(
    "pipeline: it serves as many steps at a time as max_concurrent_batches says",
    "return a future before the step is done, or state 1",
)
FAILURE = Rule(
    "failure: the loss of a worker is reported once to the callback, and a close is no loss",
    "keep the callback that on_failure gets, and call it with an error when a worker ends",
)
CLOSE = Rule(
    "close: it releases the workers, its threads, processes and files, and may be called twice",
    "join what was started, and return at once if it is closed already",
)
TOKENS = Rule(
    "tokens: requests get the tokens that they get with uniproc",
    "pass plans and results on unchanged",
)

_SECONDS = 5.0
_CLOSE_SECONDS = 1.0
_STEP_SECONDS = 0.1
_FAILS, _SLOW = "fails", "slow"
_STEPS = st.lists(
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 5), max_size=4), min_size=1, max_size=8
)


class WorkerFailure(Exception):  # noqa: N818 - it stands for any error of a worker
    """What the workers of the suite raise."""


class ScriptedWorker:
    """A worker without a model: its tokens show which steps it ran before, and in what order."""

    def __init__(self, made: list[ScriptedWorker], rank: int) -> None:
        """`made` gets the worker, where it is in the process of the test."""
        self.rank = rank
        self.closed = False
        self._history, self._waiting = 17, 0
        self._level = 0
        made.append(self)

    def load_model(self) -> WorkerInfo:
        """Return an info that differs by rank."""
        return WorkerInfo(64, (1 << 20) - self.rank)

    def initialize_cache(self, num_blocks: int) -> None:
        """Become part of what every token depends on."""
        self._history = (self._history * 31 + num_blocks) % 65_521

    def set_max_model_len(self, max_model_len: int) -> None:
        """Do nothing."""

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """Fail, take long, or return None, as the ids of the requests say."""
        if _FAILS in plan.num_scheduled_tokens:
            raise WorkerFailure(f"step {plan.step} failed")
        if _SLOW in plan.num_scheduled_tokens:
            time.sleep(_STEP_SECONDS)
        self._history = (self._history * 31 + plan.step) % 65_521
        self._waiting = plan.step
        return None if plan.total_num_scheduled_tokens else ModelRunnerOutput()

    def sample_tokens(
        self, plan: SchedulerOutput, bitmask: GrammarBitmask | None = None
    ) -> ModelRunnerOutput:
        """Return tokens of the step whose `execute_model` ran last; a bitmask changes them."""
        if plan.step != self._waiting:
            raise RESULTS.violation(
                f"the worker was to sample step {plan.step} when step {self._waiting} had run last"
            )
        tokens = {
            request_id: [(self._history + 7 * index + count + _sum_of(bitmask)) % 257]
            for index, (request_id, count) in enumerate(plan.num_scheduled_tokens.items())
        }
        return ModelRunnerOutput(sampled_token_ids=tokens)

    def sleep(self, level: int) -> None:
        """Remember the level."""
        self._level = level

    def wake_up(self, tags: Sequence[str]) -> None:
        """Forget the level."""
        if tags:
            self._level = 0

    def list_loras(self) -> set[int]:
        """Return rank and level."""
        return {self.rank, 1000 + self._level}

    def remove_lora(self, lora_id: int) -> bool:
        """Raise an error that names the argument."""
        raise WorkerFailure(f"adapter {lora_id} of rank {self.rank}")

    def close(self) -> None:
        """Remember it."""
        self.closed = True


class ExecutorSuite(ComponentSuite):
    """Base class of a test class, which sets `executor`, and `options` if it has some.

    Attributes:
        executor: the class under test.
        importable: whether the engine can import the class; if not, `test_tokens` is skipped.
    """

    kind = "executors"
    executor: ClassVar[type[Executor]]
    importable: ClassVar[bool] = True

    def lose_worker(self, executor: Executor) -> None:
        """End a worker as a crash would; override it if workers run outside of calls."""
        pytest.skip(f"{type(self).__name__} does not override lose_worker(); {executor.name}")

    def _component(self) -> type[Component]:
        return self.executor

    def test_contract(self) -> None:
        """The class states its contract and can be built; its options survive pickling."""

        def build() -> None:
            with self._started():
                pass

        self._run_checks(
            "contract: the loader can check and build the class",
            lambda: reject_replaced_tests(type(self), ExecutorSuite),
            self._check_contract,
            build,
        )

    def test_results(self) -> None:
        """The results of any steps are those of a worker that is called directly."""
        self._search(RESULTS.text, 25, self._check_results, steps=_STEPS)

    def test_calls(self) -> None:
        """A call reaches every worker, once and in rank order."""
        self._run_checks(CALLS.text, self._check_calls)

    def test_errors(self) -> None:
        """A worker's error is raised, of a step and of a call."""
        self._run_checks(ERRORS.text, self._check_step_error, self._check_call_error)

    def test_sleep(self) -> None:
        """Workers sleep and wake up."""
        self._run_checks(SLEEP.text, self._check_sleep)

    def test_pipeline(self) -> None:
        """Steps overlap if more than one may be in flight."""
        self._run_checks(PIPELINE.text, self._check_pipeline)

    def test_failure(self) -> None:
        """The callback is called for the loss of a worker, not for a close."""
        self._run_checks(FAILURE.text, self._check_no_failure, self._check_failure)

    def test_close(self) -> None:
        """Nothing is left after close, and it may be called again."""
        self._run_checks(CLOSE.text, self._check_close)

    def test_tokens(self) -> None:
        """In an engine with the scripted model, tokens are those of uniproc."""
        if not self.importable or "<locals>" in self.executor.__qualname__:
            pytest.skip("the engine cannot import the class")
        self._run_checks(TOKENS.text, self._check_tokens)

    @contextmanager
    def _started(self) -> Iterator[tuple[Executor, list[ScriptedWorker]]]:
        made: list[ScriptedWorker] = []
        create = functools.partial(ScriptedWorker, made)
        executor: Executor = self._build(ExecutorContext, create_worker=create)
        try:
            info = executor.start()
            if not isinstance(info, WorkerInfo):
                raise RESULTS.violation(
                    f"start returned {short_repr(info)}", "return the WorkerInfo of load_model"
                )
            least = (1 << 20) - max((worker.rank for worker in made), default=0)
            if made and info.available_bytes != least:
                raise RESULTS.violation(
                    f"start returned {info.available_bytes} available bytes, a worker has {least}",
                    "return the info of the worker with least memory",
                )
            executor.initialize_cache(8)
            yield executor, made
        finally:
            executor.close()

    def _check_results(self, steps: Sequence[Mapping[str, int]]) -> None:
        plain = ScriptedWorker([], 0)
        plain.initialize_cache(8)
        with self._started() as (executor, _):
            depth = _depth(executor)
            under_way: list[tuple[SchedulerOutput, Callable[[], ModelRunnerOutput]]] = []
            for step, counts in enumerate(steps, 1):
                plan = _plan(step, counts)
                under_way.append((plan, _begin(executor, plan, in_pipeline=depth > 1)))
                if len(under_way) == depth:
                    _compare(plain, *under_way.pop(0))
            for plan, result in under_way:
                _compare(plain, plan, result)

    def _check_calls(self) -> None:
        with self._started() as (executor, made):
            results = executor.collective_rpc("list_loras")
            if not isinstance(results, list):
                raise CALLS.violation(f"it returned {short_repr(results)}, no list")
            count = len(made) or len(results)
            if results != (expected := [{rank, 1000} for rank in range(count)]) or not results:
                raise CALLS.violation(
                    f"{count} workers returned {expected}, collective_rpc returned "
                    f"{short_repr(results)}"
                )
            executor.collective_rpc("sleep", (2,))
            if (results := executor.collective_rpc("list_loras")) != [
                {rank, 1002} for rank in range(count)
            ]:
                raise CALLS.violation(
                    f"after sleep(2) on all of {count} workers, these say {short_repr(results)}"
                )

    def _check_step_error(self) -> None:
        with self._started() as (executor, _):
            observed = "a step whose worker raised WorkerFailure gave a result"
            try:
                result = _begin(executor, _plan(1, {_FAILS: 1}), in_pipeline=False)()
            except Violation as violation:
                if violation.rule == FUTURES.text:
                    raise
                observed = violation.observed
            except Exception as error:
                if "step 1 failed" in str(error):
                    return
                observed = "the worker raised WorkerFailure('step 1 failed'), the executor raised "
                observed += f"{type(error).__name__}: {error}"
            else:
                observed += f": {short_repr(result)}"
            raise ERRORS.violation(observed)

    def _check_call_error(self) -> None:
        with self._started() as (executor, _):
            try:
                results = executor.collective_rpc("remove_lora", (7,))
            except Exception as error:
                if "adapter 7 of rank" not in str(error):
                    raise ERRORS.violation(
                        f"the worker raised WorkerFailure('adapter 7 of rank 0'), collective_rpc "
                        f"raised {type(error).__name__}: {error}"
                    ) from error
            else:
                raise ERRORS.violation(
                    f"the worker raised WorkerFailure, collective_rpc returned "
                    f"{short_repr(results)}"
                )

    def _check_sleep(self) -> None:
        with self._started() as (executor, _):
            for method, args, level in (("sleep", (1,), 1), ("wake_up", (["kv_cache"],), 0)):
                executor.collective_rpc(method, args)
                results = executor.collective_rpc("list_loras")
                if not all(1000 + level in result for result in results):
                    raise SLEEP.violation(f"after {method}{args} a worker is not at level {level}")

    def _check_pipeline(self) -> None:
        with self._started() as (executor, _):
            depth = _depth(executor)
            if depth == 1:
                return
            results = []
            for step in range(1, depth + 1):
                future = _future(executor.execute_model(_plan(step, {_SLOW: 1})), "execute_model")
                sampling = executor.sample_tokens(_plan(step, {_SLOW: 1}))
                results.append(_future(sampling, "sample_tokens"))
                if step == 1 and future.done():
                    raise PIPELINE.violation(
                        f"max_concurrent_batches is {depth}, but execute_model returned only when "
                        f"its step was done"
                    )
            for result in results:
                _wait(result, "sample_tokens")

    def _check_no_failure(self) -> None:
        called: list[BaseException] = []
        with self._started() as (executor, _):
            executor.on_failure(called.append)
        if called:
            raise FAILURE.violation(f"close called the callback with {short_repr(called[0])}")

    def _check_failure(self) -> None:
        called: list[BaseException] = []
        with self._started() as (executor, _):
            executor.on_failure(called.append)
            self.lose_worker(executor)
            _until(lambda: bool(called), _SECONDS)
            if not called:
                raise FAILURE.violation(
                    f"a worker was lost, and the callback was not called within {_SECONDS:g} s"
                )
            if not isinstance(called[0], BaseException):
                raise FAILURE.violation(f"the callback was called with {short_repr(called[0])}")

    def _check_close(self) -> None:
        before = _holdings()
        with self._started() as (executor, made):
            _begin(executor, _plan(1, {"a": 1}), in_pipeline=_depth(executor) > 1)()
            executor.close()  # and then again
        if open_ones := [worker.rank for worker in made if not worker.closed]:
            raise CLOSE.violation(f"the workers of ranks {open_ones} are not closed")
        _until(lambda: not _more(before, _holdings()), _CLOSE_SECONDS)
        if more := _more(before, _holdings()):
            raise CLOSE.violation(f"after close there are more {', '.join(more)}")

    def _check_tokens(self) -> None:
        cls, name = self.executor, self._name()
        options = {"plugin": {name: dict(self.options)}} if self.options else {}
        mine = {"executor": {"use": f"{cls.__module__}:{cls.__qualname__}"}, **options}
        runs = [executor_tokens(extra) for extra in ({}, mine)]
        for request_id, expected in runs[0].items():
            if (tokens := runs[1].get(request_id)) != expected:
                raise TOKENS.violation(
                    f"request {request_id!r} got {tokens}, with uniproc it gets {expected}"
                )


def _plan(step: int, counts: Mapping[str, int]) -> SchedulerOutput:
    """Return a plan in which each request is new."""
    requests = tuple(
        NewRequest(
            source=EngineCoreRequest(
                request_id=request_id, prompt_token_ids=[1] * count, params=SamplingParams()
            ),
            output_token_ids=(),
            block_ids=([0],),
            num_computed_tokens=0,
        )
        for request_id, count in counts.items()
    )
    return SchedulerOutput(
        step=step,
        new_requests=requests,
        num_scheduled_tokens=dict(counts),
        total_num_scheduled_tokens=sum(counts.values()),
    )


def _depth(executor: Executor) -> int:
    depth = executor.max_concurrent_batches
    if type(depth) is not int or depth < 1:
        raise PIPELINE.violation(
            f"max_concurrent_batches is {short_repr(depth)}", "return a whole number from 1"
        )
    return depth


def _bitmask(plan: SchedulerOutput) -> GrammarBitmask | None:
    """Return a bitmask for every second step."""
    names = list(plan.num_scheduled_tokens)
    if plan.step % 2 or not names:
        return None
    return GrammarBitmask(names, np.full((len(names), 9), plan.step, dtype=np.int32))


def _sum_of(bitmask: GrammarBitmask | None) -> int:
    return 0 if bitmask is None else int(bitmask.bitmask.sum()) + len(bitmask.request_ids)


def _begin(
    executor: Executor, plan: SchedulerOutput, *, in_pipeline: bool
) -> Callable[[], ModelRunnerOutput]:
    """Start a step as an engine does; return a function that waits for its result."""
    forward = _future(executor.execute_model(plan), "execute_model")
    sampling: Future[Any] | None = None
    if in_pipeline and plan.total_num_scheduled_tokens:
        sampling = _future(executor.sample_tokens(plan, _bitmask(plan)), "sample_tokens")

    def result() -> ModelRunnerOutput:
        output = _wait(forward, "execute_model")
        if output is None and plan.total_num_scheduled_tokens:
            later = sampling or _future(
                executor.sample_tokens(plan, _bitmask(plan)), "sample_tokens"
            )
            output = _wait(later, "sample_tokens")
        if not isinstance(output, ModelRunnerOutput):
            raise RESULTS.violation(
                f"the result of step {plan.step} is {short_repr(output)}, no ModelRunnerOutput"
            )
        return output

    return result


def _compare(
    plain: ScriptedWorker, plan: SchedulerOutput, result: Callable[[], ModelRunnerOutput]
) -> None:
    """Compare a result with that of a worker that is called directly."""
    sampled = plain.execute_model(plan) or plain.sample_tokens(plan, _bitmask(plan))
    expected = sampled.sampled_token_ids
    tokens = result().sampled_token_ids
    for request_id in expected.keys() | tokens.keys():
        wanted, got = expected.get(request_id, []), tokens.get(request_id, [])
        if len(wanted) != len(got):
            raise RESULTS.violation(
                f"in step {plan.step} request {request_id!r} got {len(got)} tokens, the worker "
                f"sampled {len(wanted)}"
            )
        if wanted != got:
            raise RESULTS.violation(
                f"in step {plan.step} request {request_id!r} got token {got[0]}; a worker that ran "
                f"each step once and in order samples {wanted[0]}"
            )


def _future(value: Any, method: str) -> Future[Any]:
    if not isinstance(value, Future):
        raise FUTURES.violation(f"{method} returned {short_repr(value)}")
    return value


def _wait(future: Future[Any], method: str) -> Any:
    try:
        return future.result(timeout=_SECONDS)
    except FutureTimeoutError:
        raise FUTURES.violation(
            f"the future of {method} was not done after {_SECONDS:g} s"
        ) from None


def _until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def _holdings() -> dict[str, int]:
    """Return how many threads, child processes and open files this process has."""
    counts = {"threads": threading.active_count()}
    with suppress(OSError):
        counts["open files"] = len(os.listdir("/proc/self/fd"))
        children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
        counts["processes"] = len(children.read_text().split())
    return counts


def _more(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    """Return what there is more of, with the numbers."""
    return [
        f"{name} ({count}, before {before[name]})"
        for name, count in after.items()
        if name in before and count > before[name]
    ]
