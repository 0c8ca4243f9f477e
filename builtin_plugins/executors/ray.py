"""The executor that runs a Ray actor per worker, on one node or several."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from hardpoint import plugins
from hardpoint.errors import EngineClosedError, EngineDeadError
from hardpoint.plugins import (
    ConfigError,
    Executor,
    ExecutorContext,
    GrammarBitmask,
    HardpointError,
    ModelRunnerOutput,
    SchedulerOutput,
)
from hardpoint.plugins.parallel import Placement
from hardpoint.toolkit.ray_cluster import (
    Connection,
    RayNode,
    actor_failure,
    arrange,
    check_capacity,
    health_check_seconds,
    import_ray,
    listening_address,
    needed_resources,
    nodes_of,
    reserve,
    short_text,
)
from hardpoint.toolkit.workers.calls import decode_result, encode_call
from hardpoint.toolkit.workers.joining import are_out_of_step, failed_rank, first_error_or

from .ray_worker import CONCURRENCY_GROUPS, RayWorker

if TYPE_CHECKING:
    from hardpoint.plugins.process.executor import WorkerInfo

_log = logging.getLogger("hardpoint")

_INLINE_BYTES = 90_000
"""Calls up to this size travel in the messages to the actors; longer ones are stored once."""
_PROGRESS_SECONDS = 1.0
_CLOSE_SECONDS = 5.0


@dataclass(frozen=True)
class _Rank:
    """A worker's actor, and where it runs."""

    rank: int
    actor: Any
    node: RayNode
    pid: int = 0

    def __str__(self) -> str:
        process = f" (process {self.pid})" if self.pid else ""
        return f"rank {self.rank}{process} on {self.node}"


@dataclass(frozen=True, eq=False)
class _RankCall:
    """A call of a rank that is under way."""

    method: str
    rank: _Rank
    future: Future[Any]


