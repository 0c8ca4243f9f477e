"""What an engine process does: build the engine core, serve it, and end."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import threading
import time

import msgspec

from hardpoint.core.blame import blamed
from hardpoint.core.engine.build import BuiltCore, build_core
from hardpoint.core.engine.prepare import prepare_worker
from hardpoint.core.engine.request_check import RequestCheck
from hardpoint.core.wire import EngineAddresses, EngineCoreReadyResponse
from hardpoint.core.worker.worker import WorkerSpec
from hardpoint.plugins import EngineConfig, Origins, PluginLoadError, PluginSet
from hardpoint.registry.discovery import discover

from .child import ParentWatch
from .labels import engine_name, log_as, name_process
from .launch import Launch
from .loop import EngineLoop, LoopOptions, LoopQueues
from .sender import Outbox
from .signals import handle_signals, restore_signals
from .transport import EngineIO

__all__ = ["run_engine"]

_log = logging.getLogger("hardpoint")

_ABANDONED_SECONDS = 4.0  # to end in order, after the parent has gone


def run_engine(launch: Launch, watch: ParentWatch) -> None:
    """Serve until told to end, by a signal or by the parent's death.

    Raises:
        HardpointError: the engine cannot be built; the parent raises it too.
    """
    name_process(engine_name(launch.engine_index))
    log_as(launch.engine_index, launch.log_level)
    config = msgspec.convert(launch.config, EngineConfig)
    origins = Origins(launch.origins)
    plugins = PluginSet(launch.manifest)
    check_versions(plugins)
    with contextlib.ExitStack() as closing:  # each is closed, whatever another one raises
        spec = prepare_worker(config, plugins, origins, lambda _what, _done, _total: None)
        closing.callback(spec.loader.close)
        built = build_core(spec, plugins.hooks(), origins, time.monotonic)
        closing.callback(built.core.close)
        _serve(launch, watch, spec, built, closing)


def _serve(
    launch: Launch,
    watch: ParentWatch,
    spec: WorkerSpec,
    built: BuiltCore,
    closing: contextlib.ExitStack,
) -> None:
    """Be there for clients. What is opened is closed with `closing`, clients are told then."""
    addresses = msgspec.json.decode(launch.address, type=EngineAddresses)
    queues = LoopQueues(output=Outbox(len(addresses.outputs)))
    settings = spec.config.engine
    loop = EngineLoop(
        built.core,
        queues,
        LoopOptions(settings.drain_seconds, settings.watchdog_seconds, settings.watchdog_exits),
    )
    closing.callback(restore_signals)
    handle_signals(loop)
    gone = threading.Event()

    def abandon() -> None:
        gone.set()
        loop.request_shutdown()
        loop.request_shutdown()  # at once: nobody is left to drain for

    watch.on_gone(abandon, grace_s=_ABANDONED_SECONDS)
    identity = launch.engine_index.to_bytes(2, "little")
    check = RequestCheck(spec.model_config.vocab_size, launch.engine_index)
    io = EngineIO(identity, addresses, queues, check, hash_prompt=built.core.hash_prompt)
    gc.collect()
    gc.freeze()  # what lives as long as the engine need not be looked at again
    io.start(_ready(spec, built))
    try:
        loop.run()
    except BaseException as error:
        _log.critical("the engine failed", exc_info=error)
        named = blamed(error, spec.plugins) if isinstance(error, Exception) else error
        watch.report(named)  # before anything that may hang
        _end(io, failed=True, heard=not gone.is_set())
        sys.exit(1)
    _log.info("the engine exits, as it was told to")
    _end(io, failed=False, heard=not gone.is_set())


def _ready(spec: WorkerSpec, built: BuiltCore) -> EngineCoreReadyResponse:
    return EngineCoreReadyResponse(
        manifest_hash=spec.plugins.manifest.hash,
        max_model_len=built.size.max_model_len,
        num_gpu_blocks=built.size.num_blocks,
    )


def _end(io: EngineIO, *, failed: bool, heard: bool) -> None:
    """Tell clients what is left to tell; from now on, a signal ends what hangs here."""
    restore_signals()
    io.close(failed=failed, heard=heard)


def check_versions(plugins: PluginSet) -> None:
    """Refuse plugins that are other versions here than in the process that resolved them.

    Raises:
        PluginLoadError: naming the plugin, both versions and this process.
    """
    here = {found.distribution: found.version for found in discover()}
    for entry in plugins.manifest.entries:
        version = here.get(entry.distribution)
        if version is not None and version != entry.version:
            raise PluginLoadError(
                f"{entry.source}: version {entry.version} was found where the engine was asked "
                f"for, version {version} is installed in the engine process (pid {os.getpid()})"
            )
