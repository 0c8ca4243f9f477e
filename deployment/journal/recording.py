"""Recording of the inputs of an engine core (`engine.journal`)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from hardpoint.core.engine.core import EngineCore, EngineInputs, QueuedRequest
from hardpoint.core.engine.step import EngineCoreParts, Outputs
from hardpoint.core.engine.utility_calls import UTILITIES
from hardpoint.core.weights.worker_spec import WorkerSpec
from hardpoint.host.boundary.parts.gates import PartTransfers
from hardpoint.host.live.change import Action
from hardpoint.host.registry.blame import describe
from hardpoint.host.registry.discovery import installed_version
from hardpoint.host.system.encoding import Encoder, WireError
from hardpoint.plugins import (
    EngineCoreRequest,
    HardpointError,
    ModelRunnerOutput,
    RequestError,
    SchedulerOutput,
    WaitReason,
)
from hardpoint.plugins.scheduling.scheduler import BlockTransfers, Gates
from hardpoint.toolkit.step_cost import StepTimes

from .fingerprint import model_fingerprint
from .records import (
    CLOSED,
    Arrival,
    Build,
    Compact,
    Event,
    Failure,
    Gate,
    JournalHeader,
    Keyframe,
    LiveState,
    PartReplies,
    RequestEnd,
    message_digest,
    plan_record,
    result_record,
    what_returned,
)
from .tape import TapedExecutor, TapedGates, TapedTransfers, taped_calls
from .writer import JournalWriter, RingWriter


def journal_path(path: str, engine_index: int) -> Path:
    """Return the file of an engine: further engines have their number in its name."""
    return Path(f"{path}.engine{engine_index}" if engine_index else path)


class Recorder:
    """The tape that records values, call by call."""

    def __init__(self) -> None:
        """Note nothing yet: no call of the core is under way."""
        self.event: Event | None = None
        self._thread = 0

    def begin(self, event: Event) -> None:
        """Note from now on, in this thread."""
        self._thread = threading.get_ident()
        self.event = event

    def end(self) -> None:
        """Note no more."""
        self.event = None

    def clock(self, read: Callable[[], float]) -> float:
        """Note a reading of the engine's clock by the engine's thread."""
        now = read()
        if (event := self.event) is not None and threading.get_ident() == self._thread:
            event.clock.append(now)
        return now

    def time(self, read: Callable[[], float]) -> float:
        """Note a reading of the clock that measures steps."""
        now = read()
        if self.event is not None:
            self.event.times.append(now)
        return now

    def gate(self, request_id: str, read: Callable[[], WaitReason | None]) -> WaitReason | None:  # noqa: ARG002
        """Note the answer of the gates of a request."""
        try:
            reason = read()
        except HardpointError as error:
            self._note("gates", Gate(failure=failure_record(error)))
            raise
        self._note("gates", gate_record(reason))
        return reason

    def matched(
        self,
        request_id: str,  # noqa: ARG002
        read: Callable[[], tuple[int | None, bool]],
    ) -> tuple[int | None, bool]:
        """Note how many tokens a step part can load."""
        num_tokens = read()
        self._note("matched", num_tokens)
        return num_tokens

    def done(self, read: Callable[[], bool]) -> bool:
        """Note whether a result is there."""
        is_done = read()
        self._note("done", is_done)
        return is_done

    def answers(self, part: str, message: bytes, read: Callable[[], list[Any]]) -> list[Any]:
        """Note the answers of worker halves."""
        answers = read()
        self._note("answers", PartReplies.of(part, answers, message_digest(message)))
        return answers

    def plan(self, plan: SchedulerOutput) -> None:
        """Note a plan."""
        self._note("plans", plan_record(plan))

    def result(
        self, plan: SchedulerOutput, read: Callable[[], ModelRunnerOutput | None]
    ) -> ModelRunnerOutput | None:
        """Note a result, or the error that was raised."""
        try:
            result = read()
        except BaseException as error:
            self._note("raised", failure_record(error))
            raise
        if isinstance(result, ModelRunnerOutput):  # the engine reports anything else
            self._note("results", result_record(plan.step, result))
        return result

    def _note(self, channel: str, item: Any) -> None:
        if self.event is not None:
            getattr(self.event, channel).append(item)


class RecordedCore(EngineCore):
    """An engine core that records its calls.

    Calls that it makes itself are part of the one that made them.
    """

    def __init__(
        self, parts: EngineCoreParts, recorder: Recorder, writer: JournalWriter | RingWriter
    ) -> None:
        super().__init__(parts)
        self._recorder, self._writer = recorder, writer
        self._encoder = Encoder(inline_below=1 << 30)
        self._compact = Compact()
        self._num_events = 0
        self._arrivals: dict[str, Arrival] = {}  # of live requests, where keyframes have them
        self._changed: list[Event] = []  # the calls of the last live change
        self._changing: list[Event] = []  # those of the one under way
        self._plain_step, self.step = self.step, self._recorded_step

    @property
    def _is_off(self) -> bool:
        """Whether a call is not recorded: another one makes it, or the journal is over."""
        if self._writer.why_over:
            self._arrivals.clear()  # no keyframe follows
            return True
        return self._recorder.event is not None

    @contextlib.contextmanager
    def _recorded(self, event: Event) -> Iterator[Event | None]:
        if self._is_off:
            yield None
            return
        self._recorder.begin(event)
        try:
            yield event
        except BaseException as error:
            event.failure = failure_record(error)
            raise
        finally:
            self._recorder.end()
            self._write(event)

    def _write(self, event: Event) -> None:
        self._num_events += 1
        self._writer.write(self._compact.shrink(event))
        if self._writer.is_due:
            self._compact = Compact()
            self._writer.write(self._keyframe())

    def _recorded_step(
        self, late_aborts: Callable[[], Sequence[str]] = tuple
    ) -> tuple[Outputs, bool]:
        if self._is_off:
            return self._plain_step(late_aborts)
        if not self.has_requests():  # a step would change nothing, and polls would fill the file
            return {}, False
        event = Event("step")

        def taken() -> Sequence[str]:
            request_ids = late_aborts()
            event.late_aborts.extend(request_ids)
            return request_ids

        self._recorder.begin(event)
        try:
            outputs, executed = self._plain_step(taken)
        except BaseException as error:
            event.failure = failure_record(error)
            self._recorder.end()
            self._write(event)
            self._writer.sync()
            raise
        self._recorder.end()
        if outputs:
            event.ended = self._ended(outputs)
        self._write(event)
        return outputs, executed

    def _ended(self, outputs: Outputs) -> list[RequestEnd]:
        ended = []
        for message in outputs.values():
            for output in message.outputs:
                if output.finish_reason is not None:
                    reason = str(output.finish_reason)
                    ended.append(RequestEnd(output.request_id, reason, output.error))
                    self._arrivals.pop(output.request_id, None)
        return ended

    def add_request(
        self,
        request: EngineCoreRequest,
        block_hashes: list[bytes] | None = None,
        arrived: float | None = None,
    ) -> None:
        """Queue a request; see EngineCore."""
        if self._is_off:
            super().add_request(request, block_hashes, arrived)
            return
        arrivals = [self._arrival(request, block_hashes, arrived)]
        with self._recorded(Event("add", arrivals=arrivals)):
            super().add_request(request, block_hashes, arrived)
            self._keep(arrivals)

    def add_requests(self, requests: Sequence[QueuedRequest]) -> None:
        """Queue the requests of one call, or none; see EngineCore."""
        if self._is_off:
            super().add_requests(requests)
            return
        arrivals = [self._arrival(*queued) for queued in requests]
        with self._recorded(Event("add_all", arrivals=arrivals)):
            super().add_requests(requests)
            self._keep(arrivals)

    def _arrival(
        self, request: EngineCoreRequest, hashes: list[bytes] | None, arrived: float | None
    ) -> Arrival:
        frames = self._encoded(request, f"request {request.request_id!r}")
        return Arrival(request.request_id, frames, hashes is not None, arrived)

    def _encoded(self, message: Any, subject: str) -> list[bytes]:
        """Return the frames of a message.

        Raises:
            RequestError: something in it is no data, such as a callable.
        """
        try:
            return [bytes(frame) for frame in self._encoder.encode(message)]
        except WireError as cause:
            raise RequestError(f"{subject}: engine.journal cannot record it: {cause}") from None

    def _keep(self, arrivals: list[Arrival]) -> None:
        if self._writer.has_keyframes:
            self._arrivals |= {arrival.request_id: arrival for arrival in arrivals}

    def abort_requests(self, request_ids: Iterable[str] | None) -> Outputs:
        """Abort requests; see EngineCore."""
        ids = None if request_ids is None else list(request_ids)
        if ids == []:
            return {}
        with self._recorded(Event("abort", request_ids=ids)) as event:
            outputs = super().abort_requests(ids)
            if event is not None:
                event.ended = self._ended(outputs)
        return outputs

    def enter_loop(self) -> None:
        """Register the busy loop; see EngineCore."""
        with self._recorded(Event("loop")):
            super().enter_loop()

    def went_idle(self) -> None:
        """Complete the pauses that wait; see EngineCore."""
        if not self._pause.is_pending:
            return
        with self._recorded(Event("idle")):
            super().went_idle()

    def flush(self) -> list[Outputs]:
        """Complete all steps that are under way; see EngineCore."""
        with self._recorded(Event("flush")):
            return super().flush()

    def leave_loop(self, message: str) -> None:
        """Fail the pauses that are not complete; see EngineCore."""
        with self._recorded(Event("leave")):
            super().leave_loop(message)

    def record_call(self, method: str, run: Callable[[], Any], arguments: Sequence[Any]) -> Any:
        """Run a control call, and record it."""
        if self._is_off:
            return run()
        frames = self._encoded(list(arguments), method)
        with self._recorded(Event("call", method=method, arguments=frames)) as event:
            result = run()
            returned = what_returned(method, arguments, result)
            if event is not None:
                event.returned = returned
            if method == "live_change":  # before the event is written, which a keyframe may follow
                call = Event("call", method=method, arguments=frames, returned=returned)
                self._note_change(arguments[0], call)
        return result

    def _note_change(self, action: Action, call: Event) -> None:
        """Keep the calls of a hot reconfiguration for keyframes: it replaces earlier ones."""
        if action == "prepare":
            self._changing = []
        self._changing.append(call)
        if action == "keep":
            self._changed = self._changing
        if action in ("keep", "undo"):
            self._changing = []

    def _keyframe(self) -> Keyframe:
        now = self._scheduler.context.clock()
        live = [
            LiveState(
                self._arrivals[request.request_id],
                list(request.output_token_ids),
                max(now - request.arrival_time, 0.0),
            )
            for request in self._scheduler.live_requests()
            if request.request_id in self._arrivals
        ]
        return Keyframe(self._num_events, live, [*self._changed, *self._changing])

    def close(self) -> None:
        """Release all; write the end of the journal."""
        try:
            super().close()
        finally:
            self._writer.close(CLOSED)


def _recorded_utility(name: str) -> Callable[..., Any]:
    declared = UTILITIES[name]

    @functools.wraps(declared.run)
    def run(self: RecordedCore, *args: Any, **kwargs: Any) -> Any:
        arguments = declared.by_position(args, kwargs)
        call = functools.partial(declared.run, self, *args, **kwargs)
        return self.record_call(name, call, arguments)

    return run


for _name in UTILITIES:
    setattr(RecordedCore, _name, _recorded_utility(_name))


class RecordedInputs(EngineInputs):
    """Records all that passes, into the file of `engine.journal`."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._recorder = Recorder()
        self._build = build_of(spec)

    def clock(self, clock: Callable[[], float]) -> Callable[[], float]:
        """Return the clock with its readings recorded."""
        return functools.partial(self._recorder.clock, clock)

    def gates(self, gates: Gates) -> Gates:
        """Return the gates with their answers recorded."""
        return TapedGates(gates, self._recorder)

    def transfers(self, transfers: PartTransfers | None) -> BlockTransfers | None:
        """Return the transfers with their answers recorded."""
        return None if transfers is None else TapedTransfers(transfers, self._recorder)

    def core(self, parts: EngineCoreParts) -> EngineCore:
        """Return a core that records its calls.

        Raises:
            JournalError: the file cannot be created.
        """
        recorder = self._recorder
        header = header_of(self.spec, parts, self._build)
        settings = self.spec.config.engine
        assert settings.journal is not None
        path = journal_path(settings.journal, self.spec.place.rank)
        writer = (RingWriter if settings.journal_ring else JournalWriter)(
            path, settings.journal_bytes, header
        )
        return RecordedCore(taped_parts(parts, recorder), recorder, writer)


