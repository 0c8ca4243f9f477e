"""The synchronous engine: add requests, step, get outputs."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from hardpoint.core.engine.utility_calls import EngineUtilities
from hardpoint.errors import (
    EngineClosedError,
    EngineDeadError,
    EngineTimeoutError,
    PluginFaultError,
)
from hardpoint.host.boundary.errors import RefusedInCallError, attribute_error, engine_dead
from hardpoint.host.live.driver import next_of
from hardpoint.host.live.settings import ChangeRequest
from hardpoint.host.registry.blame import is_fault, raise_unless_fault
from hardpoint.host.system.engine_lock import EngineLock, locked
from hardpoint.plugins import (
    EngineCoreRequest,
    FinishReason,
    HardpointError,
    RequestError,
    SamplingParams,
    SchedulingPolicy,
    WaitReason,
)
from hardpoint.plugins.component.manifest import Manifest
from hardpoint.plugins.config_tables import Seconds
from hardpoint.plugins.requests import Prompt
from hardpoint.plugins.requests.stats import Health, StepFault
from hardpoint.typed import convert

from .engine_owner import EngineOwner
from .engine_parts import EngineParts
from .frontend import METRICS_TIMEOUT_S
from .outputs.request_state import AnyOutput
from .requests.input_processor import NO_EXTRAS, Params, RequestExtras
from .requests.submission import Submission

_log = logging.getLogger("hardpoint")

_CHANGE_PAUSE = frozenset({"pause", "resume", "sleep", "wake_up"})

Sent = Callable[[EngineCoreRequest], object]
CallRequest = tuple[str, Prompt | EngineCoreRequest, Params | None, RequestExtras]
"""The arguments of `LLMEngine.add_request`."""


class LLMEngine(EngineOwner):
    """Joins input processor, engine core and output processor.

    Threads are served in turn, a call or a step at a time; `step` returns the outputs of all
    requests, whichever thread added them. In a fork of the process, every call raises
    HardpointError, and `close` does nothing.

    Attributes:
        lock: held by each method; a caller may hold it for several calls.
        is_paused: whether no request gets tokens before the engine is resumed.
    """

    def __init__(self, parts: EngineParts) -> None:
        super().__init__(parts)
        self._client = parts.client
        self._fallbacks: dict[str, StepFault] = {}
        self._slow: dict[str, StepFault] = {}
        # An engine that is dropped releases what closing it does; at exit the system does.
        self._release = weakref.finalize(self, self._frontend.close, self._client.close)
        self._release.atexit = False
        self._closed = False
        self._dead: EngineDeadError | None = None
        self._policy_lock = threading.Lock()
        self.is_paused = False
        self.lock = EngineLock()
        self.lock.wait_at_exit(self._client.end_waiting)

    @locked
    def add_request(
        self,
        request_id: str,
        prompt: Prompt | EngineCoreRequest,
        params: Params | None = None,
        extras: RequestExtras = NO_EXTRAS,
    ) -> str:
        """Check a request and queue it.

        Args:
            request_id: outputs carry it. Several live requests may have one id; `abort_requests`
                then ends them all.
            prompt: or a prebuilt request, which has its own parameters.

        Returns:
            The request's unique id, for `abort_requests` and `why_waiting`.

        Raises:
            RequestError: the request is wrong; no other request is affected.
            OverloadedError: too many wait; of an engine's own process, with the first output.
            EngineClosedError: the engine was closed.
            EngineDeadError: the engine has ended, maybe because of this request; an
                EngineFaultError if a plugin is responsible.
            EngineTimeoutError: the engine's process takes no messages.
        """
        return self.add_requests([(request_id, prompt, params, extras)])[0]

    @locked
    def add_requests(
        self, requests: Iterable[CallRequest], name: str = "", sent: Sent = lambda _: None
    ) -> list[str]:
        """Check the requests of one call and queue them, in one message; or none of them.

        Args:
            requests: the arguments of `add_request` for each.
            name: name of the list of requests in messages, with the index of the refused one.
            sent: gets each one, as the first completion of its prompt.

        Returns:
            Their unique ids.

        Raises:
            As `add_request`. An engine's process that refuses one ends all; its output is first.
        """
        self.check_open()
        submissions: list[Submission] = []
        try:
            for request in requests:
                submissions.append(self._frontend.submitter.submit(*request))
        except BaseException as error:
            self._frontend.forget([submission.parent.internal_id for submission in submissions])
            raise _placed(error, name, len(submissions)) from error.__cause__
        ids = [submission.parent.internal_id for submission in submissions]
        try:
            self._send(submissions, name)
            for submission in submissions:
                sent(submission.children[0])
        except BaseException as error:
            self._forget(ids, FinishReason.ERROR)
            if _ends_engine(error):
                self._fail(error)
            raise
        return ids

    def _send(self, submissions: Sequence[Submission], name: str) -> None:
        children = [child for submission in submissions for child in submission.children]
        if len(children) == 1:
            self._client.add_request(children[0])
            return
        try:
            self._client.add_requests(children)
        except RefusedInCallError as refused:
            ends = itertools.accumulate(len(submission.children) for submission in submissions)
            place = next(place for place, end in enumerate(ends) if refused.index < end)
            raise _placed(refused.error, name, place) from refused.error.__cause__

    @locked
    def abort_requests(self, request_ids: str | Iterable[str]) -> None:
        """End requests, by the ids given to `add_request` or returned by it.

        They have no further outputs. Unknown ids are ignored.

        Raises:
            RequestError: one is no string; none ends.
        """
        self._forget(request_ids, FinishReason.ABORT)

    def has_unfinished_requests(self) -> bool:
        """Return whether any request is live."""
        return self._frontend.output.num_unfinished_requests() > 0

    def get_num_unfinished_requests(self) -> int:
        """Return the number of live requests, each completion of a prompt counted."""
        return self._frontend.output.num_unfinished_requests()

    @locked
    def step(self, timeout: float | None = None) -> list[AnyOutput]:
        """Run one step, or wait for the next outputs of an engine process; return them.

        It never waits for a paused engine. An error ends the engine, for faults of plugins that are
        contained raise none. An interrupt ends the live requests and leaves the engine usable; a
        timeout ends nothing.

        Args:
            timeout: seconds to wait for an engine in a process of its own. None has no limit;
                `engine.watchdog_exits` then ends an engine that hangs.

        Raises:
            RequestError: the timeout is no number of seconds.
            EngineClosedError: the engine was closed, before or during the step.
            EngineDeadError: the engine has ended; an EngineFaultError if a plugin is responsible.
            EngineTimeoutError: it gave no outputs in time.
        """
        self.check_open()
        if timeout is not None:
            timeout = convert(timeout, Seconds, path="timeout", error=RequestError)
        observers = self._frontend.observers
        if observers.exist:
            self._call_observers(observers.report_if_due)
        waits = self.has_unfinished_requests() and not self.is_paused
        deadlines = self._frontend.deadlines
        left = deadlines.seconds_left() if deadlines.is_used else None
        is_limited = left is not None and (timeout is None or left < timeout)
        try:
            outputs = self._client.get_output(wait=waits, timeout=left if is_limited else timeout)
            processed = []
            if outputs is not None:
                processed.append(self._frontend.process_outputs(outputs))
            if left is not None:
                processed.append(self._frontend.end_expired())
            if aborts := [request_id for batch in processed for request_id in batch.aborts]:
                self._client.abort_requests(aborts)
        except BaseException as error:
            if is_fault(error):
                self._fail(error)
            self._forget(self._frontend.output.live_ids(), FinishReason.ABORT)
            raise
        if outputs is None and not is_limited:
            during = self._client.activity.snapshot().during
            raise EngineTimeoutError(f"the engine gave no outputs within {timeout:g} s{during}")
        if observers.exist and outputs is not None and outputs.outputs:
            self._call_observers(observers.flush)
        return [output for batch in processed for output in batch.request_outputs]

    @property
    def ranks(self) -> Collection[int]:
        """The numbers of the engines."""
        return self._client.ranks

    @property
    def pids(self) -> Mapping[int, int]:
        """The process ids of the engines that serve in processes of their own, by rank."""
        return self._client.pids

    @locked
    def why_waiting(self, request_id: str) -> dict[int, WaitReason | None]:
        """Return why the completions of a request got no tokens in the last step, by index.

        None stands for completions that got some; finished completions are left out.

        Raises:
            RequestError: no live request has that id.
        """
        self.check_open()
        live = self._frontend.children_of(request_id)
        reasons = EngineUtilities.why_waiting.call(self.call_utility, list(live))
        return dict(zip(live.values(), reasons, strict=True))

    def change(self, request: ChangeRequest) -> Manifest:
        """Change plugins or settings while requests run: in all processes, or in none.

        Other threads add requests and run steps while it is prepared.

        Returns:
            The new generation of the manifest.

        Raises:
            BusyError: another change is under way.
            ConfigError, PluginError: the change is wrong, or cannot be made without a restart.
            HardpointError: a process failed, or took too long. Nothing has changed.
        """
        with contextlib.ExitStack() as stack:
            steps, change = stack.enter_context(self._changes.begin(request))
            answer: list[str] | BaseException | None = None
            while (action := next_of(steps, answer)) is not None:
                if action == "commit":  # no request is sent before the frontend has switched
                    stack.enter_context(self.lock)
                try:
                    if isinstance(action, float):
                        time.sleep(action)
                        continue
                    answer = EngineUtilities.live_change.call(
                        self.call_utility, action, change if action == "prepare" else None
                    )
                except BaseException as error:  # the steps raise it again, once all is undone
                    answer = error
        return change.manifest

    def set_policy(
        self, use: str | type[SchedulingPolicy], options: Mapping[str, Any] | None = None
    ) -> Manifest:
        """Replace the scheduling policy between two steps, as `change` does.

        Args:
            use: entry-point name, FQCN or class.
            options: options of the policy.

        Returns:
            The new generation of the manifest.

        Raises:
            ConfigError, PluginError: the policy cannot be built.
        """
        policy = {"use": use, "options": {} if options is None else options}
        with self._policy_lock:  # several follow one another
            return self.change(ChangeRequest.of("set_policy()", policy=policy))

    @locked
    def call_utility(self, method: str, *args: Any, rank: int | None = None) -> Any:
        """Call one of the engine's utilities, such as "pause" or "scheduler_stats", and wait.

        Args:
            method: one of `utility_calls.UTILITIES`, which declares its parameters and result.
            args: by position.
            rank: the engine to call; None is all of them.

        Raises:
            RequestError: no such utility, or wrong arguments.
            HardpointError: raised by the utility.
            EngineClosedError, EngineDeadError, EngineTimeoutError: it could not be called.
        """
        self.check_open()
        method = convert(method, str, path="method", error=RequestError)
        try:
            return self._client.call_utility(method, *args, rank=rank)
        finally:
            if method in _CHANGE_PAUSE:
                with contextlib.suppress(EngineDeadError):  # that was reported already
                    self.is_paused = EngineUtilities.is_paused.call(self._client.call_utility)

    def default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a request without any, as the model's files recommend."""
        return self._frontend.input.default_params()

    @locked
    def health(self) -> Health:
        """Return the faults of plugins, their effects, and the quarantined plugins."""
        if not self._closed:
            self._fallbacks = EngineUtilities.step_faults.call(self.call_utility)
            self._slow = EngineUtilities.slow_plugins.call(self.call_utility)
        return self._frontend.health(self._fallbacks, self._slow, self._client.num_restarts)

    @locked
    def metrics(self) -> str:
        """Return the exports of observers; nothing without any, or once closed.

        If an engine does not answer within a second, its last report is used.

        Raises:
            EngineFaultError: a component with faults of scope engine failed.
        """
        if self._closed or not self._frontend.observers.has_exports:
            return ""
        answer = None
        with contextlib.suppress(HardpointError):
            answer = EngineUtilities.plugin_report.call(self._ask_soon)
        try:
            return self._frontend.exposition(answer, self._client.num_restarts)
        except PluginFaultError as fault:
            self._fail(fault)

    def _ask_soon(self, method: str, *args: Any) -> Any:
        return self._client.call_utility(method, *args, timeout=METRICS_TIMEOUT_S)

    def close(self) -> None:
        """End the engine and free its memory; a thread that waits for outputs gets an error.

        Closing twice does nothing.
        """
        if not self.lock.owner.is_other and not self._closed:
            self._client.end_waiting()
            self._close()

    @locked
    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._frontend.output.drop(self._frontend.output.live_ids())
            self._release()

    def _call_observers(self, call: Callable[[], None]) -> None:
        try:
            call()
        except PluginFaultError as error:
            self._fail(error)

    def _forget(self, request_ids: str | Iterable[str], reason: FinishReason) -> None:
        if self._closed:  # closing ended them all
            return
        ids = self._frontend.forget(request_ids, reason)
        try:
            if ids:
                self._client.abort_requests(ids)
        except BaseException as error:
            if _ends_engine(error):
                self._fail(error)
            raise

    def _fail(self, error: BaseException) -> NoReturn:
        """End the engine; raise the error as an engine in a process of its own would.

        If another thread or a method called by the step closes the engine, that is the error.
        """
        if self._dead is not None:  # another thread has met the error
            raise engine_dead(self._dead)
        if self._closed or isinstance(error, EngineClosedError):
            raise EngineClosedError("the engine was closed during the call")
        in_step = self._client.activity.snapshot().in_step
        reported = self._frontend.named(attribute_error(error, self.parts.plugins), in_step)
        self._dead = reported
        self._end()
        raise reported from reported.__cause__

    def _end(self) -> None:
        try:
            self._frontend.drop_all()
            self.close()
        except BaseException as further:
            raise_unless_fault(further)
            _log.exception("closing the engine after an error failed as well")

    def check_open(self) -> None:
        """Check that the engine is open.

        Raises:
            EngineClosedError: it was closed.
            EngineDeadError: it has ended.
        """
        if self._dead is not None:  # each call reports it, not the first one alone
            raise engine_dead(self._dead)
        if self._closed:
            raise EngineClosedError("the engine is closed")


def _placed(error: BaseException, name: str, index: int) -> BaseException:
    """Return an error of a request as one of its place in a call; of a list without a name as is.

    So it is returned too if it is none of the request.
    """
    if not name or not isinstance(error, RequestError):
        return error
    return type(error)(f"{name}[{index}]: {error}")


def _ends_engine(error: BaseException) -> bool:
    if isinstance(error, PluginFaultError):
        return not isinstance(error, EngineDeadError)
    return not isinstance(error, HardpointError) and is_fault(error)
