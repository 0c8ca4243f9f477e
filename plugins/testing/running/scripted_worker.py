"""Workers without a model, for the executor suite: they run wherever an executor puts them.

The script of a worker's actions is in files of a folder, which the suite and
the workers share.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from hardpoint.plugins import (
    GrammarBitmask,
    HardpointError,
    ModelError,
    ModelRunnerOutput,
    SchedulerOutput,
    WorkerInfo,
)
from hardpoint.plugins.component import Progress
from hardpoint.plugins.executor import WorkerLaunch
from hardpoint.plugins.requests.stats import PluginMeter
from hardpoint.testing.threads import until

FACTORY = f"{__name__}:open_scripted_worker"
REPORTING_PART = "scripted"
"""Name of the step part of the workers' reports."""

_WAIT_SECONDS = 20.0  # a worker waits no longer for what never comes
_POLL_SECONDS = 0.002


class WorkerFailure(Exception):  # noqa: N818 - it stands for any error of a worker
    """The error of the suite's workers."""


class Does(Enum):
    """The behaviour of a worker when a method of an order is called."""

    FAIL = "fail"
    """It raises an error."""
    WAIT = "wait"
    """It waits for an abort, as in a collective."""
    TAKE_LONG = "take long"
    """It takes the seconds of the order, or until the order is withdrawn."""


class Order(msgspec.Struct, frozen=True):
    """An order to workers.

    Attributes:
        method: name of a method of `Worker`; "open" is its construction.
        does: the action.
        ranks: the ranks that do it.
        others_wait: whether the other ranks wait for an abort, as in a collective.
        seconds: before anything else.
    """

    method: str
    does: Does
    ranks: tuple[int, ...]
    others_wait: bool = False
    seconds: float = 0.0


class RecordedCall(msgspec.Struct, frozen=True):
    """A call that a worker got.

    Attributes:
        method: name of a method of `Worker`; "open" is its construction, "defect" is not a call:
            `detail` describes the defect.
        detail: the step of a plan, or the arguments.
        process: the process that it runs in.
        thread: thread of that process.
    """

    method: str
    detail: str
    process: int
    thread: int


class WorkerScript:
    """The calls that the workers of an executor got, and the orders to them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def note(self, rank: int, method: str, detail: str = "") -> None:
        """Add a call of a worker."""
        call = RecordedCall(method, detail, os.getpid(), threading.get_ident())
        with (self._folder / f"rank-{rank}").open("ab") as file:
            file.write(msgspec.json.encode(call) + b"\n")

    def calls(self, rank: int) -> list[RecordedCall]:
        """Return the calls that a worker got, in their order."""
        try:
            lines = (self._folder / f"rank-{rank}").read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        whole = [line for line in lines if line.endswith(b"\n")]
        return [msgspec.json.decode(line, type=RecordedCall) for line in whole]

    def was_called(self, rank: int, method: str) -> bool:
        """Return whether a worker was called for a method."""
        return any(call.method == method for call in self.calls(rank))

    def defects(self) -> list[str]:
        """Return the defects that workers found."""
        ranks = [int(path.name.rpartition("-")[2]) for path in self._folder.glob("rank-*")]
        return [
            call.detail
            for rank in sorted(ranks)
            for call in self.calls(rank)
            if call.method == "defect"
        ]

    @contextmanager
    def ordered(self, order: Order) -> Iterator[None]:
        """Let workers do something while the body runs."""
        self.set_order(order)
        try:
            yield
        finally:
            (self._folder / "order").unlink()

    def set_order(self, order: Order) -> None:
        """Let workers do something from now on."""
        new = self._folder / "order.new"
        new.write_bytes(msgspec.json.encode(order))
        new.replace(self._folder / "order")

    def order(self) -> Order | None:
        """Return the order to workers, if there is one."""
        try:
            return msgspec.json.decode((self._folder / "order").read_bytes(), type=Order)
        except FileNotFoundError:
            return None


class StepHistory:
    """The tokens of a worker, which depend on the steps that it ran, in order."""

    def __init__(self) -> None:
        self._value = 17

    def initialize(self, num_blocks: int) -> None:
        """Include the size of the cache in the inputs of every token."""
        self._value = (self._value * 31 + num_blocks) % 65_521

    def run(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run a step."""
        self._value = (self._value * 31 + plan.step) % 65_521
        return None if plan.total_num_scheduled_tokens else ModelRunnerOutput()

    def sample(self, plan: SchedulerOutput, bitmask: GrammarBitmask | None) -> ModelRunnerOutput:
        """Return the tokens of the step that ran last; a bitmask changes them."""
        masked = 0 if bitmask is None else int(bitmask.bitmask.sum()) + len(bitmask.request_ids)
        return ModelRunnerOutput(
            sampled_token_ids={
                request_id: [(self._value + 7 * index + count + masked) % 257]
                for index, (request_id, count) in enumerate(plan.num_scheduled_tokens.items())
            }
        )


