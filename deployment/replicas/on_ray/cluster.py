"""The Ray cluster that engines are placed on."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from hardpoint.errors import (
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    HardpointError,
    PluginLoadError,
)
from hardpoint.plugins.config.engine import ParallelConfig
from hardpoint.toolkit.ray_cluster import (
    Connection,
    RayNode,
    actor_failure,
    check_capacity,
    import_ray,
    needed_resources,
    nodes_of,
    reserve,
)

from .actor import EngineActor

_SETTING = "parallel.ray"


@dataclasses.dataclass(frozen=True)
class _Joined:
    """The joined cluster, with the environment of the program, or of its job."""

    address: str
    namespace: str = ""
    runtime_env: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    join_timeout_seconds: float = 10.0


class EngineCluster:
    """Places engines, each with one bundle for all of its ranks, on the node with fewest of them.

    Attributes:
        address: the IP address of this program's node.
        num_per_node: engines that a node has at most after the start.
    """

    def __init__(self, parallel: ParallelConfig) -> None:
        """Join the cluster.

        Args:
            parallel: has `parallel.ray`, and how many engines there are to be.

        Raises:
            ConfigError: Ray is not installed, no cluster answers, or it is too small.
        """
        assert parallel.ray is not None
        try:
            self._ray = import_ray()
        except ImportError as cause:
            raise ConfigError(f"{_SETTING}: {cause}") from cause
        self._connection = Connection(self._ray, _Joined(parallel.ray.address), _SETTING)
        # After the connection was left, a call of Ray's would make another one.
        self._changed = threading.Condition()
        self._num_engines: Counter[str] = Counter()  # by node
        self._actors: set[PlacedActor] = set()
        self._num_placing = 0
        self._is_closed = False
        with contextlib.ExitStack() as undo:
            undo.callback(self._connection.close)
            self._needed = needed_resources(self._ray, parallel.ray, parallel.world_size)
            count = parallel.data - parallel.num_local
            self._check_room(count)
            self.num_per_node = math.ceil(count / len(self._large_nodes()))
            self.address = str(importlib.import_module("ray.util").get_node_ip_address())
            undo.pop_all()

    @property
    def nodes(self) -> list[RayNode]:
        """The nodes that live."""
        return list(nodes_of(self._ray).values())

    def place(
        self,
        launch_of: Callable[[RayNode], bytes],
        *,
        timeout_s: float,
        is_cancelled: Callable[[], bool],
        waits: bool,
    ) -> PlacedActor:
        """Return an actor that runs one more engine, once there is room for it.

        Args:
            launch_of: returns an encoded ActorLaunch for the node.
            timeout_s: maximum time to wait.
            is_cancelled: asked while it waits.
            waits: whether it is waited for nodes that are not there.

        Raises:
            ConfigError: there is no room, whatever ends.
            HardpointError: there was no room in time, or it was cancelled.
            EngineDeadError: the node was lost in the meantime.
            EngineClosedError: `close` was called.
        """
        with self._changed:
            if self._is_closed:
                raise EngineClosedError("the Ray cluster was left")
            if not waits:
                self._check_room(self._num_engines.total() + 1)
            near = self._node_with_fewest()
            self._num_engines[near] += 1
            self._num_placing += 1
        try:
            group = reserve(
                self._needed,
                1,
                strategy="STRICT_PACK",
                timeout_s=timeout_s,
                setting="parallel.join_seconds",
                what="engine",
                near=near,
                is_cancelled=lambda: self._is_closed or is_cancelled(),
            )
            try:
                return self._start(group, launch_of)
            except BaseException:
                self._remove(group)
                raise
        finally:
            with self._changed:
                self._num_engines[near] -= 1
                self._num_placing -= 1
                self._changed.notify_all()

    def _start(self, group: Any, launch_of: Callable[[RayNode], bytes]) -> PlacedActor:
        util = importlib.import_module("ray.util")
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        (node_id,) = util.placement_group_table(group)["bundles_to_node_id"].values()
        node = nodes_of(self._ray).get(node_id)
        if node is None:
            raise EngineDeadError(f"the Ray node {node_id[:12]} was lost while an engine started")
        needed = self._needed
        actor = (
            self._ray.remote(EngineActor)
            .options(
                num_cpus=needed.get("CPU", 0),
                num_gpus=needed.get("GPU", 0),
                resources={k: v for k, v in needed.items() if k not in ("CPU", "GPU")},
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=0
                ),
            )
            .remote()
        )
        running = actor.run.remote(launch_of(node)).future()
        placed = PlacedActor(actor, node, group, running, self._end)
        with self._changed:
            self._num_engines[node_id] += 1
            self._actors.add(placed)
        return placed

    def _end(self, placed: PlacedActor) -> None:
        with self._changed:
            if placed not in self._actors:
                return
            self._actors.remove(placed)
            self._num_engines[placed.node.id] -= 1
            with contextlib.suppress(Exception):
                self._ray.kill(placed.actor)
            self._remove(placed.group)

    def _remove(self, group: Any) -> None:
        with contextlib.suppress(Exception):
            importlib.import_module("ray.util").remove_placement_group(group)

    def _check_room(self, count: int) -> None:
        try:
            check_capacity(self.nodes, self._needed, count, "SPREAD", "engines")
        except ConfigError as error:
            raise ConfigError(f"{_SETTING}: {error}") from None

    def _node_with_fewest(self) -> str:
        """Return the id of the node that should get the next engine; call it with the lock."""
        nodes = self._large_nodes() or self.nodes
        return min((self._num_engines[node.id], node.id) for node in nodes)[1]

    def _large_nodes(self) -> list[RayNode]:
        needed = self._needed.items()
        return [
            node for node in self.nodes if all(node.resources.get(k, 0) >= v for k, v in needed)
        ]

    def close(self) -> None:
        """End the actors that are left; leave the cluster, unless others in this program use it."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not self._num_placing)
            for placed in list(self._actors):
                self._end(placed)
        self._connection.close()


class PlacedActor:
    """An actor for one engine.

    Attributes:
        actor: Ray's handle of it.
        node: where it runs.
        group: its placement group.
        running: what EngineActor.run returns.
    """

    def __init__(
        self,
        actor: Any,
        node: RayNode,
        group: Any,
        running: Future[bytes],
        end: Callable[[PlacedActor], None],
    ) -> None:
        """Take over an actor; `end` ends it, and releases its resources."""
        self.actor, self.node, self.group, self.running = actor, node, group, running
        self._end = end

    def failure(self, error: BaseException) -> HardpointError:
        """Return the error for one of Ray's that `running` ended with."""
        failure = actor_failure(error, self.node, str(self.node))
        return failure if isinstance(failure, PluginLoadError) else EngineDeadError(str(failure))

    def end(self) -> None:
        """Kill it, and release its resources. The second time does nothing."""
        self._end(self)
