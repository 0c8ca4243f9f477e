"""A fleet of engines on a virtual clock, behind one balancer."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hardpoint.configuration.loading import config_from
from hardpoint.host.boundary.faults import StepFaults
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins import ConfigError, EngineConfig, EngineCoreOutputs, StepCost

from .client import SimulatedClient
from .engine import EngineSettings, SimulatedEngine
from .measures import Measures
from .reports import DecisionTimes, FleetReport, Objective
from .step_costs import CostFile
from .timeline import Timeline
from .workload import SimulatedRequest


class Fleet:
    """Engines (`parallel.data`) and their client, which run a trace on a virtual clock.

    Balancer, schedulers, policies, KV cache managers, eviction policies, prefix index and reports
    are the real ones, built from a configuration; only devices are replaced, by the cost of their
    steps. Messages take no time. An engine without work costs none either.

    Attributes:
        clock: the virtual clock, in seconds since the start of the trace.
        engines: those that have not died, by rank.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | EngineConfig | str | Path,
        *,
        step_cost: StepCost | CostFile,
        objective: Objective | None = None,
        is_fixed: bool = False,
    ) -> None:
        """Build the engines.

        Args:
            config: configuration of each engine, as `LLM` takes it: a mapping, or a TOML file.
                `parallel.data` is their number, `kv_cache.num_blocks` the size of each cache.
            step_cost: the time of a step, by what it computes; a file of `hardpoint calibrate`, as
                `read_cost` returns it, has it for a model on a machine.
            objective: the service level objective of the report; None is the default one.
            is_fixed: whether no engine is added later, so that of one alone it need not be known
                what it has cached.

        Raises:
            ConfigError: a setting cannot be simulated; names it.
            PluginError: a component cannot be built.
        """
        config, sources = config_from(config, caller="Fleet")
        _check_cost(step_cost)
        self.clock = Timeline()
        self.engines: dict[int, SimulatedEngine] = {}
        self._plugins = resolve_plugins(config, sources)
        self._measures = Measures(objective or Objective())
        self._faults = StepFaults.under(config.plugins)
        self._first_tokens: dict[str, int] = {}
        self._client = SimulatedClient(
            config,
            self._plugins,
            self.clock,
            self._measures,
            has_choice=not is_fixed or config.parallel.data > 1,
        )
        self._settings = EngineSettings(
            config=config,
            plugins=self._plugins,
            step_cost=step_cost,
            faults=self._faults,
            first_token=self._first_tokens.__getitem__,
            reports_cache=self._client.reports_cache,
        )
        self._settings.check()
        self._ranks = itertools.count()
        self._started: list[SimulatedEngine] = []  # dead ones as well
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for _ in range(config.parallel.data):
                self.add_engine()
            undo.pop_all()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add_engine(self) -> int:
        """Start a further engine, which serves at once with an empty cache; return its rank."""
        engine = SimulatedEngine(next(self._ranks), self._settings, self.clock, self._receive)
        self.engines[engine.rank] = engine
        self._started.append(engine)
        self._client.add(engine)
        return engine.rank

    def lose_engine(self, rank: int) -> None:
        """End an engine; its requests go on at others, with the tokens that they have.

        Raises:
            KeyError: no engine has that rank.
        """
        engine = self.engines.pop(rank)
        engine.lose()
        self._client.remove(engine)

    def at(self, seconds: float, action: Callable[[], object]) -> None:
        """Plan an action for a time of the trace, such as `lambda: fleet.lose_engine(3)`."""
        self.clock.at(seconds, action)

    def run(self, requests: Iterable[SimulatedRequest]) -> FleetReport:
        """Run requests until all have ended; return the measures so far.

        Args:
            requests: in the order of their times, which are seconds on the clock.

        Raises:
            ValueError: a request comes before the one before it.
        """
        for _ in self.steps(requests):
            pass
        return self.report()

    def steps(self, requests: Iterable[SimulatedRequest]) -> Iterator[None]:
        """Do the same as `run` in pieces: yield after each request, and at the end.

        Raises:
            ValueError: a request comes before the one before it.
        """
        clock = self.clock
        for request in requests:
            if request.at < clock():
                raise ValueError(
                    f"at: expected the requests in the order of their times, got {request.at:g} "
                    f"after {clock():g}"
                )
            while clock.next_time < request.at:
                clock.step()
            clock.move_to(request.at)
            self._send(request)
            yield
        while clock.next_time < math.inf:
            clock.step()
        yield

    def _send(self, request: SimulatedRequest) -> None:
        request_id = f"r{self._measures.requests}"
        source = request.for_engine(request_id)
        self._first_tokens[request_id] = request.output.id + 1
        self._measures.sent(request_id, request, len(source.prompt_token_ids), self.clock())
        self._client.send(source)

    def _receive(self, engine: SimulatedEngine, outputs: EngineCoreOutputs) -> None:
        self._client.receive(engine, outputs)
        for output in outputs.outputs:
            if output.finish_reason is not None:
                self._first_tokens.pop(output.request_id, None)

    def decision_times(self) -> DecisionTimes:
        """Return the real time of the balancer's decisions."""
        return self._measures.decision_times()

    def report(self) -> FleetReport:
        """Return the measures so far."""
        measures, engines, ended = self._measures, self._started, self._measures.ended
        tokens = [engine.device.num_tokens for engine in engines]
        seconds = measures.last_output
        faults = {**self._faults.report(), **self._client.faults()}
        return FleetReport(
            balancer=self._plugins.one("balancers").name,
            engines=self._settings.config.parallel.data,
            requests=measures.requests,
            finished=measures.finished,
            refused=measures.refused,
            unfinished=measures.requests - measures.finished - measures.refused,
            refusals=measures.refusals,
            moved=measures.num_moves,
            virtual_seconds=seconds,
            steps=sum(engine.device.num_steps for engine in engines),
            preemptions=sum(engine.stats().num_preemptions for engine in engines),
            prompt_tokens=measures.prompt_tokens,
            output_tokens=measures.output_tokens,
            computed_tokens=sum(tokens),
            reuse=measures.cached_tokens / max(measures.prompt_tokens, 1),
            **ended.times(),
            tenants=ended.by_tenant(),
            conversations=ended.conversations(),
            objective=measures.objective,
            goodput=measures.num_good / seconds if seconds else 0.0,
            goodput_share=measures.num_good / max(measures.requests, 1),
            imbalance=max(tokens) * len(tokens) / max(sum(tokens), 1) if tokens else 0.0,
            load_variation=measures.load_variation(self.clock()),
            faults={name: fault.count for name, fault in faults.items()},
        )

    def curves(self) -> dict[str, list[float]]:
        """Return the curves of the times so far, see `Ended.curves`."""
        return self._measures.ended.curves()

    def close(self) -> None:
        """Close all components."""
        self._client.close()
        for engine in self._started:
            engine.close()


def _check_cost(cost: StepCost | CostFile) -> None:
    """Refuse costs with which steps take no time: no request would wait for anything."""
    if isinstance(cost, CostFile):
        return  # which was checked when it was read
    if not cost.is_trained:
        raise ConfigError("step_cost.is_trained: expected true, because times are taken from it")
    if cost.step <= 0:
        raise ConfigError(f"step_cost.step: expected milliseconds > 0, got {cost.step:g}")
