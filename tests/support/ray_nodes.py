"""A Ray cluster of two nodes on this machine."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

# Ray itself would turn 127.0.0.1 into an address of the network.
HEAD, SECOND = "127.0.0.2", "127.0.0.3"
_MEMORY = 200 * 2**20
_LOST_AFTER = {"initial_delay": 1000, "period": 1000}  # ms; three of them make about 6 s


class Nodes:
    """The cluster; the second node comes and goes.

    Attributes:
        address: HOST:PORT, where programs join.
        folder: has Ray's files; its folder "home" is the home folder meanwhile.
    """

    def __init__(
        self,
        folder: Path,
        num_cpus: int = 4,
        head: Mapping[str, float] | None = None,
        second: Mapping[str, float] | None = None,
    ) -> None:
        """Start both nodes, each with so many CPUs, and resources of its own kinds."""
        from ray.cluster_utils import Cluster

        checks = {f"health_check_{name}_ms": ms for name, ms in _LOST_AFTER.items()}
        checks |= {"health_check_timeout_ms": 1000, "health_check_failure_threshold": 3}
        self._num_cpus, self._resources = num_cpus, second
        settings = {"include_dashboard": False, "_system_config": checks}
        self._cluster = Cluster(
            initialize_head=True, head_node_args=settings | self._node(HEAD, head)
        )
        self.address = self._cluster.address
        self.folder = folder
        self.add()

    def add(self) -> None:
        self._second = self._cluster.add_node(**self._node(SECOND, self._resources))
        self._cluster.wait_for_nodes()

    def kill_second(self) -> None:
        self._cluster.remove_node(self._second, allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()

    def _node(self, address: str, resources: Mapping[str, float] | None) -> dict[str, Any]:
        return {
            "node_ip_address": address,
            "num_cpus": self._num_cpus,
            "num_gpus": 0,
            "object_store_memory": _MEMORY,
            "resources": dict(resources or {}),
        }


@contextlib.contextmanager
def two_nodes(environment: Mapping[str, str] | None = None, **settings: Any) -> Iterator[Nodes]:
    """Run a cluster that programs started meanwhile find; its files are in a folder of its own.

    Args:
        environment: variables of the cluster, and of those programs.
        settings: parameters of Nodes.
    """
    pytest.importorskip("ray")
    folder = Path(tempfile.mkdtemp(prefix="hp-ray-"))  # short, since sockets are in it
    home = folder / "home"
    home.mkdir()
    variables = {"RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0", "HOME": str(home)}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        for name, value in (variables | dict(environment or {})).items():
            patch.setenv(name, value)
        nodes = Nodes(folder, **settings)
        patch.setenv("RAY_ADDRESS", nodes.address)
        try:
            yield nodes
        finally:
            nodes.close()
            shutil.rmtree(folder, ignore_errors=True)
