"""Engines in actors of a Ray cluster of two nodes: the tokens of one engine, whatever is lost."""

from __future__ import annotations

import os
import runpy
import signal
import time
from functools import partial

import psutil
import pytest
from support.process.harness import process_config
from support.process.slow_requests import interrupted
from support.processes import ROOT
from support.ray_nodes import HEAD, SECOND, two_nodes
from support.waiting import PATIENCE_S, alive, wait_until
from test_joined_engines import GREEDY, PLUGINS, back, results

from hardpoint import LLM, EngineDeadError, HardpointError
from hardpoint.plugins import ConfigError
from hardpoint.testing import scripted_config

pytestmark = pytest.mark.nightly

NUM_CPUS = 4  # of each node, as configured for Ray


@pytest.fixture(scope="module")
def nodes():
    path = os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    with two_nodes({"PYTHONPATH": path}, num_cpus=NUM_CPUS) as started:
        yield started


@pytest.fixture(autouse=True)
def _nothing_left(nodes):
    yield
    wait_until(lambda: not actors(), what="the actors to end")
    import ray

    assert not ray.is_initialized()


def actors():
    """The process ids of actors that have our engines, of any cluster."""
    pids = []
    for process in psutil.process_iter(["cmdline"]):
        if (process.info["cmdline"] or [""])[0].startswith("ray::EngineActor"):
            pids.append(process.pid)
    return pids


def config_of(scripted, parallel=None, **engine):
    table = {"data": 2, "ray": {}, "heartbeat_seconds": 10.0, "balancer": "round_robin"}
    engine = {"restart": "on_failure", "max_resumes": 9} | engine
    return process_config(
        scripted, {"parallel": table | (parallel or {}), "engine": engine} | PLUGINS
    )


def on_ray(scripted, parallel=None, **engine) -> LLM:
    return LLM(config=config_of(scripted, parallel, **engine))


@pytest.fixture(scope="module")
def expected(scripted):
    with LLM(config=process_config(scripted, PLUGINS)) as llm:
        return results(llm)


def parent(llm, rank):
    """The actor of an engine."""
    return psutil.Process(llm.engines[rank].pid).parent()


def node_of(llm, rank):
    """The IP address of the Ray node that an engine runs on."""
    option = "--node_ip_address="
    arguments = parent(llm, rank).parent().cmdline()  # of the node's raylet
    return next(
        argument.removeprefix(option) for argument in arguments if argument.startswith(option)
    )


@pytest.fixture
def while_running(tmp_path):
    """Run requests; do something once an engine has given tokens; let them end."""

    def run(llm, rank, do):
        return interrupted(partial(results, llm), llm.engines[rank], do, tmp_path)

    return run


def kill_node(nodes, pid):
    """Kill the second node, and wait until the process of its engine has ended as well."""
    nodes.kill_second()
    wait_until(lambda: not alive(pid), PATIENCE_S, "the engine of the killed node to end")


def test_engines_on_two_nodes_give_the_tokens_of_one(scripted, expected):
    with on_ray(scripted) as llm:
        assert {node_of(llm, 0), node_of(llm, 1)} == {HEAD, SECOND}
        assert results(llm) == expected
        assert [engine.state for engine in llm.engines.load().engines] == ["serving"] * 2
        pids = [handle.pid for handle in llm.engines]
    wait_until(lambda: not any(map(alive, pids)), what="the engines to end")


def test_an_engine_or_an_actor_that_is_killed_is_replaced(scripted, expected, while_running):
    with on_ray(scripted) as llm:
        first, second = (engine.pid for engine in llm.engines)
        outputs = while_running(llm, 1, lambda: os.kill(second, signal.SIGKILL))
        assert outputs == expected
        back(llm, before=second)
        outputs = while_running(llm, 0, lambda: parent(llm, 0).kill())
        assert outputs == expected
        back(llm, 0, first)
        assert results(llm) == expected


def test_requests_go_on_when_a_node_is_killed_and_its_engine_comes_back(
    scripted, expected, nodes, while_running
):
    with on_ray(scripted, {"ray": {"num_cpus": 3}}) as llm:
        rank = next(n for n in range(2) if node_of(llm, n) == SECOND)
        before = llm.engines[rank].pid
        try:
            assert while_running(llm, rank, partial(kill_node, nodes, before)) == expected
            wait_until(lambda: llm.engines[rank].pid is None, PATIENCE_S, "the loss of the engine")
            time.sleep(1)
            assert llm.engines[rank].pid is None  # the other node has no room for it
        finally:
            nodes.add()
        back(llm, rank, before)
        assert node_of(llm, rank) == SECOND
        assert results(llm) == expected


def test_an_engine_of_a_killed_node_goes_to_another_one(scripted, expected, nodes, while_running):
    with on_ray(scripted) as llm:
        rank = next(n for n in range(2) if node_of(llm, n) == SECOND)
        before = llm.engines[rank].pid
        try:
            assert while_running(llm, rank, partial(kill_node, nodes, before)) == expected
            back(llm, rank, before)
            assert node_of(llm, rank) == HEAD
            assert results(llm) == expected
        finally:
            nodes.add()


