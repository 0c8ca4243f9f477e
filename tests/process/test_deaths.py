"""Deaths of processes are reported, and ended ones leave nothing. Real processes, real signals."""

from __future__ import annotations

import gc
import os
import signal
import textwrap
import threading
import time

import pytest
from support.internals import calls_of, sockets_of
from support.process.harness import (
    PATIENCE_S,
    Opened,
    Program,
    alive,
    assert_quick,
    drains,
    gone,
    hangs,
    holdings,
    in_step,
    nothing_left,
    pid_of,
    process_config,
    wait_until,
)
from support.process.slow_requests import SLOW, add, begin, finals, long, until_let_go
from support.waiting import HeldSteps

from hardpoint import LLM, SamplingParams
from hardpoint.errors import EngineDeadError
from hardpoint.process.child_processes.process import ChildProcess

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
NIGHTLY = pytest.mark.nightly


def test_engine_killed_under_32_requests_is_reported_at_once(opened, endless):
    llm = opened(endless, SLOW)
    pid = pid_of(llm)
    begin(llm, 32, long())
    killed = []
    killer = threading.Timer(0.3, lambda: (killed.append(time.monotonic()), os.kill(pid, 9)))
    killer.start()
    with pytest.raises(EngineDeadError, match=rf"process \(pid {pid}\) was killed by .*SIGKILL"):
        finals(llm)
    assert_quick("engine killed, LLM notified", time.monotonic() - killed[0])
    with pytest.raises(EngineDeadError, match=rf"process \(pid {pid}\) was killed by .*SIGKILL"):
        llm.generate("x")
    llm.close()


def test_a_question_asked_of_a_dying_engine_is_answered_with_its_death(opened, endless, tmp_path):
    """The engine hangs in a step, so the call waits; then it is killed."""
    llm = opened(endless, SLOW)
    pid = pid_of(llm)
    add(llm, 1, hangs(tmp_path / "begun"))
    in_step(tmp_path / "begun")
    killed = []

    def kill():
        calls = calls_of(sockets_of(llm.llm_engine.parts.client))
        wait_until(lambda: calls, PATIENCE_S, "the call")
        time.sleep(0.1)  # until it has been sent, too
        killed.append(time.monotonic())
        os.kill(pid, 9)

    threading.Thread(target=kill).start()
    with pytest.raises(EngineDeadError, match="was killed by signal 9"):
        llm.engines.scheduler_stats()
    assert_quick("engine killed, utility call notified", time.monotonic() - killed[0])
    with pytest.raises(EngineDeadError):
        llm.plugins.meters()


def test_frontend_killed_ends_the_engine(endless, tmp_path):
    source = f"""
        import json
        from support.process.harness import process_config, pid_of
        from hardpoint import LLM
        from support.process.slow_requests import SLOW, add, long
        llm = LLM(config=process_config({str(endless)!r}, SLOW))
        add(llm, 8, long())
        llm.llm_engine.step()
        print(json.dumps(pid_of(llm)), flush=True)
        while True:
            llm.llm_engine.step()
    """
    with Program(source, folder=tmp_path, forked=True) as program:
        engine = program.next_value()
        assert alive(engine)
        os.kill(program.pid, signal.SIGKILL)
        assert_quick("frontend killed, engine gone", gone(engine))


@NIGHTLY
def test_frontend_that_ends_by_an_error_ends_the_engine(endless, tmp_path):
    source = f"""
        import json
        from support.process.harness import process_config, pid_of
        from hardpoint import LLM
        llm = LLM(config=process_config({str(endless)!r}))
        print(json.dumps(pid_of(llm)), flush=True)
        raise SystemExit(7)
    """
    with Program(source, folder=tmp_path, forked=True) as program:
        engine = program.next_value()
        assert program.popen.wait(60) == 7
        assert_quick("frontend exited, engine gone", gone(engine))


LEAVING = """
        import json, os, signal, tempfile
        tempfile.tempdir = {sockets!r}
        from pathlib import Path
        from support.process.harness import hangs, in_step, process_config, pid_of
        from hardpoint import LLM
        from support.process.slow_requests import SLOW, add, long
        plugins = [*SLOW["plugins"]["enable"], "support.plugins.pacing:Hurried"]
        llm = LLM(config=process_config({model!r}, {{"plugins": {{"enable": plugins}}}}))
        add(llm, 1, {params})
        print(json.dumps([pid_of(llm), os.listdir(tempfile.tempdir)]), flush=True)
        {end}
"""


@pytest.mark.parametrize(
    ("end", "params"),
    [
        pytest.param("os.kill(os.getpid(), signal.SIGTERM)", "long()", id="sigterm", marks=NIGHTLY),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", "long()", id="sigkill"),
        pytest.param("os._exit(3)", "long()", id="exit", marks=NIGHTLY),
        pytest.param("in_step(Path('begun')); os._exit(3)", "hangs(Path('begun'))", id="hanging"),
    ],
)
def test_a_frontend_that_cannot_clean_up_leaves_no_sockets(endless, tmp_path, end, params):
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    source = LEAVING.format(sockets=str(sockets), model=str(endless), end=end, params=params)
    with Program(source, folder=tmp_path, forked=True) as program:
        engine, (folder,) = program.next_value()
        assert folder.startswith("hardpoint-")
        program.popen.wait(60)
        gone(engine)
    assert list(sockets.iterdir()) == []


