"""Launches of workers, and the workers that are made of them, in any thread, process or machine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import logging
import operator
import os
import shutil
import socket
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import msgspec
import torch

from hardpoint.core.weights.worker_spec import EnginePlace, WorkerSpec
from hardpoint.core.worker.worker import LocalWorker
from hardpoint.errors import PluginLoadError
from hardpoint.host.boundary.activity import Activity
from hardpoint.host.boundary.copies import watch_forks
from hardpoint.host.boundary.errors import naming_plugin
from hardpoint.host.registry.discovery import discover, installed_version
from hardpoint.host.registry.kinds import KINDS, Process
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.host.system.plugin_settings import StepSettings
from hardpoint.host.system.process.child import ParentWatch
from hardpoint.host.system.process.launch import ChildLaunch, decode_launch, main_objects
from hardpoint.host.system.process.naming import log_to_stderr, name_process
from hardpoint.host.system.process.process import ChildProcess, socket_pair
from hardpoint.plugins import ConfigError, EngineConfig, HardpointError
from hardpoint.plugins.component.base import Progress, no_progress
from hardpoint.plugins.component.manifest import Manifest, PluginEntry
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.executor import Worker, WorkerLaunch
from hardpoint.plugins.parallel import Placement
from hardpoint.typed import prepared

from .prepare import num_batches, prepare_worker

_log = logging.getLogger("hardpoint")

_recorded: list[Activity] = []
"""In a worker's process, what it shares with the process that started it."""

_FACTORY = "hardpoint.core.engine.worker_launch:build_worker"