def test_engines_come_and_go_under_load(scripted, expected, while_running):
    with on_ray(scripted, {"data": 1}) as llm:
        outputs = while_running(llm, 0, lambda: llm.engines.scale(2))
        assert outputs == expected
        assert {node_of(llm, 0), node_of(llm, 1)} == {HEAD, SECOND}
        gone = llm.engines[1].pid
        outputs = while_running(llm, 1, lambda: llm.engines.scale(1, drain_seconds=0.1))
        assert outputs == expected
        assert [engine.rank for engine in llm.engines] == [0]
        wait_until(lambda: not alive(gone), what="the engine to end")
        wait_until(lambda: len(actors()) == 1, what="its actor to end")
        with pytest.raises(HardpointError, match=r"parallel.ray: 9 engines need 9 CPU .* has 8"):
            llm.engines.scale(9)
        assert [engine.rank for engine in llm.engines] == [0]
        assert results(llm) == expected


def test_local_engines_and_those_on_ray_serve_together(scripted, expected):
    with on_ray(scripted, {"data": 3, "local": 1}) as llm:
        assert parent(llm, 0).pid == os.getpid()
        assert {node_of(llm, 1), node_of(llm, 2)} == {HEAD, SECOND}
        assert results(llm) == expected


def test_ranks_of_an_engine_are_on_one_node(scripted, expected):
    config = config_of(scripted, {"tensor": 2, "ray": {"num_cpus": 2}})
    with LLM(config=config | {"executor": {"use": "multiproc"}}) as llm:
        assert {node_of(llm, 0), node_of(llm, 1)} == {HEAD, SECOND}
        assert results(llm) == expected


def test_one_engine_that_dies_without_restart_ends_with_its_name(scripted):
    with on_ray(scripted, {"data": 1}, restart="never") as llm:
        pid = llm.engines[0].pid
        os.kill(pid, signal.SIGKILL)
        message = rf"\(pid {pid} on Ray node 127.0.0.\d .* \(SIGKILL\)"
        with pytest.raises(EngineDeadError, match=message):
            llm.generate("a", GREEDY)


def test_a_connection_of_the_program_is_used_and_left(scripted, nodes, expected):
    import ray

    ray.init(address=nodes.address, configure_logging=False)
    try:
        with on_ray(scripted) as llm:
            assert results(llm) == expected
        assert ray.is_initialized()
        groups = ray.util.placement_group_table().values()
        assert {group["state"] for group in groups} <= {"REMOVED"}
    finally:
        ray.shutdown()


@pytest.mark.parametrize(
    ("share", "message"),
    [
        ({"num_cpus": 5}, r"2 engines need 10 CPU \(5 each\), the Ray cluster has 8 on 2 node"),
        ({"num_gpus": 1}, r"2 engines need 2 GPU \(1 each\), .* has 0 on 2 .* 2 GPU missing"),
        ({"resources": {"tpu": 1}}, r"need 2 tpu .* has 0"),
        ({"address": f"{HEAD}:1"}, r".address: '127.0.0.2:1': no Ray cluster answers"),
    ],
)
def test_a_cluster_that_is_too_small_or_absent_is_refused(scripted, share, message):
    with pytest.raises(ConfigError, match=f"^parallel.ray.*{message}"):
        on_ray(scripted, {"ray": share})


def test_what_others_use_is_waited_for(scripted, nodes):
    import ray

    ray.init(address=nodes.address, configure_logging=False)
    try:
        group = ray.util.placement_group([{"CPU": NUM_CPUS}] * 2, strategy="SPREAD")
        assert group.wait(PATIENCE_S)
        message = r"no room for 1 engine within 1 s \(parallel.join_seconds\): others use it; 1 CPU"
        with pytest.raises(HardpointError, match=message):
            on_ray(scripted, {"join_seconds": 1.0})
        ray.util.remove_placement_group(group)
    finally:
        ray.shutdown()


def test_what_a_node_lacks_is_named(scripted, tmp_path):
    """The nodes are of this machine, so that a model vanishes from all at once."""
    import shutil

    copied = tmp_path / "model"
    shutil.copytree(scripted, copied)
    with on_ray(copied, {"data": 1}) as llm:
        shutil.rmtree(copied)
        with pytest.raises(HardpointError, match=r"engine 1 of 2: Ray node 127.0.0.\d .*model"):
            llm.engines.scale(2)
        assert [engine.rank for engine in llm.engines] == [0]


def test_the_example_completes_with_two_engines_with_three_and_with_one(scripted, capsys):
    path = ROOT / "examples" / "engines_on_ray.py"
    example = runpy.run_path(str(path))
    config = scripted_config(scripted)
    runs = example["main"](config.pop("model"), ["say abc"], **config)
    assert [outputs[0].outputs[0].text for outputs in runs] == [" abc abc abc"] * 3
    assert capsys.readouterr().out == (
        "engines: 0, 1, 2\nengines: 0\n'say abc' -> ' abc abc abc'\n"
    )
