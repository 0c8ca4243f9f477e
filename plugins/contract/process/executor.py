"""Executors: start and call the workers, in this process or others.

An executor gets a `WorkerLaunch` per rank, which is plain data, carries it to where the worker is
to run, calls `open_worker` there, and passes on the engine's calls. `hardpoint.toolkit.workers` has
libraries for it: `joining` merges the results of all ranks into one, `calls` encodes calls for
anything that moves bytes.
"""

from __future__ import annotations

import importlib
import os
import socket
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import msgspec

from hardpoint.plugins.component.base import Component, Context, Progress
from hardpoint.plugins.component.behaviour import instance, returns
from hardpoint.plugins.config.engine import EngineConfig, ParallelConfig
from hardpoint.plugins.requests.plan import GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from hardpoint.plugins.requests.stats import PluginMeter

from .parallel import Placement

__all__ = ["Executor", "ExecutorContext", "WorkerLaunch", "open_worker"]


def max_step_tokens(config: EngineConfig) -> int:
    """Return the maximum number of tokens between a request's confirmed length and a step's end.

    That is one step, or each pending step and the next token.
    """
    return max(config.scheduler.max_num_batched_tokens, Executor.MAX_CONCURRENT_BATCHES + 1)


@dataclass(frozen=True)
class WorkerInfo:
    """Memory figures of a worker that has loaded its model.

    Attributes:
        bytes_per_block: size of a block of the KV cache, all layers together that have one table;
            without states.
        available_bytes: memory that weights and the largest step leave free, if measured.
        cache_share: share of it for the KV cache, unless configured.
        sleep_levels: levels of `Worker.sleep` that the worker supports.
        windows: sliding window in tokens of each KV cache group, None is unlimited; plans have a
            block table for each. All ranks have the same.
        has_states: whether the last of these groups keeps states, see `KVCacheGroup.has_states`.
        bytes_per_state: size of a state, all layers together.
        records_decode_steps: the same as `idle_method="record_decode_step"`, of workers that were
            written before there was `Worker.idle`.
        idle_method: name of the worker's method that is to be called while the engine has nothing
            to do: "idle"; None if there is none.
        process_id: id of the worker's process, by default this process.
    """

    bytes_per_block: int
    available_bytes: int
    cache_share: float = 0.4
    sleep_levels: tuple[int, ...] = (1, 2)
    windows: tuple[int | None, ...] = (None,)
    records_decode_steps: bool = False
    idle_method: str | None = None
    has_states: bool = False
    bytes_per_state: int = 0
    process_id: int = field(default_factory=os.getpid, compare=False)

    @property
    def has_cache(self) -> bool:
        """Whether blocks of the KV cache take memory."""
        return bool(self.bytes_per_block or self.bytes_per_state)

    def __post_init__(self) -> None:
        """Give earlier workers a name of the method that they have."""
        if self.records_decode_steps:
            object.__setattr__(self, "records_decode_steps", False)
            object.__setattr__(self, "idle_method", self.idle_method or "record_decode_step")


class LateOutput:
    """The result of a step; its tokens may still be on the device.

    The executor calls `result` before any call of the worker other than `execute_model`, and in
    the thread of these calls.
    """

    def __init__(
        self, is_ready: Callable[[], bool], finish: Callable[[], ModelRunnerOutput]
    ) -> None:
        """Store the functions.

        Args:
            is_ready: returns whether the tokens are on the host.
            finish: completes the result; called once.
        """
        self._is_ready = is_ready
        self._finish = finish
        self._outcome: Future[ModelRunnerOutput] = Future()

    def is_ready(self) -> bool:
        """Return whether `result` would not wait for the device."""
        try:
            return self._outcome.done() or self._is_ready()
        except Exception:
            return True  # the device has failed, and `result` raises why

    def result(self) -> ModelRunnerOutput:
        """Wait for the tokens; return the result, or raise the error of the step."""
        if not self._outcome.done():
            try:
                self._outcome.set_result(self._finish())
            except BaseException as error:
                self._outcome.set_exception(error)
        return self._outcome.result()


