"""Engine cores around a scripted executor; a test decides when steps are done."""

from __future__ import annotations

import hashlib
import signal
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import msgspec

from hardpoint.builtin_plugins.policies import FirstComeFirstServed
from hardpoint.builtin_plugins.scheduling import DefaultScheduler
from hardpoint.builtin_plugins.step_parts.weight_updates.engine_half import VersionedRequests
from hardpoint.core.engine.core import EngineCore
from hardpoint.core.engine.pause import PauseController
from hardpoint.core.engine.step import EngineCoreParts
from hardpoint.core.kv_cache import BlockManager
from hardpoint.host.boundary.faults import StepFaults
from hardpoint.host.boundary.kv_cache import KVEventFanout
from hardpoint.host.boundary.parts.bound_half import BoundPart
from hardpoint.host.boundary.parts.engine_halves import EngineHalves
from hardpoint.plugins import (
    EngineConfig,
    EngineCoreRequest,
    ModelRunnerOutput,
    PolicyContext,
    SamplingParams,
    SchedulerContext,
    StepCost,
)
from hardpoint.plugins.component import Source
from hardpoint.plugins.scheduling.scheduler import SchedulerLimits
from hardpoint.process.engine.loop import EngineLoop, LoopOptions, LoopQueues, Prepared
from hardpoint.process.engine.sender import ClientSendQueues
from hardpoint.toolkit.step_cost import StepTimes
from hardpoint.typed import convert
from support.waiting import PATIENCE_S


def next_token(history):
    digest = hashlib.blake2b(repr(tuple(history)).encode(), digest_size=2).digest()
    return int.from_bytes(digest, "big")