# SIGTERM and SIGINT

DRAINING = SLOW | {"engine": {"drain_seconds": 600.0}}
BOTH = pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, id="term"),
        pytest.param(signal.SIGINT, id="int", marks=NIGHTLY),
    ],
)


@NIGHTLY
def test_sigterm_lets_requests_finish_within_the_limit(opened, endless, tmp_path):
    llm = opened(endless, DRAINING)
    pid = pid_of(llm)
    held = HeldSteps(tmp_path)
    begin(llm, 4, until_let_go(held))
    os.kill(pid, signal.SIGTERM)
    held.let_go()
    assert finals(llm) == ["length"] * 4
    assert_quick("drained engine gone", gone(pid))


def test_while_it_drains_new_requests_and_calls_are_refused(opened, endless, tmp_path):
    llm = opened(endless, DRAINING)
    held = HeldSteps(tmp_path)
    begin(llm, 1, until_let_go(held))
    os.kill(pid_of(llm), signal.SIGTERM)
    wait_until(lambda: drains(llm.engines.scheduler_stats), PATIENCE_S, "the drain")
    llm.llm_engine.add_request("late", "x", GREEDY)
    ended = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                ended[output.request_id] = output.outputs[0]
                held.let_go()
    assert list(ended) == ["late", "r0"]
    assert ended["late"].finish_reason == "error"
    assert "the engine is shutting down" in ended["late"].error
    assert ended["r0"].finish_reason == "length"
    assert len(ended["r0"].token_ids) == 200


def test_the_drain_limit_is_enforced(opened, endless):
    llm = opened(endless, SLOW | {"engine": {"drain_seconds": 0.5}})
    pid = pid_of(llm)
    begin(llm, 4, long())
    began = time.monotonic()
    os.kill(pid, signal.SIGTERM)
    assert finals(llm) == ["abort"] * 4
    seconds = time.monotonic() - began
    assert seconds > 0.4
    assert_quick("drain of 0.5 s ended", seconds)
    gone(pid)


@pytest.mark.parametrize(
    ("number", "second"),
    [
        pytest.param(signal.SIGTERM, signal.SIGTERM, id="twice", marks=NIGHTLY),
        pytest.param(signal.SIGINT, signal.SIGTERM, id="both"),
    ],
)
def test_a_second_signal_ends_the_drain_at_once(opened, endless, number, second):
    llm = opened(endless, DRAINING)
    pid = pid_of(llm)
    begin(llm, 4, long())
    os.kill(pid, number)
    wait_until(lambda: drains(llm.engines.scheduler_stats), PATIENCE_S, "the drain")
    time.sleep(0.1)
    assert alive(pid)
    began = time.monotonic()
    os.kill(pid, second)
    assert finals(llm) == ["abort"] * 4
    gone(pid)
    assert_quick("second signal, engine gone", time.monotonic() - began)


@BOTH
def test_a_signal_without_a_drain_aborts(opened, endless, number):
    llm = opened(endless, SLOW)
    pid = pid_of(llm)
    begin(llm, 4, long())
    began = time.monotonic()
    os.kill(pid, number)
    assert finals(llm) == ["abort"] * 4
    gone(pid)
    assert_quick("signal, engine gone", time.monotonic() - began)


@BOTH
def test_an_idle_engine_receives_a_signal_and_its_end_is_reported(opened, endless, number):
    llm = opened(endless)
    pid = pid_of(llm)
    os.kill(pid, number)
    assert_quick("idle engine gone", gone(pid))
    with pytest.raises(
        EngineDeadError, match=r"exited with code 0|cannot be reached|is shutting down"
    ):
        llm.generate("x", GREEDY)


@NIGHTLY
def test_ctrl_c_in_the_terminal_is_the_programs_own(endless, tmp_path):
    """SIGINT to the foreground group: the program catches it and its engine still serves."""
    source = f"""
        import json, os, signal
        from support.process.harness import process_config, pid_of
        from hardpoint import LLM, SamplingParams
        llm = LLM(config=process_config({str(endless)!r}))
        try:
            os.killpg(os.getpgid(0), signal.SIGINT)
        except KeyboardInterrupt:
            pass
        (output,) = llm.generate("x", SamplingParams(ignore_eos=True))
        print(json.dumps(len(output.outputs[0].token_ids)))
        llm.close()
    """
    own_group = "import os; os.setpgid(0, 0)\n"
    with Program(own_group + textwrap.dedent(source), folder=tmp_path, forked=True) as program:
        assert program.finish()[0] == [16]


# Nothing remains

USED = pytest.mark.usefixtures("used")


@pytest.fixture(scope="module")
def used(endless):
    """Use an engine once: objects made once per program are not counted."""
    open_and_close(endless)


