"""Opens the client of several engines."""

from __future__ import annotations

import contextlib
import dataclasses

from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.process.client.process_client import EngineStart, Sink
from hardpoint.process.engine_process import EngineProcess

from .choice import EngineChoice
from .group import ReplicaSet
from .hosts import EngineHosts, LocalHosts
from .restarts import RestartBudget
from .waves.group import WaveGroup, check_waves
from .waves.replicas import WaveHosts


def open_engines(
    start: EngineStart, sink: Sink | None, process: EngineProcess | None, plugins: PluginSet
) -> ReplicaSet:
    """Return a client of `parallel.data` engines, which restarts dead ones (`engine.restart`).

    Args:
        start: parameters of the first engine.
        sink: see ReplicaSet.
        process: process of the first local engine, which waits for its launch.
        plugins: has the balancer.

    Raises:
        ConfigError: experts are to be spread over the engines, and a setting does not allow it.
        PluginError: the balancer cannot be built.
        ConfigError: engines cannot join at `parallel.join_address`, or there is no Ray cluster that
            has room for them (`parallel.ray`).
        HardpointError: an engine cannot be started.
    """
    settings = start.config.engine
    budget = RestartBudget(
        enabled=settings.restart == "on_failure", max_per_minute=settings.max_restarts_per_minute
    )
    shares_experts = start.config.parallel.spreads_experts
    if shares_experts:
        check_waves(start.config, start.config_sources)
    with contextlib.ExitStack() as undo:
        hosts: EngineHosts = WaveHosts(process) if shares_experts else LocalHosts(process)
        if start.config.parallel.ray is not None:
            from .on_ray.hosts import RayHosts  # noqa: PLC0415 - most programs have no Ray

            hosts = RayHosts(start.config, hosts)
        elif start.config.parallel.join_address is not None:
            from .remote.joined_hosts import JoinedHosts  # noqa: PLC0415 - most programs have none

            hosts = JoinedHosts(start.config, hosts)
        undo.callback(hosts.close)
        choice = EngineChoice(plugins, start.config)
        undo.pop_all()
    start = dataclasses.replace(start, reports_load=True, reports_cache=choice.uses_cached_prefixes)
    if shares_experts:
        return WaveGroup(start, choice, budget, hosts, sink=sink)
    return ReplicaSet(start, choice, budget, hosts, sink=sink)