def expected(prompt, count):
    """The tokens that follow a prompt, however they are computed."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def request(name, prompt=(1, 2, 3), max_tokens=4, **fields):
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=list(prompt),
        params=SamplingParams(max_tokens=max_tokens),
        **fields,
    )


def interrupt_of_user() -> KeyboardInterrupt:
    """Return the exception of Ctrl-C."""
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt as interrupt:
        return interrupt
    raise AssertionError("SIGINT is ignored")


class ScriptedExecutor:
    """Computes each step when it is started; its futures are done at once, or when asked.

    Attributes:
        depth: depth of the pipeline.
        late: whether futures wait for `finish`.
        calls: what was called, in order.
        sampled: by step, the plan and the bitmask that sampling got.
        patient: whether they are done at once when somebody waits for them.
        fail_at: by step, the error of its forward pass.
        rpc: by method, what workers return, or raise.
    """

    def __init__(self, depth=1, *, late=False):
        self.depth = depth
        self.late = late
        self.patient = False
        self.calls = []
        self.sampled = {}
        self.fail_at = {}
        self.rpc = {}
        self.rows = {}
        self.pending = []
        self.lost = lambda error: None
        self.during = lambda plan: None
        self._results = {}

    @property
    def max_concurrent_batches(self):
        return self.depth

    def execute_model(self, plan):
        self.calls.append(("execute", plan.step))
        result = self._compute(plan)
        self.during(plan)
        future = self._future(plan.step)
        error = self.fail_at.get(plan.step)
        if plan.total_num_scheduled_tokens:
            self._results[plan.step] = result
            self._later(plan.step, future, None, error)
        else:
            self._later(plan.step, future, result, error)
        return future

    def sample_tokens(self, plan, bitmask=None):
        self.calls.append(("sample", plan.step))
        self.sampled[plan.step] = (plan, bitmask)
        future = self._future(plan.step)
        failed = RuntimeError("nothing to sample") if plan.step in self.fail_at else None
        self._later(plan.step, future, self._results.pop(plan.step, None), failed)
        return future

    def finish(self, *steps):
        """Complete the futures of steps, by default of all that were started."""
        for step, future, result, error in list(self.pending):
            if steps and step not in steps:
                continue
            self.pending.remove((step, future, result, error))
            _complete(future, result, error)

    def collective_rpc(self, method, args=(), timeout=None):
        self.calls.append((method, *args) if timeout is None else (method, *args, timeout))
        answer = self.rpc.get(method)
        if isinstance(answer, BaseException):
            raise answer
        return [answer, answer]

    def on_failure(self, callback):
        self.lost = callback

    def close(self):
        self.calls.append(("close",))

    def _future(self, step):
        return PatientFuture(lambda: self.finish(step)) if self.patient else Future()

    def _later(self, step, future, result, error):
        if self.late:
            self.pending.append((step, future, result, error))
        else:
            _complete(future, result, error)

    def _compute(self, plan):
        for name in plan.preempted_request_ids | plan.finished_request_ids:
            self.rows.pop(name, None)
        cached = plan.cached_requests
        computed = dict(zip(cached.request_ids, cached.num_computed_tokens, strict=True))
        for new in plan.new_requests:
            name = new.source.request_id
            self.rows[name] = [*new.source.prompt_token_ids, *new.output_token_ids]
            computed[name] = new.num_computed_tokens
        sampled = {}
        for name, count in plan.num_scheduled_tokens.items():
            row, drafts = self.rows[name], plan.draft_token_ids.get(name, ())
            end = computed[name] + count
            assert end <= len(row) + len(drafts), f"{name} has no such token"
            if end < len(row):
                continue
            sampled[name] = [next_token(row)]
            for draft in drafts:
                if draft != sampled[name][-1]:
                    break
                sampled[name].append(next_token([*row, *sampled[name]]))
            row += sampled[name]
        return ModelRunnerOutput(sampled_token_ids=sampled)


class PatientFuture(Future):
    """Is done when somebody waits for it, at the latest."""

    def __init__(self, hurry):
        super().__init__()
        self._hurry = hurry

    def result(self, timeout=None):
        if not self.done():
            self._hurry()
        return super().result(timeout)


def _complete(future, result, error):
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


class MidStep:
    """Keeps an executor in each step that has tokens, once one has begun, until it is let go.

    `of` returns whether a plan is of such a step, where not all that have tokens are.
    """

    def __init__(self, executor, of=lambda plan: True):
        self.begun, self.go_on = threading.Event(), threading.Event()
        self._of = of
        executor.during = self

    def __call__(self, plan):
        if plan.num_scheduled_tokens and self._of(plan):
            self.begun.set()
            assert self.go_on.wait(PATIENCE_S)


class ScriptedPart:
    """A step part with the minimum that an engine needs."""

    moves_blocks = None

    def __init__(self, name="scripted", fault_scope="engine", *, named_only=False):
        self.name, self.fault_scope, self.named_only = name, fault_scope, named_only

    def close(self):
        pass


def parts_of(half, name="scripted"):
    """Return the step parts of an engine: none, or one that ends the engine by a fault."""
    if half is None:
        return EngineHalves()
    source = Source(name, "scripted:Part", "tests", "1", "default")
    return EngineHalves([BoundPart(ScriptedPart(name), half, source, StepFaults(()))], 1 << 16)


def weight_updates_of(executor, border):
    """Return weight updates as a step part, for workers that read weights at once."""
    executor.rpc["call_part"] = (None, msgspec.msgpack.encode(True))

    def call_workers(message):
        answers = executor.collective_rpc("call_part", ("weight_updates", message))
        return [answer for _, answer in answers]

    context = SimpleNamespace(call_workers=call_workers, border=border)
    half = VersionedRequests("weight_updates", EngineConfig(), context)
    return parts_of(half, "weight_updates")


def worker_calls(executor):
    """Return the names of calls of workers, and of messages to worker halves."""
    return [
        msgspec.msgpack.decode(call[2])["type"] if call[0] == "call_part" else call[0]
        for call in executor.calls
    ]


class Rig:
    """An engine core with the default scheduler, and its outputs."""

    def __init__(  # noqa: PLR0913 - each is what some test sets
        self,
        executor=None,
        *,
        blocks=64,
        scheduler=DefaultScheduler,
        half=None,
        step_log=None,
        step_cost=None,
        step_times=None,
        log_stats=False,
        sleep_levels=(1, 2),
        idle_method=None,
        config=None,
        follow_cache=None,
        updates=False,
        make_core=EngineCore,
        **limits,
    ):
        self.executor = executor or ScriptedExecutor()
        defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 200}
        self.limits = SchedulerLimits(
            **(defaults | {"asynchronous": self.executor.depth > 1} | limits)
        )
        self.now = 0.0
        policy = FirstComeFirstServed(
            PolicyContext(name="fcfs", options=convert({}, FirstComeFirstServed.Options, path="p"))
        )
        self.cache = BlockManager(blocks, 4, events=follow_cache is not None)
        pause = PauseController(None)
        updating = updates and weight_updates_of(self.executor, pause)
        self.parts = updating or parts_of(half)
        self.scheduler = scheduler(
            SchedulerContext(
                name="default",
                options=DefaultScheduler.Options(),
                limits=self.limits,
                kv_cache=self.cache,
                policy=policy,
                clock=lambda: self.now,
                gates=self.parts.gates,
                log_stats=log_stats,
                step_cost=StepCost if step_cost is None else step_cost.current,
            )
        )
        self.core = make_core(
            EngineCoreParts(
                self.scheduler,
                self.executor,
                self.cache,
                SimpleNamespace(
                    close=lambda: None,
                    take_arguments=lambda request: None,
                    source=None,
                    plugins=None,
                ),
                KVEventFanout([], time.time, follow=follow_cache),
                StepFaults(()),
                step_parts=self.parts,
                step_log=step_log,
                step_cost=step_cost,
                step_times=step_times or StepTimes(),
                config=config,
                log_stats=log_stats,
                sleep_levels=sleep_levels,
                idle_method=idle_method,
                pause=pause,
            )
        )
        self.tokens = {}
        self.ends = {}

    def add(self, name, **fields):
        self.core.add_request(request(name, **fields))

    def step(self, *late_aborts):
        outputs, executed = self.core.step(lambda: list(late_aborts))
        self.take(outputs)
        return executed

    def take(self, by_client):
        for outputs in by_client.values():
            for output in outputs.outputs:
                self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finished:
                    self.ends[output.request_id] = str(output.finish_reason)

    def run(self, most=500):
        for _ in range(most):
            if not self.core.has_requests():
                return self.tokens
            self.step()
        raise AssertionError("it does not end")


class LoopRig(Rig):
    """The same under a busy loop in a thread of its own."""

    def __init__(self, executor=None, *, options=None, clients=1, **settings):
        options = options or LoopOptions()
        follow = options.cache_changes and options.cache_changes.add
        super().__init__(executor, follow_cache=follow, **settings)
        self.queues = LoopQueues(output=ClientSendQueues(clients))
        self.loop = EngineLoop(self.core, self.queues, options)
        self.error = None
        self.answers = {}
        self.messages = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        try:
            self.loop.run()
        except BaseException as error:
            self.error = error

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.loop.request_shutdown()
        self.loop.request_shutdown()
        self.join()

    def join(self, seconds=PATIENCE_S):
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the loop does not end"
        self.collect()

    @property
    def is_running(self):
        return self._thread.is_alive()

    def send(self, *messages):
        for message in messages:
            if isinstance(message, list):
                self.queues.abort(message, 0)
            elif isinstance(message, EngineCoreRequest):
                self.queues.input.put(Prepared(message, [], time.monotonic()))
            else:
                self.queues.input.put(message)

    def record_unmerged(self):
        """Return a list that gets each message of the loop from now on, before any is merged."""
        put, messages = self.queues.output.put, []

        def record(client, message):
            messages.append(message)
            put(client, message)

        self.queues.output.put = record
        return messages

    def collect(self):
        """Read the outputs of the loop."""
        self.queues.output.end(0)
        while (item := self.queues.output.pop(lambda _client: True)) is not None:
            client, message = item
            self.messages.append(item)
            if hasattr(message, "outputs"):
                self.take({client: message})
            else:
                self.answers[message.call_id] = message

    def until(self, condition, seconds=PATIENCE_S):
        """Take outputs until something is so."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.collect()
            if condition():
                return
            time.sleep(0.002)
        raise AssertionError("it did not come to that")
