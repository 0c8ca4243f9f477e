"""Engines that join over TCP, in processes of their own: as good as local ones, whatever dies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest
from support.driving import varied_jobs
from support.joining import JoiningEngine, Proxy, free_address
from support.process.forked_python import forked_python
from support.process.harness import process_config
from support.process.slow_requests import interrupted
from support.waiting import PATIENCE_S, alive, wait_until

from hardpoint import LLM, HardpointError, SamplingParams
from hardpoint.testing import scripted_config
from hardpoint.toolkit.curve_keys import make_client, revoke_client

JOBS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
PLUGINS = {"plugins": {"enable": ["support.plugins.slow:Slow"]}}


def head(scripted, address, settings=None, **parallel) -> LLM:
    table = {"join_address": address, "heartbeat_seconds": 10.0, "balancer": "round_robin"}
    engine = {"restart": "on_failure", "max_resumes": 9} | (settings or {})
    extra = {"parallel": table | parallel, "engine": engine} | PLUGINS
    return LLM(config=process_config(scripted, extra))


@pytest.fixture
def engine(tmp_path, scripted):
    """Start `hardpoint engine` with a configuration like the heads'."""
    engines = []

    def start(address, *more, config=None) -> JoiningEngine:
        config = scripted_config(scripted, PLUGINS) if config is None else config
        engines.append(JoiningEngine(tmp_path, config, address, *more))
        return engines[-1]

    yield start
    for running in engines:
        running.close()


def results(llm, resumes=None, slow=None, **more) -> list:
    """Run requests of many kinds; return all that a user sees of each."""
    jobs = [job for job in varied_jobs(30) if job[2].n <= 2][:JOBS]
    prompts = [{"prompt_token_ids": prompt} for _, prompt, _ in jobs]
    params = [msgspec.structs.replace(job[2], plugin_args=slow or {}) for job in jobs]
    outputs = llm.generate(prompts, params, **more)
    if resumes is not None:
        resumes += [output.num_resumes for output in outputs]
    return [
        [(c.token_ids, c.text, c.finish_reason, c.error, c.logprobs) for c in output.outputs]
        for output in outputs
    ]


def back(llm, rank=1, before=None) -> int:
    """Wait until the engine of a rank serves, another one than before; return its process id."""
    wait_until(lambda: llm.engines[rank].pid not in (None, before), PATIENCE_S, "the engine")
    return llm.engines[rank].pid


@pytest.fixture
def after(tmp_path):
    """Run the requests; do something to their engines once some have tokens; let them end."""

    def run(llm, do, **more) -> list:
        return interrupted(partial(results, llm, **more), llm.engines[1], do, tmp_path)

    return run


@pytest.mark.nightly
def test_a_joined_engine_is_as_good_as_a_local_one(scripted, engine, after, tmp_path):
    address, keys = free_address(), tmp_path / "keys"
    client = str(make_client(str(keys), "other"))
    first = engine(address, "--keys", client)
    with head(scripted, address, data=2, local=1, keys=str(keys)) as llm:
        local = results(llm, data_parallel_rank=0)
        joined = llm.engines[1].pid
        assert psutil.Process(joined).parent().pid == first.process.pid
        assert results(llm, data_parallel_rank=1) == local  # token for token
        assert results(llm) == local
        assert llm.engines[1].scheduler_stats().prefix_cache.requests > 0
        llm.engines[1].pause("keep")
        llm.engines[1].resume()
        llm.plugins.set_policy("priority")
        with pytest.raises(HardpointError, match=r"engine 1: plugin 'fair'.* has it enabled, the"):
            llm.plugins.set_policy("fair", {"tag": "who"})  # options are not taken from outside
        llm.plugins.set_policy("fcfs")

        killed = after(llm, lambda: os.kill(joined, signal.SIGKILL))
        assert killed == local
        second = back(llm, before=joined)  # of the same program, which has joined again
        assert psutil.Process(second).parent().pid == first.process.pid
        assert results(llm, data_parallel_rank=1) == local

        assert after(llm, lambda: revoke_client(str(keys), "other")) == local
        code, log = first.ended()
        assert code == 2
        assert f"error: --keys: the head at {address} refuses the key" in log
        assert "engine 1 has ended: the head has given the engine up" in log
        assert not alive(second)


@pytest.mark.nightly
def test_a_joined_engine_that_is_stopped_joins_again(scripted, engine, after):
    address = free_address()
    first = engine(address)
    with head(scripted, address, data=2, local=1, heartbeat_seconds=3.0) as llm:
        local = results(llm, data_parallel_rank=0)
        stopped = llm.engines[1].pid

        def stop() -> None:
            first.process.send_signal(signal.SIGSTOP)
            os.kill(stopped, signal.SIGSTOP)

        assert after(llm, stop) == local
        assert llm.engines[1].pid is None
        os.kill(stopped, signal.SIGCONT)
        first.process.send_signal(signal.SIGCONT)
        assert back(llm) != stopped
        wait_until(
            lambda: not alive(stopped), PATIENCE_S, "the end of the engine that was given up"
        )
        assert results(llm, data_parallel_rank=1) == local


