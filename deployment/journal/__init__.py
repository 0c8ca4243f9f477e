"""Journals of engines: record all that comes from outside (`engine.journal`), and play it back.

A subclass of the record/replay hook of the engine core, `core.engine.core`. Nothing of
this layer is imported by an engine without a journal.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins import ConfigError, EngineConfig
from hardpoint.plugins.config import ConfigSources
from hardpoint.process.build import OpenRemoteClient
from hardpoint.process.client.base import RemoteClient
from hardpoint.process.client.process_client import EngineStart, Sink
from hardpoint.process.engine_process import EngineProcess

if TYPE_CHECKING:
    from hardpoint.core.engine.core import OpenInputs

__all__ = ["inputs_of", "with_journal"]

_INPUTS = "hardpoint.journal.recording:RecordedInputs"


def with_journal(
    open_client: OpenRemoteClient, config: EngineConfig, config_sources: ConfigSources
) -> OpenRemoteClient:
    """Return the opener of a client with recording engines, if the configuration has a journal.

    Raises:
        ConfigError: the engines cannot record.
    """
    if config.engine.journal is None:
        return open_client
    parallel = config.parallel
    if parallel.spreads_experts or parallel.join_address is not None:
        why = "share experts (parallel.expert)"
        if not parallel.spreads_experts:
            why = "join from elsewhere (parallel.join_address)"
        raise ConfigError(
            config_sources.locate(
                f"engine.journal: expected none, because engines that {why} follow more than the "
                f"inputs of each, got {config.engine.journal!r}"
            )
        )

    def opened(
        start: EngineStart, sink: Sink | None, process: EngineProcess | None, plugins: PluginSet
    ) -> RemoteClient:
        return open_client(dataclasses.replace(start, inputs=_INPUTS), sink, process, plugins)

    return opened


def inputs_of(config: EngineConfig) -> OpenInputs | None:
    """Return the opener of the inputs of an engine in this process; None without a journal."""
    if config.engine.journal is None:
        return None
    from .recording import RecordedInputs  # noqa: PLC0415 - needs torch

    return RecordedInputs
