"""The parts of Ray Serve that need no cluster: versions, options, work that waits, the router."""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.metadata
import os
import pickle
import signal
import sys
from types import SimpleNamespace

import pytest
from support.scripted_folder import write_config

from hardpoint.builtin_plugins.server.config import ServerConfig
from hardpoint.builtin_plugins.server.operations.on_ray import check_for_ray, named_values
from hardpoint.errors import EngineDeadError
from hardpoint.host.registry.discovery import installed_version
from hardpoint.plugins import (
    ConfigError,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    HardpointError,
    SamplingParams,
)
from hardpoint.testing import ScriptedClock, write_scripted_model

NEEDED = r"hardpoint.ray_serve: expected ray\[serve\]>=2.60,<2.61, for request routers change"


@pytest.fixture
def fresh_import(monkeypatch):
    """Import the package as if it had not been imported."""
    for name in [module for module in sys.modules if module.startswith("hardpoint.ray_serve")]:
        monkeypatch.delitem(sys.modules, name)
    return lambda: importlib.import_module("hardpoint.ray_serve")


@pytest.mark.parametrize(("version", "shown"), [("2.55.1", "2.55.1"), ("2.61.0", "2.61.0")])
def test_another_version_of_ray_is_refused_before_it_is_imported(
    fresh_import, monkeypatch, version, shown
):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(ConfigError, match=f"{NEEDED}.* got {shown}; pip install"):
        fresh_import()


def test_without_ray_the_extra_is_named(fresh_import, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    match = rf"{NEEDED}.* got no Ray; pip install '\S*hardpoint\[ray-serve\]'"
    with pytest.raises(ConfigError, match=match):
        fresh_import()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"uds": "/run/x"}, "server.uds: expected none with --on ray, .* got '/run/x'"),
        ({"admin": "unix:/run/x"}, "server.admin: expected none with --on ray"),
        ({"tls_key": "k.pem"}, "server.tls_key: expected none with --on ray"),
        ({"port": 0}, "server.port: expected a port with --on ray, got 0"),
    ],
)
def test_settings_of_a_listener_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        check_for_ray(ServerConfig(**settings))


def test_options_are_names_and_values():
    assert named_values(["a=1", "b=x=y"]) == {"a": "1", "b": "x=y"}
    with pytest.raises(ConfigError, match="--ray: expected NAME=VALUE, got 'a'"):
        named_values(["a"])
    with pytest.raises(ConfigError, match="--ray: expected each option once, got a twice"):
        named_values(["a=1", "a=2"])


@pytest.fixture
def ray_serve():
    return pytest.importorskip("ray.serve")


@pytest.mark.usefixtures("ray_serve")
def test_options_have_types_and_bounds():
    from hardpoint.ray_serve.options import options_of

    options = options_of({"max_engines": "4", "engine_resources": '{"fast": 1}'}, "--ray")
    assert options.max_engines == 4
    assert options.engine_resources == {"fast": 1}
    assert options_of({"name": "llm"}, "--ray").name == "llm"
    with pytest.raises(ConfigError, match="--ray.max_engines: expected 3 or more, .* got 2"):
        options_of({"min_engines": 3, "max_engines": 2}, "--ray")
    with pytest.raises(ConfigError, match="--ray.min_engines: expected .* >= 1, got 0"):
        options_of({"min_engines": "0"}, "--ray")
    with pytest.raises(ConfigError, match="--ray.*no_such"):
        options_of({"no_such": 1}, "--ray")


def test_the_builder_of_serve_run_takes_names_and_values(ray_serve, tmp_path):
    from hardpoint.ray_serve import app

    folder = write_scripted_model(tmp_path / "model")
    write_config(tmp_path, folder)
    path = str(tmp_path / "hardpoint.toml")
    assert isinstance(app({"config": path, "max_engines": "4"}), ray_serve.Application)
    with pytest.raises(ConfigError, match="app.max_engines: expected .* >= 1, got 0"):
        app({"config": path, "max_engines": "0"})


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("parallel.data = 2", "parallel.data: expected 1 on Ray Serve, .* got 2"),
        ("parallel.ray = {}", "parallel.ray: expected none on Ray Serve, .* got {'ad"),
        ("engine.journal = 'a'", "engine.journal: expected none on Ray Serve, .* got 'a'"),
    ],
)
@pytest.mark.usefixtures("ray_serve")
def test_settings_of_engines_are_refused_on_ray_serve(tmp_path, line, words):
    from hardpoint.ray_serve import app

    write_config(tmp_path, write_scripted_model(tmp_path / "model"), line)
    with pytest.raises(ConfigError, match=words):
        app({"config": str(tmp_path / "hardpoint.toml")})


