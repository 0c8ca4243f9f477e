"""The executor ray without a cluster: its options, its requests to a cluster, and answers."""

from __future__ import annotations

import socket
import sys
import threading
from types import SimpleNamespace

import pytest
from support.plugins.fake import Installed

from hardpoint.builtin_plugins.executors.ray import RayExecutor
from hardpoint.errors import PluginLoadError
from hardpoint.plugins import ConfigError, ExecutorContext
from hardpoint.plugins.config.engine import ParallelConfig
from hardpoint.toolkit.ray_cluster import (
    Connection,
    RayNode,
    arrange,
    check_capacity,
    listening_address,
    needed_resources,
)


def node(name, **resources):
    return RayNode(name * 8, f"10.0.0.{ord(name) % 10}", name, resources)


@pytest.mark.parametrize(
    ("nodes", "tensor", "ranks"),
    [
        ("aabb", 2, "aabb"),
        ("abab", 2, "aabb"),
        ("abbb", 2, "bbab"),
        ("aaabbb", 2, "aabbab"),
        ("abcabc", 1, "aabbcc"),
        ("ab", 2, "ab"),
    ],
)
def test_tensor_groups_are_on_one_node_where_they_fit(nodes, tensor, ranks):
    order = arrange(list(nodes), tensor)
    assert sorted(order) == list(range(len(nodes)))
    assert "".join(nodes[bundle] for bundle in order) == ranks


@pytest.mark.parametrize(
    ("nodes", "needed", "strategy", "message"),
    [
        (
            [node("a", CPU=2.0), node("b", CPU=1.0)],
            {"CPU": 1.0},
            "PACK",
            r"^4 workers need 4 CPU \(1 each\), the Ray cluster has 3 on 2 node\(s\): 1 CPU miss",
        ),
        (
            [node("a", CPU=8.0)],
            {"CPU": 1.0, "GPU": 1.0},
            "PACK",
            r"^4 workers need 4 GPU \(1 each\), the Ray cluster has 0 on 1 node\(s\): 4 GPU miss",
        ),
        (
            [node("a", CPU=3.0), node("b", CPU=5.0)],
            {"CPU": 2.0},
            "SPREAD",
            r"^4 workers with 2 CPU each, placed by SPREAD, do not fit: Ray node 10.0.0.7 \(a, id "
            r"aaaaaaaa\) has room for 1, Ray node 10.0.0.8 \(b, id bbbbbbbb\) has room for 2$",
        ),
        ([node("a", CPU=3.0), node("b", CPU=3.0)], {"CPU": 1.0}, "STRICT_PACK", "do not fit"),
        ([node("a", CPU=9.0), node("b", CPU=9.0)], {"CPU": 1.0}, "STRICT_SPREAD", "do not fit"),
    ],
)
def test_what_a_cluster_lacks_is_named(nodes, needed, strategy, message):
    with pytest.raises(ConfigError, match=message):
        check_capacity(nodes, needed, 4, strategy)


@pytest.mark.parametrize("strategy", ["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"])
def test_a_cluster_that_fits_just_so_is_taken(strategy):
    nodes = [node("a", CPU=0.4, GPU=4.0)] * (4 if strategy == "STRICT_SPREAD" else 1)
    check_capacity(nodes, {"CPU": 0.1, "GPU": 1.0}, 4, strategy)


@pytest.mark.parametrize(
    ("options", "there", "needed"),
    [
        ({}, {"CPU": 4.0}, {"CPU": 1.0}),
        ({}, {"CPU": 4.0, "GPU": 2.0}, {"CPU": 1.0, "GPU": 1.0}),
        ({"num_gpus": 0}, {"CPU": 4.0, "GPU": 2.0}, {"CPU": 1.0}),
        ({"num_cpus": 0, "resources": {"x": 2.0}}, {"CPU": 4.0}, {"x": 2.0}),
        ({"num_cpus": 0}, {"CPU": 4.0}, {"CPU": 0.001}),
    ],
)
def test_what_a_worker_reserves(options, there, needed):
    ray = SimpleNamespace(cluster_resources=lambda: there)
    assert needed_resources(ray, RayExecutor.Options(**options)) == needed


def fake_ray(init):
    """Ray as far as joining needs it, and how often it was left."""
    ended = []
    return SimpleNamespace(
        is_initialized=lambda: False, init=init, shutdown=lambda: ended.append(1)
    )


def refuse(**settings):
    raise AssertionError(f"Ray would wait for minutes: {settings}")


@pytest.fixture
def services(monkeypatch):
    """Ray's own resolution of addresses, without Ray."""
    module = SimpleNamespace(canonicalize_bootstrap_address=lambda address: address)
    monkeypatch.setitem(sys.modules, "ray._private.services", module)
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    return module