class Worker(Protocol):
    """One rank's share of the model, made by `open_worker`.

    Ranks exchange tensors while they load the model and run steps, so every method but
    `plugin_meters`, `abort`, `start_parts` and the profile methods is called in all ranks, in the
    same order, and in threads or processes of their own. A worker is called by one thread at a
    time.
    """

    def load_model(self) -> WorkerInfo:
        """Load the weights. Returns once all ranks have loaded theirs."""

    def set_num_states(self, num_states: int) -> None:
        """Learn how many of the blocks are states, before `initialize_cache`; 0 otherwise."""

    def initialize_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache."""

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run a step; None means that `sample_tokens` follows.

        Raises:
            NotImplementedError: the plan has drafts or encoder inputs, which the worker cannot
                serve.
        """

    def sample_tokens(
        self, plan: SchedulerOutput, bitmask: GrammarBitmask | None = None
    ) -> ModelRunnerOutput | None:
        """Sample the tokens of a step if its `execute_model` returned None.

        Args:
            plan: the plan of that call.
            bitmask: as the executor got it; only the output rank needs it.

        Returns:
            The result in the output rank. In the others None, or a result that has the reports of
            the rank's step parts and nothing else; see `join_outputs`.
        """

    def begin_sampling(
        self, plan: SchedulerOutput, bitmask: GrammarBitmask | None = None
    ) -> ModelRunnerOutput | LateOutput | None:
        """Call `sample_tokens` without a wait for the device, if that is possible.

        The next step may then be launched before the tokens of this one are on the host.
        """

    def start_parts(self, weights: str | None) -> dict[str, bytes]:
        """Give the KV cache to this rank's halves of the step parts that move blocks.

        Called after `initialize_cache`. A rank does not wait for others.

        Args:
            weights: identifies the content of the model's weights, for the keys of blocks. None
                stops the halves: another rank could not start its own.

        Returns:
            The data of each half for the engine's half, by the part's name.
        """

    def execute_dummy_batch(self) -> None:
        """Run a step of one token that no request has, so that no other rank waits for this one."""

    def idle(self) -> bool | None:
        """Let a step part do one piece of work ahead, so that later steps take less time.

        Called between steps if it is the `WorkerInfo.idle_method`, while the engine has nothing to
        do; a request that comes waits until it returns.

        Returns:
            Whether it can be called again at once, since more is left; False if nothing can be done
            now. None: nothing will be until the next `wake_up`, and it need not be called.
        """

    def call_part(self, name: str, message: bytes) -> tuple[str | None, bytes]:
        """Return the answer of this rank's half of a step part, see `WorkerCalls.call`.

        Returns:
            None and the answer, or kind and text of the error that it raised.
        """

    def live_change(self, action: str, data: bytes) -> tuple[str | None, str, bool]:
        """Prepare, commit, keep or undo a change of the logits processors.

        Returns:
            Kind and text of the error that it raised, if any, and whether it is prepared.
        """

    def set_max_model_len(self, max_model_len: int) -> None:
        """Set the maximum length of a request; called before `initialize_cache`."""

    def plugin_meters(self) -> dict[str, PluginMeter]:
        """Return the meter of each logits processor, by name."""

    def plugin_states(self) -> dict[str, dict[str, Any]]:
        """Return the states of logits processors, by name; see `Component.dump_state`."""

    def sleep(self, level: int) -> None:
        """Release memory. Called between steps; cached content is not used again.

        Args:
            level: 1 releases the KV cache and moves the weights to CPU memory, 2 releases both.

        Raises:
            HardpointError: the worker does not support the level.
        """

    def wake_up(self, tags: Sequence[str]) -> None:
        """Reallocate memory released by `sleep`: "weights", "kv_cache" or both."""

    def start_profile(self) -> None:
        """Start a profile of this worker.

        Raises:
            HardpointError: no folder is configured, or a profile is being recorded.
        """

    def stop_profile(self) -> str:
        """Stop the profile; return the path of its file.

        Raises:
            HardpointError: no profile is running.
        """

    def abort(self, reason: str) -> None:
        """Let calls of this worker that wait for other ranks fail. May be called in any thread."""

    def close(self) -> None:
        """Release everything."""


