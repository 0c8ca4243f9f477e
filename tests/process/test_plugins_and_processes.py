"""Plugins that change or copy the process in which they run, or never return."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from support.process.harness import pid_of, process_config
from support.samples import Sample
from support.waiting import PATIENCE_S, alive, wait_until

from hardpoint import LLM, SamplingParams, plugins
from hardpoint.builtin_plugins.executors.uniproc import UniprocExecutor
from hardpoint.builtin_plugins.scheduling import DefaultScheduler
from hardpoint.plugins import LogitsProcessor, Phase, hookimpl
from hardpoint.process.child_processes.children import kill_children
from hardpoint.process.child_processes.process import ChildProcess
from hardpoint.testing import scripted_config

HERE = __name__
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


class NoErrors(LogitsProcessor):
    """Takes the program's stderr away."""

    contract = 1
    phase = Phase.MASK

    def apply(self, logits, rows):
        sys.stderr = None
        return logits


PLACES = pytest.mark.parametrize(
    "extra",
    [
        pytest.param({}, id="one"),
        pytest.param({"executor": {"use": "multiproc"}}, id="worker", marks=pytest.mark.nightly),
    ],
)
"""Processes in which plugins run: that of the engine, or of its worker."""


@PLACES
def test_an_engine_without_stderr_goes_on(scripted, extra):
    plugins = {"plugins": {"enable": [f"{HERE}:NoErrors"]}}
    # Set again every 0.3 s; one that fires prints stacks of a thread that imports modules, in which
    # Python may crash.
    watched = {"engine": {"watchdog_seconds": 3}}
    with LLM(config=process_config(scripted, plugins | extra | watched)) as llm:
        end = time.monotonic() + 1
        while time.monotonic() < end:
            assert llm.generate("say abc", GREEDY)[0].outputs[0].text == " abc a"


def test_the_children_of_a_process_that_ends_at_once_are_killed():
    """As where the parent has ended, and this process does not end in order."""
    ours, theirs = socket.socketpair()
    popen = subprocess.Popen(["sleep", "60"])
    child = ChildProcess(popen, ours)
    kill_children()
    assert popen.wait(PATIENCE_S) == -9
    kill_children()
    child.close()
    theirs.close()


class KeepsTheLock(LogitsProcessor):
    """Never returns, and lets no other thread of its process run."""

    contract = 1
    phase = Phase.MASK

    def apply(self, logits, rows):
        re.match("(a+)+$", "a" * 60 + "b")


class Forks(LogitsProcessor):
    """Copies its process once, and writes down the id of the copy, which returns as this does."""

    contract = 1
    phase = Phase.MASK

    def __init__(self, context):
        super().__init__(context)
        if self.options.method == "__init__":
            self.copy_process()

    class Options(plugins.Options):
        path: str
        method: str = "apply"

    def start(self, request):
        if self.options.method == "start":
            self.copy_process()

    def apply(self, logits, rows):
        if self.options.method == "apply":
            self.copy_process()
        return logits

    def copy_process(self):
        path = Path(self.options.path)
        if not path.exists():
            path.touch()
            if (pid := os.fork()) != 0:
                path.write_text(str(pid))


class Threads(Sample, Forks, contract=1):
    """Is copied in a thread that it starts itself."""

    def copy_process(self):
        thread = threading.Thread(target=super().copy_process)
        thread.start()
        thread.join()


class Plans:
    """Is copied in a hook of steps."""

    contract = 1

    class Options(plugins.Options):
        path: str

    def __init__(self, context):
        self.path = Path(context.options.path)

    @hookimpl
    def step_planned(self, record):
        if not self.path.exists():
            self.path.touch()
            if (pid := os.fork()) != 0:
                self.path.write_text(str(pid))


class Works(Sample, Forks, contract=1):
    """Has a process that it forks do some work."""

    def copy_process(self):
        numbers = multiprocessing.get_context("fork").Pool(1).map(abs, [-1, -2])
        Path(self.options.path).write_text(str(numbers))


class Ends(Sample, Forks, contract=1):
    """Forks a process that would sleep, and ends it by a signal."""

    def copy_process(self):
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        process.start()
        process.terminate()
        process.join()
        Path(self.options.path).write_text(str(process.exitcode))


def copy_process(method):
    """Fork at the first call of the method, if the environment names it."""
    path = Path(os.environ["TESTS_COPY"])
    if path.name == method and not path.exists():
        path.touch()
        if (pid := os.fork()) != 0:
            path.write_text(str(pid))


class Scheduler(Sample, DefaultScheduler, contract=2):
    """Is copied in one of its methods."""

    def add_request(self, request):
        super().add_request(request)
        copy_process("add_request")

    def schedule(self):
        plan = super().schedule()
        copy_process("schedule")
        return plan

    def update(self, plan, result):
        outputs = super().update(plan, result)
        copy_process("update")
        return outputs

    def has_requests(self):
        copy_process("has_requests")
        return super().has_requests()

    def finish_requests(self, request_ids, reason):
        copy_process("finish_requests")
        return super().finish_requests(request_ids, reason)


class Executor(Sample, UniprocExecutor, contract=2):
    """Is copied in one of its methods."""

    def execute_model(self, plan):
        copy_process("execute_model")
        return super().execute_model(plan)

    def sample_tokens(self, plan, bitmask=None):
        copy_process("sample_tokens")
        return super().sample_tokens(plan, bitmask)


