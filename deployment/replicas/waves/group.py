"""The client of engines that share experts: they start, step, pause and end together."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from concurrent.futures import Future
from typing import Any

import msgspec

from hardpoint.errors import EngineDeadError, PluginFaultError
from hardpoint.plugins import (
    ConfigError,
    EngineConfig,
    EngineCoreOutputs,
    RequestError,
)
from hardpoint.plugins.component.manifest import Manifest
from hardpoint.plugins.config import ConfigSources
from hardpoint.replicas.group import ReplicaSet
from hardpoint.replicas.replica import Replica

from .replicas import WaveReplicas, follows_another
from .scaling import WaveScaling

_FIRST_DEATH_S = 5.0
"""How long the death of an engine that lost another one waits for that one's to be noticed."""

_OF_ALL = frozenset({"pause", "resume", "sleep", "wake_up"})
"""Calls that no engine can follow alone, since the others need it in each step."""


class WaveGroup(ReplicaSet):
    """Engines of one model with expert parallelism.

    They step in waves, see `core.WaveCore`. If one dies, all end, and are started again together.
    """

    _replicas: WaveReplicas

    def __init__(self, *args: Any, **options: Any) -> None:
        """Start the engines; see ReplicaSet."""
        super().__init__(*args, replicas=WaveReplicas, **options)
        scaling = WaveScaling(
            self._replicas, self._ledger, self._changed, self._move, self._report_end
        )
        self.scale, self.retire = scaling.scale, scaling.retire

    def receive(self, replica: Replica, item: EngineCoreOutputs | Exception) -> None:
        """Take the messages of an engine; let the others join a wave that it has started."""
        if isinstance(item, Exception):
            if follows_another(item):  # whose death shows which requests are suspects
                wait = threading.Timer(_FIRST_DEATH_S, self._lost_later, (replica, item))
                wait.daemon = True
                wait.start()
                return
            if (hung := self._waited_for(replica, item)) is not None:
                self._lost_hung(hung, replica, item)
                return
        elif item.wave_complete is not None or item.start_wave is not None:
            with self._lock:
                called = self._replicas.coordinate(replica, item)
                wave = self._replicas.coordinator.wave
            for other in called:
                with contextlib.suppress(EngineDeadError):  # then all of them end
                    other.open_client.call("start_wave", wave)
        super().receive(replica, item)

    def _waited_for(self, replica: Replica, error: Exception) -> Replica | None:
        client = replica.client
        has_reason = isinstance(error, PluginFaultError) or error.__cause__ is not None
        if client is None or client.was_killed or has_reason:
            return None
        with self._lock:
            late = self._replicas.arrivals.late()
            if not late or replica.rank in late or not self._replicas.is_current(replica):
                return None
            return self._replicas.of(min(late))

    def _lost_hung(self, hung: Replica, waiting: Replica, error: Exception) -> None:
        client = hung.open_client
        during = client.activity.snapshot().during
        super().receive(
            hung,
            EngineDeadError(
                f"engine {hung.rank} (pid {client.pid}) does not go on{during}; engine "
                f"{waiting.rank} waited for it: {error}"
            ),
        )
        with contextlib.suppress(ProcessLookupError):
            os.kill(client.pid, signal.SIGKILL)

    def _lost_later(self, replica: Replica, error: Exception) -> None:
        """Count an engine as dead that lost another one, if none has died by itself."""
        if replica.client is not None:
            super().receive(replica, error)

    def call(self, method: str, *args: Any, rank: int | None = None) -> Future[Any]:
        """Call a utility of all engines, or of one; see ReplicaSet.

        Raises:
            RequestError: the engine cannot do that alone; and as ReplicaSet.
        """
        if rank is not None and method in _OF_ALL:
            raise RequestError(
                f"{method}: expected all engines, got engine {rank} alone: they share experts "
                "(parallel.expert), so that each needs the others in every step"
            )
        return super().call(method, *args, rank=rank)

    def restart_with(self, config: EngineConfig, manifest: Manifest) -> None:
        """Start engines with other parameters from now on, as many as there are."""
        with self._lock:
            parallel = msgspec.structs.replace(config.parallel, data=len(self.ranks))
            super().restart_with(msgspec.structs.replace(config, parallel=parallel), manifest)


def check_waves(config: EngineConfig, config_sources: ConfigSources) -> None:
    """Refuse settings that cannot work where engines share experts.

    Raises:
        ConfigError: naming the setting.
    """
    parallel, length = config.parallel, config.max_model_len
    joining = parallel.join_address
    refused = (
        # A stage would run a batch of another engine's step, or none.
        ("parallel.pipeline", "1", parallel.pipeline, parallel.pipeline > 1),
        # Steps that are under way at once are not matched with those of the other engines.
        ("scheduler.asynchronous", "false", "true", config.scheduler.asynchronous is True),
        # Each engine would find another length, by the memory that it has.
        ("max_model_len", "a number, or none", "'auto'", length == "auto"),
        # They meet by files and memory of one host.
        ("parallel.join_address", "none", repr(joining), joining is not None),
        ("parallel.ray", "none", "a table", parallel.ray is not None),
        ("executor.use", "an executor of this host", "'ray'", config.executor.use == "ray"),
    )
    for name, expected, got, is_set in refused:
        if is_set:
            raise ConfigError(
                config_sources.locate(
                    f"{name}: expected {expected}, since the engines share experts "
                    f"(parallel.expert with parallel.data = {parallel.data}), got {got}"
                )
            )
