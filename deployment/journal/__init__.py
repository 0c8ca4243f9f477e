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
from hardpoint.plugins.config.engine import ParallelConfig
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
    if (why := _why_none(config.parallel)) is not None:
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


def _why_none(parallel: ParallelConfig) -> str | None:
    """Return why engines cannot record; None if they can."""
    if parallel.spreads_experts:
        return "share experts (parallel.expert)"
    if parallel.ray is not None:
        return "run on Ray (parallel.ray)"
    if parallel.join_address is not None:
        return "join from elsewhere (parallel.join_address)"
    return None


def inputs_of(config: EngineConfig) -> OpenInputs | None:
    """Return the opener of the inputs of an engine in this process; None without a journal."""
    if config.engine.journal is None:
        return None
    from .recording import RecordedInputs  # noqa: PLC0415 - needs torch

    return RecordedInputs
