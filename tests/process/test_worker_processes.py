"""Engines with workers as processes: their views and actions, and the rest if one dies."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time

import msgspec
import psutil
import pytest
from support.plugins.faulty import Dense
from support.process.harness import (
    OWN_PROCESS,
    Program,
    assert_quick,
    gone,
    holdings,
    nothing_left,
)
from support.process.slow_requests import SLOW
from support.processes import ROOT
from support.scripted_folder import write_config
from support.waiting import alive

from hardpoint import LLM, AsyncLLM, SamplingParams
from hardpoint.errors import EngineDeadError, PluginLoadError
from hardpoint.plugins import LogitsProcessor, Phase
from hardpoint.testing import scripted_config

HERE = __name__
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
FAULTY = "support.plugins.refusing:RefusesToSample"
KILLED = r"the worker process of rank {rank} \(pid {pid}\) was killed by signal 9 \(SIGKILL\)"


class Refuses(Dense):
    """Cannot be made, which only the rank that samples finds out."""

    contract = 1

    def __init__(self, context):
        raise OSError("no such thing")


class Idle(LogitsProcessor):
    """Changes nothing."""

    contract = 1
    phase = Phase.PENALTY

    def apply(self, logits, rows):
        return logits


def config(folder, tensor=2, pipeline=1, **extra):
    """The configuration of an engine with worker processes."""
    parallel = {"tensor": tensor, "pipeline": pipeline}
    return scripted_config(folder, {"executor": {"use": "multiproc"}, "parallel": parallel} | extra)


def workers():
    """The worker processes of this one, of any depth, by rank."""
    by_rank = {}
    for process in psutil.Process().children(recursive=True):
        name = process.name()
        if name.startswith("Worker_") and alive(process.pid):
            by_rank[int(name.removeprefix("Worker_"))] = process
    return [by_rank[rank] for rank in sorted(by_rank)]


def text_of(llm):
    return llm.generate("say abc", GREEDY)[0].outputs[0].text


@pytest.fixture
def clean():
    """Nothing may be left of a test."""
    before = holdings()
    yield
    nothing_left(before)


def test_an_engine_sleeps_profiles_and_reports_with_all_its_workers(scripted, tmp_path, clean):
    engine = {"in_process": True, "profile_dir": str(tmp_path)}
    plugins = {"enable": [f"{HERE}:Idle"]}
    with LLM(config=config(scripted, engine=engine, plugins=plugins)) as llm:
        assert len(workers()) == 2
        assert text_of(llm) == " abc abc abc"
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert text_of(llm) == " abc abc abc"
        llm.debug.start_profile()
        files = llm.debug.stop_profile()
        assert len({os.path.basename(file) for file in files}) == 2
        for rank, file in enumerate(files):
            assert f"hardpoint-rank{rank}-{workers()[rank].pid}-" in file
            assert os.path.getsize(file)
        before = llm.plugins.meters()["idle"].steps
        llm.generate("x", SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
        assert llm.plugins.meters()["idle"].steps == before + 3


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_worker_that_dies_in_a_collective_ends_the_engine_in_a_second(scripted, rank, clean):
    errors = []
    with LLM(config=config(scripted, engine={"in_process": True})) as llm:
        text_of(llm)
        victim = workers()[rank]
        victim.send_signal(signal.SIGSTOP)

        def ask():
            try:
                llm.generate(["x"] * 50, ENDLESS)
            except EngineDeadError as error:
                errors.append((time.monotonic(), error))

        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(0.2)  # the other one now waits for it
        began = time.monotonic()
        victim.kill()
        thread.join()
        ((ended, error),) = errors
        assert_quick("the death of a worker in a collective", ended - began)
        assert re.match(KILLED.format(rank=rank, pid=victim.pid), str(error))
        began = time.monotonic()
    assert_quick("close after it", time.monotonic() - began)


def test_a_plugin_that_fails_in_one_rank_is_the_error_of_the_start(scripted, clean):
    refused = config(scripted, engine={"in_process": True}, plugins={"enable": [f"{HERE}:Refuses"]})
    with pytest.raises(PluginLoadError, match=r"plugin 'refuses'.*no such thing"):
        LLM(config=refused)


@pytest.mark.nightly
@pytest.mark.fresh_process
def test_the_command_line_reports_one_error_and_leaves_nothing(scripted, tmp_path):
    settings = ('executor.use = "multiproc"', "parallel.tensor = 2", f'sampler.use = "{FAULTY}"')
    write_config(tmp_path, scripted, *settings)
    path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-m", "hardpoint", "generate", "hi"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    print(done.stderr)
    assert done.returncode == 2
    assert done.stderr.startswith("hardpoint: error: ")
    assert "no such thing" in done.stderr
    assert not list(tmp_path.glob("hardpoint-*"))


PROGRAM = """
    import json, os, time
    import psutil
    from hardpoint import LLM, SamplingParams
    from hardpoint.plugins import LogitsProcessor, Phase
    from hardpoint.testing import scripted_config

    class Repeats(LogitsProcessor):
        contract = 1
        phase = Phase.BIAS

        def apply(self, logits, rows):
            logits[:, 65] = 1e9
            return logits

    llm = LLM(config=scripted_config({folder!r}, {{
        "executor": {{"use": "multiproc"}}, "parallel": {{"tensor": 2}},
        "engine": {{"in_process": False}}, "plugins": {{"enable": ["__main__:Repeats"]}}}}))
    params = SamplingParams(temperature=0.0, max_tokens=20, plugin_args={{"repeats": {{}}}})
    text = llm.generate("say abc", params)[0].outputs[0].text
    found = psutil.Process().children(recursive=True)
    print(json.dumps([text, {{child.name(): child.pid for child in found}}]), flush=True)
    if {dies}:
        time.sleep(600)
    llm.close()