class _Data(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration and the plugins that a worker is made of.

    Attributes:
        manifest: the plugins.
        config: an EngineConfig as plain data.
        config_sources: by dotted path, where configuration values came from.
        placement: placement of all ranks.
        num_draft_tokens, place: as in WorkerSpec.
    """

    manifest: Manifest
    config: dict[str, Any]
    config_sources: dict[str, str]
    placement: Placement
    num_draft_tokens: int
    place: EnginePlace


class _Versioned(msgspec.Struct, frozen=True, kw_only=True):
    """The data of a launch, and what must be the same where it is opened.

    Attributes:
        hardpoint, torch: versions, where the engine is.
        manifest_hash: hash of the plugins there.
        data: a _Data.
    """

    hardpoint: str
    torch: str
    manifest_hash: str
    data: bytes


class _ProcessLaunch(ChildLaunch, frozen=True, kw_only=True):
    """The launch of a worker's process.

    Attributes:
        launch: the WorkerLaunch, encoded.
        run: the executor's function that the process runs.
        descriptors: the first is that of the channel, the second that of the activity; the others
            are for the function.
        log_level: level of the logger "hardpoint".
    """

    launch: bytes
    run: str
    descriptors: tuple[int, ...]
    log_level: str


class WorkerLauncher:
    """Makes the launches of an engine's workers, and the processes for them."""

    def __init__(self, spec: WorkerSpec, config_sources: ConfigSources, activity: Activity) -> None:
        self._spec = spec
        self._config_sources = config_sources
        self._worker_activity = activity
        if num_batches(spec.config) > 1:  # then the worker and the engine run at the same time
            self._worker_activity = activity.of_worker_thread()
        self._folder = ""
        self._remove: Callable[[], object] = lambda: None
        self._lock = threading.Lock()

    def launch(self, rank: int, placement: Placement | None = None) -> WorkerLaunch:
        """Return the launch of a rank; see `ExecutorContext.launch`.

        Raises:
            ValueError: there is no such rank.
        """
        spec, world_size = self._spec, self._spec.config.parallel.world_size
        if not 0 <= rank < world_size:
            raise ValueError(f"rank: expected 0 to {world_size - 1}, got {rank}")
        data = _Data(
            manifest=spec.plugins.manifest,
            config=msgspec.to_builtins(spec.config),
            config_sources=self._config_sources.by_path,
            placement=placement or self._on_this_host(),
            num_draft_tokens=spec.num_draft_tokens,
            place=spec.place,
        )
        versioned = _Versioned(
            hardpoint=installed_version(),
            torch=str(torch.__version__),
            manifest_hash=spec.plugins.manifest.hash,
            data=msgspec.msgpack.encode(data),
        )
        prepared = (spec, self._worker_activity) if world_size == 1 else None
        return WorkerLaunch(_FACTORY, rank, world_size, msgspec.msgpack.encode(versioned), prepared)

    def start_process(
        self, launch: WorkerLaunch, run: str, pass_fds: Sequence[int] = ()
    ) -> LaunchedWorker:
        """Start a process; see `ExecutorContext.start_process`."""
        return LaunchedWorker(launch, run, pass_fds, self._spec.plugins.manifest, self._folder)

    def close(self) -> None:
        """Remove what the workers needed to find each other."""
        self._remove()
        self._folder = ""

    def _on_this_host(self) -> Placement:
        world_size = self._spec.config.parallel.world_size
        with self._lock:  # launches may be made in the threads that use them
            if world_size > 1 and not self._folder:
                self._folder = tempfile.mkdtemp(prefix="hardpoint-ranks-")
                # Also if the executor asks for launches after the start.
                self._remove = weakref.finalize(self, shutil.rmtree, self._folder, True)
        return Placement(hosts=("",) * world_size, folder=self._folder)


class _ChildWorker(ChildProcess):
    """A process of a worker.

    Attributes:
        rank: rank of the worker.
    """

    what = "worker process"
    run = "hardpoint.core.engine.worker_launch:run_worker_process"
    keeps_output = True
    rank = 0

    @property
    def label(self) -> str:
        return f"{self.what} of rank {self.rank} (pid {self.pid})"


class LaunchedWorker:
    """See `hardpoint.plugins.executor.WorkerProcess`."""

    def __init__(
        self,
        launch: WorkerLaunch,
        run: str,
        pass_fds: Sequence[int],
        manifest: Manifest,
        folder: str = "",
    ) -> None:
        """Start the process.

        Args:
            run: the executor's function.
            pass_fds: descriptors that it gets.
            folder: folder that the process removes, if this one ends without doing so.
        """
        references = [entry.value for entry in manifest.tree() if _is_needed(entry)]
        objects = main_objects([*references, run])
        self.channel, theirs = socket_pair()
        activity, shared = Activity.create_unnamed()
        try:
            self._child = _ChildWorker.spawn(pass_fds=(theirs.fileno(), shared, *pass_fds))
        except BaseException:
            self.channel.close()
            raise
        finally:
            theirs.close()
            os.close(shared)
        self._child.rank = launch.rank
        self._activity = activity
        self._owner = os.getpid()
        self.pid = self._child.pid
        try:
            self._child.launch(
                _ProcessLaunch(
                    main_objects=objects,
                    folder=folder,
                    launch=launch.encode(),
                    run=run,
                    descriptors=self._child.passed_fds,
                    log_level=logging.getLevelName(_log.getEffectiveLevel()),
                )
            )
        except BaseException:
            self.close(0)
            raise

    def sentinels(self) -> list[int]:
        """Return descriptors of which one is readable when `failure` may return an error."""
        return self._child.sentinels

    def failure(self) -> HardpointError | None:
        """Return the error that ended the child, or how it exited; None while it runs."""
        return self._child.failure()

    def doing(self) -> str | None:
        """Return whether it is stopped, and the method of a plugin that runs in a call."""
        is_busy, is_stopped = self._activity.is_busy, self._child.is_stopped
        if not (is_busy or is_stopped):
            return None
        stopped = ", stopped by a signal" if is_stopped else ""
        return stopped + (self._activity.snapshot().during if is_busy else "")

    def close(self, grace_s: float = 5.0) -> None:
        """End the child: it sees the end of the channel; kill it after `grace_s` seconds."""
        if os.getpid() == self._owner:  # a shutdown would reach the child from a fork, too
            with contextlib.suppress(OSError):
                self.channel.shutdown(socket.SHUT_RDWR)
            self._child.wait(grace_s)
        self.channel.close()
        self._child.close(0)
        self._activity.close()


def _is_needed(entry: PluginEntry) -> bool:
    return Process.WORKER in KINDS[entry.kind].processes


def run_worker_process(data: bytes, watch: ParentWatch) -> NoReturn:
    """Run an executor's function in a worker's process, and end the process."""
    code = 0
    try:
        _run_worker_process(data)
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException as error:
        watch.report(error)
        code = 1
    # At once, as the children of multiprocessing end: to tear down the interpreter and the threads
    # of torch takes up to a second, in which the other ranks would wait.
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # it is closed
            stream.flush()
    os._exit(code & 0xFF)


def _run_worker_process(data: bytes) -> None:
    """Run an executor's function.

    Raises:
        PluginLoadError: there is no such function.
    """
    start = decode_launch(data, _ProcessLaunch)
    watch_forks()
    launch = WorkerLaunch.decode(start.launch)
    name_process(f"Worker_{launch.rank}")
    log_to_stderr(f"Worker {launch.rank}", start.log_level)
    channel = socket.socket(fileno=start.descriptors[0])
    channel.set_inheritable(False)
    _recorded.append(Activity.open_unnamed(start.descriptors[1]))
    for descriptor in start.descriptors[2:]:
        os.set_inheritable(descriptor, False)
    module, _, name = start.run.partition(":")
    try:
        run = operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError) as cause:
        raise PluginLoadError(
            f"{start.run}: the function that a worker's process is to run cannot be found there: "
            f"{cause}"
        ) from cause
    run(launch, channel, list(start.descriptors[2:]))