def answering(first):
    """Listen, answer a connection with bytes; return the address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        with listener, listener.accept()[0] as connection:
            connection.recv(100)  # all that is sent
            if first is None:
                connection.recv(1)
            else:
                connection.sendall(first)

    threading.Thread(target=answer, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("nowhere", "'nowhere': expected HOST:PORT, 'auto' or 'local'; start a cluster with `ray "),
        ("a:99999", "'a:99999': expected HOST:PORT"),
        ("ray://a:1", "'ray://a:1': expected HOST:PORT.* an engine runs on a node of the cluster"),
        ("127.0.0.1:1", "'127.0.0.1:1': no Ray cluster answers at 127.0.0.1:1 within 60 s"),
        (None, "no Ray cluster answers at .* within 0.3 s .*timed out"),
        (b"SSH-2.0-OpenSSH_9", "the listener at .* is not a Ray cluster"),
    ],
)
def test_an_address_without_a_cluster_is_refused(services, address, message):
    seconds = 0.3 if address is None else 60.0
    if not isinstance(address, str):
        address = answering(address)
    options = RayExecutor.Options(address=address, join_timeout_seconds=seconds)
    with pytest.raises(ConfigError, match=f"^plugin.ray.address: .*{message}"):
        Connection(fake_ray(refuse), options, "plugin.ray")


@pytest.mark.parametrize("error", [SystemExit(15), RuntimeError("Version\nmismatch")])
def test_errors_of_ray_are_errors_of_the_configuration(services, error):
    def fail(**settings):
        raise error

    address = answering(b"\0\0\0\4\0\0\0\0\0")
    options = RayExecutor.Options(address=address, join_timeout_seconds=60.0)
    reason = "the cluster does not answer" if isinstance(error, SystemExit) else "Version mismatch"
    with pytest.raises(ConfigError, match=f"^plugin.ray.address: '{address}': {reason}; start a"):
        Connection(fake_ray(fail), options, "plugin.ray")


def test_joining_passes_what_is_configured(services):
    calls = []
    ray = fake_ray(lambda **settings: calls.append(settings))
    services.canonicalize_bootstrap_address = lambda address: resolved_address
    resolved_address = answering(b"\0\0\0\4\0\0\0\0\0")
    options = RayExecutor.Options(
        namespace="n", runtime_env={"pip": ["x"]}, join_timeout_seconds=60.0
    )
    for each in (options, RayExecutor.Options(address="local")):
        Connection(ray, each, "plugin.ray").close()
    common = {"configure_logging": False}
    assert calls == [
        {"address": resolved_address, "namespace": "n", "runtime_env": {"pip": ["x"]}, **common},
        {
            "address": "local",
            "include_dashboard": False,
            "namespace": None,
            "runtime_env": None,
            **common,
        },
    ]


class JoinedRay:
    """Ray with its one connection."""

    def __init__(self, *, joined):
        self.joined = joined

    def is_initialized(self):
        return self.joined

    def init(self, **settings):
        self.joined = True

    def shutdown(self):
        self.joined = False

    def get_runtime_context(self):
        return SimpleNamespace(gcs_address="10.0.0.1:6379")


def test_the_programs_own_connection_is_used_and_left():
    ray = JoinedRay(joined=True)
    connection = Connection(ray, RayExecutor.Options(), "plugin.ray")
    assert not connection.is_first
    connection.close()
    assert ray.joined


def test_the_last_executor_ends_a_connection():
    ray = JoinedRay(joined=False)
    first, second = (
        Connection(ray, RayExecutor.Options(address="local"), "plugin.ray") for _ in range(2)
    )
    assert (first.is_first, second.is_first) == (True, False)
    first.close()
    assert ray.joined
    second.close()
    second.close()
    assert not ray.joined


def test_a_process_is_in_one_cluster_at_a_time():
    ray = JoinedRay(joined=True)
    message = (
        "^plugin.ray.address: this process is connected with the Ray cluster at 10.0.0.1:6379, and "
        "cannot join 'b:1' as well"
    )
    with pytest.raises(ConfigError, match=message):
        Connection(ray, RayExecutor.Options(address="b:1"), "plugin.ray")
    Connection(ray, RayExecutor.Options(address="10.0.0.1:6379"), "plugin.ray")


def test_addresses_of_both_kinds():
    assert listening_address("10.0.0.1", 7) == "10.0.0.1:7"
    assert listening_address("fd00::1", 7) == "[fd00::1]:7"


def test_without_ray_the_error_has_the_command_to_install_it(installed: Installed, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    installed.offer("executors/ray", RayExecutor)
    registry = installed.resolve(executor={"use": "ray"})
    with pytest.raises(
        PluginLoadError,
        match=r"'ray' .* it needs the library ray: pip install '\S*hardpoint\[ray\]'",
    ):
        registry.create(
            registry.get("executors", "ray"),
            ExecutorContext,
            parallel=ParallelConfig(tensor=2),
            launch=None,
            start_process=None,
            progress=None,
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placement": "NEAR"}, r"plugin.ray.placement: .*NEAR"),
        ({"num_gpus": 2}, r"plugin.ray.num_gpus"),
        ({"adress": "auto"}, r"plugin.ray.*adress"),
        ({"join_timeout_seconds": 0}, r"plugin.ray.join_timeout_seconds"),
    ],
)
def test_options_are_checked(installed: Installed, options, message):
    installed.offer("executors/ray", RayExecutor)
    with pytest.raises(ConfigError, match=message):
        installed.resolve(executor={"use": "ray"}, plugin={"ray": options})
