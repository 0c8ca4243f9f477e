"""Builds engines in processes of their own, for programs that wait and for event loops."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hardpoint.core.build import (
    OpenCompanion,
    PreparedEngine,
    SendStats,
    prepare_engine,
)
from hardpoint.core.client.base import EngineCoreClient
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.core.kv_cache import CacheSize
from hardpoint.host.registry.discovery import InstalledPlugin
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.host.system.descriptors import check_descriptors
from hardpoint.plugins import EngineConfig
from hardpoint.plugins.component.base import Progress, no_progress
from hardpoint.plugins.config import ConfigSources
from hardpoint.process.child_processes.launch import Interpreter

from .async_engine import AsyncEngine
from .client.base import RemoteClient
from .client.event_loop import EventLoopBridge
from .client.process_client import EngineStart, ProcessClient, Sink
from .engine_process import EngineProcess
from .start_budget import StartBudget

_log = logging.getLogger("hardpoint")

_MARGIN_S = 60.0
"""Time that a process waits longer for its launch, so that the program reports its own delay."""

OpenRemoteClient = Callable[
    [EngineStart, Sink | None, EngineProcess | None, PluginSet], RemoteClient
]
"""Opens a client with what its engine is started with, what gets its outputs, its process, which
waits for the launch (None if it has none yet), and the plugins.
"""


def open_process_client(
    start: EngineStart, sink: Sink | None, process: EngineProcess | None, plugins: PluginSet
) -> RemoteClient:
    """Return the client of one engine, which is not restarted."""
    del plugins
    return ProcessClient(start, sink, process)


def build_process_engine(
    config: EngineConfig,
    config_sources: ConfigSources | None = None,
    *,
    progress: Progress = no_progress,
    clock: Callable[[], float] = time.monotonic,
    handed: Sequence[InstalledPlugin] = (),
    companions: Sequence[OpenCompanion] = (),
    open_client: OpenRemoteClient = open_process_client,
) -> LLMEngine:
    """Build an engine in a process of its own, or several, for a program that waits.

    Args:
        config, config_sources, progress, clock, handed, companions: as of `prepare_engine`.
        open_client: opens the client of the engine, or of several.

    Raises:
        ConfigError, PluginError, ModelError, EngineDeadError: as `prepare_engine` and
            `PreparedEngine.open`.
    """
    with _interpreter(config, is_needed=config.parallel.num_local > 0) as started:
        prepared = prepare_engine(
            config,
            config_sources or ConfigSources(),
            progress=progress,
            clock=clock,
            handed=handed,
            companions=companions,
        )
        return prepared.open(functools.partial(started.open, open_client, None), LLMEngine)


def build_async_engine(
    config: EngineConfig,
    config_sources: ConfigSources | None = None,
    *,
    progress: Progress = no_progress,
    handed: Sequence[InstalledPlugin] = (),
    companions: Sequence[OpenCompanion] = (),
    open_client: OpenRemoteClient = open_process_client,
    starts_engine: bool = True,
    send_stats: SendStats | None = None,
) -> AsyncEngine:
    """Build an engine in a process of its own, or several, for an event loop.

    Args:
        config, config_sources, progress, handed, companions, open_client: as of
            `build_process_engine`.
        starts_engine: whether a process is started; the client of another one has its own.
        send_stats: as of `prepare_engine`.

    Raises:
        ConfigError, PluginError, ModelError, EngineDeadError: as `prepare_engine` and
            `PreparedEngine.open`.
    """
    bridge = EventLoopBridge()
    with _interpreter(config, is_needed=starts_engine) as started:
        prepared = prepare_engine(
            config,
            config_sources or ConfigSources(),
            progress=progress,
            handed=handed,
            companions=companions,
            send_stats=send_stats,
        )
        return prepared.open(
            functools.partial(started.open, open_client, bridge),
            functools.partial(AsyncEngine, bridge=bridge),
        )


@dataclass(frozen=True)
class _Started:
    """A process that waits for the launch of an engine.

    Attributes:
        process: None if the client needs none of this host.
        interpreter: its Python, which others of the same program run too.
        budget: the time until it is launched; None without a process.
    """

    process: EngineProcess | None
    interpreter: Interpreter
    budget: StartBudget | None = None

    def open(
        self, open_client: OpenRemoteClient, sink: Sink | None, prepared: PreparedEngine
    ) -> tuple[EngineCoreClient, CacheSize]:
        if self.budget is not None:
            self.budget.check()
            self.budget.cancel()
        spec = prepared.spec
        start = EngineStart(
            config=spec.config,
            config_sources=prepared.config_sources,
            manifest=spec.plugins.manifest,
            log_level=logging.getLevelName(_log.getEffectiveLevel()),
            interpreter=self.interpreter,
            vocab_size=spec.model_config.vocab_size,
            vocabulary=prepared.vocabulary,
        )
        client = open_client(start, sink, self.process, spec.plugins)
        return client, CacheSize(client.ready.num_gpu_blocks, client.ready.max_model_len)


@contextlib.contextmanager
def _interpreter(config: EngineConfig, *, is_needed: bool) -> Iterator[_Started]:
    """Start Python for an engine, before this process imports torch, which takes a second."""
    interpreter = Interpreter.current()
    if not is_needed:
        yield _Started(None, interpreter)
        return
    check_descriptors()
    limit_s = config.engine.start_timeout_seconds
    process = EngineProcess.spawn(interpreter, launch_seconds=limit_s + _MARGIN_S)
    budget = StartBudget(limit_s)
    try:
        yield _Started(process, interpreter, budget)
    except BaseException:
        process.close(grace_s=0)
        raise
    finally:
        budget.cancel()
