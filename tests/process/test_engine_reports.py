"""An engine process reports its load and its cached blocks to a client that asks for it."""

from __future__ import annotations

import msgspec
import pytest
from support.internals import client_of
from support.process.harness import process_config
from support.waiting import wait_until

from hardpoint import LLM, SamplingParams
from hardpoint.journal.replay import replay
from hardpoint.plugins import EngineCoreOutputs, EngineCoreRequest
from hardpoint.process.client.output_queue import OutputQueue
from hardpoint.process.engine_process import EngineProcess
from hardpoint.replicas.prefix_index import PrefixIndex

GREEDY = SamplingParams(temperature=0.0, max_tokens=3)
SIZE = 8
TEXT = "a prompt of a few blocks, which another one may begin with"


def open_reporting(monkeypatch, folder, tables=None, **reports):
    """Open an engine with a launch that asks for reports; return it and its outputs."""
    came, launch, put = [], EngineProcess.launch, OutputQueue.put

    def launched(process, message):
        launch(process, msgspec.structs.replace(message, **reports))

    def received(outputs, item):
        if isinstance(item, EngineCoreOutputs):
            came.append(item)
        put(outputs, item)

    monkeypatch.setattr(EngineProcess, "launch", launched)
    monkeypatch.setattr(OutputQueue, "put", received)
    tables = {"kv_cache": {"block_size": SIZE}} | (tables or {})
    return LLM(config=process_config(folder, tables)), came


@pytest.fixture
def opened(scripted, monkeypatch):
    llm, came = open_reporting(monkeypatch, scripted, reports_load=True, reports_cache=True)
    with llm:
        yield llm, came


def test_a_replay_reports_to_nobody(scripted, monkeypatch, tmp_path):
    tables = {"engine": {"journal": str(tmp_path / "journal")}}
    with open_reporting(monkeypatch, scripted, tables, reports_cache=True)[0] as llm:
        llm.generate(TEXT, GREEDY)
        assert client_of(llm).call_utility("cached_blocks").stored
        llm.generate(TEXT, GREEDY)
    report = replay(tmp_path / "journal")
    assert report.difference is None, str(report.difference)
    assert report.tokens == 6


def request(ids, **fields):
    return EngineCoreRequest(request_id="x", prompt_token_ids=ids, params=GREEDY, **fields)


def index_of(came):
    index = PrefixIndex(SIZE)
    for outputs in list(came):
        if outputs.cache_changes is not None:
            assert index.apply(outputs.engine_index, outputs.cache_changes)
    return index


def test_what_ran_is_found_until_the_cache_is_reset(opened):
    llm, came = opened
    (output,) = llm.generate(TEXT, GREEDY)
    llm.generate(TEXT, GREEDY, cache_salt="mine")
    ids = output.prompt_token_ids
    plain, salted = request(ids), request(ids, cache_salt="mine")
    index = index_of(came)
    whole = (len(ids) - 1) // SIZE * SIZE
    assert whole >= 5 * SIZE
    assert index.cached_prefix_tokens(plain) == {0: whole}
    assert index.cached_prefix_tokens(salted) == {0: whole}
    assert index.cached_prefix_tokens(request(ids, cache_salt="other")) == {}
    (longer,) = llm.generate({"prompt_token_ids": [*ids[:-1], *ids]}, GREEDY)
    cached = index.cached_prefix_tokens(request(longer.prompt_token_ids))
    assert cached == {0: longer.num_cached_tokens} == {0: whole}

    restored, last = (
        PrefixIndex(SIZE),
        [outputs.cache_changes for outputs in came if outputs.cache_changes][-1],
    )
    assert not restored.apply(0, last)
    assert restored.cached_prefix_tokens(salted) == {}
    assert restored.restore(0, client_of(llm).call_utility("cached_blocks"))
    assert restored.cached_prefix_tokens(salted) == {0: whole}

    llm.reset_prefix_cache()
    wait_until(lambda: not len(index_of(came)))
    assert index_of(came).cached_prefix_tokens(plain) == {}


def test_the_load_ends_at_nothing_after_the_last_request(opened):
    llm, came = opened
    llm.generate([TEXT] * 3, SamplingParams(temperature=0.0, max_tokens=3, n=2))

    def loads():
        return [outputs.load for outputs in list(came) if outputs.load is not None]

    wait_until(lambda: loads() and loads()[-1].num_steps and not loads()[-1].num_running)
    last = loads()[-1]
    assert (last.num_waiting, last.kv_cache_usage) == (0, 0)
    assert last.last_request is not None


def test_who_asks_for_nothing_gets_nothing(scripted, monkeypatch):
    llm, came = open_reporting(monkeypatch, scripted)
    with llm:
        llm.generate(TEXT, GREEDY)
        assert came
        assert not any(outputs.load or outputs.cache_changes for outputs in came)
