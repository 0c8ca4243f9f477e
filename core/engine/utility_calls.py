"""The table of control calls, each declared once, and how an engine core runs them by name."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from hardpoint import typed
from hardpoint.host.boundary.parts.states import joined_states
from hardpoint.host.live.change import Action, LiveChange
from hardpoint.host.live.engine import EngineChanges
from hardpoint.host.registry.blame import describe
from hardpoint.host.system.control_calls import (
    AsyncCaller,
    SyncCaller,
    convert_arguments,
    utilities_of,
    utility,
)
from hardpoint.host.system.encoding import WireError
from hardpoint.plugins import Executor, HardpointError, RequestError, SchedulerStats, WaitReason
from hardpoint.plugins.executor import Worker
from hardpoint.plugins.requests.stats import Health, PluginMeter, PluginReport, StepFault
from hardpoint.plugins.scheduling.step_record import LiveRequest

from .pause import PauseController, PauseMode
from .step import EngineCoreParts

if TYPE_CHECKING:
    PauseModeName = PauseMode | Literal["abort", "wait", "keep"]
else:
    PauseModeName = PauseMode  # names are converted to it

_log = logging.getLogger("hardpoint")

T = TypeVar("T")

WORKER_METHODS = frozenset({"plugin_meters", "start_profile", "stop_profile"})
"""Methods of Worker that `collective_rpc` may call: those that leave the engine's state alone."""


class UtilityHost(Protocol):
    """The parts of an engine core that control calls use."""

    _parts: EngineCoreParts
    _pause: PauseController
    _changes: EngineChanges