class Cluster:
    """Ray and Ray Serve; notes what the application starts and ends."""

    def __init__(self, ran_before, failure, deleting=()):
        self.calls = []
        self._proxies, self._failure = ran_before and {"node": "HEALTHY"}, failure
        self._deleting = list(deleting)  # calls for the looks at the status until it is deleted

    def __getattr__(self, name):
        return lambda *_, **__: self.calls.append(name)

    def status(self):
        is_deleting = "delete llm" in self.calls and bool(self._deleting)
        if is_deleting:
            self._deleting.pop(0)()
        return SimpleNamespace(
            proxies=self._proxies, applications={"llm": 0} if is_deleting else {}
        )

    def run(self, *_, **__):
        self.calls.append("run")
        if isinstance(self._failure, Exception):
            raise self._failure
        os.kill(os.getpid(), self._failure)
        pytest.fail("the signal did not end the start")

    def delete(self, name, *, _blocking):
        assert not _blocking  # it would give up after a minute
        os.kill(os.getpid(), signal.SIGTERM)  # the cleanup goes on
        self.calls.append(f"delete {name}")

    def shutdown(self):
        os.kill(os.getpid(), signal.SIGTERM)  # the cleanup goes on
        self.calls.append("shutdown")


@pytest.fixture
def serve_on(ray_serve, monkeypatch):
    """Return a function that serves on a cluster of this file."""
    from hardpoint.ray_serve import application

    def serve(cluster):
        monkeypatch.setattr(
            application, "ray", SimpleNamespace(init=cluster.init, shutdown=cluster.end)
        )
        monkeypatch.setattr(application, "ray_serve", cluster)
        monkeypatch.setattr(application, "bound", lambda *_: None)
        monkeypatch.setattr(application, "_POLL_S", 0)
        return application.serve(None, None, None, {"name": "llm"}, ("127.0.0.1", 8000))

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield serve
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("ran_before", [False, True])
@pytest.mark.parametrize(
    ("failure", "raised"),
    [
        (signal.SIGINT, KeyboardInterrupt),
        (signal.SIGTERM, KeyboardInterrupt),
        (RuntimeError("no room"), HardpointError),
    ],
)
def test_a_start_that_ends_leaves_nothing(serve_on, ran_before, failure, raised):
    cluster = Cluster(ran_before, failure)
    with pytest.raises(raised):
        serve_on(cluster)
    middle = ["run", "delete llm"]
    if not ran_before:
        middle = ["start", *middle, "shutdown"]
    assert cluster.calls == ["init", *middle, "end"]


def test_the_end_waits_for_requests(serve_on, caplog):
    caplog.set_level("INFO", logger="hardpoint")
    looks = []
    cluster = Cluster(False, signal.SIGTERM, [lambda: looks.append(1)] * 3)
    with pytest.raises(KeyboardInterrupt):
        serve_on(cluster)
    assert len(looks) == 3
    assert cluster.calls == ["init", "start", "run", "delete llm", "shutdown", "end"]
    assert (
        "Ray Serve deletes the application 'llm': its requests may run for drain_seconds; "
        "another signal ends this wait"
    ) in caplog.text


def test_another_signal_ends_the_wait_for_requests(serve_on):
    interrupt = functools.partial(os.kill, os.getpid(), signal.SIGTERM)
    cluster = Cluster(False, signal.SIGTERM, [interrupt, pytest.fail])
    with pytest.raises(KeyboardInterrupt):
        serve_on(cluster)
    assert cluster.calls == ["init", "start", "run", "delete llm", "shutdown", "end"]


@pytest.mark.usefixtures("ray_serve")
def test_prompt_work_is_tokens_over_the_measured_rate():
    from hardpoint.ray_serve.prompt_work import PromptWork

    clock = ScriptedClock()
    work = PromptWork(clock)
    assert work.waiting_seconds == 0
    work.add("a", 1000)
    clock.advance(2)
    assert work.waiting_seconds == pytest.approx(2)  # no rate yet
    work.computed("a")
    assert work.waiting_seconds == 0
    clock.advance(100)  # idle time is no part of the rate
    work.add("b", 2000)
    work.add("c", 1000)
    assert work.waiting_seconds == pytest.approx(6)  # 500 tokens a second
    work.remove("b")
    work.computed("unknown")
    assert work.waiting_seconds == pytest.approx(2)


async def waiting_after(item, clock):
    """Return the work that waits at a replica, after a first prompt and an end of another."""
    from hardpoint.ray_serve.engine import EngineReplica
    from hardpoint.ray_serve.messages import EngineLaunch, encoded

    async def read(*names):
        requests = [
            EngineCoreRequest(request_id=name, prompt_token_ids=[1] * 1000, params=SamplingParams())
            for name in names
        ]
        return [frames async for frames in replica.run(None, encoded(requests))]

    replica = EngineReplica()
    launch = EngineLaunch(installed_version(), {"model": "m"}, {}, None, "INFO", 0, None, False)
    await replica.open(None, launch)
    first = asyncio.create_task(read("first"))
    await asyncio.sleep(0)
    clock.advance(2)
    StubClient.sink(outputs_of("first", new_token_ids=[1], finish_reason=FinishReason.STOP))
    await first
    others = asyncio.create_task(read("a", "b"))
    await asyncio.sleep(0)
    if isinstance(item, EngineCoreOutputs):
        StubClient.sink(item)
    else:
        await replica.abort(None, item)
    await asyncio.sleep(0)
    stats = await replica.record_autoscaling_stats()
    others.cancel()
    return stats["waiting_seconds"]


