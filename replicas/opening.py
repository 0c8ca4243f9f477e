"""Opens the client of several engines."""

from __future__ import annotations

import dataclasses

from hardpoint.core.client.process_client import EngineStart, Sink
from hardpoint.core.engine_process.process import EngineProcess
from hardpoint.registry.plugin_set import PluginSet

from .choice import EngineChoice
from .group import EngineGroup
from .restarts import RestartBudget
from .waves.group import WaveGroup, check_waves


def open_engines(
    start: EngineStart, sink: Sink | None, process: EngineProcess, plugins: PluginSet
) -> EngineGroup:
    """Return a client of `parallel.data` engines, which restarts dead ones (`engine.restart`).

    Args:
        start: parameters of the first engine.
        sink: see EngineGroup.
        process: process of the first engine, which waits for its launch.
        plugins: has the balancer.

    Raises:
        ConfigError: experts are to be spread over the engines, and a setting does not allow it.
        PluginError: the balancer cannot be built.
        HardpointError: an engine cannot be started.
    """
    settings = start.config.engine
    budget = RestartBudget(
        enabled=settings.restart == "on_failure", max_per_minute=settings.max_restarts_per_minute
    )
    if start.config.parallel.spreads_experts:
        check_waves(start.config, start.config_sources)
    choice = EngineChoice(plugins, start.config)
    start = dataclasses.replace(start, reports_load=True, reports_cache=choice.uses_cached_prefixes)
    group_type = WaveGroup if start.config.parallel.spreads_experts else EngineGroup
    return group_type(start, choice, budget, sink=sink, process=process)
