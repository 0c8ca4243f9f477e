"""Children that cannot end by themselves when their parent dies: the system ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.core.launch_harness import gone, output_of, state_of
from support.waiting import wait_until

from hardpoint.process.child_processes import parent_death

STOPPED = "say(os.getpid()); os.kill(os.getpid(), signal.SIGSTOP)"
HOLDS_THE_LOCK = """
import re
say(os.getpid())
re.match("(a+)+$", "a" * 60 + "b")  # never lets another thread run
"""
IN_A_SECOND = """
from hardpoint.process.child_processes import parent_death
parent_death._WAKES = signal.SIGHUP  # whose number is 1
"""


@pytest.fixture
def killed_parent(parent, tmp_path):
    """Start a parent with a child that does something; return the child's id, and a function that
    kills the parent.
    """
    started = []

    def start(body, before="", child_setup=""):
        script = tmp_path / "script.py"
        text = parent(body)
        if child_setup:
            program = tmp_path / "child_program.py"
            source = program.read_text().replace("\nmain(run)", child_setup + "main(run)")
            program.write_text(source)
        script.write_text(text + before + "process = go()\ntime.sleep(600)\n")
        running = subprocess.Popen([sys.executable, str(script)])
        pid = output_of(tmp_path)
        started.append((running, pid))

        def kill():
            running.kill()
            running.wait()

        return pid, kill

    yield start
    for running, pid in started:
        running.kill()
        running.wait()
        if not gone(pid, 0):
            os.kill(pid, signal.SIGKILL)


def rests(pid):
    """Whether a process waits for something, for a fifth of a second."""
    states = []
    for _ in range(10):
        time.sleep(0.02)
        states.append(state_of(pid))
    return set(states) == {"S"}


def test_a_stopped_child_ends_with_its_parent(killed_parent):
    pid, kill = killed_parent(STOPPED)
    wait_until(lambda: state_of(pid) == "T", what="the stop")
    kill()
    assert gone(pid)


def test_a_child_that_is_stopped_before_its_launch_ends_with_its_parent():
    script = (
        "import time\n"
        "from hardpoint.process.engine_process import EngineProcess\n"
        "EngineProcess.run = 'json:dumps'\n"  # what takes no time to import
        "process = EngineProcess.spawn()\n"
        "print(process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        pid = int(running.stdout.readline())
        wait_until(lambda: "_ctypes" in Path(f"/proc/{pid}/maps").read_text(), what="the start")
        wait_until(lambda: rests(pid), what="the wait for the launch")
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: state_of(pid) == "T", what="the stop")
        running.kill()
    try:
        assert gone(pid)
    finally:
        if not gone(pid, 0):
            os.kill(pid, signal.SIGKILL)


def test_a_child_that_holds_the_interpreters_lock_ends_with_its_parent(killed_parent):
    """After as many seconds as the signal's number is; here with another one than usual."""
    pid, kill = killed_parent(HOLDS_THE_LOCK, child_setup=IN_A_SECOND)
    time.sleep(0.3)  # it has the lock
    kill()
    assert gone(pid)


IN_A_THREAD = """
import threading
def in_a_thread(go=go):
    made = []
    thread = threading.Thread(target=lambda: made.append(go()))
    thread.start(); thread.join()
    return made[0]
go = in_a_thread
"""


def test_the_end_of_the_thread_that_started_a_child_does_not_end_it(killed_parent):
    """The system counts that as the parent's death; the alarm that follows is taken back."""
    pid, _ = killed_parent(
        "say(os.getpid()); time.sleep(600)", before=IN_A_THREAD, child_setup=IN_A_SECOND
    )
    os.kill(pid, signal.SIGHUP)  # as anybody may
    assert not gone(pid, 1.3)


FORKS = """
copy = os.fork()
if copy == 0:
    say(os.getpid())
    time.sleep(600)
    os._exit(0)
os.waitpid(copy, 0)
"""


def test_a_copy_of_a_child_is_not_ended_by_the_signal(killed_parent):
    """It has no thread that would take the alarm back."""
    ignored = IN_A_SECOND.replace("SIGHUP", "SIGURG")  # has no effect without a handler
    pid, _ = killed_parent(FORKS, child_setup=ignored)
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    assert not caught >> (signal.SIGURG - 1) & 1
    os.kill(pid, signal.SIGURG)
    assert not gone(pid, 0.3)


def test_an_alarm_of_a_plugin_is_left_alone():
    rang = []
    before = signal.signal(signal.SIGALRM, lambda *_: rang.append(True))
    try:
        signal.setitimer(signal.ITIMER_REAL, 30)
        parent_death.withdraw()
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        parent_death.withdraw()
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