@pytest.mark.nightly
@pytest.mark.parametrize("drain_seconds", [0.0, 60.0], ids=["at_once", "with_time"])
def test_an_engine_that_is_ended_in_order_leaves(scripted, engine, after, drain_seconds):
    """Its requests end there, or elsewhere; with `max_resumes` 0, as nothing has died."""
    address = free_address()
    first = engine(address)
    settings = {"max_resumes": 0, "drain_seconds": drain_seconds}
    resumes: list[int] = []
    with head(scripted, address, settings, data=2, local=1) as llm:
        local = results(llm, data_parallel_rank=0)
        left = llm.engines[1].pid

        def end() -> None:
            first.process.terminate()
            if not drain_seconds:
                wait_until(lambda: llm.engines[1].pid is None, PATIENCE_S, "its end")

        assert after(llm, end, resumes=resumes) == local
        assert (max(resumes) > 0) == (drain_seconds == 0)
        code, log = first.ended()
        assert code == 0, log
        assert not alive(left)
        assert llm.engines[1].pid is None
        assert results(llm) == local
        engine(address)
        assert back(llm, before=left)  # its rank was offered again
        assert results(llm, data_parallel_rank=1) == local


@pytest.mark.nightly
def test_what_is_swallowed_ends_on_both_sides(scripted, engine, after):
    address = free_address()
    with contextlib.closing(Proxy(address)) as proxy:
        joining = engine(proxy.address)
        with head(scripted, address, data=2, local=1, heartbeat_seconds=3.0) as llm:
            local = results(llm, data_parallel_rank=0)
            joined = llm.engines[1].pid
            assert after(llm, proxy.swallows.set) == local
            wait_until(
                lambda: joining.has_logged("the head sent nothing for 3 s"),
                PATIENCE_S,
                "the engine",
            )
            wait_until(lambda: not alive(joined), PATIENCE_S, "the end of the engine")
            proxy.swallows.clear()
            assert back(llm) != joined
            assert results(llm, data_parallel_rank=1) == local


HEAD = """
import sys, time, msgspec
from hardpoint import LLM
with LLM(config=msgspec.json.decode(sys.argv[1])) as llm:
    print(llm.engines[0].pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.nightly
def test_an_engine_outlives_its_head(scripted, engine):
    address = free_address()
    table = {"parallel": {"join_address": address, "local": 0}} | PLUGINS
    config = msgspec.json.encode(process_config(scripted, table)).decode()
    tests = str(Path(__file__).parents[1])
    joining = engine(address)
    with forked_python().popen(
        ["-c", HEAD, config],
        env=os.environ | {"PYTHONPATH": tests},
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        first = int(program.stdout.readline())
        program.kill()
    wait_until(lambda: not alive(first), PATIENCE_S, "the end of its engine")
    assert joining.process.poll() is None
    with head(scripted, address, data=1, local=0) as llm:  # headless: it has no engine of its own
        assert llm.generate("say abc", GREEDY)[0].outputs[0].token_ids
        second = llm.engines[0].pid
        assert second != first
        joining.process.terminate()  # in order
        wait_until(lambda: llm.engines[0].pid is None, PATIENCE_S, "its end")
        assert joining.ended()[0] == 0
        once = engine(address, "--once")
        back(llm, 0)
    assert once.ended()[0] == 0


def test_one_engine_joins_and_another_one_is_refused(scripted, engine, tmp_path):
    address = free_address()
    keys = str(make_client(str(tmp_path / "keys"), "other"))
    joining = engine(address)
    with head(scripted, address, data=1, local=0) as llm:
        assert llm.generate("say abc", GREEDY)[0].outputs[0].text == " abc abc abc"
        joined = llm.engines[0].pid
        assert psutil.Process(joined).parent().pid == joining.process.pid
        code, log = engine(address, "--keys", keys).ended()
        assert code == 2
        assert "does not agree on security: either side has keys" in log
        assert log.count("error:") == 1
        assert llm.engines[0].pid == joined


@pytest.mark.nightly
def test_what_may_not_join_ends_with_one_error(scripted, engine, tmp_path):
    address = free_address()
    good = engine(address)
    other = tmp_path / "other"
    other.mkdir()
    for file in scripted.iterdir():
        (other / file.name).write_bytes(file.read_bytes() + b"\n")
    with head(scripted, address, data=2, local=1) as llm:
        keys = str(make_client(str(tmp_path / "keys"), "other"))
        wrong = [
            (
                engine(address, config=scripted_config(other, PLUGINS)),
                "refuses the engine: model: ",
            ),
            (engine("10.0.0.1"), "--join: expected tcp://HOST:PORT, got '10.0.0.1'"),
            (engine(address, "--keys", keys), "does not agree on security: either side has keys"),
        ]
        for joining, words in wrong:
            code, log = joining.ended()
            assert code == 2
            assert words in log
            assert log.count("error:") == 1
        assert good.process.poll() is None
        good.close()
        fewer = engine(address, config=scripted_config(scripted))
        code, log = fewer.ended()
        assert code == 2
        assert "support.plugins.slow:Slow" in log
        assert f"the head {address} has it enabled, the configuration on " in log
        assert llm.generate("say abc", GREEDY)[0].outputs[0].token_ids
