"""A rank that hangs, with `engine.watchdog_exits`: the step ends, with the rank and the plugin."""

from __future__ import annotations

import signal
import time

import pytest
from support.process.harness import assert_quick, gone, hangs, holdings, nothing_left
from support.process.slow_requests import SLOW
from test_worker_processes import ENDLESS, GREEDY, config, text_of, workers

from hardpoint import LLM, EngineDeadError

LIMIT_S = 2.0
NIGHTLY = pytest.mark.nightly


def watched(folder, *, in_process, **ranks):
    engine = {"in_process": in_process, "watchdog_seconds": LIMIT_S, "watchdog_exits": True}
    return config(folder, engine=engine, **SLOW, **ranks)


@NIGHTLY
@pytest.mark.parametrize("in_process", [True, False])
def test_a_plugin_that_hangs_in_a_rank_is_named_and_the_rank_is_killed(
    scripted, tmp_path, in_process, capfd
):
    before = holdings()
    with LLM(config=watched(scripted, in_process=in_process)) as llm:
        assert text_of(llm) == " abc abc abc"
        ranks = workers()
        began = time.monotonic()
        message = (
            rf"^rank 0 \(pid {ranks[0].pid}\), in apply\(\) of plugin 'slow' \(.*\): "
            rf"sample_tokens took longer than {LIMIT_S:g} s \(engine\.watchdog_seconds\)"
        )
        with pytest.raises(EngineDeadError, match=message):
            llm.generate("x", hangs(tmp_path / "begun"))
        assert_quick("the end of a hanging step", time.monotonic() - began)
        gone(ranks[0].pid)
        assert "slow.py" in capfd.readouterr().err
        with pytest.raises(EngineDeadError):
            text_of(llm)
    nothing_left(before)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=NIGHTLY), 1])
def test_a_rank_that_is_stopped_is_named(scripted, rank):
    with LLM(config=watched(scripted, in_process=True)) as llm:
        text_of(llm)
        victim = workers()[rank]
        victim.send_signal(signal.SIGSTOP)
        stopped = rf"^rank {rank} \(pid {victim.pid}\), stopped by a signal"
        with pytest.raises(EngineDeadError, match=stopped) as error:
            llm.generate(["x"] * 50, ENDLESS)
        assert f"rank {1 - rank}" not in str(error.value)
        gone(victim.pid)


@NIGHTLY
def test_a_long_step_that_is_not_too_long_goes_on(scripted):
    with LLM(config=watched(scripted, in_process=True, tensor=1, pipeline=2)) as llm:
        assert text_of(llm) == " abc abc abc"
        time.sleep(LIMIT_S * 1.5)  # the time between steps does not count
        assert [o.outputs[0].text for o in llm.generate(["say abc"] * 3, GREEDY)] == [
            " abc abc abc"
        ] * 3
