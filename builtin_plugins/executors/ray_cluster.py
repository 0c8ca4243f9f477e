"""The Ray cluster of an executor: joining it, and reserving resources for the workers."""

from __future__ import annotations

import importlib
import ipaddress
import os
import socket
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from hardpoint import plugins
from hardpoint.plugins import ConfigError, HardpointError

_EPSILON = 1e-6  # Ray counts resources in 1/10000


class RayOptions(plugins.Options):
    """Which cluster the workers run on, and what each of them gets.

    Attributes:
        address: `HOST:PORT` of the cluster. "auto" is the one that RAY_ADDRESS names, else the one
            that runs on this machine. "local" starts a cluster on this machine and ends it with
            the engine. A cluster that the program has joined itself is used and left as it is.
        namespace: Ray's namespace in which the actors are; empty is a new one.
        placement: how the workers are spread over nodes: PACK on few, SPREAD over many, STRICT_PACK
            on one, STRICT_SPREAD each on another.
        num_cpus: CPUs that a worker reserves.
        num_gpus: GPUs that a worker reserves; None is 1 if the cluster has GPUs, else 0.
        resources: resources of the cluster's own kinds that a worker reserves.
        runtime_env: runtime environment of the actors, as Ray has it.
        join_timeout_seconds: maximum time until the cluster answers.
        start_timeout_seconds: maximum time until the resources are free and the actors run,
            including what `runtime_env` installs.
    """

    address: Annotated[str, Meta(min_length=1)] = "auto"
    namespace: str = ""
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    num_cpus: Annotated[float, Meta(ge=0)] = 1.0
    num_gpus: Annotated[int, Meta(ge=0, le=1)] | None = None
    resources: dict[str, Annotated[float, Meta(gt=0)]] = {}
    runtime_env: dict[str, Any] = {}
    join_timeout_seconds: Annotated[float, Meta(gt=0)] = 10.0
    start_timeout_seconds: Annotated[float, Meta(gt=0)] = 300.0


@dataclass(frozen=True)
class RayNode:
    """A node of the cluster.

    Attributes:
        id: Ray's id of the node.
        address: its IP address.
        hostname: name of its machine.
        resources: resources that it has, used or not.
    """

    id: str
    address: str
    hostname: str
    resources: Mapping[str, float]

    def __str__(self) -> str:
        """Name it as `ray list nodes` does."""
        return f"Ray node {self.address} ({self.hostname}, id {self.id[:12]})"


def import_ray() -> Any:
    """Return the module ray.

    Raises:
        ImportError: it is not installed, or its import fails.
    """
    try:
        return importlib.import_module("ray")
    except ImportError as cause:
        raise ImportError(
            f"it needs the library ray: pip install 'hardpoint[ray]' ({cause})"
        ) from cause


