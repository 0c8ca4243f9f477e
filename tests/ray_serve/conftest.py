"""A cluster of two nodes on this machine, with Serve."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path

import pytest

MEMORY = 100 * 2**20
# Ray itself would turn 127.0.0.1 into an address of the network.
HEAD, SECOND = "127.0.0.2", "127.0.0.3"


def free_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


class Nodes:
    """Two nodes; the ingress runs on the first, and one engine on each."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        checks = {f"health_check_{name}_ms": 1000 for name in ("initial_delay", "period")}
        checks |= {"health_check_timeout_ms": 1000, "health_check_failure_threshold": 3}
        head = {"include_dashboard": False, "_system_config": checks}
        self._cluster = Cluster(
            initialize_head=True, head_node_args=head | self._node(HEAD, ingress=1, engine=1)
        )
        self.address = self._cluster.address
        self.add()

    def add(self):
        self._second = self._cluster.add_node(**self._node(SECOND, engine=1))
        self._cluster.wait_for_nodes()

    def kill_second(self):
        self._cluster.remove_node(self._second, allow_graceful=False)

    def close(self):
        self._cluster.shutdown()

    @staticmethod
    def _node(address, **resources):
        return {
            "node_ip_address": address,
            "num_cpus": 4,
            "num_gpus": 0,
            "object_store_memory": MEMORY,
            "resources": resources,
        }


@pytest.fixture(scope="session")
def nodes():
    folder = tempfile.mkdtemp(prefix="hp-rs-")  # short, since sockets are in it
    Path(folder, "home").mkdir()
    settings = {
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ADDRESS": None,
        "HOME": str(Path(folder, "home")),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.delenv(name, raising=False) if value is None else patch.setenv(name, value)
        started = Nodes()
        patch.setenv("RAY_ADDRESS", started.address)
        try:
            yield started
        finally:
            started.close()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def port(nodes):
    """The port at which Serve listens; this process has joined the cluster."""
    import ray
    from ray import serve

    port = free_port()
    ray.init(address=nodes.address, log_to_driver=bool(os.environ.get("RAY_SERVE_TEST_LOG")))
    try:
        # The proxies of two nodes of one machine would share the port.
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        yield port
        serve.shutdown()
    finally:
        ray.shutdown()
