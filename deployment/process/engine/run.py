"""The engine process: build the engine core, serve its clients, shut down."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pkgutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from time import sleep  # its own: plugins may replace that of the module
from types import FrameType

import msgspec

from hardpoint.core.engine.build import BuiltCore, build_core
from hardpoint.core.engine.core import EngineInputs, OpenInputs
from hardpoint.core.engine.prepare import prepare_worker
from hardpoint.core.engine.request_check import RequestCheck
from hardpoint.core.engine.worker_launch import check_versions
from hardpoint.core.weights.worker_spec import EnginePlace, WorkerSpec
from hardpoint.host.boundary.activity import Activity
from hardpoint.host.boundary.copies import watch_forks
from hardpoint.host.boundary.errors import attribute_error, naming_plugin
from hardpoint.host.boundary.parts.bound_half import request_fields
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.host.system.control_groups import read_control
from hardpoint.host.system.threads import CPUS
from hardpoint.plugins import EngineConfig
from hardpoint.plugins.component.base import no_progress
from hardpoint.plugins.config import ConfigSources
from hardpoint.process.cache_changes import CacheChangeLog
from hardpoint.process.child_processes.child import ParentWatch
from hardpoint.process.child_processes.launch import decode_launch
from hardpoint.process.child_processes.naming import log_to_stderr, name_process
from hardpoint.process.launch import Launch
from hardpoint.process.protocol import EngineAddresses, EngineCoreReadyResponse
from hardpoint.process.worker_process import LaunchedWorker

from .garbage import settle_heap
from .loop import EngineLoop, LoopOptions, LoopQueues
from .sender import ClientSendQueues
from .transport import EngineIO

_log = logging.getLogger("hardpoint")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def handle_signals(loop: EngineLoop) -> None:
    """Drain the loop at the first signal, stop it at the second; a third one kills the process.

    Call in the main thread, which runs the loop.
    """
    # Python runs handlers in the main thread between two instructions. A signal that comes just
    # before that thread waits for input, or in another thread, does not end the waiting. So
    # Python's own C code writes a byte for each signal, and a second thread wakes up the loop.
    count = 0

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            _reset_signals()
        loop.request_shutdown()

    receiver, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    threading.Thread(
        target=_wake_up, args=(loop, receiver, wakeup), name="EngineSignals", daemon=True
    ).start()
    signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    _let_signals_end_copies()
    for number in _SIGNALS:
        signal.signal(number, handle)


def _reset_signals() -> None:
    """Restore the default handlers: the signals end the process at once."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _let_signals_end_copies() -> None:
    """Let the signals end copies that a plugin makes by `os.fork`, and not wake up the loop."""
    held = threading.local()

    def hold() -> None:
        # Python drops a signal that a copy gets before it is set up.
        held.before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, held.before)

    def end() -> None:
        signal.set_wakeup_fd(-1)
        _reset_signals()
        release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=end)


def _wake_up(loop: EngineLoop, receiver: socket.socket, _wakeup: socket.socket) -> None:
    while receiver.recv(64):
        loop.wake_up()


def engine_name(index: int) -> str:
    """Return the process name of an engine: EngineCore for the first one of a program."""
    return f"EngineCore_DP{index}" if index else "EngineCore"


def log_as(index: int, level: str) -> None:
    """Write the log to stderr; each line begins with the engine's index and process id.

    Args:
        index: index of the engine.
        level: level of the logger "hardpoint".
    """
    log_to_stderr(f"EngineCore {index}", level)


_BEAT_INTERVAL_S = 0.25


def _beat(activity: Activity) -> None:
    while True:
        activity.beat()
        sleep(_BEAT_INTERVAL_S)


