"""Programs in processes with limits: answers, and reasons of ends."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.waiting import PATIENCE_S, wait_until

from hardpoint.errors import EngineClosedError, HardpointError
from hardpoint.toolkit.limited import LimitedProcess

PROGRAM = """
import os
import time

def start(settings):
    kept = []
    def answer(request):
        if request == b"sleep":
            time.sleep(3600)
        if request == b"hold":
            open(settings["begun"], "w").close()
            while os.path.exists(settings["held"]):
                time.sleep(0.005)
        if request == b"memory":
            kept.append(bytes(1 << 30))
        if request == b"print":
            print("no answer")
        if request == b"raise":
            raise ValueError(settings["word"])
        return settings["word"].encode() + request * 2
    return answer
"""


def process(tmp_path, **options):
    (tmp_path / "program.py").write_text(PROGRAM)
    settings = {"seconds": 60.0, "max_bytes": 512 << 20, "max_answer_bytes": 1 << 20}
    return LimitedProcess(
        tmp_path / "program.py",
        "to test",
        needs="nothing",
        settings={
            "word": "<",
            "begun": str(tmp_path / "begun"),
            "held": str(tmp_path / "held"),
        },
        **settings | options,
    )


def test_requests_are_answered_in_order(tmp_path):
    made = process(tmp_path)
    assert made.pid is None
    assert [made.ask(b"a"), made.ask(b"b", b"c"), made.ask(b"")] == [b"<aa", b"<bcbc", b"<"]
    first = made.pid
    assert made.ask(b"print") == b"<printprint"  # what it prints is no answer
    assert made.pid == first
    made.close()
    assert made.pid is None
    made.close()


@pytest.mark.parametrize("request_", [b"memory", b"raise", b"x" * (1 << 20)])
def test_what_ends_a_process_ends_no_other_request(tmp_path, request_):
    with contextlib.closing(process(tmp_path)) as made:
        assert made.ask(b"a") == b"<aa"
        assert made.ask(request_) is None
        assert made.pid is None
        assert made.ask(b"a") == b"<aa"


def test_a_request_has_a_time(tmp_path):
    with contextlib.closing(process(tmp_path, seconds=0.2)) as made:
        assert made.ask(b"sleep") is None


def test_one_that_is_closed_is_not_started_again_for_those_who_wait(tmp_path):
    made = process(tmp_path)
    (tmp_path / "held").touch()
    with ThreadPoolExecutor(5) as threads:
        answers = [threads.submit(made.ask, b"hold") for _ in range(4)]
        wait_until((tmp_path / "begun").exists, what="the first one to be answered")
        closing = threads.submit(made.close)
        wait_until(lambda: made._is_closed)
        (tmp_path / "held").unlink()
        errors = [answer.exception() for answer in answers]
        closing.result()
    assert made.pid is None
    assert sum(isinstance(error, EngineClosedError) for error in errors) == 3
    with pytest.raises(EngineClosedError, match="the process to test was closed"):
        made.ask(b"a")


def test_a_fork_during_a_turn_has_a_process_of_its_own(tmp_path):
    made = process(tmp_path)
    (tmp_path / "held").touch()
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(made.ask, b"hold")
        wait_until((tmp_path / "begun").exists, what="the turn of the other thread")
        if (child := os.fork()) == 0:
            with contextlib.suppress(BaseException):
                signal.alarm(int(PATIENCE_S))  # ends it if it hangs
                answer = made.ask(b"a")
                made.close()
                os._exit(answer != b"<aa")
            os._exit(2)
        status = os.waitpid(child, 0)[1]
        (tmp_path / "held").unlink()
        assert answer.result() == b"<holdhold"
    made.close()
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_program_that_cannot_start_is_an_error(tmp_path):
    made = process(tmp_path)
    (tmp_path / "program.py").write_text("import a_module_that_is_not_there")
    with pytest.raises(HardpointError, match="a process to test: .* is nothing installed there"):
        made.ask(b"a")


@pytest.mark.parametrize("starts", [0, 1], ids=["when it starts", "in a request"])
def test_a_request_that_no_thread_can_time_leaves_no_answer_to_the_next(
    tmp_path, monkeypatch, starts
):
    made, start, begun = process(tmp_path), threading.Timer.start, []

    def no_thread(timer):
        begun.append(timer)
        if len(begun) == starts + 1:
            raise RuntimeError("can't start new thread")
        start(timer)

    monkeypatch.setattr(threading.Timer, "start", no_thread)
    with pytest.raises(HardpointError, match="no time limit: can't start new thread"):
        made.ask(b"a")
    assert [made.ask(b"b"), made.ask(b"c")] == [b"<bb", b"<cc"]
    made.close()


def test_an_interrupt_at_any_moment_leaves_no_answer_to_the_next(tmp_path, monkeypatch):
    made = process(tmp_path)
    assert made.ask(b"a") == b"<aa"

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading, "Timer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.ask(b"b")
    assert made.ask(b"c") == b"<cc"
    made.close()
