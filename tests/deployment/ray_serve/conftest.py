"""A cluster of two nodes on this machine, with Serve."""

from __future__ import annotations

import os

import pytest
from support.joining import free_port
from support.ray_nodes import two_nodes


@pytest.fixture(scope="module")
def nodes():
    """Two nodes; the ingress runs on the first, and one engine on each."""
    with two_nodes(head={"ingress": 1, "engine": 1}, second={"engine": 1}) as started:
        yield started


@pytest.fixture(scope="module")
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