def outputs_of(request_id, **fields):
    return EngineCoreOutputs(outputs=[EngineCoreOutput(request_id=request_id, **fields)])


class StubClient:
    """The client of an engine process that runs nothing."""

    ready = pid = None

    def __init__(self, start, sink):
        StubClient.start, StubClient.sink = start, staticmethod(sink)

    def offer_requests(self, requests):
        return lambda: True

    def abort_requests(self, request_ids):
        pass


@pytest.mark.usefixtures("ray_serve")
@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (outputs_of("a", new_token_ids=[1]), 1),  # 2000 tokens in 2 seconds
        (outputs_of("a", finish_reason=FinishReason.STOP), 1),  # pooling
        (outputs_of("a", finish_reason=FinishReason.ERROR), 2),  # 1000 tokens in 2 seconds
        (outputs_of("a", finish_reason=FinishReason.TIMEOUT), 2),
        (EngineCoreOutputs(finished_requests={"a"}), 2),
        (["a"], 2),
    ],
    ids=["token", "pooling", "error", "timeout", "rejected", "aborted"],
)
def test_prompts_of_failed_requests_are_not_computed(monkeypatch, item, expected):
    from hardpoint.ray_serve import engine
    from hardpoint.ray_serve.prompt_work import PromptWork

    clock = ScriptedClock()
    monkeypatch.setattr(engine, "PromptWork", lambda: PromptWork(clock))
    monkeypatch.setattr(engine, "ProcessClient", StubClient)
    monkeypatch.delattr(engine.EngineReplica, "__del__")  # a coroutine, for Serve
    assert asyncio.run(waiting_after(item, clock)) == pytest.approx(expected)


@pytest.mark.usefixtures("ray_serve")
@pytest.mark.parametrize(
    ("waiting", "running", "target", "wanted"),
    [
        ([], [], 2, 2),  # nothing reported yet
        ([0.0, 0.0], [0.0, 0.0], 2, 1),
        ([6.0], [1.0], 1, 3),
        ([0.5, 0.5], [0.9, 0.8], 2, 2),  # one engine cannot run what runs
        ([0.5, 0.5, 0.0], [0.4, 0.4, 0.0], 3, 1),
        ([0.1], [1.0], 1, 1),  # a full engine alone is no reason for another
    ],
)
def test_the_policy_asks_for_engines_by_work_that_waits(waiting, running, target, wanted):
    from hardpoint.ray_serve.autoscaling import WaitingPromptWork

    metrics = {
        "waiting_seconds": dict(enumerate(waiting)),
        "running_share": dict(enumerate(running)),
    }
    context = SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=target)
    assert WaitingPromptWork(2.0)(context) == (wanted, {})


@pytest.fixture
def route(ray_serve):
    """Ask a router without a cluster for the ranks of a call, among replicas by id."""
    from hardpoint.ray_serve.router import EngineRouter

    router = EngineRouter.__new__(EngineRouter)
    router.initialize_state()

    async def ask(address, ids):
        replicas = [
            SimpleNamespace(replica_id=SimpleNamespace(unique_id=replica_id)) for replica_id in ids
        ]
        vars(router)["_replicas"] = dict(zip(ids, replicas, strict=True))  # as Ray keeps them
        pending = SimpleNamespace(
            args=[address],
            routing_context=SimpleNamespace(should_backoff=False),
            future=asyncio.get_running_loop().create_future(),
        )
        ranks = await router.choose_replicas(replicas, pending)
        assert pending.routing_context.should_backoff
        ids_by_rank = [[replica.replica_id.unique_id for replica in rank] for rank in ranks]
        return ids_by_rank, pending.future.exception() if pending.future.done() else None

    return lambda address, ids: asyncio.run(ask(address, ids))


def test_the_router_returns_the_chosen_engine_as_the_only_rank(route):
    from hardpoint.ray_serve.router import Address

    assert route(Address("b"), ["a", "b"]) == ([["b"]], None)


def test_a_call_of_a_replica_that_takes_none_fails(route):
    from hardpoint.ray_serve.router import Address

    _, error = route(Address("c"), ["a", "b"])
    assert isinstance(error, EngineDeadError)
    assert str(error) == "the replica c takes no more requests"


def test_the_router_tells_its_caller_about_replicas(route):
    from hardpoint.ray_serve.router import Address

    told = []
    address = Address(None, told.append)
    route(address, ["a"])
    route(address, ["a"])
    route(address, ["a", "b"])
    assert told == [{"a"}, {"a", "b"}]
    assert pickle.loads(pickle.dumps(address)).on_replicas is None
