"""The owner of worker processes where none can be started for a while."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace

import pytest
from support.waiting import PATIENCE_S, until

from hardpoint.errors import EngineDeadError
from hardpoint.plugins import EngineConfig
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.server.generator import WorkerPlan
from hardpoint.workers import owner

NO_MEMORY = "the worker process could not be started: [Errno 12] Cannot allocate memory"
BUDGET = 3


class Process:
    """A worker that is ready at once, runs until it is signalled, and notes its events."""

    passed_fds = ()
    launched: list[Process]
    to_fail = 0  # calls of `spawn`

    def __init__(self):
        self.pid, self.returncode, self.killed = id(self), None, False

    @classmethod
    def spawn(cls, **_):
        if cls.to_fail:
            cls.to_fail -= 1
            raise EngineDeadError(NO_MEMORY)
        return cls()

    def launch(self, launch):
        self.index = launch.index
        self.launched.append(self)
        Shared.answers[-1]("ready", [])

    def failure(self):
        return None if self.returncode is None else EngineDeadError("it was killed")

    def close(self, _=0.0):
        pass

    def kill(self):
        self.killed = True


class Shared:
    view = ()
    answers: list

    def connect(self, answer):
        self.answers.append(answer)
        return SimpleNamespace(folder="/nowhere")

    def disconnect(self, _):
        pass

    def follows(self, _):
        pass


class Engine:
    def __init__(self):
        self.config, self.shared, self.dead_error = EngineConfig(), Shared(), None

    async def aclose(self):
        pass


@pytest.fixture
def workers(monkeypatch):
    Process.launched, Process.to_fail, Shared.answers = [], 0, []

    def end(pid, number):
        assert number == signal.SIGTERM
        next(process for process in Process.launched if process.pid == pid).returncode = 0

    monkeypatch.setattr(owner, "CommandWorkerProcess", Process)
    monkeypatch.setattr(owner, "_PAUSE_S", 0.01)
    monkeypatch.setattr(owner.os, "kill", end)
    return owner.Workers(Engine(), ConfigSources({}), BUDGET)


def run(workers, steps):
    """Start three workers, await the steps of a test and close; return the exit code."""

    async def all_of_it():
        await workers.start(WorkerPlan(run="nothing:at_all", num_workers=3))
        try:
            await steps()
            async with asyncio.timeout(PATIENCE_S):
                return await workers.wait()
        finally:
            await workers.aclose()

    code = asyncio.run(all_of_it())
    assert not any(process.killed for process in Process.launched)
    return code


def test_a_worker_that_cannot_be_started_is_tried_again(workers, caplog):
    async def steps():
        Process.to_fail = BUDGET - 1
        Process.launched[1].returncode = -9
        await until(lambda: len(Process.launched) == 4, "the worker")
        workers.send_signal(signal.SIGTERM)

    assert run(workers, steps) == 0
    assert [process.index for process in Process.launched] == [0, 1, 2, 1]
    tried = [record.message for record in caplog.records if "tried again" in record.message]
    assert len(tried) == BUDGET - 1
    assert tried[0].startswith("worker 1 could not be started, and is tried again in 0.01 s: ")
    assert tried[0].endswith(NO_MEMORY)


def test_the_others_are_asked_to_end_once_the_budget_is_spent(workers, caplog):
    async def steps():
        Process.to_fail = 100
        Process.launched[1].returncode = -9

    assert run(workers, steps) == 3
    assert Process.to_fail == 100 - BUDGET
    assert caplog.records[-1].message == "workers end too often; the others are ended, too"


def test_a_signal_ends_the_wait_for_a_worker(workers, monkeypatch):
    monkeypatch.setattr(owner, "_PAUSE_S", 3600.0)

    async def steps():
        Process.to_fail = 1
        for process in Process.launched[:]:
            process.returncode = -9
        await until(lambda: len(Process.launched) == 5, "the workers")
        workers.send_signal(signal.SIGTERM)

    assert run(workers, steps) == 0
