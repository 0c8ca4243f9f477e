"""Workers as Ray actors: equal tokens, failures, and cleanup."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from support.processes import ROOT
from support.ray_nodes import HEAD, SECOND, two_nodes
from support.waiting import alive, wait_until

from hardpoint import LLM, EngineDeadError, HardpointError, SamplingParams
from hardpoint.builtin_plugins.executors.ray import RayExecutor
from hardpoint.errors import PluginError
from hardpoint.plugins import ConfigError, ExecutorContext, ModelError, SchedulerOutput
from hardpoint.plugins.config.engine import ParallelConfig
from hardpoint.plugins.executor import WorkerLaunch
from hardpoint.testing import ExecutorSuite

pytestmark = pytest.mark.nightly

TOKEN = "a-token-of-these-tests-alone-0123456789"
CPUS = 16  # of each node, as configured for Ray


@pytest.fixture(scope="module")
def nodes():
    with two_nodes({"RAY_AUTH_TOKEN": TOKEN}, num_cpus=CPUS) as started:
        yield started
        # Interactive programs of other tests, which have this home too, write their history.
        home = started.folder / "home"
        written = {path.name for path in home.iterdir()} - {".python_history"}
        assert written == set(), "nothing is written into the home folder"


@pytest.fixture(autouse=True)
def _nothing_left(nodes, request):
    yield
    if request.cls is not None:
        return  # the suite shares executors among its tests, and looks for what they leave
    wait_until(lambda: not actors(), what="the actors to end")
    import ray

    assert not ray.is_initialized()
    assert {"RayResults", "RayFailure"}.isdisjoint(each.name for each in threading.enumerate())


def actors():
    """The processes of actors that hold our workers, of any cluster."""
    pids = []
    for process in psutil.process_iter(["cmdline"]):
        if (process.info["cmdline"] or [""])[0].startswith("ray::RayWorker"):
            pids.append(process.pid)
    return pids


@pytest.fixture
def open_executor(nodes):
    """Make executors of workers without a model, and close them."""
    opened = []

    def make(parallel=None, data="", **options):
        parallel = parallel or ParallelConfig(tensor=2)
        options = {"address": nodes.address, "runtime_env": with_tests_on_path()} | options
        context = ExecutorContext(
            name="ray",
            options=RayExecutor.Options(**options),
            parallel=parallel,
            launch=lambda rank, placement=None: WorkerLaunch(
                "support.ray_worker:make", rank, parallel.world_size, data.encode()
            ),
            start_process=None,
            progress=lambda *progress: made.reported.append(progress),
            num_batches=parallel.pipeline,
        )
        made = RayExecutor(context)
        made.reported = []
        opened.append(made)
        return made

    yield make
    for each in opened:
        each.close()


def with_tests_on_path(**more):
    return {"env_vars": {"PYTHONPATH": path_after(ROOT / "tests"), **more}}


def path_after(folder):
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def pids(executor):
    return [int(each.split()[0]) for each in executor.collective_rpc("stop_profile")]


# The calls of an executor


def test_calls_come_in_order_and_one_rank_gives_the_result(open_executor):
    executor = open_executor(ParallelConfig(pipeline=2))
    assert executor.max_concurrent_batches == 2
    assert [info.available_bytes for info in executor.start()] == [100, 101]
    steps = [executor.execute_model(SchedulerOutput(step=step)) for step in range(1, 30)]
    seen = [list(step.result(30).num_nans_in_logits.values()) for step in steps]
    assert seen == [list(range(1, n + 1)) for n in range(1, 30)]
    assert [[*each] for each in executor.collective_rpc("plugin_meters")] == [
        [str(step) for step in range(1, 30)]
    ] * 2


def test_a_long_plan_is_stored_once(open_executor):
    executor = open_executor()
    executor.start()
    names = frozenset(f"{n:0100d}" for n in range(3000))
    plan = SchedulerOutput(step=1, finished_request_ids=names)
    assert executor.execute_model(plan).result(30).num_nans_in_logits == {"1": 1}


def test_errors_of_a_rank_reach_the_caller_and_the_next_step_runs(open_executor):
    executor = open_executor()
    executor.start()
    with pytest.raises(HardpointError, match="no such step") as caught:
        executor.execute_model(SchedulerOutput(step=666)).result(30)
    assert "In rank 0 (process " in caught.value.__notes__[-1]
    assert executor.execute_model(SchedulerOutput(step=2)).result(30) is not None


def test_a_call_of_all_ranks_has_a_limit(open_executor):
    executor = open_executor()
    executor.start()
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"start_parts: rank 1 .* did not answer within 0.5 s"):
        executor.collective_rpc("start_parts", ("3",), timeout=0.5)
    assert time.monotonic() - began < 30


def test_progress_is_that_of_the_slowest(open_executor):
    executor = open_executor(data="slow load")
    executor.start()
    assert executor.reported
    assert {stage for stage, _, _ in executor.reported} == {"weights"}


def test_the_start_line_has_the_places_of_ranks_and_the_time_to_notice_a_lost_node(
    open_executor, nodes, caplog
):
    caplog.set_level(logging.INFO, "hardpoint")
    executor = open_executor(placement="STRICT_SPREAD")
    executor.start()
    assert f"executor ray: Ray cluster at {nodes.address}; rank 0 (process " in caplog.text
    assert HEAD in caplog.text
    assert SECOND in caplog.text
    assert "the loss of a node is noticed within about 6 s" in caplog.text


def test_workers_close_with_the_executor(open_executor, tmp_path):
    executor = open_executor(data=str(tmp_path))
    executor.start()
    mine = pids(executor)
    executor.close()
    executor.close()
    assert {path.name for path in tmp_path.iterdir()} == {"abort 0", "abort 1", "0", "1"}
    wait_until(lambda: not any(map(alive, mine)))
    with pytest.raises(HardpointError, match="was closed"):
        executor.execute_model(SchedulerOutput(step=1)).result(30)


def test_runtime_env_passes_through(open_executor):
    executor = open_executor(runtime_env=with_tests_on_path(SMALL_WORKER="here"))
    executor.start()
    assert {each.split()[1] for each in executor.collective_rpc("stop_profile")} == {"here"}


def test_a_connection_of_the_program_is_used_and_left(open_executor, nodes):
    import ray

    ray.init(address=nodes.address, configure_logging=False)
    try:
        executor = open_executor(address="auto")
        executor.start()
        executor.close()
        assert ray.is_initialized()
        groups = ray.util.placement_group_table().values()
        assert {group["state"] for group in groups} <= {"REMOVED"}
    finally:
        ray.shutdown()


def test_what_actors_print_does_not_go_to_the_programs_stdout(open_executor, capfd):
    import ray

    executor = open_executor()
    executor.start()
    prints = [
        rank.actor.__ray_call__.remote(lambda _: print("printed", flush=True))
        for rank in executor._ranks
    ]
    ray.get(prints)
    out = err = ""

    def is_repeated():
        nonlocal out, err
        more_out, more_err = capfd.readouterr()
        out, err = out + more_out, err + more_err
        return "printed" in out + err

    wait_until(is_repeated)
    assert "printed" not in out


class TestConformance(ExecutorSuite):
    executor = RayExecutor
    parallel = ((2, 1), (1, 2))
    communicator = "torch"
    failure_seconds = 60.0

    def lose_worker(self, executor, rank):
        os.kill(executor.worker_pids[rank], signal.SIGKILL)


# Reports when something is lost


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_actor_is_reported_once_while_idle(open_executor, rank):
    executor = open_executor()
    executor.start()
    reported = []
    executor.on_failure(reported.append)
    pid = pids(executor)[rank]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: reported)
    assert str(reported[0]).startswith(
        f"executor 'ray': lost rank {rank} (process {pid}) on Ray node"
    )
    with pytest.raises(HardpointError, match="lost rank"):
        executor.execute_model(SchedulerOutput(step=1)).result(30)
    executor.close()
    assert len(reported) == 1


def test_a_killed_actor_is_reported_in_mid_step(open_executor):
    executor = open_executor(ParallelConfig(pipeline=2))
    executor.start()
    reported = []
    executor.on_failure(reported.append)
    pid = pids(executor)[0]
    steps = [executor.execute_model(SchedulerOutput(step=step)) for step in (20_000, 20_001)]
    time.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    for step in steps:
        with pytest.raises(HardpointError, match="lost rank 0"):
            step.result(60)
    wait_until(lambda: reported)
    assert len(reported) == 1


def test_an_actor_killed_while_loading_ends_the_start(open_executor):
    executor = open_executor(data="slow load")
    killed = []

    def kill():
        wait_until(lambda: executor.reported)
        killed.append(min(actors()))
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(HardpointError, match=r"lost rank \d"):
        executor.start()
    killer.join()
    assert killed


def test_ranks_that_wait_for_a_lost_one_are_stopped(open_executor, tmp_path):
    executor = open_executor(data=str(tmp_path))
    executor.start()
    os.kill(pids(executor)[0], signal.SIGKILL)
    written = tmp_path / "abort 1"
    wait_until(lambda: written.exists() and "lost rank 0" in written.read_text())


def test_a_killed_node_is_reported(open_executor, nodes):
    executor = open_executor(placement="STRICT_SPREAD")
    executor.start()
    reported = []
    executor.on_failure(reported.append)
    try:
        nodes.kill_second()
        wait_until(lambda: reported)
        assert SECOND in str(reported[0])
        executor.close()
    finally:
        nodes.add()


# What is refused at start


def test_an_address_that_does_not_answer_is_refused_in_time(open_executor):
    executor = open_executor(address=f"{HEAD}:1", join_timeout_seconds=3)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"plugin.ray.address: '127.0.0.2:1': no Ray cluster"):
        executor.start()
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_cpus": 20}, r"2 workers need 40 CPU \(20 each\), .* has 32 on 2 .* 8 CPU missing"),
        ({"num_gpus": 1}, r"2 workers need 2 GPU \(1 each\), .* has 0 on 2 node\(s\): 2 GPU miss"),
        ({"resources": {"tpu": 1}}, r"need 2 tpu .* has 0"),
        ({"num_cpus": 9, "placement": "STRICT_PACK"}, r"9 CPU each, placed by STRICT_PACK, do not"),
    ],
)
def test_too_few_resources_are_named(open_executor, options, message):
    with pytest.raises(ConfigError, match=f"plugin.ray: .*{message}"):
        open_executor(**options).start()


def test_resources_that_others_use_are_waited_for_so_long(open_executor):
    first = open_executor(num_cpus=CPUS)
    first.start()
    second = open_executor(start_timeout_seconds=1)
    with pytest.raises(HardpointError, match=r"no room for 2 workers within 1 s: .* 2 CPU more"):
        second.start()
    second.close()
    assert len(pids(first)) == 2


def test_an_error_at_open_names_the_node(open_executor):
    executor = open_executor(data="open", placement="STRICT_SPREAD")
    with pytest.raises(
        HardpointError, match=r"^Ray node 127.0.0.[23] \(.*\): torch: the engine has version 1"
    ):
        executor.start()


def test_an_error_while_loading_does_not_wait_for_others(open_executor):
    with pytest.raises(ModelError, match=r"^Ray node 127.0.0.[23] .*: the weights are of"):
        open_executor(data="load").start()


def test_hardpoint_missing_on_a_node_is_named(open_executor, tmp_path):
    (tmp_path / "hardpoint").mkdir()
    (tmp_path / "hardpoint" / "__init__.py").write_text("")
    environment = {"env_vars": {"PYTHONPATH": path_after(tmp_path)}}
    with pytest.raises(PluginError, match=r"Ray node 127.0.0.\d .*: Hardpoint is not installed"):
        open_executor(runtime_env=environment).start()


# Whole engines


PROMPTS = [[(7 * i + j) % 250 for j in range(3 + 5 * i)] for i in range(8)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    from hardpoint.testing import write_scripted_model

    folder = write_scripted_model(tmp_path_factory.mktemp("llama"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 257,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "eos_token_id": 256,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def settings(nodes, tensor, pipeline, **options):
    several = tensor * pipeline > 1
    return {
        "dtype": "float32",
        "load": {"use": "dummy"},
        "kv_cache": {"num_blocks": 64},
        "scheduler": {"max_num_batched_tokens": 64},
        "executor": {"use": "ray" if several else "uniproc"},
        "parallel": {"tensor": tensor, "pipeline": pipeline},
        "plugin": {"ray": {"address": nodes.address, **options}} if several else {},
    }


def generate(folder, config):
    params = [
        SamplingParams(temperature=i % 2, seed=i, max_tokens=16, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    with LLM(str(folder), config=config) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize(
    ("tensor", "pipeline", "placement"),
    [(2, 1, "PACK"), (2, 1, "STRICT_SPREAD"), (1, 2, "STRICT_SPREAD"), (2, 2, "SPREAD")],
)
def test_the_tokens_are_those_of_one_process(nodes, llama, tensor, pipeline, placement):
    alone = generate(llama, settings(nodes, 1, 1))
    config = settings(nodes, tensor, pipeline, placement=placement)
    assert generate(llama, config) == alone


def test_an_engine_process_joins_the_cluster_by_itself(nodes, llama):
    alone = generate(llama, settings(nodes, 1, 1))
    config = settings(nodes, 1, 2) | {"engine": {"in_process": False}}
    assert generate(llama, config) == alone


def test_a_killed_actor_ends_the_engine_process(nodes, llama):
    config = settings(nodes, 1, 2) | {"engine": {"in_process": False}}
    with LLM(str(llama), config=config) as llm:
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=2))
        os.kill(actors()[0], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"executor 'ray': lost rank \d"):
            llm.generate(PROMPTS, SamplingParams(max_tokens=200, ignore_eos=True))


def test_a_killed_program_leaves_nothing_in_the_cluster(nodes, llama):
    code = (
        "import json, sys\n"
        "from hardpoint import LLM\n"
        "llm = LLM(sys.argv[1], config=json.loads(sys.argv[2]))\n"
        "print('READY', flush=True)\n"
        "sys.stdin.read()\n"
    )
    run = [sys.executable, "-c", code, str(llama), json.dumps(settings(nodes, 1, 2))]
    with subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        try:
            while (line := program.stdout.readline()) and "READY" not in line:
                pass
            assert len(actors()) == 2
        finally:
            program.kill()
    wait_until(lambda: not actors())
    import ray

    ray.init(address=nodes.address, configure_logging=False)
    try:
        wait_until(lambda: ray.available_resources().get("CPU") == 2 * CPUS)
    finally:
        ray.shutdown()


def test_a_plugin_missing_on_a_node_is_named(nodes, llama, tmp_path, monkeypatch):
    (tmp_path / "lonely.py").write_text(
        "from hardpoint.plugins import LogitsProcessor, Phase\n"
        "class Lonely(LogitsProcessor):\n"
        "    contract = 1\n"
        "    phase = Phase.BIAS\n"
        "    def apply(self, logits, rows):\n"
        "        return logits\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = settings(nodes, 1, 2) | {
        "plugins": {"enable": [{"use": "lonely:Lonely", "name": "lonely"}]}
    }
    with pytest.raises(PluginError, match=r"Ray node 127.0.0.\d .*lonely"):
        generate(llama, config)
    environment = {"env_vars": {"PYTHONPATH": path_after(tmp_path)}}
    config["plugin"]["ray"]["runtime_env"] = environment
    assert len(generate(llama, config)) == len(PROMPTS)


def test_a_cluster_of_its_own_ends_with_the_engine(llama, nodes):
    code = (
        "import json, sys\n"
        "from hardpoint import LLM, SamplingParams\n"
        "folder, config = sys.argv[1], json.loads(sys.argv[2])\n"
        "with LLM(folder, config=config) as llm:\n"
        "    llm.generate([[1, 2]], SamplingParams(max_tokens=2))\n"
        "import psutil\n"
        "left = [p.name() for p in psutil.Process().children(recursive=True)]\n"
        "print('LEFT', sorted({n for n in left if 'raylet' in n or 'gcs' in n}))\n"
    )
    config = settings(nodes, 1, 2, address="local")
    run = [sys.executable, "-c", code, str(llama), json.dumps(config)]
    ran = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert "LEFT []" in ran.stdout, ran.stdout + ran.stderr


def test_the_command_exits_with_2_when_no_cluster_answers(nodes, llama):
    environment = os.environ | {"RAY_ADDRESS": f"{HEAD}:1"}
    run = [sys.executable, "-m", "hardpoint", "generate", "--model", str(llama), "a"]
    run += ["--set", "executor.use=ray", "--set", "parallel.pipeline=2", "--set", "load.use=dummy"]
    ran = subprocess.run(run, capture_output=True, text=True, timeout=120, env=environment)
    assert ran.returncode == 2, ran.stderr
    assert "plugin.ray.address: 'auto': no Ray cluster answers at 127.0.0.2:1" in ran.stderr
