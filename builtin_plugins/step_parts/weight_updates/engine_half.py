"""The engine's half of weight updates: all workers take new weights between two steps."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from hardpoint import typed
from hardpoint.errors import HardpointError, RequestError
from hardpoint.plugins import (
    EngineConfig,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineHalf,
    Request,
    SchedulerStats,
    WeightLoader,
)
from hardpoint.plugins.requests import WeightRun
from hardpoint.plugins.step_part import EngineHalfContext
from hardpoint.toolkit.updated_weights import UpdatedWeights

from .messages import (
    AskWeights,
    Call,
    DropArguments,
    DropWeights,
    PollArguments,
    PrepareArguments,
    ReadWeights,
    UseArguments,
    UseWeights,
)

if TYPE_CHECKING:
    from hardpoint.plugins.requests.resumed import ResumedOutputs
    from hardpoint.plugins.step_part.engine import StepBorder

_GIVEN_UP = "the update of the weights was given up"


@dataclass
class _TokenVersions:
    """The versions of a live request's tokens.

    Attributes:
        runs: see `EngineCoreOutput.weight_runs`.
        stale: the request, if it has keys and values of earlier weights; else None.
        num_preemptions: number of preemptions then.
        is_reported: whether its client has the runs.
    """

    runs: list[WeightRun]
    stale: Request | None = None
    num_preemptions: int = 0
    is_reported: bool = True


class VersionedRequests(EngineHalf):
    """Replaces the weights of the model, and knows the version of each token.

    It is active once the weights have a version, which is then in outputs and statistics.
    """

    def __init__(self, name: str, config: EngineConfig, context: EngineHalfContext) -> None:
        self._name, self._parallel = name, config.parallel
        self._call_workers, self._border = context.call_workers, context.border
        self._version = config.load.version
        self._prepared: PrepareArguments | None = None
        self._loader: WeightLoader | None = None  # of the prepared weights, for KV keys
        self._live: dict[str, _TokenVersions] = {}
        self.is_active = config.load != type(config.load)(use=config.load.use)
        self._methods: Mapping[str, tuple[type, Callable[[Any], Any]]] = {
            "prepare": (PrepareArguments, self._prepare),
            "poll": (PollArguments, self._poll),
            "use": (UseArguments, self._use),
            "drop": (DropArguments, self._drop),
        }

    # Calls of programs

    def call(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """Answer a call of `LLM.weights.update`.

        Raises:
            RequestError: there is no such method, or arguments are wrong.
            HardpointError: the engine sleeps or is about to, or workers cannot read the weights.
        """
        if method not in self._methods:
            known = ", ".join(self._methods)
            raise RequestError(f"method: expected one of {known}, got {method!r}")
        arguments_type, answer = self._methods[method]
        return answer(typed.convert(dict(arguments), arguments_type, path="", error=RequestError))

    @property
    def _between(self) -> StepBorder:
        if self._border is None:
            raise HardpointError("the weights of this engine cannot be replaced")
        return self._border

    def _prepare(self, update: PrepareArguments) -> bool:
        """Begin to read weights in all workers; an update that waits is given up.

        Raises:
            RequestError: a field is wrong, or kept keys and values would get into stores.
            HardpointError: the engine sleeps, or shares experts with others.
        """
        if self._parallel.spreads_experts:
            raise HardpointError(
                "update_weights: the weights of engines that share experts (parallel.expert) "
                "cannot be replaced, since a step with the new ones would be tried by each alone"
            )
        border = self._between
        border.check(update.mode)
        border.give_up(self._name, _GIVEN_UP)
        if not update.recompute and border.moves_blocks is not None:
            raise RequestError(
                "recompute: expected true: a kv_connector would mix keys and values of earlier "
                "and of new weights"
            )
        self._forget_prepared()
        if border.moves_blocks is not None:  # before workers read the files, which may change
            self._loader = self._loader_of(update)
        self._prepared = update
        self._send(ReadWeights(update.ticket, update.updates))
        return True

    def _poll(self, update: PollArguments) -> bool | None:
        """Return True once all workers have read the weights, None before.

        Raises:
            HardpointError: one cannot, or no weights are prepared; all workers have forgotten them.
        """
        return True if self._is_read(update.ticket) else None

    def _is_read(self, ticket: int) -> bool:
        if self._prepared is None or self._prepared.ticket != ticket:
            raise HardpointError("no weights are prepared: prepare() comes first")
        try:
            answers = self._send(AskWeights(ticket))
        except HardpointError:
            self._forget_prepared()
            raise
        return all(msgspec.msgpack.decode(answer, type=bool) for answer in answers)

    def _use(self, update: UseArguments) -> Future[bool]:
        """Let all workers use the prepared weights, once no step is under way.

        Raises:
            RequestError: an unknown mode, or a mode that this engine cannot do.
            HardpointError: the weights are not read, or the engine sleeps.
        """
        if not self._is_read(update.ticket):
            raise HardpointError("the weights are still being prepared")
        border = self._between
        border.check(update.mode)
        border.give_up(self._name, _GIVEN_UP)
        change = functools.partial(self._change, recompute=update.recompute)
        return border.run(self._name, update.mode, change)

    def _change(self, *, recompute: bool) -> bool:
        prepared, self._prepared = self._prepared, None
        assert prepared is not None, "prepare() comes first"
        border = self._between
        of_prepare, self._loader = self._loader, None

        def loader() -> WeightLoader:
            return of_prepare or self._loader_of(prepared)

        use = functools.partial(self._send, UseWeights(prepared.ticket))
        border.change_weights(use, loader, recompute=recompute)
        self._note(prepared.version, keeps_cache=not recompute)
        self.is_active, self._version = True, prepared.version
        return True

    def _loader_of(self, update: PrepareArguments) -> WeightLoader:
        base = self._between.loader
        base = base.base if isinstance(base, UpdatedWeights) else base
        return UpdatedWeights(base, update.updates)

    def _drop(self, arguments: DropArguments) -> bool:  # noqa: ARG002
        """Forget the prepared weights; a waiting `use` fails."""
        self._between.give_up(self._name, _GIVEN_UP)
        self._forget_prepared()
        return True

    def _forget_prepared(self) -> None:
        prepared, self._prepared, self._loader = self._prepared, None, None
        if prepared is not None:
            with contextlib.suppress(HardpointError):  # workers without a model have none prepared
                self._send(DropWeights(prepared.ticket))

    def _send(self, call: Call) -> Sequence[bytes]:
        return self._call_workers(msgspec.msgpack.encode(call))

    # Versions of tokens

    def _note(self, version: str, *, keeps_cache: bool) -> None:
        before, self._live = self._live, {}
        for request in self._between.live_requests():
            count = len(request.output_token_ids)
            live = before.get(request.request_id) or _TokenVersions(
                [WeightRun(0, self._version, self._version)]
            )
            is_old = keeps_cache and request.num_computed_tokens > 0
            oldest = live.runs[-1].kv_version if is_old else version
            live.runs = [run for run in live.runs if run.start < count]
            live.runs.append(WeightRun(count, version, oldest))
            live.stale, live.num_preemptions = request if is_old else None, request.num_preemptions
            live.is_reported = False
            self._live[request.request_id] = live

    def check(self, request: EngineCoreRequest) -> None:
        """Note the versions of a request's tokens that another engine has sampled."""
        self._live.pop(request.request_id, None)
        if request.resumed is not None:
            self._live[request.request_id] = self._resumed(request.resumed)

    def _resumed(self, resumed: ResumedOutputs) -> _TokenVersions:
        count = len(resumed.output_token_ids)
        runs = [run for run in resumed.weight_runs or () if run.start < count]
        versions = self._version, self._version
        if not runs or (runs[-1].version, runs[-1].kv_version) != versions:
            runs.append(WeightRun(count, *versions))
        return _TokenVersions(runs, is_reported=False)

    def refused(self, request_id: str) -> None:
        """Forget a request."""
        self._live.pop(request_id, None)

    def ended(self, request_id: str) -> None:
        """Forget a request."""
        self._live.pop(request_id, None)

    def publish(self, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        """Add the versions of tokens to outputs with a client that does not have them yet."""
        for output in (output for message in outputs.values() for output in message.outputs):
            live = self._live.get(output.request_id)
            if live is None:
                live = _TokenVersions(
                    [WeightRun(0, self._version, self._version)], is_reported=False
                )
                self._live[output.request_id] = live
            elif live.stale is not None:
                self._follow(live, live.stale, len(output.new_token_ids))
            if not live.is_reported:
                output.weight_runs, live.is_reported = list(live.runs), True
            if output.finished:
                del self._live[output.request_id]

    def _follow(self, live: _TokenVersions, request: Request, num_new: int) -> None:
        if request.num_preemptions == live.num_preemptions:
            return
        start = len(request.output_token_ids) - num_new
        live.runs.append(WeightRun(start, self._version, self._version))
        live.stale, live.is_reported = None, False

    def add_stats(self, stats: SchedulerStats) -> None:
        """Add the version of the weights, unless they come from the model's files."""
        if self.is_active:
            stats.weight_version = self._version