def taped_parts(parts: EngineCoreParts, tape: Any) -> EngineCoreParts:
    """Return the parts of an engine core, with an executor and a timer that pass a tape."""
    calls = parts.step_parts.calls
    calls.use(taped_calls(parts.executor.collective_rpc, tape))
    return dataclasses.replace(
        parts,
        executor=TapedExecutor(parts.executor, tape),
        step_times=StepTimes(functools.partial(tape.time, time.perf_counter)),
    )


def header_of(spec: WorkerSpec, parts: EngineCoreParts, build: Build) -> JournalHeader:
    """Return the header of an engine's journal."""
    config = parts.config or spec.config
    windows = [group.window for group in parts.kv_cache.groups]
    return JournalHeader(
        build=build,
        manifest=spec.plugins.manifest,
        config=msgspec.to_builtins(config),
        model=model_fingerprint(spec.loader.context.files),
        engine_index=spec.place.rank,
        reports_cache=parts.kv_events.follow is not None,
        started=time.time(),
        clock=parts.scheduler.context.clock(),
        ring=spec.config.engine.journal_ring,
        windows=[] if windows == [None] else windows,
    )


def build_of(spec: WorkerSpec) -> Build:
    """Return the build that has to be the same for the same bits."""
    device = spec.device
    if device.type == "cpu":
        name = f"cpu {torch.backends.cpu.get_cpu_capability()}"
    else:
        name = torch.cuda.get_device_name(device)
    return Build(
        hardpoint=installed_version(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        machine=f"{platform.machine()} {sys.platform}",
        device=name,
        dtype=str(spec.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        operations=spec.config.ops.use,
        attention=spec.config.attention.use,
        ranks=spec.config.parallel.world_size,
    )


def gate_record(reason: WaitReason | None) -> Gate:
    """Return the record of a gate's answer."""
    if reason is None:
        return Gate()
    waiting_for = reason.waiting_for.value
    return Gate(waiting_for, reason.message, reason.needed, reason.available, reason.ahead)


def failure_record(error: BaseException) -> Failure:
    """Return the record of an error."""
    return Failure(type(error).__name__, describe(error)[:4000])
