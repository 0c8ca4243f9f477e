"""Launches of workers, and the workers that are made of them, in any thread, process or machine."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import socket
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from hardpoint.core.weights.worker_spec import EnginePlace, WorkerSpec
from hardpoint.core.worker.worker import LocalWorker
from hardpoint.errors import PluginLoadError
from hardpoint.host.boundary.activity import Activity
from hardpoint.host.boundary.errors import naming_plugin
from hardpoint.host.registry.discovery import discover, installed_version
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.host.system.plugin_settings import StepSettings
from hardpoint.plugins import ConfigError, EngineConfig, HardpointError
from hardpoint.plugins.component.base import Progress, no_progress
from hardpoint.plugins.component.manifest import Manifest
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.executor import Worker, WorkerLaunch, WorkerProcess
from hardpoint.plugins.parallel import Placement
from hardpoint.typed import prepared

from .prepare import num_batches, prepare_worker

_recorded: list[Activity] = []

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
    """The data of a launch, and the versions required in the process that opens it.

    Attributes:
        hardpoint, torch: versions, where the engine is.
        manifest_hash: hash of the plugins there.
        data: a _Data.
    """

    hardpoint: str
    torch: str
    manifest_hash: str
    data: bytes


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
    ) -> WorkerProcess:
        """Start a process; see `ExecutorContext.start_process`.

        Raises:
            HardpointError: the engine was built without a starter of worker processes.
        """
        if (start := self._spec.start_worker) is None:
            raise HardpointError(
                "executor: it starts worker processes, and this engine was built without "
                "`start_worker` (hardpoint.process.worker_process)"
            )
        return start(launch, run, pass_fds, self._spec.plugins.manifest, self._folder)

    def close(self) -> None:
        """Remove the files by which the workers found each other."""
        self._remove()
        self._folder = ""

    def _on_this_host(self) -> Placement:
        world_size = self._spec.config.parallel.world_size
        with self._lock:  # launches may be made in the threads that use them
            if world_size > 1 and not self._folder:
                self._folder = tempfile.mkdtemp(prefix="hardpoint-ranks-")
                # Also if the executor asks for launches after the start.
                self._remove = weakref.finalize(self, _remove, self._folder, os.getpid())
        return Placement(hosts=("",) * world_size, folder=self._folder)


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # a fork of it has the object, but not the workers
        shutil.rmtree(folder, ignore_errors=True)


def record_worker_in(activity: Activity) -> None:
    """Let the worker of this process record its activity in memory of the engine's process."""
    _recorded.append(activity)


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
    """Return the data of a launch, if it can be used here."""
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
    """A worker that names the responsible plugin in errors, since they leave the process.

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
    """Return the device of a rank: each has one GPU of its host."""
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
    """Reject plugins with other versions in this process than where they were resolved.

    Args:
        where: names this process in messages.

    Raises:
        PluginLoadError: naming the plugin, both versions and this process.
    """
    here = {plugin.distribution: plugin.version for plugin in discover()}
    for entry in plugins.manifest.tree():
        version = here.get(entry.distribution)
        if version is not None and version != entry.version:
            raise PluginLoadError(
                f"{entry.source}: version {entry.version} was found where the engine was asked "
                f"for, version {version} is installed in {where} (pid {os.getpid()})"
            )
