"""Output of an engine process, and how it ends: in order, by a fault, by force."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.process.harness import (
    PATIENCE_S,
    alive,
    assert_quick,
    gone,
    in_step,
    pid_of,
    process_config,
    wait_until,
)
from support.process.raw_client import RawClient
from support.waiting import HeldSteps

from hardpoint.errors import EngineDeadError
from hardpoint.plugins import SamplingParams
from hardpoint.process.protocol import ENGINE_CORE_DEAD, ENGINE_CORE_EXITED

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)

LABELLED = r"\[EngineCore 0, pid {pid}\] (.*)"


@pytest.fixture
def engine(endless, tmp_path):
    """Start engines with a policy that writes `closed` when it is closed; see `RawClient`."""
    clients = []

    def start(*, engine=None, plugins=None, seconds=0.0, **options):
        config = {
            "engine": engine or {},
            "plugins": {"enable": ["support.plugins.slow:Slow", "support.plugins.faulty:Dense"]}
            | (plugins or {}),
            "scheduler": {"policy": "support.plugins.closing:Closing"},
            "plugin": {"closing": {"path": str(tmp_path / "closed"), "seconds": seconds}},
        }
        clients.append(RawClient(process_config(endless, config), **options))
        return clients[-1]

    yield start
    for client in clients:
        client.process.kill()
        client.close()


def using(plugin: str, max_tokens: int = 10, **arguments) -> dict[str, Any]:
    """Fields of a request that uses a plugin."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return {"params": params, "plugin_args": {plugin: arguments}}


def lines_of(client: RawClient) -> list[str]:
    """The log of the engine, without the labels, which every line must have."""
    logged = []
    for line in client.log.read_text().splitlines():
        labelled = re.fullmatch(LABELLED.format(pid=client.process.pid), line)
        assert labelled, f"no label: {line!r}"
        logged.append(labelled[1])
    return logged


def left_in(client: RawClient, awaited: list[bytes] | None = None) -> list[list[bytes]]:
    """All unread messages of the engine; one may be sure to come."""
    messages: list[list[bytes]] = []
    while client.pull.poll(300 if awaited is None or awaited in messages else PATIENCE_S * 1000):
        messages.append(client.pull.recv_multipart())
    return messages


def test_a_clean_end(engine, tmp_path):
    client = engine(engine={"drain_seconds": 600.0}, log_level="INFO")
    assert psutil.Process(client.process.pid).name() == "EngineCore"
    assert Path(f"/proc/{client.process.pid}/comm").read_text() == "EngineCore\n"
    held = HeldSteps(tmp_path)
    client.add("a", **using("slow", 200, **held.slow(0.3)["slow"]))
    client.receive()
    client.send(b"rubbish")
    wait_until(lambda: "dropped" in client.log.read_text(), PATIENCE_S, "a line in the log")
    client.process.terminate()
    held.let_go()
    client.ends(["a"])
    assert client.process.wait(PATIENCE_S) == 0
    logged = lines_of(client)
    warnings = [line for line in logged if not line.startswith("INFO")]
    assert warnings[0].startswith("WARNING: dropped a message of client 0: request type")
    assert logged[-1] == "INFO: the engine exits, as requested"
    assert len([line for line in logged if "the engine exits" in line]) == 1
    assert not [line for line in logged if "CRITICAL" in line]
    assert left_in(client, [ENGINE_CORE_EXITED]) == [[ENGINE_CORE_EXITED]]
    assert (tmp_path / "closed").exists()


def test_a_fault_that_nothing_contains(engine, tmp_path):
    client = engine(plugins={"on_error": {"dense": "engine"}}, log_level="INFO")
    client.add("a", **using("slow", 30_000, seconds=0.02))
    client.receive()
    client.add("b", **using("dense", how="raise"))
    assert client.process.wait(PATIENCE_S) == 1
    *_, last = left_in(client, [ENGINE_CORE_DEAD])
    assert last == [ENGINE_CORE_DEAD]
    logged = lines_of(client)
    assert len([line for line in logged if line.startswith("CRITICAL: the engine failed")]) == 1
    assert not [line for line in logged if "the engine exits" in line]
    assert "broken apply" in "".join(logged)
    assert (tmp_path / "closed").exists()
    assert "broken apply" in "".join(client.process.failure().__notes__)


@pytest.mark.nightly
def test_a_failure_is_reported_before_a_cleanup_that_hangs(engine, tmp_path):
    client = engine(seconds=60.0, plugins={"on_error": {"dense": "engine"}})
    client.add("a", **using("dense", how="raise"))
    wait_until(client.process.failure, PATIENCE_S, "the report")
    assert alive(client.process.pid)
    assert "broken apply" in str(client.process.failure())
    wait_until((tmp_path / "closed").exists, PATIENCE_S, "the cleanup")
    *_, last = left_in(client, [ENGINE_CORE_DEAD])
    assert last == [ENGINE_CORE_DEAD]


