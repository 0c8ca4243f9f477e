"""Messages describe an engine process that has ended, and its activity."""

from __future__ import annotations

import os
import signal
import socket
import subprocess

import pytest
from support.core.launch_harness import LIMIT_S

from hardpoint.host.boundary.activity import Activity, PluginCalls
from hardpoint.plugins.component import Source
from hardpoint.process.engine_process import EngineProcess

SOURCE = Source.of_module("slow", "acme:Slow", "default")


@pytest.fixture
def running():
    """Start a process in which a plugin's method runs, as its parent sees it."""
    processes = []

    def start(method: str = "apply") -> EngineProcess:
        ours, _theirs = socket.socketpair()
        popen = subprocess.Popen(["sleep", "600"])
        process = EngineProcess(popen, ours)
        process.activity = Activity()
        calls = PluginCalls(process.activity, "logits_processors", SOURCE)
        if method:
            process.activity.cells[0] = calls.number(method)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.close(0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_that_others_send_is_nobodys_fault(running, number):
    process = running()
    os.kill(process.pid, number)
    process.wait(LIMIT_S)
    assert process.description == (
        f"the engine process (pid {process.pid}) was killed by signal {int(number)} "
        f"({number.name}), which others send, while apply() of plugin 'slow' ({SOURCE.value}) ran"
    )
    assert process.was_killed


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE])
def test_a_crash_is_in_the_method_that_ran(running, number):
    process = running()
    os.kill(process.pid, number)
    process.wait(LIMIT_S)
    assert process.description == (
        f"the engine process (pid {process.pid}) was killed by signal {int(number)} "
        f"({number.name}), in apply() of plugin 'slow' ({SOURCE.value})"
    )
    assert not process.was_killed


def test_a_signal_while_no_plugin_runs(running):
    process = running("")
    assert process.description.endswith(" is running")
    process.kill()
    process.wait(LIMIT_S)
    assert process.description.endswith(" was killed by signal 9 (SIGKILL)")
