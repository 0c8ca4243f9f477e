"""A worker without a model that follows orders in the arguments of its calls, and its launches."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from hardpoint.builtin_plugins.executors.multiproc import MultiprocExecutor
from hardpoint.errors import CommunicationAbortedError, ModelError
from hardpoint.plugins import ExecutorContext, ModelRunnerOutput, SchedulerOutput, WorkerInfo
from hardpoint.plugins.component.manifest import Manifest
from hardpoint.plugins.config.engine import ParallelConfig
from hardpoint.plugins.executor import WorkerLaunch
from hardpoint.plugins.requests.stats import PluginMeter
from hardpoint.process.worker_process import LaunchedWorker

FACTORY = f"{__name__}:make_worker"
_NO_PLUGINS = Manifest(hardpoint="", entries=())


class Obeying:
    """Orders are texts `rank action argument`; rank `*` is every rank."""

    def __init__(self, launch: WorkerLaunch, progress: Callable[[str, int, int], None] | None):
        self.rank = launch.rank
        self._progress = progress
        self._orders: dict[str, list[str]] = msgspec.msgpack.decode(launch.data)
        self._aborted = threading.Event()
        self._reason = ""
        self._calls: list[str] = []
        self._obey(self._orders.get("open", ()))

    def _obey(self, orders: Any) -> None:
        for order in sorted(orders):
            rank, action, argument = (*order.split(" ", 2), "")[:3]
            if rank in ("*", str(self.rank)):
                getattr(self, f"_{action}")(argument)

    def _kill(self, _argument: str) -> None:
        print("about to die\nof a signal", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def _exit(self, code: str) -> None:
        sys.exit(int(code))

    def _raise(self, message: str) -> None:
        raise ModelError(message)

    def _follow(self, reason: str) -> None:
        raise CommunicationAbortedError(reason)

    def _late(self, argument: str) -> None:
        """Fail once there is a file."""
        path, _, message = argument.partition(" ")
        self._await(path)
        raise ModelError(message)

    def _await(self, path: str) -> None:
        end = time.monotonic() + 60
        while not os.path.exists(path) and time.monotonic() < end:
            time.sleep(0.005)

    def _hang(self, path: str) -> None:
        """Write a file and hang."""
        open(path, "w").close()
        time.sleep(60)

    def _sleep(self, seconds: str) -> None:
        time.sleep(float(seconds))

    def _meet(self, _argument: str) -> None:
        """Wait for a rank that does not come."""
        self._aborted.wait()
        raise RuntimeError(f"aborted: {self._reason}")

    def load_model(self) -> WorkerInfo:
        for done in range(1, 4):
            self._progress("Loading weights", done, 3)
        self._obey(self._orders.get("load", ()))
        return WorkerInfo(16, 1000 + self.rank)

    def initialize_cache(self, num_blocks: int) -> None:
        self._calls.append(f"cache {num_blocks}")

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        self._calls.append(f"execute {plan.step}")
        self._obey(plan.finished_request_ids)
        return None

    def sample_tokens(
        self, plan: SchedulerOutput, bitmask: object = None
    ) -> ModelRunnerOutput | None:
        self._obey(plan.preempted_request_ids)
        return (
            ModelRunnerOutput({"r": [plan.step]}) if self._orders["output"] == self.rank else None
        )

    def start_parts(self, weights: str) -> dict[str, bytes]:
        self._obey([weights])
        return {}

    def wake_up(self, tags: Sequence[str]) -> None:
        self._obey(tags)

    def plugin_meters(self) -> dict[str, PluginMeter]:
        return {"process": PluginMeter(steps=os.getpid())}

    def stop_profile(self) -> str:
        return " ".join([str(self.rank), *self._calls])

    def abort(self, reason: str) -> None:
        self._reason = reason
        self._aborted.set()

    def close(self) -> None:
        if written := self._orders.get("closed"):
            with open(written, "a") as file:
                file.write(f"{self.rank}\n")


def make_worker(launch: WorkerLaunch, progress: Any) -> Obeying:
    """The factory of the launches."""
    return Obeying(launch, progress)


def executor(
    tensor: int = 2,
    pipeline: int = 1,
    orders: Mapping[str, Any] | None = None,
    progress: Callable[[str, int, int], None] = lambda *_: None,
    watchdog_seconds: float = 0.0,
    start_seconds: float = 60.0,
) -> MultiprocExecutor:
    """An executor of such workers."""
    parallel = ParallelConfig(tensor=tensor, pipeline=pipeline, start_seconds=start_seconds)
    data = msgspec.msgpack.encode({"output": parallel.output_rank, **(orders or {})})
    context = ExecutorContext(
        name="multiproc",
        options=None,
        parallel=parallel,
        launch=lambda rank, _placement=None: WorkerLaunch(FACTORY, rank, parallel.world_size, data),
        start_process=lambda launch, run, pass_fds=(): LaunchedWorker(
            launch, run, pass_fds, _NO_PLUGINS
        ),
        progress=progress,
        watchdog_seconds=watchdog_seconds,
        num_batches=parallel.pipeline,
    )
    return MultiprocExecutor(context)


def plan(step: int, *orders: str, sampling: tuple[str, ...] = ()) -> SchedulerOutput:
    """A plan in which workers obey orders."""
    return SchedulerOutput(
        step=step,
        num_scheduled_tokens={"r": 1},
        total_num_scheduled_tokens=1,
        finished_request_ids=frozenset(orders),
        preempted_request_ids=frozenset(sampling),
    )