"""


@pytest.mark.nightly
@pytest.mark.fresh_process
@pytest.mark.parametrize("dies", [False, True])
def test_workers_of_an_engine_process_have_the_plugins_of_main(scripted, tmp_path, dies):
    source = PROGRAM.format(folder=str(scripted), dies=dies)
    with Program(source, folder=tmp_path) as program:
        text, pids = program.next_value()
        assert text == text[0] * 20
        assert sorted(pids) == ["EngineCore", "Worker_0", "Worker_1"]
        if dies:
            program.popen.kill()
        else:
            _, err = program.finish()
            assert "terminate called" not in err
        for pid in pids.values():
            gone(pid)


@pytest.mark.nightly
@pytest.mark.fresh_process
def test_a_restarted_engine_serves_with_new_workers(scripted):
    before = holdings()

    async def ask(llm):
        async for output in llm.generate("say abc", GREEDY):
            last = output
        return last.outputs[0].text

    async def main():
        restarting = config(scripted, engine=OWN_PROCESS | {"resume": "off"}, **SLOW)
        async with AsyncLLM(config=restarting, restart="on_failure") as llm:
            assert await ask(llm) == " abc abc abc"
            for rank in (0, 1):
                old = workers()
                stuck = asyncio.create_task(ask_endless(llm))
                while not (await llm.engines.scheduler_stats()).num_running:
                    await asyncio.sleep(0.01)
                began = time.monotonic()
                old[rank].kill()
                with pytest.raises(EngineDeadError, match=f"rank {rank}"):
                    await stuck
                assert_quick("the death of a worker", time.monotonic() - began)
                assert await ask(llm) == " abc abc abc"
                assert not any(alive(process.pid) for process in old)
                assert len(workers()) == 2

    async def ask_endless(llm):
        params = msgspec.structs.replace(ENDLESS, plugin_args={"slow": {"seconds": 0.1}})
        async for _ in llm.generate("x", params):
            pass

    asyncio.run(main())
    nothing_left(before)


@pytest.mark.usefixtures("forked_ranks")
def test_an_engine_process_that_is_killed_takes_its_workers_with_it(scripted):
    before = holdings()
    with LLM(config=config(scripted, engine=OWN_PROCESS)) as llm:
        text_of(llm)
        processes = workers()
        os.kill(llm.llm_engine.parts.client.pid, signal.SIGKILL)
        for process in processes:
            gone(process.pid)
        with pytest.raises(EngineDeadError):
            text_of(llm)
    nothing_left(before)
