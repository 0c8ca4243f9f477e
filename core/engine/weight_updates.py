"""Weights that change while the engine serves: prepared in all workers, used between two steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hardpoint.core.weights.updated_weights import UpdatedWeights
from hardpoint.host.boundary.errors import error_of
from hardpoint.host.boundary.parts.engine_halves import EngineHalves
from hardpoint.host.boundary.step_check import live_request
from hardpoint.plugins import (
    EngineConfig,
    EngineCoreOutputs,
    Executor,
    HardpointError,
    RequestError,
    Scheduler,
    WeightLoader,
)
from hardpoint.plugins.config_tables import LoadConfig
from hardpoint.plugins.requests.resumed import ResumedOutputs, WeightRun


@dataclass
class _Live:
    """The versions of a live request's tokens.

    Attributes:
        runs: see `EngineCoreOutput.weight_runs`.
        num_preemptions: those that it had when it kept its keys and values; None if it did not.
        is_reported: whether its client has the runs.
    """

    runs: list[WeightRun]
    num_preemptions: int | None = None
    is_reported: bool = True


class WeightUpdates:
    """Replaces the weights of the model, and knows the version of each token.

    Attributes:
        version: version of the weights.
    """

    def __init__(
        self,
        config: EngineConfig,
        loader: WeightLoader,
        executor: Executor,
        scheduler: Scheduler,
        step_parts: EngineHalves,
    ) -> None:
        """Begin with the weights of the configuration.

        Args:
            config: configuration of the engine.
            loader: loader of the weights.
            executor: has the workers.
            scheduler: has the requests.
            step_parts: are notified of other weights.
        """
        self._base = loader.base if isinstance(loader, UpdatedWeights) else loader
        self._executor, self._scheduler = executor, scheduler
        self._step_parts = step_parts
        self._prepared: tuple[tuple[str, ...], str] | None = None
        self._tells = config.load != LoadConfig(use=config.load.use)
        self._live: dict[str, _Live] = {}
        self.version = config.load.version

    def prepare(self, updates: Sequence[str], version: str, *, recompute: bool) -> None:
        """Begin to read other weights, in all workers; the arguments are those of `use`, too.

        Raises:
            RequestError: kept keys and values would get into stores.
        """
        if not recompute and self._step_parts.moves_blocks is not None:
            raise RequestError(
                "recompute: expected true: a kv_connector would store keys and values of earlier "
                "weights among those of the new ones"
            )
        self.drop()
        self._prepared = tuple(updates), version
        self._executor.collective_rpc("prepare_weights", self._prepared)

    def are_prepared(self) -> bool:
        """Return whether all workers have read them; if one cannot, all forget them.

        Raises:
            HardpointError: none are being prepared, or the first one of the workers.
        """
        if self._prepared is None:
            raise HardpointError("no weights are prepared: prepare_weights() comes first")
        states = self._executor.collective_rpc("weights_prepared")
        for _, kind, text in states:
            if kind is not None:
                self.drop()
                raise error_of(kind, text)
        return all(is_read for is_read, _, _ in states)

    def drop(self) -> None:
        """Forget what was prepared."""
        if self._prepared is not None:
            self._prepared = None
            self._executor.collective_rpc("drop_weights")

    def use(self, *, recompute: bool) -> None:
        """Use what was prepared, in all workers; no step is under way.

        Args:
            recompute: whether requests that have begun compute their keys and values again.
        """
        assert self._prepared is not None, "prepare() comes first"
        (updates, version), self._prepared = self._prepared, None
        parts = self._step_parts
        if parts.moves_blocks is not None:
            parts.blocks.weights_load(UpdatedWeights(self._base, updates))
        self._scheduler.reset_prefix_cache(recompute_running=recompute)
        self._executor.collective_rpc("use_weights")
        parts.weights_changed()
        parts.blocks.restart()
        self._note(version, kept=not recompute)
        self._tells, self.version = True, version

    def _note(self, version: str, *, kept: bool) -> None:
        before, self._live = self._live, {}
        for request in self._scheduler.live_requests():
            count = len(request.output_token_ids)
            live = before.get(request.request_id) or _Live(
                [WeightRun(0, self.version, self.version)]
            )
            is_old = kept and request.num_computed_tokens > 0
            oldest = live.runs[-1].kv_version if is_old else version
            live.runs = [run for run in live.runs if run.start < count]
            live.runs.append(WeightRun(count, version, oldest))
            live.num_preemptions = request.num_preemptions if is_old else None
            live.is_reported = False
            self._live[request.request_id] = live

    def resumed(self, request_id: str, resumed: ResumedOutputs) -> None:
        """Note the versions of a new request's tokens that another engine has sampled."""
        if not self._tells:
            return
        count = len(resumed.output_token_ids)
        runs = [run for run in resumed.weight_runs or () if run.start < count]
        if not runs or (runs[-1].version, runs[-1].kv_version) != (self.version, self.version):
            runs.append(WeightRun(count, self.version, self.version))
        self._live[request_id] = _Live(runs, is_reported=False)

    def mark(self, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        """Add the versions of tokens to outputs whose client does not have them yet."""
        if not self._tells:
            return
        for output in (output for message in outputs.values() for output in message.outputs):
            live = self._live.get(output.request_id)
            if live is None:
                live = _Live([WeightRun(0, self.version, self.version)], is_reported=False)
                self._live[output.request_id] = live
            elif live.num_preemptions is not None:
                self._follow(live, output.request_id, len(output.new_token_ids))
            if not live.is_reported:
                output.weight_runs, live.is_reported = list(live.runs), True
            if output.finished:
                del self._live[output.request_id]

    def _follow(self, live: _Live, request_id: str, num_new: int) -> None:
        request = live_request(self._scheduler, request_id)
        if request is None or request.num_preemptions == live.num_preemptions:
            return
        start = len(request.output_token_ids) - num_new
        live.runs.append(WeightRun(start, self.version, self.version))
        live.num_preemptions, live.is_reported = None, False

    @property
    def shown_version(self) -> str | None:
        """The version of the weights; None while they are those of the model's files."""
        return self.version if self._tells else None

    def forget(self, request_ids: Iterable[str] | None) -> None:
        """Forget requests that were ended by others; None is all of them."""
        if request_ids is None:
            self._live.clear()
        elif self._live:
            for request_id in request_ids:
                self._live.pop(request_id, None)
