"""The worker halves of step parts behind one object: called in steps that have data for them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from hardpoint.errors import HardpointError, PluginFaultError, shown
from hardpoint.plugins import ModelRunnerOutput, SchedulerOutput
from hardpoint.plugins.manifest import Source
from hardpoint.plugins.model import Attend
from hardpoint.plugins.step_part import StepPart, StepRows, WorkerHalf, WorkerHalfContext
from hardpoint.registry.blame import describe, faults_as, raise_unless_fault

from .activity import PluginCalls
from .errors import close_named


class BoundWorkerHalf:
    """The worker half of one part."""

    def __init__(self, part: StepPart, half: WorkerHalf, calls: PluginCalls) -> None:
        """Call the half by `calls`; the part is closed with it."""
        self.name, self.half = part.name, half
        self._part, self._calls = part, calls
        self.source = calls.source

    def overrides(self, method: str) -> bool:
        """Return whether the half has a method of its own."""
        return getattr(type(self.half), method) is not getattr(WorkerHalf, method)

    def run(self, method: str, *args: Any) -> Any:
        """Call a method of the half."""
        return self._calls.run(method, getattr(self.half, method), *args)

    def close(self) -> None:
        """Close the half and the part."""
        with ExitStack() as stack:
            stack.callback(close_named, self.source, self._part.close)
            stack.callback(close_named, self.source, self.half.close)


class WorkerParts:
    """The worker halves of all parts.

    A half that fails is left out of the rest of the step. In the rank that samples, the engine gets
    its fault with the result and decides by the part's scope; in another rank the step fails.
    """

    def __init__(self, halves: Sequence[BoundWorkerHalf] = (), *, reports: bool = True) -> None:
        """Bind the halves, in the order of their calls.

        Args:
            halves: of all parts that have one.
            reports: whether this rank's results reach the engine.
        """
        self._halves = tuple(halves)
        self._reports = reports
        self._active: list[BoundWorkerHalf] = []
        self._users: dict[str, frozenset[str]] = {}  # by part
        self._faults: dict[str, str] = {}

    def __bool__(self) -> bool:
        """Return whether there are any halves."""
        return bool(self._halves)

    def begin(self, plan: SchedulerOutput) -> None:
        """Begin a step: the halves for which a plan has data take it."""
        self._active, self._faults = [], {}
        for half in self._halves:
            part = plan.part_data.get(half.name)
            if part is not None:
                self._active.append(half)
                self._users[half.name] = frozenset(part.request_ids)
                if half.overrides("begin"):
                    self._run(half, "begin", plan, part.data)

    @property
    def wants_layers(self) -> bool:
        """Whether a half is called for each layer of this step."""
        return any(half.overrides("around_layers") for half in self._active)

    def around_layers(self, attend: Attend) -> Attend:
        """Return `attend` with the calls of all halves around it."""
        for half in reversed([one for one in self._active if one.overrides("around_layers")]):
            inner = self._run(half, "around_layers", attend)
            if callable(inner):
                attend = inner
        return attend

    def hidden(
        self, hidden: torch.Tensor, request_ids: Sequence[str], starts: Sequence[int]
    ) -> torch.Tensor:
        """Return the hidden states of a step as the halves change them.

        Args:
            hidden: [tokens, hidden_size].
            request_ids: requests of the step.
            starts: first token of each request, and the number of all tokens.
        """
        spans = list(zip(request_ids, starts, starts[1:], strict=False))
        for half in list(self._active):
            if half.overrides("hidden"):
                own = [span for span in spans if span[0] in self._users[half.name]]
                lengths = [end - start for _, start, end in own]
                rows = StepRows([name for name, *_ in own], [0, *itertools.accumulate(lengths)])
                indices = [row for _, start, end in own for row in range(start, end)]
                hidden = self._changed(half, "hidden", hidden, indices, rows)
        return hidden

    def logits(self, logits: torch.Tensor, request_ids: Sequence[str]) -> torch.Tensor:
        """Return the logits of a step, [rows, vocab_size], as the halves change them."""
        for half in list(self._active):
            if half.overrides("logits"):
                users = self._users[half.name]
                indices = [row for row, name in enumerate(request_ids) if name in users]
                names = [request_ids[row] for row in indices]
                logits = self._changed(half, "logits", logits, indices, names)
        return logits

    def _changed(
        self,
        half: BoundWorkerHalf,
        method: str,
        values: torch.Tensor,
        indices: Sequence[int],
        rows: Any,
    ) -> torch.Tensor:
        """Return values of which a half has changed its own rows; others' it never gets."""
        if not indices:
            return values
        own = values if len(indices) == len(values) else values[list(indices)]
        changed = self._run(half, method, own, rows)
        if changed is None:
            return values
        if not isinstance(changed, torch.Tensor) or changed.shape != own.shape:
            expected = f"a tensor {list(own.shape)} or None"
            self._leave_out(half, f"its {method}() gave {_form(changed)}, expected {expected}")
            return values
        if len(indices) == len(values):
            return changed.to(values.dtype)
        result = values.clone()
        result[list(indices)] = changed.to(values.dtype)
        return result

    def report(self, output: ModelRunnerOutput) -> None:
        """Add the reports and the faults of the halves to the result of the step."""
        for half in list(self._active):
            if half.overrides("sampled"):
                users, tokens = self._users[half.name], output.sampled_token_ids
                self._run(half, "sampled", {name: tokens[name] for name in users & tokens.keys()})
        for half in list(self._active):
            if half.overrides("report"):
                report = self._run(half, "report")
                if report is not None and not isinstance(report, bytes):
                    self._leave_out(half, f"its report() gave {shown(report)}, expected bytes")
                elif report is not None:
                    output.part_reports[half.name] = report
        output.part_faults.update(self._faults)
        self._active, self._faults = [], {}

    def sleep(self, level: int) -> None:
        """Let all halves release memory."""
        for half in self._halves:
            half.run("sleep", level)

    def wake_up(self) -> None:
        """Let all halves allocate again."""
        for half in self._halves:
            half.run("wake_up")

    def close(self) -> None:
        """Close all halves."""
        with ExitStack() as stack:
            for half in self._halves:
                stack.callback(half.close)

    def _run(self, half: BoundWorkerHalf, method: str, *args: Any) -> Any:
        """Call a method; leave the half out of the step if it fails."""
        try:
            return half.run(method, *args)
        except BaseException as cause:
            raise_unless_fault(cause)
            self._leave_out(half, f"its {method}() failed: {describe(cause)}", cause)
            return None

    def _leave_out(
        self, half: BoundWorkerHalf, message: str, cause: BaseException | None = None
    ) -> None:
        if not self._reports:
            raise PluginFaultError(f"{half.source}: {message}") from cause
        self._active.remove(half)
        self._faults[half.name] = message


def opened_half(part: StepPart, context: WorkerHalfContext, source: Source) -> WorkerHalf | None:
    """Return the worker half of a part; None if it has none.

    Raises:
        PluginFaultError: it cannot be built; the part is closed.
    """
    name = f"{source}: its worker_half()"
    try:
        with faults_as(PluginFaultError, name, passing=(HardpointError,)):
            half = part.worker_half(context)
        if half is not None and not isinstance(half, WorkerHalf):
            raise PluginFaultError(f"{name} gave {shown(half)}, expected a WorkerHalf or None")
    except BaseException:
        part.close()
        raise
    return half


def _form(value: object) -> str:
    """Return shape or type of a value, for messages."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)}"
    return shown(value)