COPYING = [
    *[("scheduler", name) for name in ("add_request", "schedule", "update", "has_requests")],
    ("scheduler", "finish_requests"),
    *[("executor", name) for name in ("execute_model", "sample_tokens")],
]


@pytest.mark.parametrize(("kind", "method"), COPYING)
def test_a_copy_that_a_scheduler_or_executor_makes_ends(
    endless, tmp_path, monkeypatch, kind, method
):
    path = tmp_path / method
    monkeypatch.setenv("TESTS_COPY", str(path))
    config = {kind: {"use": f"{HERE}:{kind.title()}"}}
    going_on = SamplingParams(temperature=0.0, max_tokens=30_000, ignore_eos=True)
    with LLM(config=process_config(endless, config)) as llm:
        stream = llm.stream("x", going_on)
        next(stream)
        stream.close()
        for _ in range(2):
            assert len(llm.generate("x", GREEDY)[0].outputs[0].token_ids) == 6
        wait_until(lambda: path.exists() and path.read_text(), what="the copy")
        copy = int(path.read_text())
        wait_until(lambda: not alive(copy), what="the end of the copy")


def forking(name, method, path):
    return {
        "plugins": {"enable": [f"{HERE}:{name}"]},
        "plugin": {name.lower(): {"path": str(path), "method": method}},
    }


@pytest.mark.parametrize(
    "method", [pytest.param("__init__", marks=pytest.mark.nightly), "start", "apply"]
)
@PLACES
def test_a_copy_of_the_process_ends_where_it_would_go_on(scripted, tmp_path, capfd, extra, method):
    config = forking("Forks", method, tmp_path / "pid") | extra
    with LLM(config=process_config(scripted, config)) as llm:
        for _ in range(2):
            assert llm.generate("say abc", GREEDY)[0].outputs[0].text == " abc a"
        copy = int((tmp_path / "pid").read_text())
        wait_until(lambda: not alive(copy), what="the end of the copy")
    (logged,) = [line for line in capfd.readouterr().err.splitlines() if "forked" in line]
    assert re.search(rf"'forks' \({HERE}:Forks\), .*: its {method}\(\) forked this process", logged)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "method",
    ["__init__", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("start", "apply"))],
)
def test_a_copy_in_a_thread_of_a_plugin_ends_with_it(scripted, tmp_path, capfd, method):
    config = forking("Threads", method, tmp_path / "pid")
    with LLM(config=process_config(scripted, config)) as llm:
        for _ in range(2):
            assert llm.generate("say abc", GREEDY)[0].outputs[0].text == " abc a"
        copy = int((tmp_path / "pid").read_text())
        wait_until(lambda: not alive(copy), what="the end of the copy")
    (logged,) = [line for line in capfd.readouterr().err.splitlines() if "forked" in line]
    assert f"plugin 'threads' ({HERE}:Threads)" in logged


@pytest.mark.nightly
def test_a_copy_in_a_hook_of_steps_is_of_its_plugin(scripted, tmp_path, capfd):
    config = {
        "plugins": {"enable": [f"{HERE}:Plans"]},
        "plugin": {"plans": {"path": str(tmp_path / "pid")}},
    }
    with LLM(config=process_config(scripted, config)) as llm:
        assert llm.generate("say abc", GREEDY)[0].outputs[0].text == " abc a"
        copy = int((tmp_path / "pid").read_text())
        wait_until(lambda: not alive(copy), what="the end of the copy")
    (logged,) = [line for line in capfd.readouterr().err.splitlines() if "forked" in line]
    assert f"plugin 'plans' ({HERE}:Plans)" in logged
    assert "its step_planned() forked this process" in logged


@pytest.mark.nightly
def test_a_copy_that_does_work_of_its_own_is_left_alone(scripted, tmp_path):
    config = forking("Works", "start", tmp_path / "numbers")
    with LLM(config=process_config(scripted, config)) as llm:
        assert llm.generate("say abc", GREEDY)[0].outputs[0].text == " abc a"
    assert (tmp_path / "numbers").read_text() == "[1, 2]"


def test_a_copy_is_ended_by_a_signal_and_the_engine_is_not(scripted, tmp_path):
    config = forking("Ends", "start", tmp_path / "code")
    with LLM(config=process_config(scripted, config)) as llm:
        for _ in range(2):
            assert llm.generate("say abc", GREEDY)[0].outputs[0].text == " abc a"
    assert (tmp_path / "code").read_text() == str(-signal.SIGTERM)


@pytest.mark.nightly
def test_a_rank_that_keeps_the_interpreters_lock_is_gone_once_its_engine_is(scripted):
    config = scripted_config(
        scripted,
        {
            "executor": {"use": "multiproc"},
            "parallel": {"pipeline": 3},
            "plugins": {"enable": [f"{HERE}:KeepsTheLock"]},
            "engine": {"in_process": False},
        },
    )
    llm = LLM(config=config)
    ranks = [child.pid for child in psutil.Process(pid_of(llm)).children(recursive=True)]
    assert len(ranks) == 3
    llm.llm_engine.add_request("a", "say abc", GREEDY)
    busy = psutil.Process(ranks[-1])
    before = busy.cpu_times().user
    wait_until(lambda: busy.cpu_times().user > before + 0.5, what="the call")
    llm.close()
    wait_until(lambda: not any(map(alive, ranks)), what="the end of the ranks")
