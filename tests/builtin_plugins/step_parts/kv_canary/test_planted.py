"""Defects planted in a running engine: the KV canary finds and names each."""

from __future__ import annotations

import re

import pytest
from support.cases import nightly_but
from support.core.scripted_connector import Script, use
from support.driving import FINAL
from support.internals import core_of

from hardpoint import LLM, SamplingParams
from hardpoint.core.kv_cache import block_hashes
from hardpoint.core.kv_cache.block_pool import BlockPool
from hardpoint.core.worker.input_batch import InputBatch
from hardpoint.plugins import EngineCoreRequest
from hardpoint.plugins.requests import LoRARequest
from hardpoint.testing import scripted_config, scripted_engine

CANARY = {"debug": {"kv_canary": True}, "max_model_len": 128, "kv_cache": {"block_size": 8}}
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, **FINAL)
ONE, OTHER = list(range(20)), list(range(50, 75))


def request(name, prompt, **fields):
    return EngineCoreRequest(
        request_id=name, prompt_token_ids=prompt, params=PARAMS, arrival_time=0.0, **fields
    )


def errors(engine, *requests):
    """Run requests of the core; return the errors of failed ones."""
    core = core_of(engine)
    for source in requests:
        core.add_request(source)
    by_request = {}
    while core.has_requests():
        outputs, _ = core.step()
        for message in outputs.values():
            for output in message.outputs:
                if output.error:
                    by_request[output.request_id] = output.error
    return by_request


@pytest.fixture
def engine(scripted):
    engine = scripted_engine(scripted, CANARY)
    yield engine
    engine.close()


def planted(monkeypatch, change, at=3):
    """Change the inputs of the step of that number."""
    prepare, steps = InputBatch.prepare, []

    def changed(self, *args):
        step = prepare(self, *args)
        steps.append(step)
        if len(steps) == at:
            change(step.packed)
        return step

    monkeypatch.setattr(InputBatch, "prepare", changed)


def test_two_requests(engine):
    assert errors(engine, request("a", ONE), request("b", OTHER)) == {}


def test_swapped_entries(engine, monkeypatch):
    def swap(packed):
        packed.tables[0][:, 1] = packed.tables[0].flip(0)[:, 1]

    planted(monkeypatch, swap)
    messages = errors(engine, request("a", ONE), request("b", OTHER))
    named = r"block \d+ of request '{}', in place of block \d+, has keys and values at position 8 "
    named += "that are those of request '{}', at position 8"
    assert re.search(named.format("a", "b"), messages["a"])
    assert re.search(named.format("b", "a"), messages["b"])


def test_slots_that_are_off_by_one(engine, monkeypatch):
    planted(monkeypatch, lambda packed: packed.slots[0].add_(1))
    messages = errors(engine, request("a", ONE))
    assert re.search(
        r"of request 'a' .* at position 21 that are none: they were never", messages["a"]
    )


def test_slots_of_a_chunk_that_are_off_by_one(engine, monkeypatch):
    planted(monkeypatch, lambda packed: packed.slots[0].copy_(packed.slots[0].roll(1)), at=1)
    messages = errors(engine, request("a", ONE))
    assert re.search(
        r"of request 'a' .* at position 0 .* those of request 'a', at position 1", messages["a"]
    )


def test_a_wrong_token(engine, monkeypatch):
    planted(monkeypatch, lambda packed: packed.token_ids.add_(1))
    messages = errors(engine, request("a", ONE))
    assert re.search(r"of request 'a' .* at position 21 that are those of another", messages["a"])


def test_a_block_that_was_freed_and_reused(engine, monkeypatch):
    allocate, held = BlockPool.allocate, []

    def freed(self, count, **kind):
        blocks = allocate(self, count, **kind)
        held.append(blocks)
        return held[0][:1] + blocks[1:] if len(held) == 2 else blocks

    monkeypatch.setattr(BlockPool, "allocate", freed)
    messages = errors(engine, request("a", ONE), request("b", OTHER))
    assert re.search(
        r"of request 'a' .* at position 0 that are those of request 'b', at position 0",
        messages["a"],
    )