class ScriptedWorker:
    """A rank without a model."""

    def __init__(self, launch: WorkerLaunch) -> None:
        data = msgspec.msgpack.decode(launch.data, type=tuple[str, int, bool])
        folder, self._output_rank, self._reports = data
        self.rank, self._world_size = launch.rank, launch.world_size
        self._script = WorkerScript(Path(folder))
        self._history, self._waiting = StepHistory(), 0
        self._level = 0
        self._aborted = ""
        self._busy = threading.Lock()
        with self._called("open"):
            pass

    def load_model(self) -> WorkerInfo:
        """Return an info that differs by rank, once all ranks load their models."""
        with self._called("load_model"):
            ranks = range(self._world_size)
            self._wait(
                lambda: all(self._script.was_called(rank, "load_model") for rank in ranks),
                f"rank {self.rank} loads its model, and there is a rank that does not",
            )
            return WorkerInfo(64, (1 << 20) - self.rank)

    def initialize_cache(self, num_blocks: int) -> None:
        """Include the number of blocks in the inputs of every token."""
        with self._called("initialize_cache", num_blocks):
            self._history.initialize(num_blocks)

    def set_max_model_len(self, max_model_len: int) -> None:
        """Note it."""
        with self._called("set_max_model_len", max_model_len):
            pass

    def set_num_states(self, num_states: int) -> None:
        """Note it."""
        with self._called("set_num_states", num_states):
            pass

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """Return None, or of a plan without tokens a result, which is wrong but in one rank."""
        with self._called("execute_model", plan.step):
            self._waiting = plan.step
            result = self._history.run(plan)
            if result is not None and self.rank != self._output_rank:
                result.num_nans_in_logits = {f"rank {self.rank}": 1}
            return result if result is None else self._with_report(plan, result)

    def sample_tokens(
        self, plan: SchedulerOutput, bitmask: GrammarBitmask | None = None
    ) -> ModelRunnerOutput | None:
        """Return the tokens of the last step of `execute_model`, in one rank.

        The others return their reports, if they have any.
        """
        with self._called("sample_tokens", plan.step):
            if plan.step != self._waiting:
                text = f"the worker was to sample step {plan.step} when step {self._waiting} had "
                self._script.note(self.rank, "defect", text + "run last")
                raise WorkerFailure(text + "run last")
            result = self._history.sample(plan, bitmask)
            if self.rank == self._output_rank:
                return self._with_report(plan, result)
            return self._with_report(plan, ModelRunnerOutput()) if self._reports else None

    def _with_report(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> ModelRunnerOutput:
        """Add a report that names the step, like a step part that moves blocks."""
        if self._reports:
            result.part_reports = {REPORTING_PART: {self.rank: step_message(plan)}}
        return result

    def start_parts(self, weights: str | None) -> dict[str, bytes]:
        """Note it; there are none."""
        with self._called("start_parts", weights):
            return {}

    def execute_dummy_batch(self) -> None:
        """Note it."""
        with self._called("execute_dummy_batch"):
            pass

    def idle(self) -> bool | None:
        """Note it; there is nothing to do."""
        with self._called("idle"):
            return None

    def plugin_meters(self) -> dict[str, PluginMeter]:
        """Return none."""
        return {}

    def sleep(self, level: int) -> None:
        """Remember the level."""
        with self._called("sleep", level):
            self._level = level

    def wake_up(self, tags: Sequence[str]) -> None:
        """Forget the level."""
        with self._called("wake_up", list(tags)):
            if tags:
                self._level = 0

    def start_profile(self) -> None:
        """Note it."""
        with self._called("start_profile"):
            pass

    def stop_profile(self) -> str:
        """Return rank and level."""
        with self._called("stop_profile"):
            return f"rank {self.rank} at level {self._level}"

    def abort(self, reason: str) -> None:
        """Abort waiting calls."""
        self._script.note(self.rank, "abort", reason)
        self._aborted = reason or "without a reason"

    def close(self) -> None:
        """Note it."""
        self._script.note(self.rank, "close")

    @contextmanager
    def _called(self, method: str, *args: Any) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            text = f"{method} of rank {self.rank} was called while another call of it ran"
            self._script.note(self.rank, "defect", text)
            raise WorkerFailure(text)
        try:
            detail = str(args[0]) if len(args) == 1 else json.dumps(args)
            self._script.note(self.rank, method, detail if args else "")
            yield
            order = self._script.order()
            if order is not None and order.method == method:
                self._obey(order)
        finally:
            self._busy.release()

    def _obey(self, order: Order) -> None:
        text = f"{order.method} of rank {self.rank}"
        does = order.does if self.rank in order.ranks else None
        if does is Does.TAKE_LONG:
            until(lambda: self._script.order() != order, order.seconds)
        elif does is not None:
            time.sleep(order.seconds)
        if does is Does.FAIL:
            raise ModelError(f"{text} failed")
        if does is Does.WAIT or (does is None and order.others_wait):
            self._wait(lambda: False, f"{text} was not aborted")

    def _wait(self, is_done: Callable[[], bool], reason: str) -> None:
        deadline = time.monotonic() + _WAIT_SECONDS
        while not is_done():
            if self._aborted:
                raise HardpointError(f"rank {self.rank} was aborted: {self._aborted}")
            if time.monotonic() > deadline:
                self._script.note(self.rank, "defect", reason)
                raise WorkerFailure(reason)
            time.sleep(_POLL_SECONDS)


def step_message(plan: SchedulerOutput) -> bytes:
    """Return the report of each rank about a step."""
    return msgspec.msgpack.encode(plan.step)


def open_scripted_worker(
    launch: WorkerLaunch,
    progress: Progress | None,  # noqa: ARG001
) -> ScriptedWorker:
    """Make the worker of a launch of the suite."""
    return ScriptedWorker(launch)


def scripted_launch(
    folder: Path, rank: int, world_size: int, output_rank: int, *, reports: bool
) -> WorkerLaunch:
    """Return the launch of a rank with its script in a folder; `reports` enables step reports."""
    data = msgspec.msgpack.encode((str(folder), output_rank, reports))
    return WorkerLaunch(FACTORY, rank, world_size, data)
