"""Reports of an engine process to its parent, and how a parent ends one."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
from support.core.launch_harness import (
    AT_ONCE_S,
    LIMIT_S,
    failure_of,
    launch,
    output_of,
    state_of,
    write_child,
)

from hardpoint.process.child_processes import process as child_process
from hardpoint.process.engine_process import EngineProcess


def test_no_failure_while_it_is_well(child, tmp_path):
    process = child("say(1); time.sleep(600)")
    assert process.failure() is None
    output_of(tmp_path)
    assert process.failure() is None
    assert process.returncode is None
    assert process.wait(0.01) is None
    assert process.description.endswith("is running")


def test_kill_is_noticed_at_once(child, tmp_path):
    process = child("say(1); time.sleep(600)")
    output_of(tmp_path)
    process.kill()
    start = time.monotonic()
    failure = failure_of(process)
    assert time.monotonic() - start < AT_ONCE_S
    assert "was killed by signal 9 (SIGKILL)" in str(failure)


def test_close_ends_a_child_that_does_nothing(child, tmp_path):
    process = child("say(1); time.sleep(600)")
    output_of(tmp_path)
    start = time.monotonic()
    process.close(grace_s=LIMIT_S)
    process.close()
    assert time.monotonic() - start < AT_ONCE_S
    assert process.returncode == 1
    process.kill()  # nothing is left to be killed


def test_close_lets_a_child_finish(child, tmp_path):
    process = child(
        """
        done = threading.Event()
        watch.on_gone(done.set, 600)
        say("up")
        done.wait()
        say("finished")
        """
    )
    assert output_of(tmp_path) == "up"
    process.close(grace_s=LIMIT_S)
    assert process.returncode == 0
    assert output_of(tmp_path) == "finished"


def test_finishing_has_a_limit(child, tmp_path):
    process = child("watch.on_gone(lambda: time.sleep(600), 0.2); say(1); time.sleep(600)")
    output_of(tmp_path)
    start = time.monotonic()
    process.close(grace_s=LIMIT_S)
    assert 0.2 < time.monotonic() - start < AT_ONCE_S
    assert process.returncode == 1


def test_close_kills_what_hangs(child, tmp_path):
    process = child("say(1); os.kill(os.getpid(), signal.SIGSTOP)")
    output_of(tmp_path)
    while state_of(process.pid) != "T":
        time.sleep(0.01)
    process.close(grace_s=0.1)
    assert process.returncode == -signal.SIGKILL


def test_collected_without_close(child, tmp_path):
    process = EngineProcess.start(
        launch(), program=write_child(tmp_path, "say(1); time.sleep(600)")
    )
    pid, descriptors = process.pid, process.sentinels
    output_of(tmp_path)
    del process
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_without_process_descriptors(child, tmp_path, monkeypatch):
    def refuse(pid):
        raise OSError("no such system call")

    monkeypatch.setattr(child_process.os, "pidfd_open", refuse)
    process = child("say(1); time.sleep(600)")
    assert len(process.sentinels) == 1
    output_of(tmp_path)
    assert process.wait(0.05) is None
    process.kill()
    assert "killed by signal 9" in str(failure_of(process))
    assert process.wait() == -9


def test_descriptors_are_given_back(child, tmp_path):
    gc.collect()  # of other tests
    before = set(os.listdir("/proc/self/fd"))
    process = child("say(1)")
    assert process.wait(LIMIT_S) == 0
    process.close()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_forked_copy_does_nothing_to_the_child(child, tmp_path):
    process = child("say(1); time.sleep(600)")
    output_of(tmp_path)
    if (forked := os.fork()) == 0:
        process.terminate()
        process.kill()
        process.close()
        os._exit(0)
    assert os.waitpid(forked, 0)[1] == 0
    assert process.wait(0.3) is None
    assert process.failure() is None


def test_close_ends_the_child_beside_a_forked_process(child, tmp_path):
    process = child("say(1); time.sleep(600)")
    output_of(tmp_path)
    if (forked := os.fork()) == 0:
        time.sleep(600)
        os._exit(0)
    try:
        start = time.monotonic()
        process.close(grace_s=LIMIT_S)
        assert time.monotonic() - start < AT_ONCE_S
        assert process.returncode == 1
    finally:
        os.kill(forked, signal.SIGKILL)
        os.waitpid(forked, 0)


def test_a_child_that_the_kernel_killed_to_get_memory_is_reported_so(child, monkeypatch):
    count = 4
    monkeypatch.setattr(child_process, "oom_kills", lambda: count)
    probable = (
        r"\(SIGKILL\), probably by the kernel to get memory: since it started, the cgroup has "
    )
    for new, expected in (
        (4, r"\(SIGKILL\)$"),
        (5, rf"{probable}counted 1 process that it killed \(oom_kill\)$"),
        (7, rf"{probable}counted 2 processes that it killed \(oom_kill\)$"),
    ):
        process = child("time.sleep(600)")
        count = new
        process.kill()
        assert re.search(expected, str(failure_of(process)))


def test_watchers_in_many_threads(child, tmp_path):
    process = child("say(1); time.sleep(600)")
    output_of(tmp_path)
    codes = []
    threads = [threading.Thread(target=lambda: codes.append(process.wait())) for _ in range(8)]
    for thread in threads:
        thread.start()
    process.terminate()
    for thread in threads:
        thread.join(LIMIT_S)
    assert codes == [-signal.SIGTERM] * 8


def test_an_end_is_known_while_another_thread_finds_out(child, tmp_path):
    process = child("say(1); time.sleep(600)")
    output_of(tmp_path)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    other = process._popen._waitpid_lock  # what `Popen.poll` gives up at
    other.acquire()
    threading.Timer(0.1, other.release).start()
    assert process.returncode == -9


def test_a_report_at_the_end_is_received(child, monkeypatch):
    """The process reports and ends after the parent has last read its reports."""
    process = child("raise ValueError('no disk')")
    process.wait(LIMIT_S)
    listen, skipped = process._receive, []

    def late():
        if skipped:
            listen()
        skipped.append(True)

    monkeypatch.setattr(process, "_receive", late)
    assert "ValueError: no disk" in str(process.failure())


def test_one_that_lets_go_and_does_not_end(child, tmp_path, monkeypatch):
    monkeypatch.setattr(child_process, "_EXIT_TIMEOUT_S", 0.1)
    source = """
        import socket
        say(1)
        launch = socket.socket(fileno=int(sys.orig_argv[-2]))
        launch.shutdown(socket.SHUT_WR)
        time.sleep(600)
        """
    failure = failure_of(child(source))
    assert re.fullmatch(
        r"the engine process \(pid \d+\) does not serve any more, and does not end", str(failure)
    )