def test_a_wrong_block_of_a_connector(open_engine):
    script = use(Script())
    connector = {"kv_connector": {"use": "support.core.scripted_connector:ScriptedConnector"}}
    engine = open_engine(CANARY | connector)
    assert errors(engine, request("a", ONE), request("b", OTHER)) == {}
    core_of(engine).reset_prefix_cache()
    first, second, *_ = script.kept
    script.kept[first], script.kept[second] = script.kept[second], script.kept[first]
    messages = errors(engine, request("c", ONE))
    assert re.search(
        r"of request 'c' .* at position 0 that are those of request '.', at position 8",
        messages["c"],
    )


def test_a_rejected_draft_that_is_left_behind(open_engine, monkeypatch):
    drafts = {
        "speculation": {"use": ["hardpoint.testing:ScriptedSpeculator"], "adaptive": False},
        "plugin": {"scripted_speculator": {"right": 0.0, "replies": [[ONE, [65] * 20]]}},
    }
    monkeypatch.setattr(InputBatch, "drop_rejected", lambda self, cached: None)
    engine = open_engine(CANARY | drafts)
    messages = errors(engine, request("a", ONE))
    assert re.search(
        r"of request 'a' .* that are those of a rejected draft of request 'a'", messages["a"]
    )


STALE = {
    "adapter": ({"lora": LoRARequest("one", 1)}, "with adapter 'one'"),
    "no adapter": ({}, "with no adapter"),
    "salt": ({"cache_salt": "x"}, "with another cache salt or adapter"),
}


@pytest.mark.parametrize(("fields", "message"), STALE.values(), ids=STALE)
def test_blocks_of_another_adapter_or_salt(engine, monkeypatch, fields, message):
    monkeypatch.setattr(block_hashes, "extra_keys", lambda *args: {})
    others_fields = {} if fields.get("lora") else {"lora": LoRARequest("two", 2)}
    others_fields = {"cache_salt": "y"} if fields.get("cache_salt") else others_fields
    assert errors(engine, request("a", ONE, **fields)) == {}
    messages = errors(engine, request("b", ONE, **others_fields))
    assert re.search(
        rf"of request 'b' .* position 0 that .* the same tokens {message}", messages["b"]
    )


def test_a_block_of_the_same_content_that_is_not_the_planned_one(open_engine, monkeypatch):

    def duplicate(packed):
        packed.tables[0][0, 0] = packed.tables[0][1, 0]

    planted(monkeypatch, duplicate, at=2)
    uncached = {"kv_cache": {"block_size": 8, "prefix_caching": False}}
    engine = open_engine(CANARY | uncached)
    messages = errors(engine, request("a", ONE), request("b", ONE))
    assert set(messages) == {"a"}
    assert re.search(r"in place of block \d+, .* at position 0 that are its own", messages["a"])


RANKS = {"executor": {"use": "multiproc"}}
PROCESSES = {
    "here": {},
    "its own": {"engine": {"in_process": False}},
    "tensor ranks": RANKS | {"parallel": {"tensor": 2}},
    "stages": RANKS | {"parallel": {"pipeline": 2}},
    "ahead": RANKS | {"scheduler": {"asynchronous": True}},
}


@pytest.mark.parametrize("where", nightly_but(PROCESSES, "here", "its own", "stages"))
def test_it_is_found_in_any_process(scripted, where):
    shifts = {"plugins": {"enable": ["support.plugins.corrupting:ShiftsSlots"]}}
    with LLM(config=scripted_config(scripted, CANARY | shifts | PROCESSES[where])) as llm:
        (output,) = llm.generate([ONE], PARAMS)
    assert output.outputs[0].finish_reason == "error"
    assert re.search(r"at position 21 that are none: they were never", output.outputs[0].error)