def _use_own_cores(index: int, num_engines: int) -> None:
    """Pin this process, and its children, to its part of the CPUs.

    Whole cores are divided, those of a NUMA node next to each other. If there are fewer cores than
    engines, several engines have the same core.

    Args:
        index: number of this process's engine.
        num_engines: engines among which the CPUs of this process are divided.
    """
    try:
        usable = os.sched_getaffinity(0)
    except AttributeError:  # another system than Linux
        return
    cores: dict[tuple[str, str], set[int]] = {}
    for number in sorted(usable):
        folder = CPUS / f"cpu{number}"
        node = min((link.name for link in folder.glob("node*")), key=len, default="")
        siblings = read_control(folder / "topology" / "thread_siblings_list")
        cores.setdefault((node, siblings or f"{number}"), set()).add(number)
    by_node = [cores[key] for key in sorted(cores, key=lambda key: (len(key[0]), key[0]))]
    count = len(by_node)
    place = index % num_engines  # of one that was added later
    if count >= num_engines:
        part = by_node[place * count // num_engines : (place + 1) * count // num_engines]
    else:
        part = [by_node[index % count]]
    os.sched_setaffinity(0, frozenset().union(*part))


_EXECUTORS_WATCH_S = 5.0  # for an executor of several ranks to find and end those that hang
_ORPHAN_GRACE_S = 4.0  # to shut down in order, after the parent has ended


def run_engine(data: bytes, watch: ParentWatch, inputs: OpenInputs = EngineInputs) -> None:
    """Serve until a signal, or the end of the parent.

    Args:
        data: a Launch.
        watch: watch of the parent.
        inputs: as `open_inputs` of `build_core`, unless the launch names it.

    Raises:
        HardpointError: the engine cannot be built; the parent raises it too.
    """
    launch = decode_launch(data, Launch)
    watch_forks()
    name_process(engine_name(launch.engine_index))
    log_as(launch.engine_index, launch.log_level)
    config = msgspec.convert(launch.config, EngineConfig)
    config_sources = ConfigSources(launch.config_sources)
    if config.parallel.num_local > 1 and config.executor.threads == "auto":
        _use_own_cores(launch.local_rank, config.parallel.num_local)
    plugins = PluginSet(launch.manifest)
    check_versions(plugins, "the engine process")
    with contextlib.ExitStack() as closing:  # all are closed, even if one raises
        with naming_plugin(plugins):
            place = EnginePlace(
                launch.engine_index, launch.num_sharing, launch.local_rank, launch.engines
            )
            spec = prepare_worker(config, plugins, config_sources, no_progress, place)
        closing.callback(spec.loader.close)
        spec = dataclasses.replace(spec, start_worker=LaunchedWorker)
        changes = CacheChangeLog() if launch.reports_cache else None
        activity = Activity.open(Path(launch.folder)) if launch.folder else None
        with naming_plugin(plugins):
            built = build_core(
                spec,
                plugins.hooks(),
                config_sources,
                time.monotonic,
                activity,
                launch.vocabulary,
                None if changes is None else changes.add,
                pkgutil.resolve_name(launch.inputs) if launch.inputs else inputs,
            )
        closing.callback(built.core.close)
        _serve(launch, watch, spec, built, changes, closing)


def _serve(
    launch: Launch,
    watch: ParentWatch,
    spec: WorkerSpec,
    built: BuiltCore,
    changes: CacheChangeLog | None,
    closing: contextlib.ExitStack,
) -> None:
    addresses = msgspec.json.decode(launch.address, type=EngineAddresses)
    queues = LoopQueues(output=ClientSendQueues(len(addresses.outputs)))
    settings = spec.config.engine
    loop = EngineLoop(
        built.core,
        queues,
        LoopOptions(
            settings.drain_seconds,
            settings.watchdog_seconds,
            settings.watchdog_exits,
            _EXECUTORS_WATCH_S if spec.config.parallel.world_size > 1 else 0.0,
            reports_load=launch.reports_load,
            cache_changes=changes,
        ),
    )
    closing.callback(_reset_signals)
    handle_signals(loop)
    is_orphan = threading.Event()

    def stop() -> None:
        is_orphan.set()
        loop.request_shutdown()
        loop.request_shutdown()  # twice: there is no client left to drain for

    watch.on_gone(stop, grace_s=_ORPHAN_GRACE_S)
    identity = launch.engine_index.to_bytes(2, "little")
    used = request_fields(spec.plugins, spec.config)
    vocab_size, states = spec.model_config.vocab_size, spec.plugins.keeping_states()
    check = RequestCheck(vocab_size, launch.engine_index, used, states)
    io = EngineIO(identity, addresses, queues, check, hash_prompt=built.core.hash_prompt)
    settle_heap(spec.config.engine.long_collection_seconds)
    activity = built.core.activity
    threading.Thread(target=_beat, args=(activity,), name="EngineBeat", daemon=True).start()
    io.start(_ready(spec, built))
    try:
        loop.run()
    except BaseException as error:
        _log.critical("the engine failed", exc_info=error)
        watch.report(attribute_error(error, spec.plugins))  # before anything that may hang
        _end(io, failed=True, has_clients=not is_orphan.is_set())
        sys.exit(1)
    _log.info("the engine exits, as requested")
    _end(io, failed=False, has_clients=not is_orphan.is_set())


def _ready(spec: WorkerSpec, built: BuiltCore) -> EngineCoreReadyResponse:
    return EngineCoreReadyResponse(
        manifest_hash=spec.plugins.manifest.hash,
        max_model_len=built.size.max_model_len,
        num_gpu_blocks=built.size.num_blocks,
    )


def _end(io: EngineIO, *, failed: bool, has_clients: bool) -> None:
    _reset_signals()  # so that a signal ends the process if this hangs
    io.close(failed=failed, has_clients=has_clients)
