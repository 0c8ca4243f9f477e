"""Ranks that cannot work: one clear error each, exit code 2, and nothing is left running."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile

import psutil
import pytest
import torch
from safetensors.torch import save_file
from support.parallel import write_random_model
from support.process.fork_server import STARTS
from support.process.forked_python import forked_python
from support.shared_memory import our_shared_memory
from support.waiting import wait_until

from hardpoint import LLM, ConfigError, HardpointError, SamplingParams, typed
from hardpoint.core.engine.prepare import prepare_worker
from hardpoint.core.engine.worker_launch import WorkerLauncher
from hardpoint.errors import ModelError, PluginFaultError, PluginLoadError
from hardpoint.host.boundary.activity import Activity
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins import EngineConfig
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.executor import open_worker
from hardpoint.testing import scripted_config

BROKEN = "support.plugins.parallel_broken"
NOT_HERE = """
import os
if os.environ["HARDPOINT_TEST_ENGINE"] != str(os.getpid()):
    raise ImportError("not in a worker")
from support.plugins.parallel_forms import Waves as Absent
"""


def several(tensor=1, pipeline=1, **parallel):
    return {
        "executor": {"use": "multiproc"},
        "parallel": {"tensor": tensor, "pipeline": pipeline, **parallel},
    }


@pytest.fixture(autouse=True)
def nothing_left(tmp_path, monkeypatch):
    """Neither a process, nor shared memory, nor a temporary folder remains."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    forked_python()  # it and the server have processes of their own from now on
    STARTS.start_server()
    processes, shared = _processes(), set(our_shared_memory())
    yield
    wait_until(lambda: _processes() <= processes, what="the end of the workers")
    wait_until(lambda: set(our_shared_memory()) <= shared, what="the end of shared memory")
    assert list(folder.glob("hardpoint-*")) == []


def _processes():
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.fixture
def llama(tmp_path):
    folder = write_random_model(tmp_path / "llama", "LlamaForCausalLM")
    save_file({"other": torch.zeros(1)}, folder / "model.safetensors")  # not read that far
    return {"model": str(folder), "device": "cpu", "dtype": "float32"}


def fails(config, kind, message):
    with pytest.raises(kind, match=message) as raised:
        LLM(config=config)
    assert type(raised.value) is kind
    return str(raised.value)


def test_one_worker_cannot_be_several(llama):
    message = (
        r"executor.use: 'uniproc' runs one worker, parallel asks for 4 \(tensor 2 x pipeline 2\); "
        r"'multiproc' runs several"
    )
    fails(llama | {"parallel": {"tensor": 2, "pipeline": 2}}, ConfigError, message)


def test_models_report_how_they_can_be_divided(scripted):
    def config(name, **ranks):
        config = scripted_config(scripted, several(**ranks))
        config["plugins"]["enable"] = [{"use": f"{BROKEN}:{name}", "name": "ScriptedForCausalLM"}]
        return config

    message = "parallel.tensor: plugin 'ScriptedForCausalLM'.*cannot be divided in this way.*: none"
    fails(config("Whole", tensor=2), ModelError, message)
    message = "parallel.tensor: .*in `parallelism`: parallel.pipeline"
    fails(config("Layered", tensor=2, pipeline=2), ModelError, message)


def test_experts_need_a_mixture_of_experts(llama):
    message = "parallel.expert: plugin 'LlamaForCausalLM'.*: parallel.tensor, parallel.pipeline"
    fails(llama | several(tensor=2, expert=True), ModelError, message)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"communicator": "pigeon"}, "parallel.communicator: .*'pigeon'.*found: .*torch"),
        ({"tensor": 0}, "parallel.tensor: expected a whole number >= 1, got 0"),
        ({"start_seconds": 0}, "parallel.start_seconds: expected a number > 0, got 0"),
        ({"data": 0}, "parallel.data: expected a whole number >= 1, got 0"),
    ],
)
def test_settings(scripted, parallel, message):
    config = scripted_config(scripted, several(**{"tensor": 2, **parallel}))
    with pytest.raises(HardpointError, match=message + r".*\(from argument LLM"):
        LLM(config=config)


