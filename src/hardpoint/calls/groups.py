"""The engine of an LLM, and the groups of members of LLM and AsyncLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.host.registry.discovery import InstalledPlugin
from hardpoint.plugins import EngineConfig
from hardpoint.plugins.config import ConfigSources
from hardpoint.progress import ProgressDisplay

from .adapter_resolvers import AdapterResolvers
from .adapters import AdapterGroup, AsyncAdapterGroup
from .debug import AsyncDebugGroup, DebugGroup
from .engines import AsyncEngineGroup, EngineGroup, builder_of
from .io_processors import open_io_processors
from .model import AsyncModelGroup, ModelGroup
from .plugins import AsyncPluginGroup, PluginGroup
from .running import AsyncRequests, SyncRequests
from .weights import AsyncWeightUpdateGroup, WeightFiles, WeightUpdateGroup

if TYPE_CHECKING:
    from hardpoint.process.async_engine import AsyncEngine

__all__ = ["COMPANIONS", "AsyncGroups", "SyncGroups", "async_groups", "open_engine", "sync_groups"]

COMPANIONS = (AdapterResolvers, open_io_processors)
"""Open the plugins of the groups, with an engine."""


@dataclass(frozen=True)
class SyncGroups:
    """The groups of an LLM."""

    adapters: AdapterGroup
    engines: EngineGroup
    weights: WeightUpdateGroup
    plugins: PluginGroup
    debug: DebugGroup
    model: ModelGroup


@dataclass(frozen=True)
class AsyncGroups:
    """The groups of an AsyncLLM."""

    adapters: AsyncAdapterGroup
    engines: AsyncEngineGroup
    weights: AsyncWeightUpdateGroup
    plugins: AsyncPluginGroup
    debug: AsyncDebugGroup
    model: AsyncModelGroup


def open_engine(
    config: EngineConfig,
    config_sources: ConfigSources,
    passed_plugins: Sequence[InstalledPlugin],
    *,
    draws: bool,
) -> LLMEngine:
    """Load the model of an LLM.

    Args:
        passed_plugins: plugins that the program gives.
        draws: whether progress is shown.
    """
    config, build = builder_of(config, config_sources)
    with ProgressDisplay(draws) as display:
        return build(
            config,
            config_sources,
            progress=display.report,
            handed=passed_plugins,
            companions=COMPANIONS,
        )


def sync_groups(engine: LLMEngine, files: WeightFiles) -> tuple[SyncRequests, SyncGroups]:
    """Return the object that runs the requests of an LLM, and the groups.

    Args:
        files: the files that weight updates write; the caller removes them.
    """
    adapters = AdapterGroup(engine)
    requests = SyncRequests(engine, adapters)
    return requests, SyncGroups(
        adapters,
        EngineGroup(engine),
        WeightUpdateGroup(engine, files),
        PluginGroup(engine, requests),
        DebugGroup(engine, requests),
        ModelGroup(engine, requests),
    )


def async_groups(engine: AsyncEngine, files: WeightFiles) -> tuple[AsyncRequests, AsyncGroups]:
    """Return the request runner of an AsyncLLM, and the groups, as `sync_groups` does."""
    adapters = AsyncAdapterGroup(engine)
    requests = AsyncRequests(engine, adapters)
    return requests, AsyncGroups(
        adapters,
        AsyncEngineGroup(engine, engine.change),
        AsyncWeightUpdateGroup(engine, files),
        AsyncPluginGroup(engine, requests, engine.change),
        AsyncDebugGroup(engine, requests),
        AsyncModelGroup(engine, requests),
    )