class Connection:
    """The connection of this process with a cluster, of which Ray has one at a time.

    Executors share it. The last that closes it ends it, unless the program itself has made it.

    Attributes:
        is_first: whether this made it.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _users: ClassVar[list[Connection]] = []
    """Those that use a connection which one of them has made."""

    def __init__(self, ray: Any, options: RayOptions, setting: str) -> None:
        """Connect this process with the cluster, or use the connection that is there.

        Args:
            ray: the module.
            options: options of the executor.
            setting: where they are configured, for messages.

        Raises:
            ConfigError: there is no cluster, it does not answer or refuses this process, or this
                process is connected with another one.
        """
        self._ray = ray
        with self._lock:
            self.is_first = not ray.is_initialized()
            if self.is_first:
                _join(ray, options, setting)
                self._users.clear()
            else:
                _check_same(ray, options, setting)
            if self.is_first or self._users:
                self._users.append(self)

    def close(self) -> None:
        """End the connection, if nothing else uses it."""
        with self._lock:
            if self in self._users:
                self._users.remove(self)
                if not self._users:
                    self._ray.shutdown()


def _join(ray: Any, options: RayOptions, setting: str) -> None:
    where = f"{setting}.address: {options.address!r}"
    if options.address.startswith("ray://"):
        raise ConfigError(
            f"{where}: expected HOST:PORT, 'auto' or 'local'; an engine runs on a node of the "
            f"cluster, not behind the server for Ray clients"
        )
    settings = {
        "namespace": options.namespace or None,
        "runtime_env": options.runtime_env or None,
        "configure_logging": False,
    }
    try:
        if options.address == "local":
            ray.init(address="local", include_dashboard=False, **settings)
            return
        address = _resolved(options.address)
        if address is not None:
            _check_answer(address, options.join_timeout_seconds)
        ray.init(address=address or options.address, **settings)
    except (Exception, SystemExit) as error:  # Ray lets some failures exit the process
        ray.shutdown()
        raise ConfigError(
            f"{where}: {_cause(error)}; start a cluster with `ray start --head`, or set 'local' to "
            f"have one started on this machine"
        ) from error


def _check_same(ray: Any, options: RayOptions, setting: str) -> None:
    if options.address in ("auto", "local"):
        return
    current = str(ray.get_runtime_context().gcs_address)
    if options.address != current:
        raise ConfigError(
            f"{setting}.address: this process is connected with the Ray cluster at {current}, and "
            f"cannot join {options.address!r} as well; 'auto' uses that one"
        )


def _resolved(address: str) -> str | None:
    """Return the address that Ray will connect to, HOST:PORT; None if that is not known.

    Raises:
        ConnectionError: no cluster runs on this machine.
        ValueError: it is no address.
    """
    if address != "auto":
        _split(address)
    services = importlib.import_module("ray._private.services")
    resolve = getattr(services, "canonicalize_bootstrap_address", None)
    found = resolve(address) if resolve else address if address != "auto" else None
    return None if found is None else str(found)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError("expected HOST:PORT, 'auto' or 'local'")
    return host.strip("[]"), int(port)


def _check_answer(address: str, timeout_s: float) -> None:
    """Check that a gRPC server answers there, for which Ray itself would wait for minutes.

    Raises:
        ConnectionError: it does not.
    """
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
    try:
        with socket.create_connection(_split(address), timeout_s) as connection:
            connection.settimeout(timeout_s)
            if _uses_tls():
                return
            connection.sendall(preface)
            answer = connection.recv(9)
    except OSError as error:
        raise ConnectionError(
            f"no Ray cluster answers at {address} within {timeout_s:g} s ({error})"
        ) from error
    if answer[3:4] != b"\4":  # the frame of its settings
        raise ConnectionError(f"what listens at {address} is no Ray cluster")


def _uses_tls() -> bool:
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def nodes_of(ray: Any) -> dict[str, RayNode]:
    """Return the living nodes of the cluster by their id."""
    return {
        node["NodeID"]: RayNode(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["NodeManagerHostname"],
            node["Resources"],
        )
        for node in ray.nodes()
        if node["Alive"]
    }


def needed_resources(ray: Any, options: RayOptions) -> dict[str, float]:
    """Return the resources that a worker reserves."""
    num_gpus = options.num_gpus
    if num_gpus is None:
        num_gpus = 1 if ray.cluster_resources().get("GPU", 0) >= 1 else 0
    needed = {"CPU": options.num_cpus, "GPU": float(num_gpus), **options.resources}
    # A bundle may not be empty.
    return {name: count for name, count in needed.items() if count} or {"CPU": 0.001}


def check_capacity(
    nodes: Sequence[RayNode], needed: Mapping[str, float], world_size: int, strategy: str
) -> None:
    """Check that the cluster can hold all workers when nothing else runs.

    Args:
        nodes: nodes of the cluster.
        needed: by a worker.
        world_size: number of workers.
        strategy: strategy of their placement.

    Raises:
        ConfigError: it cannot; the message names the resources that are missing.
    """
    for name, count in needed.items():
        total = sum(node.resources.get(name, 0.0) for node in nodes)
        if total + _EPSILON < count * world_size:
            raise ConfigError(
                f"{world_size} workers need {count * world_size:g} {name} ({count:g} each), the "
                f"Ray cluster has {total:g} on {len(nodes)} node(s): "
                f"{count * world_size - total:g} {name} missing"
            )
    rooms = [
        min(int((node.resources.get(name, 0.0) + _EPSILON) / n) for name, n in needed.items())
        for node in nodes
    ]
    if strategy == "STRICT_PACK":
        room = max(rooms)
    elif strategy == "STRICT_SPREAD":
        room = sum(room > 0 for room in rooms)
    else:
        room = sum(rooms)
    if room < world_size:
        bundle = " and ".join(f"{count:g} {name}" for name, count in needed.items())
        has = ", ".join(f"{node} has room for {n}" for node, n in zip(nodes, rooms, strict=True))
        raise ConfigError(
            f"{world_size} workers with {bundle} each, placed by {strategy}, do not fit: {has}"
        )


def arrange(bundles: Sequence[str], tensor: int) -> list[int]:
    """Return the bundle of each rank, so that tensor groups are on one node where they can be.

    Args:
        bundles: id of the node of each bundle.
        tensor: number of ranks in a tensor group.
    """
    by_node: dict[str, list[int]] = {}
    for bundle, node in enumerate(bundles):
        by_node.setdefault(node, []).append(bundle)
    whole, rest = [], []
    for members in by_node.values():
        fitting = len(members) // tensor * tensor
        whole += members[:fitting]
        rest += members[fitting:]
    return whole + rest


def reserve(ray: Any, options: RayOptions, world_size: int) -> Any:
    """Return a placement group with a bundle per worker.

    Raises:
        ConfigError: the cluster has not enough resources.
        HardpointError: they were not free in time.
    """
    nodes = list(nodes_of(ray).values())
    needed = needed_resources(ray, options)
    check_capacity(nodes, needed, world_size, options.placement)
    util = importlib.import_module("ray.util")
    group = util.placement_group([dict(needed)] * world_size, strategy=options.placement)
    try:
        if not group.wait(options.start_timeout_seconds):
            free = Counter(ray.available_resources())
            lacking = {
                name: count * world_size - free[name]
                for name, count in needed.items()
                if free[name] + _EPSILON < count * world_size
            }
            what = ", ".join(f"{count:g} {name} more" for name, count in lacking.items())
            raise HardpointError(
                f"the Ray cluster has no room for {world_size} workers within "
                f"{options.start_timeout_seconds:g} s: others use it; "
                f"{what or 'what is free is on the wrong nodes'} needed"
            )
    except BaseException:
        util.remove_placement_group(group)
        raise
    return group


def health_check_seconds() -> float | None:
    """Return after how long Ray notices that a node does not answer; None if it is not known."""
    try:
        config = importlib.import_module("ray._raylet").Config
        interval = config.health_check_period_ms() + config.health_check_timeout_ms()
        return float(interval * config.health_check_failure_threshold() / 1000)
    except (ImportError, AttributeError):
        return None


def listening_address(address: str, port: int) -> str:
    """Return `HOST:PORT` of an IP address."""
    if ipaddress.ip_address(address).version == 6:
        return f"[{address}]:{port}"
    return f"{address}:{port}"


def _cause(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "the cluster does not answer"
    return " ".join(str(error).split())[:500] or type(error).__name__