@pytest.mark.parametrize("name", ["NoInfos", "OneInfo", "OtherThings"])
def test_an_executor_without_an_info_per_rank(scripted, name):
    ranks = {"executor": {"use": f"{BROKEN}:{name}"}, "parallel": {"tensor": 2}}
    message = rf"{BROKEN}:{name}.*its start\(\) gave .*, expected a list of 2 WorkerInfo"
    fails(scripted_config(scripted, ranks), PluginFaultError, message)


def test_more_ranks_than_devices(scripted, monkeypatch):
    """The second rank of a host with one GPU; that is noticed before any device is touched."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    sources = ConfigSources({})
    settings = scripted_config(scripted, several(tensor=2) | {"device": "cuda"})
    config = typed.convert(settings, EngineConfig, path="")
    plugins = resolve_plugins(config, sources)
    spec = prepare_worker(config, plugins, sources, lambda *_: None)
    with contextlib.closing(WorkerLauncher(spec, sources, Activity())) as launcher:
        message = r"parallel: 2 ranks run on .* rank 1 needs CUDA device 1 .*CUDA_VISIBLE_DEVICES"
        with pytest.raises(ConfigError, match=message):
            open_worker(launcher.launch(1))
        open_worker(launcher.launch(0)).close()


PROGRAM_CASES = [
    pytest.param(
        ["executor.use=multiproc", "parallel.tensor=3"],
        "hardpoint: error: parallel.tensor: 8 attention heads cannot be divided among 3 ranks",
        id="heads",
    ),
    pytest.param(
        ["executor.use=multiproc", "parallel.pipeline=4"],
        "parallel.pipeline: expected at most 3, the model's number of layers, got 4",
        id="layers",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        ["parallel.tensor=2"],
        "executor.use: 'uniproc' runs one worker",
        id="uniproc",
    ),
    pytest.param(
        ["executor.use=multiproc", "parallel.tensor=2", "parallel.start_seconds=0.001"],
        "within 0.001 s",
        id="rendezvous",
        marks=pytest.mark.nightly,
    ),
]


@pytest.mark.parametrize(("settings", "message"), PROGRAM_CASES)
def test_the_program_ends_with_code_2(llama, tmp_path, settings, message):
    sets = [part for setting in settings for part in ("--set", setting)]
    command = ["-m", "hardpoint", "generate", "x", "--model", llama["model"], *sets]
    done = forked_python().run(command, tmp_path, dict(os.environ))
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.nightly
def test_a_plugin_that_cannot_be_imported_in_a_worker(scripted, tmp_path, monkeypatch):
    (tmp_path / "absent_there.py").write_text(NOT_HERE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HARDPOINT_TEST_ENGINE", str(os.getpid()))
    plugins = {"plugins": {"enable": ["absent_there:Absent"]}}
    message = (
        r"plugin 'absent'.*plugins.enable\[1\].*its import failed: ImportError: not in a worker"
    )
    fails(scripted_config(scripted, several(tensor=2) | plugins), PluginLoadError, message)
    sys.modules.pop("absent_there")


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [{"tensor": 2}, {"pipeline": 2}])
def test_a_plugin_that_may_end_the_engine_ends_it_at_once(scripted, ranks):
    """The ranks that wait for the sampling rank do not hang."""
    plugins = {"enable": [f"{BROKEN}:BreaksLate"], "on_error": {"breaks_late": "engine"}}
    config = scripted_config(scripted, several(**ranks) | {"plugins": plugins})
    params = SamplingParams(max_tokens=9, ignore_eos=True, plugin_args={"breaks_late": {}})
    with LLM(config=config) as llm:
        for _ in range(2):  # the second call is told the same
            with pytest.raises(HardpointError, match="breaks_late.*broken in process"):
                llm.generate("x", params)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (several(3), r"parallel\.tensor: 8 attention heads cannot be divided among 3 ranks; 2, 4"),
        (several(1, 5), r"parallel\.pipeline: expected at most 3, the model's number of layers"),
    ],
)
def test_what_cannot_be_divided_starts_no_process(llama, monkeypatch, parallel, message):
    monkeypatch.setattr(WorkerLauncher, "start_process", lambda *_: pytest.fail("it was started"))
    fails(llama | parallel, ModelError, message)