@USED
def test_close_leaves_nothing(endless):
    before = holdings()
    pids = [open_and_close(endless) for _ in range(2)]
    assert_quick("closed, nothing left", nothing_left(before))
    assert not any(map(alive, pids))


def open_and_close(folder) -> int:
    llm = LLM(config=process_config(folder))
    pid = pid_of(llm)
    llm.generate(["x"] * 4, GREEDY)
    llm.close()
    return pid


@pytest.mark.nightly
@USED
def test_close_with_requests_in_flight_is_quick(endless, monkeypatch):
    """They are not waited for any more, whatever the drain limit; they would take a minute."""
    before = holdings()
    monkeypatch.setattr(ChildProcess.close, "__defaults__", (60.0,))  # grace_s
    plugins = {"enable": ["support.plugins.slow:Slow", "support.plugins.pacing:Unhurried"]}
    llm = LLM(config=process_config(endless, DRAINING | {"plugins": plugins}))
    begin(llm, 16, long())
    began = time.monotonic()
    llm.close()
    llm.close()
    assert_quick("closed under 16 requests", time.monotonic() - began)
    nothing_left(before)


@USED
def test_an_engine_without_references_is_released(endless):
    before = holdings()
    llm = LLM(config=process_config(endless))
    pid = pid_of(llm)
    llm.generate("x", GREEDY)
    began = time.monotonic()
    del llm
    gc.collect()
    gone(pid)
    nothing_left(before)
    assert_quick("collected, nothing left", time.monotonic() - began)


@USED
def test_a_killed_engine_leaves_nothing_once_closed(endless):
    before = holdings()
    llm = LLM(config=process_config(endless))
    os.kill(pid_of(llm), signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        llm.generate("x", GREEDY)
    llm.close()
    nothing_left(before)


@NIGHTLY
@USED
def test_an_engine_that_cannot_start_leaves_nothing(endless):
    before = holdings()
    hanging = {
        "plugins": {"enable": ["test_start_errors:Hangs"]},
        "engine": {"start_timeout_seconds": 0.05},
    }
    for _ in range(2):
        with pytest.raises(
            EngineDeadError, match=r"not ready within 0\.05 s|of 0\.05 s for the whole start"
        ):
            LLM(config=process_config(endless, hanging))
    nothing_left(before)


@NIGHTLY
def test_two_engines_in_one_program(scripted, endless, opened: Opened):
    first, second = opened(scripted), opened(endless)
    ours = first.generate(["say abc"] * 2, GREEDY)
    theirs = second.generate(["say abc"] * 2, GREEDY)
    assert [output.outputs[0].text for output in ours] == [" abc abc abc"] * 2
    assert theirs[0].outputs[0].text != ours[0].outputs[0].text
    os.kill(pid_of(second), signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        second.generate("x", GREEDY)
    assert first.generate("say abc", GREEDY)[0].outputs[0].text == " abc abc abc"


# The watchdog


@pytest.mark.nightly
def test_a_step_that_hangs_is_reported_with_stacks(opened, endless, tmp_path, capfd):
    """Each of its steps hangs: a busy machine may be late for the first one."""
    llm = opened(endless, SLOW | {"engine": {"watchdog_seconds": 1.0}})
    held = HeldSteps(tmp_path)
    add(llm, 1, SamplingParams(max_tokens=40, ignore_eos=True, plugin_args=held.slow(2.0)))
    logged = ""

    def reported():
        nonlocal logged
        logged += capfd.readouterr().err
        stacks = logged.rpartition("Timeout (0:00:01")[2]
        threads = stacks.count("Thread 0x")  # the loop, the reader and the writer
        return "slow.py" in stacks and "in apply" in stacks and threads >= 3

    wait_until(reported, PATIENCE_S, "the stacks")
    held.let_go()
    assert finals(llm) == ["length"]
    assert llm.generate("x", GREEDY)  # the engine lives


def test_a_step_that_hangs_ends_the_engine_if_it_shall(opened, endless, tmp_path, capfd):
    engine = {"watchdog_seconds": 1.0, "watchdog_exits": True}
    llm = opened(endless, SLOW | {"engine": engine})
    began = time.monotonic()
    message = "was ended by its watchdog: a step took longer than 1 s"
    add(llm, 1, hangs(tmp_path / "begun"))
    with pytest.raises(EngineDeadError, match=message) as error:
        finals(llm)
    assert "(engine.watchdog_seconds), in apply() of plugin 'slow'" in str(error.value)
    assert_quick("hanging engine ended", time.monotonic() - began)
    assert "slow.py" in capfd.readouterr().err


def test_closing_an_engine_that_hangs_kills_it(opened, endless, tmp_path, monkeypatch):
    monkeypatch.setattr(ChildProcess.close, "__defaults__", (0.5,))  # grace_s
    llm = opened(endless, SLOW)
    pid = pid_of(llm)
    add(llm, 1, hangs(tmp_path / "begun"))
    in_step(tmp_path / "begun")
    began = time.monotonic()
    llm.close()
    assert_quick("hanging engine closed", time.monotonic() - began)
    assert not alive(pid)