@dataclass(frozen=True)
class WorkerLaunch:
    """All that it takes to open a worker: plain data, for any thread, process or machine.

    Attributes:
        factory: `package.module:function` that makes the worker of a launch.
        rank: rank of the worker.
        world_size: number of ranks.
        data: inputs of the factory, as msgpack.
        prepared: objects that the engine has built, for a worker in its own process; not encoded.
        on_forward: called by such a worker in each step that has tokens, when all is ready for the
            model; not encoded. An executor that calls the worker in another thread sets it, to
            hand out earlier results while the model computes.
    """

    factory: str
    rank: int
    world_size: int
    data: bytes = field(repr=False)
    prepared: Any = field(default=None, repr=False, compare=False)
    on_forward: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    def encode(self) -> bytes:
        """Return it as msgpack, for `decode`."""
        return msgspec.msgpack.encode((self.factory, self.rank, self.world_size, self.data))

    @classmethod
    def decode(cls, encoded: bytes) -> WorkerLaunch:
        """Return the launch that `encode` has encoded."""
        return cls(*msgspec.msgpack.decode(encoded, type=tuple[str, int, int, bytes]))


def open_worker(launch: WorkerLaunch, progress: Progress | None = None) -> Worker:
    """Make the worker of a launch, here; `Worker.load_model` loads its model.

    Args:
        launch: from `ExecutorContext.launch`.
        progress: is called while weights are loaded.

    Raises:
        PluginError: a plugin of the engine is not installed here, or in another version.
        HardpointError: Hardpoint or torch is of another version here.
        ModelError: the model's files are not here, or the device is not.
    """
    module, _, name = launch.factory.partition(":")
    worker: Worker = getattr(importlib.import_module(module), name)(launch, progress)
    return worker


class LaunchWorker(Protocol):
    """See `ExecutorContext.launch`."""

    def __call__(self, rank: int, placement: Placement | None = None) -> WorkerLaunch:
        """Return the launch of a rank's worker."""


class WorkerProcess(Protocol):
    """A child process in which a worker runs, seen from the executor.

    It has the `sys.path`, working directory, interpreter flags and plugins in `__main__` of this
    process, needs no `__main__` guard, and ends when this process ends in whatever way.
    """

    pid: int
    channel: socket.socket
    """A stream socket to the child, for messages of the executor's own; it closes it."""

    def sentinels(self) -> list[int]:
        """Return descriptors to poll; one is readable when `failure` may return an error."""

    def failure(self) -> BaseException | None:
        """Return the error that ended the child, or how it exited; None while it runs."""

    def doing(self) -> str | None:
        """Return the state of a child that does not answer, as the rest of a message.

        Returns:
            None if no call of its worker runs; nothing, if one runs; and that a signal has stopped
                the child, and the method of a plugin that runs, such as `, in apply() of plugin
                'x'`.
        """

    def close(self, grace_s: float = 5.0) -> None:
        """End the child; kill it after `grace_s` seconds. May be called twice."""


class StartProcess(Protocol):
    """See `ExecutorContext.start_process`."""

    def __call__(
        self, launch: WorkerLaunch, run: str, pass_fds: Sequence[int] = ()
    ) -> WorkerProcess:
        """Start a process; return before it runs."""


