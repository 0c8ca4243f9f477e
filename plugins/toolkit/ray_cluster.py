"""Joining a Ray cluster, and reserving resources on it for actors."""

from __future__ import annotations

import importlib
import ipaddress
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from hardpoint.errors import ConfigError, HardpointError, PluginLoadError, install_command

__all__ = [
    "ClusterOptions",
    "Connection",
    "RankResources",
    "RayNode",
    "actor_failure",
    "arrange",
    "check_capacity",
    "health_check_seconds",
    "import_ray",
    "listening_address",
    "needed_resources",
    "nodes_of",
    "reserve",
    "short_text",
]

_EPSILON = 1e-6  # Ray counts resources in 1/10000
_POLL_S = 0.5


class ClusterOptions(Protocol):
    """Which cluster is joined, and how.

    Attributes:
        address: `HOST:PORT` of the cluster. "auto" is the address in RAY_ADDRESS, else the cluster
            on this machine. "local" starts a cluster on this machine and ends it with
            the connection. A cluster that the program has joined itself is used and left as it is.
        namespace: Ray's namespace in which the actors are; empty is a new one.
        runtime_env: runtime environment of the actors, as Ray has it.
        join_timeout_seconds: maximum time until the cluster answers.
    """

    @property
    def address(self) -> str: ...  # noqa: D102
    @property
    def namespace(self) -> str: ...  # noqa: D102
    @property
    def runtime_env(self) -> Mapping[str, Any]: ...  # noqa: D102
    @property
    def join_timeout_seconds(self) -> float: ...  # noqa: D102


class RankResources(Protocol):
    """The resources that each rank reserves.

    Attributes:
        num_cpus: CPUs.
        num_gpus: GPUs; None is 1 if the cluster has GPUs, else 0.
        resources: custom resources of the cluster.
    """

    @property
    def num_cpus(self) -> float: ...  # noqa: D102
    @property
    def num_gpus(self) -> int | None: ...  # noqa: D102
    @property
    def resources(self) -> Mapping[str, float]: ...  # noqa: D102


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
            f"it needs the library ray: {install_command('ray')} ({cause})"
        ) from cause


class Connection:
    """The connection of this process with a cluster; Ray allows one at a time.

    Its users share it. The last that closes it ends it, unless the program itself has made it.

    Attributes:
        is_first: whether this made it.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _users: ClassVar[list[Connection]] = []
    """Users of a connection that another user has made."""

    def __init__(self, ray: Any, options: ClusterOptions, setting: str) -> None:
        """Connect this process with the cluster, or use the connection that is there.

        Args:
            ray: the module.
            setting: where they are configured, for messages.

        Raises:
            ConfigError: there is no cluster, it does not answer or rejects this process, or this
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


def _join(ray: Any, options: ClusterOptions, setting: str) -> None:
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


def _check_same(ray: Any, options: ClusterOptions, setting: str) -> None:
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
        ValueError: it is not an address.
    """
    if address != "auto":
        _split(address)
    services = importlib.import_module("ray._private.services")
    resolve = getattr(services, "canonicalize_bootstrap_address", None)
    resolved = resolve(address) if resolve else address if address != "auto" else None
    return None if resolved is None else str(resolved)


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
        raise ConnectionError(f"the listener at {address} is not a Ray cluster")


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


def needed_resources(ray: Any, share: RankResources, num_ranks: int = 1) -> dict[str, float]:
    """Return the resources that ranks of one bundle reserve."""
    num_gpus = share.num_gpus
    if num_gpus is None:
        num_gpus = 1 if ray.cluster_resources().get("GPU", 0) >= 1 else 0
    needed = {"CPU": share.num_cpus, "GPU": float(num_gpus), **share.resources}
    # A bundle may not be empty.
    return {name: n * num_ranks for name, n in needed.items() if n} or {"CPU": 0.001}


def check_capacity(
    nodes: Sequence[RayNode],
    needed: Mapping[str, float],
    count: int,
    strategy: str,
    what: str = "workers",
) -> None:
    """Check that the cluster can hold all bundles when nothing else runs.

    Args:
        nodes: nodes of the cluster.
        needed: by a bundle.
        count: number of bundles.
        strategy: strategy of their placement.
        what: name of the users of bundles, for messages.

    Raises:
        ConfigError: it cannot; the message names the resources that are missing.
    """
    for name, amount in needed.items():
        total = sum(node.resources.get(name, 0.0) for node in nodes)
        if total + _EPSILON < amount * count:
            raise ConfigError(
                f"{count} {what} need {amount * count:g} {name} ({amount:g} each), the "
                f"Ray cluster has {total:g} on {len(nodes)} node(s): "
                f"{amount * count - total:g} {name} missing"
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
    if room < count:
        bundle = " and ".join(f"{amount:g} {name}" for name, amount in needed.items())
        has = ", ".join(f"{node} has room for {n}" for node, n in zip(nodes, rooms, strict=True))
        raise ConfigError(
            f"{count} {what} with {bundle} each, placed by {strategy}, do not fit: {has}"
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


def reserve(
    needed: Mapping[str, float],
    count: int,
    *,
    strategy: str,
    timeout_s: float,
    setting: str = "",
    what: str = "workers",
    near: str | None = None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> Any:
    """Return a placement group with bundles, once their resources are there and free.

    Args:
        needed: by a bundle.
        count: number of bundles.
        strategy: strategy of their placement.
        timeout_s: maximum time to wait.
        setting: name of the setting of that time, for messages.
        what: name of the users of bundles, for messages.
        near: id of the node that is taken if it has room, with the strategy STRICT_PACK.
        is_cancelled: asked while it waits.

    Raises:
        HardpointError: they were not free in time, or it was cancelled.
    """
    util = importlib.import_module("ray.util")
    group = util.placement_group(
        [dict(needed)] * count, strategy=strategy, _soft_target_node_id=near
    )
    deadline = time.monotonic() + timeout_s
    try:
        while not group.wait(max(min(deadline - time.monotonic(), _POLL_S), 0.0)):
            if is_cancelled():
                raise HardpointError(f"{count} {what}: the reservation was cancelled")
            if time.monotonic() >= deadline:
                limit = f"{timeout_s:g} s ({setting})" if setting else f"{timeout_s:g} s"
                raise _no_room(needed, count, what, limit)
    except BaseException:
        util.remove_placement_group(group)
        raise
    return group


def _no_room(needed: Mapping[str, float], count: int, units: str, limit: str) -> HardpointError:
    free = Counter(import_ray().available_resources())
    lacking = {
        name: amount * count - free[name]
        for name, amount in needed.items()
        if free[name] + _EPSILON < amount * count
    }
    more = ", ".join(f"{amount:g} {name} more" for name, amount in lacking.items())
    return HardpointError(
        f"the Ray cluster has no room for {count} {units} within {limit}: others use it; "
        f"{more or 'free resources on other nodes'} needed"
    )


def actor_failure(error: BaseException, node: RayNode, where: str) -> HardpointError:
    """Return the error of an actor that did not start.

    Args:
        error: Ray's.
        node: its node.
        where: names it in messages.
    """
    text = str(error)
    if "No module named 'hardpoint" in text:
        last = text.rstrip().rpartition("\n")[2].strip()
        return PluginLoadError(f"{node}: Hardpoint is not installed there: {last}")
    return HardpointError(f"{where}: its actor did not start: {short_text(error)}")


def short_text(error: BaseException) -> str:
    """Return the text of an error of Ray's, without its advice."""
    return " ".join(str(error).partition("Some common causes")[0].split())[:800]


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