class ControlCalls:
    """The control calls that programs make: EngineCore runs them, LLM and AsyncLLM send them."""

    @utility(has_timeout=False)
    def pause(
        self: UtilityHost, mode: PauseModeName = "abort", *, clear_cache: bool = True
    ) -> Future[None]:
        """Stop generating until `resume`; return once no step is under way.

        New requests wait until `resume`. An engine that was restarted is not paused.

        Args:
            mode: what happens to requests in flight, such as those of an open stream: "abort" ends
                them, "keep" lets them continue after `resume`, and "wait" lets those that are
                running finish first. "wait" needs an engine in a process of its own.
            clear_cache: clear the prefix cache once the engine is paused; kept requests are then
                recomputed, with the same result.

        Raises:
            RequestError: an unknown mode, or a mode that this engine does not support.
        """
        return self._pause.pause(mode, clear_cache=clear_cache)

    @utility()
    def resume(self: UtilityHost) -> None:
        """Continue after a pause.

        Raises:
            HardpointError: the engine is asleep.
        """
        self._pause.resume()

    @utility()
    def is_paused(self: UtilityHost) -> bool:
        """Return whether the engine is paused until `resume`."""
        return self._pause.is_paused_by_user

    @utility(has_timeout=False)
    def sleep(self: UtilityHost, level: int = 1, mode: PauseModeName = "abort") -> Future[None]:
        """Pause, then release memory until `wake_up`.

        Args:
            level: 0 only pauses and keeps the caches; 1 releases the KV cache and moves the weights
                to CPU memory; 2 releases both, and `wake_up` loads the weights again.
            mode: as for `pause`.

        Raises:
            RequestError: an unknown level or mode.
            HardpointError: the engine is already asleep.
        """
        return self._pause.sleep(level, mode)

    @utility(has_timeout=False)
    def wake_up(self: UtilityHost, tags: Sequence[str] | None = None) -> None:
        """Reallocate memory that `sleep` released; resume once all of it is allocated.

        Args:
            tags: any of "weights", "kv_cache" and "scheduling"; None is all of them.

        Raises:
            RequestError: an unknown tag.
            HardpointError: scheduling was requested while some memory would remain released.
        """
        self._pause.wake_up(tags)

    @utility()
    def is_sleeping(self: UtilityHost) -> bool:
        """Return whether the engine is asleep."""
        return self._pause.is_sleeping

    @utility()
    def reset_prefix_cache(self: UtilityHost, *, recompute_running: bool = False) -> None:
        """Clear the prefix cache.

        Args:
            recompute_running: also recompute running requests, for example after weights changed.
        """
        scheduler = self._parts.scheduler
        scheduler.reset_prefix_cache(recompute_running=recompute_running)
        if count := scheduler.num_unfinished_requests():
            _log.warning("the prefix cache was reset; unfinished requests: %d", count)

    @utility()
    def reset_encoder_cache(self: UtilityHost) -> None:
        """Clear the embeddings of images and the like: they are made again where they are needed.

        Raises:
            HardpointError: the engine has no encoder cache.
        """
        parts = self._parts.step_parts
        if parts.encoder_cache is None:
            raise HardpointError("there is no encoder cache: no worker encodes images or sounds")
        parts.weights_changed()

    @utility(has_timeout=False)
    def collective_rpc(
        self: UtilityHost, method: str, timeout: float | None = None, args: Sequence[Any] = ()
    ) -> list[Any]:
        """Call a method of every worker; return the results in rank order.

        Args:
            method: a method of `Worker` that leaves the engine's state alone.
            timeout: seconds; None is no limit.
            args: by position.

        Raises:
            RequestError: the method may not be called, or its arguments are wrong.
            HardpointError: a worker failed, or took too long.
        """
        return _call_workers(self._parts.executor, method, args, timeout)

    @utility(has_timeout=False)
    def call_part(
        self: UtilityHost, part: str, method: str, arguments: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a step part that answers calls; return its answer, plain data.

        Args:
            part: name of the part.
            method: name of the call.
            arguments: by name, plain data.

        Raises:
            RequestError: there is no such part or method, or its arguments are wrong.
            HardpointError: the part failed.
        """
        return self._parts.step_parts.calls.to_part(part, method, arguments or {})

    @utility()
    def start_profile(self: UtilityHost) -> None:
        """Start profiling the workers; the profiles go to `engine.profile_dir`."""
        self._parts.executor.collective_rpc("start_profile")

    @utility(has_timeout=False)
    def stop_profile(self: UtilityHost) -> list[str]:
        """Stop profiling; return the files that the workers' profiles were written to."""
        return self._parts.executor.collective_rpc("stop_profile")

    @utility()
    def plugin_meters(self: UtilityHost) -> dict[str, PluginMeter]:
        """Return the cost of each logits processor, by name: steps, rows, seconds, faults."""
        return _merged(self._parts.executor.collective_rpc("plugin_meters"))

    @utility()
    def plugin_states(self: UtilityHost) -> dict[str, dict[str, Any]]:
        """Return the states of components that have one, by name; see `Component.dump_state`."""
        of_workers = _merged(self._parts.executor.collective_rpc("plugin_states"))
        return joined_states(self._parts.states(), of_workers)

    @utility()
    def scheduler_stats(self: UtilityHost) -> SchedulerStats:
        """Return how many requests run and wait, and the state of the KV cache."""
        return self._parts.scheduler_stats()

    @utility()
    def live_requests(
        self: UtilityHost, external_ids: Sequence[str] | None = None
    ) -> list[LiveRequest]:
        """Return live completions in order of arrival, with their progress and why they wait.

        Args:
            external_ids: ids of the requests, as the user knows them; None is all.
        """
        scheduler = self._parts.scheduler
        now = scheduler.context.clock()
        live = scheduler.live_requests()
        if external_ids is not None:
            chosen = set(external_ids)
            live = [request for request in live if request.source.external_req_id in chosen]
        return [
            LiveRequest(
                request_id=request.request_id,
                external_id=request.source.external_req_id or request.request_id,
                index=request.source.child_index,
                status=request.status.value,
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=request.num_computed_tokens,
                num_output_tokens=len(request.output_token_ids),
                priority=request.priority,
                age_seconds=max(now - request.arrival_time, 0.0),
                tags=dict(request.tags),
                waits_for=scheduler.why_waiting(request.request_id),
                num_cached_tokens=max(request.num_cached_tokens, 0),
            )
            for request in sorted(live, key=lambda request: request.arrival_time)
        ]


class EngineUtilities(ControlCalls):
    """All control calls of an engine core: for programs, and for frontends only."""

    @utility()
    def supported_tasks(self: UtilityHost) -> list[str]:
        """Return the tasks of the model: generating, and the tasks of step parts."""
        model_tasks = ["generate"] if self._parts.generates else []
        return [*model_tasks, *self._parts.step_parts.tasks]

    @utility()
    def why_waiting(self: UtilityHost, request_ids: list[str]) -> list[WaitReason | None]:
        """Return per live request why it got no tokens in the last step; None if it got some."""
        return [self._parts.scheduler.why_waiting(request_id) for request_id in request_ids]

    @utility()
    def live_change(
        self: UtilityHost, action: Action, change: LiveChange | None = None
    ) -> list[str]:
        """Do something about a change of plugins and settings, see `EngineChanges.run`."""
        return self._changes.run(action, change)

    @utility()
    def step_faults(self: UtilityHost) -> dict[str, StepFault]:
        """Return the decisions that plugins failed to take, by plugin name."""
        return self._parts.faults.report()

    @utility()
    def slow_plugins(self: UtilityHost) -> dict[str, StepFault]:
        """Return the steps in which plugins took too long, by plugin name."""
        return _slow_plugins(self._parts, self._parts.executor.collective_rpc("plugin_meters"))

    @utility()
    def plugin_report(self: UtilityHost) -> PluginReport:
        """Return the engine's report for sinks; of `health`, the engine's own entries."""
        parts = self._parts
        meters: list[dict[str, PluginMeter]] = parts.executor.collective_rpc("plugin_meters")
        return PluginReport(
            meters=_merged(meters),
            health=Health({}, {}, parts.faults.report(), _slow_plugins(parts, meters)),
            scheduler=parts.scheduler_stats(),
            sleep_level=self._pause.sleep_level,
        )


class SyncControlCalls(ControlCalls, SyncCaller):
    """The control calls of a program that waits for them."""


class AsyncControlCalls(ControlCalls, AsyncCaller):
    """The control calls of a program that runs an event loop."""


UTILITIES = utilities_of(EngineUtilities)
"""All control calls by name; nothing else can be called."""


def run_utility(core: EngineUtilities, method: str, arguments: Sequence[Any]) -> Any:
    """Run a utility by name; return its result, which may be a future.

    Raises:
        RequestError: there is no such utility, or the arguments do not fit its declaration.
        Exception: raised by the utility.
    """
    known = UTILITIES if method in UTILITIES else utilities_of(type(core))
    _check_name(method, known)
    return known[method].run_on(core, arguments)


def failure_of(method: str, error: BaseException) -> HardpointError:
    """Return the error that the caller gets: one of Hardpoint's tree as it is, others wrapped.

    A call that cannot be decoded is a wrong request.
    """
    if isinstance(error, HardpointError) and not isinstance(error, WireError):
        return error
    kind = RequestError if isinstance(error, WireError) else HardpointError
    wrapped = kind(f"Call to {method} method failed: {describe(error)}")
    wrapped.__cause__ = error
    return wrapped


def _merged(of_workers: Sequence[Mapping[str, T]]) -> dict[str, T]:
    return {name: value for by_name in of_workers for name, value in by_name.items()}


def _slow_plugins(
    parts: EngineCoreParts, meters_of_workers: Sequence[Mapping[str, PluginMeter]]
) -> dict[str, StepFault]:
    slow = parts.faults.slow()
    for meters in meters_of_workers:
        for name, meter in meters.items():
            if meter.slow_steps:
                slow[name] = StepFault(
                    meter.slow_steps,
                    f"plugin {name!r}: its methods took up to {meter.slowest_step:.3g} s in "
                    f"one step, more than plugins.slow_seconds",
                )
    return slow


def _call_workers(
    executor: Executor, method: str, arguments: Sequence[Any], timeout: float | None
) -> list[Any]:
    """Call a method of every worker by name; return the results in rank order."""
    _check_name(method, WORKER_METHODS)
    arguments = convert_arguments(getattr(Worker, method), arguments, RequestError)
    if timeout is None:
        return executor.collective_rpc(method, arguments)
    if not timeout > 0:
        raise RequestError(f"timeout: expected a number > 0, got {timeout:g}")
    return executor.collective_rpc(method, arguments, timeout)


def _check_name(method: str, callable_names: Collection[str]) -> None:
    if method not in callable_names:
        known = sorted(callable_names)
        raise RequestError(
            f"method: expected one of {', '.join(known)}, got {method!r}"
            f"{typed.suggest(method, known)}"
        )
