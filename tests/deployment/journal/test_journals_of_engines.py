"""Journals of several engines, of engines that are started again, and of adapters and parts."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest
from support.adapters import lora, write_adapter, write_model
from support.journal.files import of_other_torch, with_header
from support.plugins.changing_parts import FIRST, Mark
from support.process.harness import process_config
from support.waiting import until

from hardpoint import LLM, AsyncLLM, SamplingParams
from hardpoint.builtin_plugins.step_parts.adapters import worker_half
from hardpoint.builtin_plugins.step_parts.adapters.files import load_adapter
from hardpoint.builtin_plugins.step_parts.adapters.readings import Readings
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.journal.replay import replay
from hardpoint.testing import scripted_config

NUM_REQUESTS = 6
PARAMS = SamplingParams(max_tokens=150, temperature=1.0, seed=3, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
_begin = Readings.begin
WITHOUT_END = ["the journal has no end: its engine was killed, or is running"]


async def tokens_of(llm, prompt, params=PARAMS, **more):
    token_ids = []
    async for output in llm.generate(prompt, params, **more):
        token_ids = output.outputs[0].token_ids
    return token_ids


def check(path, notes=()):
    """Replay a journal; return how many tokens were compared."""
    report = replay(path)
    assert report.difference is None, (path.name, str(report.difference))
    assert report.notes == list(notes), path.name
    return report.tokens


def names(folder):
    return sorted(path.name for path in folder.glob("journal*"))


def config_of(model, folder, num_engines, **tables):
    engine = {"engine": {"journal": str(folder / "journal")}}
    return process_config(model, engine | {"parallel": {"data": num_engines}} | tables)


def test_each_engine_of_a_set_has_its_own(scripted, tmp_path):
    async def run():
        llm = AsyncLLM(config=config_of(scripted, tmp_path, 2))
        try:
            await llm.plugins.change(enable=[Mark], config={"scheduler.policy": "fair"})
            calls = [tokens_of(llm, f"{index} is") for index in range(NUM_REQUESTS)]
            return await asyncio.gather(*calls)
        finally:
            await llm.aclose()

    results = asyncio.run(run())
    assert names(tmp_path) == ["journal", "journal.engine1"]
    counts = [check(tmp_path / name) for name in names(tmp_path)]
    assert min(counts) >= PARAMS.max_tokens
    assert sum(counts) == sum(map(len, results))


@pytest.mark.parametrize(
    ("num_engines", "files"),
    [
        (1, ["journal", "journal.previous"]),
        pytest.param(
            2,
            ["journal", "journal.engine1", "journal.engine1.previous"],
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_requests_that_go_on_at_an_engine_that_is_started_again(
    scripted, tmp_path, num_engines, files
):
    """Both journals are replayed: of the engine that was killed, and with the latest plugins."""

    async def run():
        llm = AsyncLLM(config=config_of(scripted, tmp_path, num_engines), restart="on_failure")
        try:
            await llm.plugins.change(enable=[Mark], options={"mark": {"mark": 2}})
            expected = await tokens_of(llm, "0 is")
            calls = [asyncio.ensure_future(tokens_of(llm, "0 is")) for _ in range(NUM_REQUESTS)]
            while not all(call.done() for call in calls):
                if any(request.num_output_tokens for request in await llm.engines.live_requests()):
                    break
                await asyncio.sleep(0.01)
            pid = llm.engines[-1].pid
            os.kill(pid, signal.SIGKILL)
            results = await asyncio.gather(*calls)
            await until(lambda: llm.engines[-1].pid not in (pid, None), "the other engine")
            marked = [
                tokens_of(llm, f"{index} is", SHORT, tags={"marked": "yes"}) for index in range(4)
            ]
            return expected, results, await asyncio.gather(*marked)
        finally:
            await llm.aclose()

    expected, results, marked = asyncio.run(run())
    assert results == [expected] * NUM_REQUESTS
    assert marked == [[FIRST + 2] * SHORT.max_tokens] * 4
    assert names(tmp_path) == files
    for name in files:
        assert check(tmp_path / name, WITHOUT_END if name.endswith("previous") else ()) > 0


@pytest.mark.parametrize("in_process", [True, False], ids=["in process", "own process"])
def test_step_parts_that_change(scripted, tmp_path, in_process):
    path, extras = tmp_path / "journal", RequestExtras(tags={"marked": "yes"})
    engine = {"engine": {"journal": str(path), "in_process": in_process}}
    with LLM(config=scripted_config(scripted, engine)) as llm:
        engine = llm.llm_engine
        for number in range(3):
            change = {"options": {"mark": {"mark": number}}} if number else {"enable": [Mark]}
            llm.plugins.change(**change)
            engine.add_request(f"r{number}", "a", SHORT, extras)
            engine.step()
        llm.plugins.change(disable=["mark"])
        engine.add_request("plain", "a", SHORT, extras)
        while engine.has_unfinished_requests():
            engine.step()
    assert check(path) == 4 * SHORT.max_tokens


def let_read(monkeypatch, how):
    """Let workers read an adapter in some time, or before they are asked how far they are."""

    def load(*args):
        time.sleep(0.05)
        return load_adapter(*args)

    def begin(*args):
        ticket = _begin(*args)
        for thread in threading.enumerate():
            if thread.name == "hardpoint-adapter":
                thread.join()
        return ticket

    monkeypatch.setattr(worker_half, "load_adapter", load if how == "slow" else load_adapter)
    monkeypatch.setattr(Readings, "begin", _begin if how == "slow" else begin)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """The folders of a model and of three adapters."""
    base = tmp_path_factory.mktemp("adapted")
    model, folders = write_model(base / "model"), [base / name for name in "abc"]
    for number, folder in enumerate(folders):
        write_adapter(folder, model, size=0.4, r=2, seed=number)
    return base / "model", folders


@pytest.mark.parametrize(
    ("replayed", "recorded"),
    [
        pytest.param("slow", "slow", marks=pytest.mark.nightly),
        ("slow", "at once"),
        ("at once", "slow"),
        pytest.param("at once", "at once", marks=pytest.mark.nightly),
    ],
)
def test_adapters(adapted, tmp_path, monkeypatch, recorded, replayed):
    """Workers keep one of three: the others are read again for requests, and that one after sleep.

    A replay may have read an adapter before it had been when the journal was recorded, or after.
    """
    model, folders = adapted
    config = {
        "engine": {"journal": str(tmp_path / "journal"), "in_process": True},
        "adapters": {"max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": 4},
        "kv_cache": {"num_blocks": 64},
    }
    prompts = [[3, 1, 4, 1, 5] * 4, [2, 7, 1, 8] * 6]
    let_read(monkeypatch, recorded)
    with LLM(str(model), config=config, max_model_len=64) as llm:
        a, b, c = (lora(folder.name, number, folder) for number, folder in enumerate(folders, 1))
        runs = [llm.generate(prompts, SHORT, lora_request=adapter) for adapter in (None, a, b, c)]
        llm.sleep()
        llm.wake_up()
        runs += [
            llm.generate(prompts, SHORT, lora_request=adapter) for adapter in (a, [a, b], None)
        ]
    tokens = [[output.outputs[0].token_ids for output in run] for run in runs]
    assert tokens[0] == tokens[6]
    assert tokens[1] == tokens[4] != tokens[2]
    assert tokens[5] == [tokens[1][0], tokens[2][1]]
    let_read(monkeypatch, replayed)
    assert check(tmp_path / "journal") == 14 * SHORT.max_tokens
    with_header(tmp_path / "journal", of_other_torch)
    forced = replay(tmp_path / "journal", anyway=True)
    assert (forced.difference, forced.tokens, len(forced.notes)) == (None, 14 * SHORT.max_tokens, 1)