def test_a_start_that_fails_sends_nothing_on_the_sockets(engine):
    client = engine(plugins={"enable": ["test_start_errors:Refuses"]}, waits=False)
    assert client.process.wait(60) == 1
    assert left_in(client) == []
    assert not client.router.poll(0)
    assert client.log.read_text() == ""


BROKEN_THREADS = """
from hardpoint.process.child_processes.__main__ import main

def run(launch, watch):
    from hardpoint.process.engine import transport
    from hardpoint.process.engine.run import run_engine

    def start(self, ready):
        raise RuntimeError("can't start new thread")

    transport.EngineIO.start = start
    run_engine(launch, watch)

main(run)
"""


@pytest.mark.nightly
@pytest.mark.fresh_process
def test_threads_that_cannot_start_leave_nothing_open(engine, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(BROKEN_THREADS)
    client = engine(waits=False, program=program)
    assert client.process.wait(60) == 1
    assert "RuntimeError: can't start new thread" in str(client.process.failure())
    assert (tmp_path / "closed").exists()
    assert left_in(client) == []


@pytest.mark.parametrize(
    "numbers",
    [
        (signal.SIGTERM, signal.SIGINT),
        pytest.param((signal.SIGINT, signal.SIGTERM), marks=pytest.mark.nightly),
    ],
)
def test_a_cleanup_that_hangs_ends_at_the_next_signal(engine, tmp_path, numbers):
    client = engine(seconds=60.0)
    pid = client.process.pid
    os.kill(pid, numbers[0])
    wait_until((tmp_path / "closed").exists, PATIENCE_S, "the cleanup")
    began = time.monotonic()
    os.kill(pid, numbers[1])
    gone(pid)
    assert_quick("hanging cleanup, engine gone", time.monotonic() - began)
    assert client.process.wait(PATIENCE_S) == -numbers[1]


def test_a_signal_that_interrupts_nothing_is_received(engine):
    """It comes to another thread, so that the system does not end the main thread's waiting."""
    client = engine()
    pid = client.process.pid
    client.call("is_paused")
    time.sleep(0.3)  # until the loop waits
    began = time.monotonic()
    (thread,) = [each for each in threads_of(pid) if each != pid][:1]
    assert ctypes.CDLL(None).tgkill(pid, thread, signal.SIGTERM) == 0
    gone(pid)
    assert_quick("signal to another thread, engine gone", time.monotonic() - began)
    assert client.process.wait(PATIENCE_S) == 0


def threads_of(pid: int) -> list[int]:
    """The threads of a process that take SIGTERM; threads of ZMQ do not."""
    taking = []
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        if not in_mask("SigBlk", status, signal.SIGTERM):
            taking.append(int(status.parent.name))
    return taking


def in_mask(name: str, status: Path, number: int) -> bool:
    """Whether a signal is in a mask of a process or a thread, as the system reports it."""
    (mask,) = re.findall(rf"^{name}:\s*(\w+)", status.read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.nightly
def test_a_step_that_hangs_ends_at_the_third_signal(engine, tmp_path):
    client = engine(engine={"drain_seconds": 600.0})
    pid = client.process.pid
    begun = tmp_path / "begun"
    client.add("a", **using("slow", seconds=60, begun=str(begun)))
    in_step(begun)
    for number in (signal.SIGINT, signal.SIGTERM):  # two of a kind may arrive as one
        os.kill(pid, number)
        time.sleep(0.3)
        assert client.process.returncode is None
    status = Path(f"/proc/{pid}/status")
    wait_until(lambda: not in_mask("SigCgt", status, signal.SIGINT), PATIENCE_S, "the second one")
    began = time.monotonic()
    os.kill(pid, signal.SIGINT)
    gone(pid)
    assert_quick("third signal, engine gone", time.monotonic() - began)
    assert client.process.wait(PATIENCE_S) == -signal.SIGINT


def test_a_request_after_a_drain_of_no_time(opened, endless, tmp_path):
    """The engine has closed its sockets, and takes a minute to close the rest.

    Until the program knows of it, a request is still sent, and has the error in its output.
    """
    config = {
        "engine": {"drain_seconds": 0.0},
        "scheduler": {"policy": "support.plugins.closing:Closing"},
        "plugin": {"closing": {"path": str(tmp_path / "closed"), "seconds": 60.0}},
    }
    llm = opened(endless, config)
    os.kill(pid_of(llm), signal.SIGTERM)
    wait_until((tmp_path / "closed").exists, PATIENCE_S, "the cleanup")
    try:
        [output] = llm.generate("x", GREEDY)
    except EngineDeadError as error:
        reason = str(error)
    else:
        reason = output.outputs[0].error
    assert reason == "the engine is shutting down"
    with pytest.raises(EngineDeadError, match=r"^the engine is shutting down$"):
        llm.generate("x", GREEDY)
    os.kill(pid_of(llm), signal.SIGKILL)
