"""While an engine has nothing to do, its loop lets workers work ahead: record decode steps."""

from __future__ import annotations

import json
import threading
import time

import pytest
from support.core import graphs
from support.core.engine_harness import PATIENCE_S, LoopRig, ScriptedExecutor, request
from support.core.graphs import SIZES_FILE, graphed_script
from support.waiting import wait_until

from hardpoint import LLM, ModelError, SamplingParams
from hardpoint.errors import PluginFaultError
from hardpoint.process.protocol import UtilityCall
from hardpoint.testing import scripted_config

RECORD = ("idle",)


class Recording(ScriptedExecutor):
    """Has some steps to record, and can be kept in the recording of one."""

    def __init__(self, left):
        super().__init__()
        self.left = left
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def collective_rpc(self, method, args=(), timeout=None):
        if method == RECORD[0]:
            self.left -= 1
            self.rpc[method] = self.left > 0
            self.begun.set()
            assert self.go_on.wait(PATIENCE_S)
        return super().collective_rpc(method, args, timeout)


def test_all_steps_are_recorded_one_after_the_other():
    executor = Recording(3)
    with LoopRig(executor, idle_method="idle") as rig:
        rig.until(lambda: executor.calls.count(RECORD) == 3)
        time.sleep(0.05)
        assert executor.calls.count(RECORD) == 3
        rig.send(request("a"))
        rig.until(lambda: rig.ends == {"a": "length"})
        rig.until(lambda: executor.calls.count(RECORD) == 4)  # it may have more by now


def test_workers_that_have_no_more_are_not_asked_until_they_wake_up():
    executor = ScriptedExecutor()
    executor.rpc[RECORD[0]] = None
    with LoopRig(executor, idle_method="idle") as rig:
        rig.until(lambda: executor.calls.count(RECORD) == 1)
        rig.send(request("a"))
        rig.until(lambda: rig.ends == {"a": "length"})
        time.sleep(0.05)
        assert executor.calls.count(RECORD) == 1
        for number, (call, args) in enumerate((("sleep", [1, "wait"]), ("wake_up", [None]))):
            rig.send(UtilityCall(0, number, call, args))
            rig.until(lambda number=number: number in rig.answers)
        rig.until(lambda: executor.calls.count(RECORD) == 2)
        time.sleep(0.05)
        assert executor.calls.count(RECORD) == 2


def test_a_request_waits_for_one_recording_at_most():
    executor = Recording(10_000)
    executor.go_on.clear()
    with LoopRig(executor, idle_method="idle") as rig:
        assert executor.begun.wait(PATIENCE_S)
        rig.send(request("a"))
        executor.go_on.set()
        rig.until(lambda: rig.ends == {"a": "length"})
    assert executor.calls.index(("execute", 1)) == 1
    assert executor.calls[0] == RECORD


def test_nothing_is_recorded_unless_workers_ask_for_it():
    executor = Recording(3)
    with LoopRig(executor) as rig:
        rig.send(request("a"))
        rig.until(lambda: rig.ends == {"a": "length"})
        time.sleep(0.05)
    assert RECORD not in executor.calls


@pytest.mark.parametrize("call", ["pause", "sleep"])
def test_nothing_is_recorded_while_paused(call):
    executor = Recording(0)
    args = ["wait", False] if call == "pause" else [1, "wait"]
    with LoopRig(executor, idle_method="idle") as rig:
        rig.send(UtilityCall(0, 1, call, args))
        rig.until(lambda: 1 in rig.answers)
        before = executor.calls.count(RECORD)
        rig.send(["unknown"])
        rig.until(rig.queues.input.empty)
        time.sleep(0.05)
        assert executor.calls.count(RECORD) == before


@pytest.mark.parametrize("error", [ModelError("model: no"), KeyError("no")])
def test_an_executor_that_fails_ends_the_engine(error):
    executor = ScriptedExecutor()
    executor.rpc[RECORD[0]] = error
    rig = LoopRig(executor, idle_method="idle")
    with rig:
        rig.join()
    if isinstance(error, ModelError):
        assert rig.error is error
    else:
        assert isinstance(rig.error, PluginFaultError)
        assert "the executor: its collective_rpc failed: KeyError: 'no'" in str(rig.error)


def test_an_engine_process_records_after_its_first_answer(scripted, tmp_path, monkeypatch):
    sizes = tmp_path / "sizes"
    monkeypatch.setenv(SIZES_FILE, str(sizes))
    folder = tmp_path / "model"
    folder.mkdir()
    for file in scripted.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Replayable"]}))
    enable = [{"use": f"{graphs.__name__}:ReplayableScript", "name": "Replayable"}]
    extra = {"plugins": {"enable": enable}, "engine": {"in_process": False}}
    params = SamplingParams(temperature=0.0, max_tokens=20)
    with LLM(config=scripted_config(folder, graphed_script(extra))) as llm:
        assert not sizes.exists()
        before = llm.generate("say abc", params)[0].outputs[0].token_ids
        wait_until(lambda: sizes.exists() and sizes.read_text().split() == ["8", "4", "2", "1"])
        assert llm.generate("say abc", params)[0].outputs[0].token_ids == before
