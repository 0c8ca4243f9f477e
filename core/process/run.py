"""What an engine process does: build the engine core, serve it, and end."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from types import FrameType

import msgspec

from hardpoint.plugins import EngineConfig, Origins, PluginLoadError, PluginSet
from hardpoint.plugins.discovery import discover

from ..blame import blamed
from ..build_core import build_core
from ..engine_io import EngineIO
from ..engine_loop import EngineLoop, LoopOptions, LoopQueues
from ..incoming import RequestCheck
from ..outbox import Outbox
from ..prepare import prepare_worker
from ..wire import EngineAddresses, EngineCoreReadyResponse
from .child import ParentWatch
from .launch import Launch

__all__ = ["run_engine"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_ABANDONED_SECONDS = 4.0  # to end in order, after the parent has gone


def run_engine(launch: Launch, watch: ParentWatch) -> None:
    """Serve until told to end, by a signal or by the parent's death.

    Raises:
        HardpointError: the engine cannot be built; the parent raises it too.
    """
    logging.basicConfig(format="%(levelname)s engine: %(message)s")
    logging.getLogger("hardpoint").setLevel(launch.log_level)
    config = msgspec.convert(launch.config, EngineConfig)
    origins = Origins(launch.origins)
    plugins = PluginSet(launch.manifest)
    check_versions(plugins)
    spec = prepare_worker(config, plugins, origins, lambda _what, _done, _total: None)
    built = build_core(spec, plugins.hooks(), origins, time.monotonic)
    addresses = msgspec.json.decode(launch.address, type=EngineAddresses)
    queues = LoopQueues(output=Outbox(len(addresses.outputs)))
    settings = config.engine
    loop = EngineLoop(
        built.core,
        queues,
        LoopOptions(settings.drain_seconds, settings.watchdog_seconds, settings.watchdog_exits),
    )
    _handle_signals(loop)
    gone = threading.Event()

    def abandon() -> None:
        gone.set()
        loop.request_shutdown()
        loop.request_shutdown()  # at once: nobody is left to drain for

    watch.on_gone(abandon, grace_s=_ABANDONED_SECONDS)
    identity = launch.engine_index.to_bytes(2, "little")
    io = EngineIO(identity, addresses, queues, RequestCheck(spec.model_config.vocab_size))
    gc.collect()
    gc.freeze()  # what lives as long as the engine need not be looked at again
    io.start(EngineCoreReadyResponse(built.size.max_model_len, built.size.num_blocks))
    failed = True
    try:
        loop.run()
        failed = False
    except Exception as error:
        named = blamed(error, plugins)
        raise named from (error if named is not error else error.__cause__)
    finally:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)  # another one ends what hangs here
        io.close(failed=failed, heard=not gone.is_set())
        built.core.close()
        spec.loader.close()


def _handle_signals(loop: EngineLoop) -> None:
    """Have the loop end in order at the first signal, soon at the second; a third one kills."""
    seen = 0

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        if seen > 1:
            signal.signal(number, signal.SIG_DFL)
        loop.request_shutdown()

    for number in _SIGNALS:
        signal.signal(number, handle)


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
