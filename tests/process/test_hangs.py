"""An engine process that hangs is noticed from outside, ended, and restarted where it may be."""

from __future__ import annotations

import os
import signal
import time

import pytest
from support.http_server import running
from support.process.harness import alive, gone, hangs, pid_of
from support.process.slow_requests import SLOW, add, begin, finals, long
from support.waiting import until, wait_until

from hardpoint import AsyncLLM, EngineDeadError, SamplingParams
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.plugins import LogitsProcessor, Phase
from hardpoint.testing import scripted_config

SILENT = {"engine": {"hung_process_seconds": 2.0}}
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def test_a_stopped_engine_is_dead_for_all_that_wait(opened, endless, caplog):
    llm = opened(endless, SLOW | SILENT)
    pid = pid_of(llm)
    begin(llm, 4, long())
    os.kill(pid, signal.SIGSTOP)
    message = (
        rf"the engine process \(pid {pid}\) hangs: it gave no sign of life for 2 s "
        r"\(engine.hung_process_seconds\)"
    )
    with pytest.raises(EngineDeadError, match=message):
        finals(llm)
    gone(pid)
    assert "it is killed" in caplog.text


def test_a_request_ends_at_its_deadline_though_its_engine_is_stopped(opened, endless):
    llm = opened(endless, SLOW)
    pid = pid_of(llm)
    os.kill(pid, signal.SIGSTOP)
    try:
        llm.llm_engine.add_request("r", [1], long(), RequestExtras(timeout=0.5))
        assert finals(llm) == ["timeout"]
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.nightly
def test_a_step_that_hangs_ends_the_engine(opened, endless, tmp_path):
    llm = opened(endless, SLOW | {"engine": {"hung_step_seconds": 1.5}})
    pid = pid_of(llm)
    add(llm, 1, hangs(tmp_path / "begun"))
    message = (
        r"hangs: a step takes longer than 1.5 s \(engine.hung_step_seconds\), in apply\(\) of "
    )
    with pytest.raises(EngineDeadError, match=message + "plugin 'slow'"):
        finals(llm)
    gone(pid)


@pytest.mark.nightly
def test_an_engine_that_is_idle_or_works_does_not_hang(opened, endless):
    engine = {"hung_process_seconds": 3.0, "hung_step_seconds": 3.0}
    llm = opened(endless, SLOW | {"engine": engine})
    pid = pid_of(llm)
    slow = {"slow": {"seconds": 0.5}}
    params = SamplingParams(max_tokens=8, ignore_eos=True, plugin_args=slow)
    assert llm.generate("x", params)[0].outputs[0].finish_reason == "length"
    assert alive(pid)


class ReplacesSleep(LogitsProcessor):
    """Replaces `time.sleep`, as libraries do that switch threads or stop clocks."""

    contract = 1
    phase = Phase.PENALTY

    def apply(self, logits, rows):
        del rows

        def sleep(seconds):
            raise RuntimeError(seconds)

        time.sleep = sleep
        return logits


@pytest.mark.nightly
def test_a_plugin_that_replaces_sleep_does_not_hang(opened, endless):
    enabled = {"plugins": {"enable": [f"{__name__}:ReplacesSleep"]}}
    llm = opened(endless, enabled | SILENT)
    llm.generate("x", GREEDY)
    time.sleep(3.0)
    assert alive(pid_of(llm))


@pytest.mark.nightly
async def test_it_is_restarted(scripted):
    config = scripted_config(scripted, SILENT)
    async with AsyncLLM(config=config, restart="on_failure") as llm:
        assert [output async for output in llm.generate("say abc", GREEDY)]
        first = llm.engines.pid
        os.kill(first, signal.SIGSTOP)
        await until(lambda: llm.is_running and llm.engines.pid != first, "another engine")
        assert [output async for output in llm.generate("say abc", GREEDY)]
        assert (await llm.plugins.health()).restarts == 1


def test_a_server_is_not_ready_until_it_is(scripted, tmp_path):
    """Before its first request, too."""
    gate = tmp_path / "closed"
    gated = {
        "plugins": {"enable": ["support.plugins.pacing:Gate"]},
        "plugin": {"gate": {"path": str(gate)}},
    }
    config = scripted_config(scripted, SILENT | gated)
    llm = AsyncLLM(config={**config, "server": {"port": 0}}, restart="on_failure")
    with running(llm) as server:
        gate.touch()  # so that another one does not get ready
        os.kill(llm.engines.pid, signal.SIGSTOP)
        answers = []

        def is_ready():
            answers.append(server.client.get("/ready"))
            return answers[-1].status_code == 200

        wait_until(lambda: not is_ready())
        assert answers[-1].status_code == 503
        assert answers[-1].json() == {
            "status": "unavailable",
            "reason": "the engine is being restarted; send the request again",
        }
        gate.unlink()
        wait_until(is_ready)
    llm.close()
