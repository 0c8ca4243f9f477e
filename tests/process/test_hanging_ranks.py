"""A rank that hangs, with `engine.watchdog_exits`: the step ends, with the rank and the plugin."""

from __future__ import annotations

import signal
import threading
import time

import pytest
from support.process.harness import assert_fast, hangs, holdings, nothing_left
from support.process.slow_requests import SLOW
from support.waiting import alive, wait_until
from test_worker_processes import ENDLESS, GREEDY, config, text_of, workers

from hardpoint import LLM, EngineDeadError

LIMIT_S = 1.0


def watched(folder, *, in_process, **ranks):
    engine = {"in_process": in_process, "watchdog_seconds": LIMIT_S, "watchdog_exits": True}
    return config(folder, engine=engine, **SLOW, **ranks)


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
        assert_fast("the end of a hanging step", time.monotonic() - began, LIMIT_S * 1.1 + 6)
        wait_until(lambda: not alive(ranks[0].pid), 2, "the end of the rank")
        assert "slow.py" in capfd.readouterr().err
        with pytest.raises(EngineDeadError):
            text_of(llm)
    nothing_left(before, 5)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_is_named(scripted, rank):
    errors = []
    with LLM(config=watched(scripted, in_process=True)) as llm:
        text_of(llm)
        victim = workers()[rank]

        def ask():
            try:
                llm.generate(["x"] * 50, ENDLESS)
            except EngineDeadError as error:
                errors.append(str(error))

        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(0.2)
        victim.send_signal(signal.SIGSTOP)
        thread.join(30)
        assert errors
        assert errors[0].startswith(f"rank {rank} (pid {victim.pid}), stopped by a signal")
        assert f"rank {1 - rank}" not in errors[0]
        wait_until(lambda: not alive(victim.pid), 2, "the end of the rank")


def test_a_long_step_that_is_not_too_long_goes_on(scripted, tmp_path):
    del tmp_path
    with LLM(config=watched(scripted, in_process=True, tensor=1, pipeline=2)) as llm:
        assert text_of(llm) == " abc abc abc"
        time.sleep(LIMIT_S * 1.5)  # the time between steps does not count
        assert [o.outputs[0].text for o in llm.generate(["say abc"] * 3, GREEDY)] == [
            " abc abc abc"
        ] * 3