class RayExecutor(Executor):
    """Runs each rank in a Ray actor, in a placement group, and sends all of them each call."""

    contract = 2

    class Options(plugins.Options):
        """Ray cluster of the workers, and resources of each worker.

        Attributes:
            address: `HOST:PORT` of the cluster. "auto" is the cluster in RAY_ADDRESS, otherwise the
                cluster of this machine. "local" starts a cluster on this machine and ends it with
                the engine. If the program has joined a cluster, that one is used and not ended.
            namespace: Ray namespace of the actors; empty is a new one.
            placement: strategy of the placement group: PACK on few nodes, SPREAD over many,
                STRICT_PACK on one, STRICT_SPREAD one worker per node.
            num_cpus: CPUs that a worker reserves.
            num_gpus: GPUs that a worker reserves; None is 1 if the cluster has GPUs, else 0.
            resources: custom resources that a worker reserves.
            runtime_env: Ray's runtime environment of the actors.
            join_timeout_seconds: maximum time until the cluster answers.
            start_timeout_seconds: maximum time until the resources are free and the actors run,
                including what `runtime_env` installs.
        """

        address: Annotated[str, Meta(min_length=1)] = "auto"
        namespace: str = ""
        placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
        num_cpus: Annotated[float, Meta(ge=0)] = 1.0
        num_gpus: Annotated[int, Meta(ge=0, le=1)] | None = None
        resources: dict[str, Annotated[float, Meta(gt=0)]] = {}
        runtime_env: dict[str, Any] = {}
        join_timeout_seconds: Annotated[float, Meta(gt=0)] = 10.0
        start_timeout_seconds: Annotated[float, Meta(gt=0)] = 300.0

    options: Options

    def __init__(self, context: ExecutorContext) -> None:
        """Start nothing yet.

        Raises:
            ImportError: Ray is not installed.
        """
        super().__init__(context)
        self._ray = import_ray()
        self._connection: Connection | None = None
        self._group: Any = None
        self._ranks: list[_Rank] = []
        self._watches: list[Any] = []
        self._folder = ""
        self._calls: set[_RankCall] = set()
        self._lock = threading.Lock()
        self._results: queue.SimpleQueue[tuple[_RankCall, Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._callback: Callable[[BaseException], None] | None = None
        self._failed: BaseException | None = None
        self._closing = False

    @property
    def max_concurrent_batches(self) -> int:
        """Steps in flight at most, as many as the context asks for."""
        return self.context.num_batches

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers on their nodes, in rank order."""
        return [rank.pid for rank in self._ranks]

    def start(self) -> list[WorkerInfo]:
        """Join the cluster, start the actors and load the model.

        Raises:
            ConfigError: the cluster does not answer, or has not the resources.
            PluginError: a node lacks Hardpoint or a plugin, or has another version.
            HardpointError: an actor did not start, or died.
        """
        setting = f"plugin.{self.name}"
        self._connection = Connection(self._ray, self.options, setting)
        needed = needed_resources(self._ray, self.options)
        count, strategy = self.context.parallel.world_size, self.options.placement
        try:
            check_capacity(list(nodes_of(self._ray).values()), needed, count, strategy)
        except ConfigError as error:
            raise ConfigError(f"{setting}: {error}") from error
        timeout_s = self.options.start_timeout_seconds
        self._group = reserve(needed, count, strategy=strategy, timeout_s=timeout_s)
        self._thread = threading.Thread(target=self._complete, name="RayResults", daemon=True)
        self._thread.start()
        self._start_actors()
        self._open_workers()
        infos = self._load()
        self._remove_folder()
        return infos

    def initialize_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache in every worker."""
        self.collective_rpc("initialize_cache", (num_blocks,))

    def execute_model(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput | None]:
        """Run the model in every worker."""
        return first_error_or(self._call("execute_model", (plan,)), self._output_rank)

    def sample_tokens(
        self, plan: SchedulerOutput, bitmask: GrammarBitmask | None = None
    ) -> Future[ModelRunnerOutput]:
        """Sample in the output rank."""
        return first_error_or(self._call("sample_tokens", (plan, bitmask)), self._output_rank)

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), timeout: float | None = None
    ) -> list[Any]:
        """Call a method of every worker."""
        futures = self._call(method, args)
        try:
            return self._gather(method, futures, timeout)
        except Exception as error:
            if are_out_of_step(method, futures):
                self._fail(error)
            raise

    def _gather(
        self, method: str, futures: Sequence[Future[Any]], timeout: float | None
    ) -> list[Any]:
        done, _ = wait(futures, timeout, FIRST_EXCEPTION)
        if (failed := failed_rank(futures)) is not None:
            futures[failed].result()
        if late := [str(r) for r, f in zip(self._ranks, futures, strict=True) if f not in done]:
            raise TimeoutError(f"{method}: {', '.join(late)} did not answer within {timeout:g} s")
        return [future.result() for future in futures]

    def on_failure(self, callback: Callable[[BaseException], None]) -> None:
        """Register the callback for the loss of an actor."""
        with self._lock:
            self._callback = callback
            failed = self._failed
        if failed is not None:
            callback(failed)

    def close(self) -> None:
        """End the actors, remove the placement group, and leave the cluster if this joined it."""
        with self._lock:
            was_closed, self._closing = self._closing, True
        if was_closed:
            return
        if self._connection is not None and self._ray.is_initialized():
            self._end_actors()
            if self._group is not None:
                with contextlib.suppress(Exception):
                    importlib.import_module("ray.util").remove_placement_group(self._group)
        self._fail_calls(EngineClosedError(f"the executor {self.name!r} was closed"))
        if self._thread is not None:
            self._results.put(None)
            self._thread.join()
        if self._connection is not None:
            self._connection.close()

    @property
    def _output_rank(self) -> int:
        return self.context.parallel.output_rank

    def _start_actors(self) -> None:
        """Start an actor per bundle, and wait for them.

        Raises:
            HardpointError: one did not start; the message names its node.
        """
        util = importlib.import_module("ray.util")
        bundles = util.placement_group_table(self._group)["bundles_to_node_id"]
        nodes = nodes_of(self._ray)
        needed = needed_resources(self._ray, self.options)
        assert self._connection is not None
        actor_class = self._ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(RayWorker)
        # The connection that is made here has it for all; there, Ray takes local folders too.
        environment = None if self._connection.is_first else self.options.runtime_env or None
        strategy = importlib.import_module("ray.util.scheduling_strategies")
        places = [bundles[bundle] for bundle in sorted(bundles)]
        order = arrange(places, self.context.parallel.tensor)
        for index, bundle in enumerate(order):
            actor = actor_class.options(
                num_cpus=needed.get("CPU", 0),
                num_gpus=needed.get("GPU", 0),
                resources={k: v for k, v in needed.items() if k not in ("CPU", "GPU")},
                max_restarts=0,
                max_task_retries=0,
                runtime_env=environment,
                scheduling_strategy=strategy.PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=bundle
                ),
            ).remote()
            self._ranks.append(_Rank(index, actor, nodes[bundles[bundle]]))
        deadline = time.monotonic() + self.options.start_timeout_seconds
        starting = [(rank, rank.actor.pid.remote()) for rank in self._ranks]
        for rank, reference in starting:
            pid = self._get(rank, reference, deadline)
            self._ranks[rank.rank] = replace(rank, pid=pid)
        for rank in self._ranks:
            self._watches.append(
                watch := rank.actor.wait.options(concurrency_group="watch").remote()
            )
            watch.future().add_done_callback(functools.partial(self._ended, rank))

    def _open_workers(self) -> None:
        """Open the worker of each actor.

        Raises:
            HardpointError: a worker cannot be opened; the message names its node.
        """
        placement = self._placement()
        deadline = time.monotonic() + self.options.start_timeout_seconds
        opened = []
        for rank in self._ranks:
            launch = self.context.launch(rank.rank, placement)
            opened.append(rank.actor.open.remote(self._ray.put(launch.encode())))
        for rank, reference in zip(self._ranks, opened, strict=True):
            if result := self._get(rank, reference, deadline):
                with _naming_node(rank):
                    decode_result("open_worker", result, str(rank))

    def _placement(self) -> Placement:
        """Return the placement of ranks; nodes count as hosts, even on one machine."""
        first = self._ranks[0]
        hosts = tuple(rank.node.id for rank in self._ranks)
        devices = (0,) * len(hosts)  # Ray shows each actor its own only
        if len(set(hosts)) == 1:
            self._folder = self._control(first, "make_folder") if len(hosts) > 1 else ""
            return Placement(hosts=hosts, folder=self._folder, devices=devices)
        port = self._control(first, "free_port", first.node.address)
        return Placement(
            hosts=hosts,
            addresses=tuple(rank.node.address for rank in self._ranks),
            store=listening_address(first.node.address, port),
            devices=devices,
        )

    def _remove_folder(self) -> None:
        folder, self._folder = self._folder, ""
        for rank in self._ranks if folder else ():
            remove = rank.actor.remove_folder.options(concurrency_group="control")
            with contextlib.suppress(Exception):
                self._ray.get(remove.remote(folder), timeout=_CLOSE_SECONDS)
                return

    def _load(self) -> list[WorkerInfo]:
        _log.info("executor %s: %s", self.name, self._description())
        futures = self._call("load_model", ())
        reported = None
        while not wait(futures, _PROGRESS_SECONDS, FIRST_EXCEPTION)[0].issuperset(futures):
            if any(future.done() and future.exception() for future in futures):
                break
            reported = self._report_progress(reported)
        if (failed := failed_rank(futures)) is not None:
            with _naming_node(self._ranks[failed]):
                futures[failed].result()
        return [future.result() for future in futures]

    def _report_progress(self, reported: Any) -> Any:
        calls = [
            rank.actor.progress.options(concurrency_group="control").remote()
            for rank in self._ranks
        ]
        try:
            progress = self._ray.get(calls, timeout=_PROGRESS_SECONDS)
        except Exception:
            return reported  # an actor that is busy or dead, which its calls report
        slowest = min(progress, key=lambda item: item[1] / max(item[2], 1))
        if slowest != reported and slowest[2]:
            self.context.progress(*slowest)
        return slowest

    def _description(self) -> str:
        seconds = health_check_seconds()
        time_text = "Ray's health-check time" if seconds is None else f"about {seconds:g} s"
        return (
            f"Ray cluster at {self._ray.get_runtime_context().gcs_address}; "
            f"{'; '.join(map(str, self._ranks))}; the loss of a node is noticed within {time_text}"
        )

    def _control(self, rank: _Rank, method: str, *args: Any) -> Any:
        """Call a method of an actor while its worker runs a step."""
        call = getattr(rank.actor, method).options(concurrency_group="control").remote(*args)
        return self._get(rank, call, time.monotonic() + self.options.start_timeout_seconds)

    def _get(self, rank: _Rank, reference: Any, deadline: float) -> Any:
        """Return the result of an actor's call while it starts.

        Raises:
            PluginLoadError: Hardpoint is not installed on its node.
            HardpointError: it died, or did not answer by the deadline.
        """
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(reference, timeout=max(deadline - time.monotonic(), 0.1))
        except exceptions.GetTimeoutError:
            raise HardpointError(
                f"{rank}: its actor did not start within "
                f"{self.options.start_timeout_seconds:g} s (plugin.{self.name}."
                f"start_timeout_seconds)"
            ) from None
        except exceptions.RayError as error:
            raise actor_failure(error, rank.node, str(rank)) from error

    def _call(self, method: str, args: Sequence[Any]) -> list[Future[Any]]:
        data: Any = encode_call(method, args)
        with self._lock:
            if self._failed is not None or self._closing:
                return [self._lost() for _ in self._ranks]
            if len(data) > _INLINE_BYTES:
                data = self._ray.put(data)
            calls = [_RankCall(method, rank, Future()) for rank in self._ranks]
            self._calls.update(calls)
            for call in calls:
                sent = call.rank.actor.run.remote(data).future()
                sent.add_done_callback(functools.partial(self._answered, call))
        return [call.future for call in calls]

    def _lost(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(
            self._failed or EngineClosedError(f"the executor {self.name!r} was closed")
        )
        return future

    def _answered(self, call: _RankCall, sent: Future[Any]) -> None:
        self._results.put((call, sent))

    def _complete(self) -> None:
        """Complete the futures of calls, in a thread of their own: Ray's must not wait."""
        while (item := self._results.get()) is not None:
            call, sent = item
            error = sent.exception()
            with self._lock:
                if call not in self._calls:
                    continue  # it has failed with the others
                if error is None:
                    self._calls.discard(call)
            if error is not None:
                self._lose(call.rank, error)
                continue
            try:
                result = decode_result(call.method, sent.result(), str(call.rank))
            except Exception as raised:
                call.future.set_exception(raised)
            else:
                call.future.set_result(result)

    def _ended(self, rank: _Rank, watch: Future[Any]) -> None:
        error = watch.exception()
        if not self._closing:
            # Not in Ray's thread, in which the callback could not use Ray.
            lost = error or RuntimeError("it ended")
            threading.Thread(target=self._lose, args=(rank, lost), name="RayFailure").start()

    def _lose(self, rank: _Rank, cause: BaseException) -> None:
        self._fail(EngineDeadError(f"executor {self.name!r}: lost {rank}: {short_text(cause)}"))

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._failed is not None or self._closing:
                return
            self._failed, callback = error, self._callback
        self._fail_calls(error)
        self._abort(self._ranks, str(error))
        if callback is not None:
            callback(error)

    def _abort(self, ranks: Sequence[_Rank], reason: str) -> None:
        for rank in ranks:
            with contextlib.suppress(Exception):
                rank.actor.abort.options(concurrency_group="control").remote(reason)

    def _fail_calls(self, error: BaseException) -> None:
        with self._lock:
            calls, self._calls = self._calls, set()
        for call in calls:
            call.future.set_exception(error)

    def _end_actors(self) -> None:
        """Let the workers close, if they can within seconds, and kill their actors."""
        self._abort(self._ranks, f"the executor {self.name!r} is being closed")
        if self._watches:
            close = encode_call("close")
            with contextlib.suppress(Exception):
                closed = [rank.actor.run.remote(close) for rank in self._ranks]
                self._ray.wait(closed, num_returns=len(closed), timeout=_CLOSE_SECONDS)
        self._remove_folder()
        for rank in self._ranks:
            with contextlib.suppress(Exception):
                self._ray.kill(rank.actor)
        with contextlib.suppress(Exception):
            if self._watches:
                watches = self._watches
                self._ray.wait(watches, num_returns=len(watches), timeout=_CLOSE_SECONDS)


@contextlib.contextmanager
def _naming_node(rank: _Rank) -> Iterator[None]:
    try:
        yield
    except HardpointError as error:
        raise type(error)(f"{rank.node}: {error}") from error