@dataclass(frozen=True, kw_only=True)
class ExecutorContext(Context["Executor"]):
    """Context of an executor.

    Attributes:
        parallel: how many ranks there are, and which one samples.
        launch: `launch(rank, placement)` returns the launch of the worker of a rank. `placement` is
                the hosts of the ranks; None is all on this host.
        start_process: `start_process(launch, run, pass_fds)` starts a child process, which calls
            `run`, a `package.module:function`, with the launch, the child's end of the channel and
            the descriptors of `pass_fds` that it got. An error of `run` is the child's `failure`.
        progress: to call while weights are loaded.
        watchdog_seconds: duration of a call after which a worker writes the stacks of its threads
            to stderr; 0 is never.
        watchdog_exits: whether a step that takes longer is a failure: the executor names the ranks
            that hang, and ends them.
        num_batches: steps that are to be in flight at once, if the executor can: one for each stage
            of a pipeline, or two with `scheduler.asynchronous`.
        all_report: whether ranks that do not sample return results of steps as well, which
            `join_outputs` joins; if not, only the output rank's result has to be sent.
    """

    parallel: ParallelConfig
    launch: LaunchWorker
    start_process: StartProcess
    progress: Progress
    watchdog_seconds: float = 0.0
    watchdog_exits: bool = False
    num_batches: int = 1
    all_report: bool = False


class Executor(Component):
    """Starts the workers and sends them the plan of each step."""

    MAX_CONCURRENT_BATCHES: ClassVar[int] = 7
    """The most that `max_concurrent_batches` of any executor may be."""
    LateOutput: ClassVar[type[LateOutput]] = LateOutput
    overlaps_steps: ClassVar[bool] = False
    """Whether steps overlap with `scheduler.asynchronous = "auto"`: the executor takes two steps at
    once and calls `Worker.begin_sampling`."""

    context: ExecutorContext

    @property
    def max_concurrent_batches(self) -> int:
        """Steps in flight at most, 1 to MAX_CONCURRENT_BATCHES, 7; more than 1 is a pipeline.

        In a pipeline `sample_tokens` is called before the step's `execute_model` is done, and
        begins after it. If `execute_model` itself returns a result, the result of `sample_tokens`
        is ignored.
        """
        return 1

    @abstractmethod
    def start(self) -> Sequence[WorkerInfo]:
        """Start the workers and load the model; return their infos in rank order."""

    @abstractmethod
    def initialize_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache in every worker."""

    @returns(instance(Future))
    @abstractmethod
    def execute_model(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput | None]:
        """Start a step.

        A result of None means that sampling waits for `sample_tokens`. A plan without tokens, which
        only names ended requests to the workers, returns its result at once.
        """

    @abstractmethod
    def sample_tokens(
        self, plan: SchedulerOutput, bitmask: GrammarBitmask | None = None
    ) -> Future[ModelRunnerOutput]:
        """Sample the tokens of a step if its `execute_model` returned None.

        A request of the plan for which the result has no token, though it is computed to its last
        one, or has too many, ends with an error that names the executor.

        Args:
            plan: plan of that `execute_model` call.
            bitmask: tokens that grammars allow; None if no request of the step has a grammar.
        """

    @abstractmethod
    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), timeout: float | None = None
    ) -> list[Any]:
        """Call a worker method on every worker; return their results in rank order.

        Args:
            method: name of a method of `Worker`.
            args: positional.
            timeout: seconds for all workers together; None is no limit. Workers in this process
                are not interrupted.

        Raises:
            HardpointError: `Worker` has no such method.
            TimeoutError: the workers did not answer in time.
        """

    def on_failure(self, callback: Callable[[BaseException], None]) -> None:
        """Register a callback for the loss of workers; it may run in any thread.

        It is called once, when a worker has ended, or a call of `collective_rpc` has left ranks out
        of step (`are_out_of_step`). Its error ends the engine: an engine process at once, unless it
        is in a step, and one in the caller's process with the next call. The default never calls
        it, for executors of one worker, which fails only in calls.
        """