def build_worker(launch: WorkerLaunch, progress: Progress | None) -> Worker:
    """Make the worker of a launch; see `open_worker`."""
    if launch.prepared is not None:
        spec, activity = launch.prepared
        settings = StepSettings(process=False)  # the engine, in this process, restores those
        return LocalWorker(spec, activity, launch.on_forward, settings)
    data = _checked_data(launch)
    plugins = PluginSet(data.manifest)
    config = msgspec.convert(data.config, prepared(EngineConfig))
    with naming_plugin(plugins):
        spec = prepare_worker(
            config, plugins, ConfigSources(data.config_sources), progress or no_progress
        )
    spec = dataclasses.replace(
        spec,
        rank=launch.rank,
        placement=data.placement,
        device=_device_of(launch.rank, data.placement, spec.device, data.place.local_rank),
        num_draft_tokens=data.num_draft_tokens,
        place=data.place,
    )
    activity = _recorded[-1] if _recorded else Activity()
    activity.compares_settings = config.debug.watch_plugins
    return _NamingWorker(LocalWorker(spec, activity), plugins, activity)


def _checked_data(launch: WorkerLaunch) -> _Data:
    """Return the data of a launch, if it can be used here.

    Raises:
        HardpointError: it was made by another version of Hardpoint or torch, or was damaged.
        PluginLoadError: a plugin has another version here.
    """
    where = f"rank {launch.rank} on {socket.gethostname()}"
    try:
        made = msgspec.msgpack.decode(launch.data, type=_Versioned)
        here = {"hardpoint": installed_version(), "torch": str(torch.__version__)}
        for name, version in here.items():
            if (wanted := getattr(made, name)) != version:
                raise HardpointError(
                    f"{name}: the engine has version {wanted}, {where} (pid {os.getpid()}) has "
                    f"{version}; install the same one"
                )
        data = msgspec.msgpack.decode(made.data, type=prepared(_Data))
    except msgspec.MsgspecError as cause:
        raise HardpointError(f"launch: {where} cannot read it: {cause}") from None
    if data.manifest.hash != made.manifest_hash:
        raise HardpointError(f"launch: {where} got other plugins than the engine has")
    check_versions(PluginSet(data.manifest), where)
    return data


class _NamingWorker:
    """A worker whose errors name the plugin that is responsible, since they leave the process.

    It records that a call is under way, for the process that watches this one.
    """

    def __init__(self, worker: LocalWorker, plugins: PluginSet, activity: Activity) -> None:
        self._worker = worker
        self._plugins = plugins
        self._activity = activity

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._worker, name)

        if name == "abort":  # comes from another thread, during a call
            return method

        @functools.wraps(method)
        def call(*args: Any) -> Any:
            self._activity.begin_call()
            try:
                with naming_plugin(self._plugins):
                    return method(*args)
            finally:
                self._activity.end_step()

        self.__dict__[name] = call
        return call


def _device_of(
    rank: int, placement: Placement, device: torch.device, engine_rank: int
) -> torch.device:
    """Return the device of a rank: each has one GPU of its host.

    Raises:
        ConfigError: there are fewer.
    """
    if device.type != "cuda":
        return device
    local = placement.local(rank)
    if placement.devices:
        index = placement.devices[rank]
    else:
        index = local.index(rank) + engine_rank * len(local)
    if index >= (count := torch.cuda.device_count()):
        raise ConfigError(
            f"parallel: {len(local)} ranks run on {socket.gethostname()}, and rank {rank} needs "
            f"CUDA device {index} of the {count} that its process may use (CUDA_VISIBLE_DEVICES)"
        )
    return torch.device("cuda", index)


def check_versions(plugins: PluginSet, where: str) -> None:
    """Reject plugins whose versions differ between this process and the one that resolved them.

    Args:
        plugins: to check.
        where: names this process in messages.

    Raises:
        PluginLoadError: naming the plugin, both versions and this process.
    """
    here = {found.distribution: found.version for found in discover()}
    for entry in plugins.manifest.tree():
        version = here.get(entry.distribution)
        if version is not None and version != entry.version:
            raise PluginLoadError(
                f"{entry.source}: version {entry.version} was found where the engine was asked "
                f"for, version {version} is installed in {where} (pid {os.getpid()})"
            )
