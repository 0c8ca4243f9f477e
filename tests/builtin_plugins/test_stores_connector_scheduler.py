"""The scheduler half of the connector "stores": its lookups, loads and saves."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from hardpoint import SamplingParams
from hardpoint.builtin_plugins.kv_connectors.jobs import (
    BlockLoad,
    Handshake,
    Jobs,
    Lookup,
    Save,
    WorkerMessage,
)
from hardpoint.builtin_plugins.kv_connectors.planning import StoresScheduler
from hardpoint.builtin_plugins.kv_connectors.stores import StoresOptions
from hardpoint.plugins import (
    CachedRequests,
    EngineCoreRequest,
    Executor,
    KVConnectorContext,
    NewRequest,
    RequestError,
    SchedulerOutput,
)
from hardpoint.plugins.config_tables import KVConnectorConfig
from hardpoint.plugins.kv_connector import KVSchedulerContext
from hardpoint.plugins.requests import LoRARequest, MultiModalFeature
from hardpoint.plugins.requests.request import Request

SIZE = 4
LOAD_SECONDS = 10.0


def hashes_of(request, count):
    """Return the chained hashes of a request's leading blocks."""
    assert count * SIZE <= request.num_tokens, "only known tokens have hashes"
    known = [*request.source.prompt_token_ids, *request.output_token_ids]
    return [hashlib.sha256(bytes(known[: SIZE * (index + 1)])).digest() for index in range(count)]


def request(name, prompt, **fields):
    params = SamplingParams(max_tokens=50)
    source = EngineCoreRequest(
        request_id=name, prompt_token_ids=list(prompt), params=params, **fields
    )
    return Request(source)


class Engine:
    """Calls the half as an engine does."""

    def __init__(self, ranks=1, *, loads_in_step=False, config=None):
        self.now = 100.0
        config = config or KVConnectorConfig(stores=["memory"], load_seconds=LOAD_SECONDS)
        self.half = StoresScheduler(
            KVConnectorContext(name="stores", options=StoresOptions(), config=config),
            KVSchedulerContext(
                block_size=SIZE,
                block_hashes=hashes_of,
                clock=lambda: self.now,
                world_size=ranks,
            ),
            loads_in_step=loads_in_step,
        )
        self.blocks = {}
        self.next_block = 0
        self.step = 0

    def match(self, request, computed=0):
        return self.half.get_num_new_matched_tokens(request, computed)

    def jobs(self, **plan):
        """Return the jobs of a plan."""
        return self.half.build_connector_meta(SchedulerOutput(step=self.step, **plan))

    def asked(self, request, computed=0):
        """Ask for a request; return the lookup that follows."""
        assert self.match(request, computed) == (None, False)
        (lookup,) = self.jobs().lookups
        return lookup

    def answer(self, lookup, *counts):
        for rank, count in enumerate(counts):
            self.half.receive(rank, WorkerMessage(found={lookup.serial: count}))

    def allocate(self, request, external=0):
        """Give a request blocks for all its tokens; return them."""
        count = -(-request.num_tokens // SIZE)
        self.blocks[request.request_id] = list(range(self.next_block, self.next_block + count))
        self.next_block += count
        table = self.blocks[request.request_id]
        self.half.update_state_after_alloc(request, (table,), external)
        return table

    def loading(self, request, count, computed=0):
        """Let a request load its first `count` blocks; return the load."""
        self.answer(self.asked(request, computed), count)
        tokens, asynchronous = self.match(request, computed)
        assert asynchronous
        self.allocate(request, tokens)
        (load,) = self.jobs().loads
        return load

    def begin(self, request, computed, scheduled):
        """Schedule a request for the first time; return its saves."""
        new = NewRequest(request.source, (), (self.blocks[request.request_id],), computed)
        return self.saves(new_requests=[new], num_scheduled_tokens={request.request_id: scheduled})

    def go_on(self, request, computed, scheduled, new_blocks=()):
        """Schedule a running request; return its saves."""
        name = request.request_id
        cached = CachedRequests([name], [computed], {name: (new_blocks,)} if new_blocks else {})
        return self.saves(cached_requests=cached, num_scheduled_tokens={name: scheduled})

    def saves(self, **plan):
        jobs = self.jobs(**plan)
        return [] if jobs is None else jobs.saves


PROMPT = range(10, 24)  # three blocks and a half


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def a():
    return request("a", PROMPT)


# Lookups


def test_first_it_asks_then_it_knows(engine, a):
    lookup = engine.asked(a)
    assert lookup.hashes == hashes_of(a, 3)
    assert engine.match(a) == (None, False)
    assert engine.jobs() is None  # it asks once
    engine.answer(lookup, 2)
    assert engine.match(a) == (8, True)
    assert engine.match(a) == (8, True)


def test_nothing_is_stored(engine, a):
    engine.answer(engine.asked(a), 0)
    assert engine.match(a) == (0, False)
    assert engine.jobs() is None


@pytest.mark.parametrize("length", [1, 4])
def test_the_last_token_is_computed(engine, length):
    assert engine.match(request("a", range(length))) == (0, False)
    assert engine.jobs() is None


def test_the_last_block_of_a_prompt_is_computed_if_it_has_the_last_token(engine):
    assert len(engine.asked(request("a", range(8))).hashes) == 1
    assert len(engine.asked(request("b", range(9))).hashes) == 2


def test_only_what_the_local_cache_lacks_is_asked_for(engine, a):
    lookup = engine.asked(a, computed=4)
    assert lookup.hashes == hashes_of(a, 3)[1:]
    engine.answer(lookup, 2)
    assert engine.match(a, 4) == (8, True)
    assert engine.match(a, 12) == (0, False)


def test_the_local_cache_grows_while_it_asks(engine, a):
    lookup = engine.asked(a)
    engine.answer(lookup, 3)
    assert engine.match(a, 8) == (4, True)
    table = engine.allocate(a, 4)
    (load,) = engine.jobs().loads
    assert (load.hashes, load.block_ids) == (hashes_of(a, 3)[2:], table[2:3])


def test_the_local_cache_loses_blocks_while_it_asks(engine, a):
    engine.answer(engine.asked(a, computed=8), 1)
    again = engine.asked(a, computed=0)
    assert again.hashes == hashes_of(a, 3)
    engine.answer(again, 1)
    assert engine.match(a) == (4, True)


def test_all_ranks_must_have_a_block():
    engine, a = Engine(ranks=3), request("a", PROMPT)
    lookup = engine.asked(a)
    for rank, count in ((1, 3), (0, 2), (1, 0)):  # the last one comes twice
        engine.half.receive(rank, WorkerMessage(found={lookup.serial: count}))
        assert engine.match(a) == (None, False)
    engine.half.receive(2, WorkerMessage(found={lookup.serial: 3}))
    assert engine.match(a) == (0, False)


def test_answers_to_lookups_of_before_are_ignored(engine, a):
    lookup = engine.asked(a)
    engine.half.request_finished(a, ((),))
    engine.answer(lookup, 3)
    again = engine.asked(a)
    assert again.serial != lookup.serial
    engine.answer(lookup, 3)
    assert engine.match(a) == (None, False)
    engine.answer(again, 1)
    assert engine.match(a) == (4, True)


def test_requests_with_adapters_are_left_alone(engine):
    special = request("a", PROMPT, lora=LoRARequest("x", 1))
    assert engine.match(special) == (0, False)
    engine.allocate(special)
    assert engine.begin(special, 0, 14) == []


def test_kv_transfer_params_need_a_store_that_exchanges_blocks(engine):
    engine.half.set_handshakes([Handshake(), Handshake()])
    wanted = request("a", PROMPT, kv_transfer_params={"do_remote_decode": True})
    with pytest.raises(RequestError, match="kv_transfer_params: no store of kv_connector.stores"):
        engine.half.check_request(wanted.source)
    engine.half.check_request(request("b", PROMPT).source)


# Loads


def test_prompts_with_media_are_stored_and_loaded_as_others(engine):
    seen = request("a", PROMPT, features=[MultiModalFeature("f", 0, 2)])
    load = engine.loading(seen, 2)
    assert load == BlockLoad("a", hashes_of(seen, 2), engine.blocks["a"][:2])


def test_what_is_there_is_loaded(engine, a):
    load = engine.loading(a, 2)
    assert load == BlockLoad("a", hashes_of(a, 2), engine.blocks["a"][:2])
    assert engine.jobs() is None


def test_no_more_is_loaded_than_the_scheduler_wants(engine, a):
    engine.answer(engine.asked(a), 3)
    assert engine.match(a) == (12, True)
    table = engine.allocate(a, 4)
    (load,) = engine.jobs().loads
    assert (load.hashes, load.block_ids) == (hashes_of(a, 1), table[:1])
    engine.allocate(b := request("b", PROMPT))
    assert engine.jobs() is None
    assert engine.match(b) == (None, False)


def test_a_prefix_is_loaded_once(engine, a):
    engine.loading(a, 3)
    b, c = request("b", PROMPT), request("c", [1, *PROMPT])
    assert engine.match(b) == (None, False)
    assert engine.jobs() is None  # no lookup, no load
    assert engine.asked(c).hashes == hashes_of(c, 3)
    engine.half.load_ended("a", failed=False)
    assert engine.match(b, 12) == (0, False)  # it is in the local cache


def test_who_waits_for_a_load_that_fails_asks(engine, a):
    engine.loading(a, 3)
    b = request("b", PROMPT)
    assert engine.match(b) == (None, False)
    engine.half.load_ended("a", failed=True)
    assert engine.asked(b).hashes == hashes_of(b, 3)


def test_who_waits_for_a_load_does_not_wait_for_ever(engine, a):
    engine.loading(a, 3)
    b = request("b", PROMPT)
    engine.now += LOAD_SECONDS - 0.1
    assert engine.match(b) == (None, False)
    engine.now += 0.2
    engine.asked(b)


def test_only_the_first_missing_block_is_waited_for(engine, a):
    engine.loading(a, 3)
    longer = request("b", [*PROMPT, *range(30, 40)])
    assert engine.match(longer, 0) == (None, False)
    assert engine.jobs() is None
    assert engine.asked(longer, 12).hashes == hashes_of(longer, 5)[3:]


# Saves


def saved(save):
    return list(zip(save.hashes, save.block_ids, strict=True))


def test_blocks_are_saved_in_the_step_that_completes_them(engine, a):
    table, expected = engine.allocate(a), hashes_of(a, 3)
    assert engine.begin(a, 0, 5) == [Save(expected[:1], table[:1])]
    assert engine.go_on(a, 5, 2) == []
    assert engine.go_on(a, 7, 7) == [Save(expected[1:], table[1:3])]
    a.append(1)
    assert engine.go_on(a, 14, 1) == []
    a.append(2)
    (save,) = engine.go_on(a, 15, 1)
    assert saved(save) == [(hashes_of(a, 4)[3], table[3])]


def test_blocks_that_are_added_later(engine, a):
    engine.allocate(a)
    engine.begin(a, 0, 14)
    for token in range(5):
        a.append(token)
    assert len(engine.go_on(a, 14, 2)) == 1
    assert engine.go_on(a, 16, 1, [77]) == []
    a.append(9)
    (save,) = engine.go_on(a, 17, 3)
    assert save.block_ids == [77]


def test_drafts_are_not_saved(engine, a):
    """A step computes drafts; it is not known yet whether they are accepted."""
    engine.allocate(a)
    engine.begin(a, 0, 14)
    a.append(1)
    assert engine.go_on(a, 14, 4) == []  # one token and three drafts
    a.append(2)
    assert len(engine.go_on(a, 15, 4)) == 1


def test_equal_blocks_are_saved_once(engine, a):
    engine.allocate(a)
    assert len(engine.begin(a, 0, 14)) == 1
    b = request("b", [*PROMPT[:8], *range(8)])
    table = engine.allocate(b)
    (save,) = engine.begin(b, 0, 16)
    assert saved(save) == list(zip(hashes_of(b, 4)[2:], table[2:], strict=True))


def test_cached_and_loaded_blocks_are_not_saved(engine, a):
    engine.loading(a, 2)
    engine.half.load_ended("a", failed=False)
    (save,) = engine.begin(a, 8, 6)
    assert save.hashes == hashes_of(a, 3)[2:]
    b = request("b", PROMPT)
    engine.allocate(b)
    assert engine.begin(b, 0, 14) == []  # what was loaded is stored


def test_what_could_not_be_loaded_is_saved(engine, a):
    engine.loading(a, 2)
    engine.half.load_ended("a", failed=True)
    (save,) = engine.begin(a, 0, 14)
    assert save.hashes == hashes_of(a, 3)


def test_what_was_not_stored_is_saved_again(engine, a):
    engine.allocate(a)
    engine.begin(a, 0, 14)
    engine.half.receive(0, WorkerMessage(unsaved=hashes_of(a, 2)[1:]))
    b = request("b", PROMPT)
    engine.allocate(b)
    (save,) = engine.begin(b, 0, 14)
    assert save.hashes == hashes_of(a, 2)[1:]


def test_what_a_lookup_does_not_find_is_saved_again(engine, a):
    engine.allocate(a)
    engine.begin(a, 0, 14)
    b = request("b", PROMPT)
    engine.answer(engine.asked(b), 1)  # the store has evicted the others
    engine.match(b)
    engine.allocate(b, 4)
    engine.half.load_ended("b", failed=False)
    (save,) = engine.begin(b, 4, 10)
    assert save.hashes == hashes_of(a, 3)[1:]


def test_preempted_and_ended_requests_save_nothing(engine, a):
    b = request("b", range(40, 60))
    for live in (a, b):
        engine.allocate(live)
        engine.begin(live, 0, 5)
    engine.half.request_finished(b, (engine.blocks["b"],))
    assert (
        engine.saves(preempted_request_ids=frozenset("a"), finished_request_ids=frozenset("b"))
        == []
    )
    assert engine.go_on(a, 5, 9) == []
    assert engine.go_on(b, 5, 9) == []
    engine.allocate(a)
    (save,) = engine.begin(a, 0, 14)
    assert saved(save) == list(zip(hashes_of(a, 3)[1:], engine.blocks["a"][1:3], strict=True))


def test_a_request_of_the_same_id_begins_in_the_step_after_its_end(engine, a):
    engine.allocate(a)
    engine.begin(a, 0, 5)
    engine.half.request_finished(a, (engine.blocks["a"],))
    other = request("a", range(60, 70))
    table = engine.allocate(other)
    new = NewRequest(other.source, (), (table,), 0)
    (save,) = engine.saves(
        new_requests=[new], num_scheduled_tokens={"a": 10}, finished_request_ids=frozenset("a")
    )
    assert saved(save) == list(zip(hashes_of(other, 2), table[:2], strict=True))


# Plans that are lost


def test_lost_loads_are_given_up_by_the_engine(engine, a):
    engine.answer(engine.asked(a), 2)
    engine.match(a)
    engine.allocate(a, 8)
    lost = engine.jobs()
    engine.half.plan_lost(lost)
    assert engine.jobs() is None
    engine.half.load_ended("a", failed=True)
    assert engine.jobs() is None


def test_after_a_lost_plan_it_asks_again(engine, a):
    """Of the lookup itself as of an answer that is lost."""
    lost = engine.asked(a)
    engine.half.plan_lost(Jobs(lookups=[lost]))
    again = engine.asked(a)
    assert again.serial != lost.serial
    engine.half.plan_lost(Jobs())
    last = engine.asked(a)
    engine.answer(lost, 3)
    engine.answer(again, 3)
    assert engine.match(a) == (None, False)
    engine.answer(last, 2)
    engine.half.plan_lost(Jobs())
    assert engine.match(a) == (8, True)


def test_loads_that_no_plan_has_taken_are_given_up(engine, a):
    engine.answer(engine.asked(a), 2)
    engine.match(a)
    engine.allocate(a, 8)
    engine.half.load_ended("a", failed=True)
    assert engine.jobs() is None
    engine.asked(request("b", PROMPT))  # it is not loaded


def test_what_a_lost_plan_was_to_save_is_saved_when_it_is_computed_again(engine, a):
    engine.allocate(a)
    new = NewRequest(a.source, (), (engine.blocks["a"],), 0)
    lost = engine.jobs(new_requests=[new], num_scheduled_tokens={"a": 14})
    engine.half.plan_lost(lost)
    engine.allocate(a)
    (save,) = engine.begin(a, 0, 14)
    assert save.hashes == hashes_of(a, 3)


# Loads within a step, which may fail


def from_peer(name, prompt, tokens):
    return request(
        name,
        prompt,
        kv_transfer_params={
            "do_remote_prefill": True,
            "remote_engine_id": "p",
            "transfer_token": "0" * 32,
            "num_tokens": tokens,
        },
    )


def test_what_is_computed_after_a_load_in_the_step_is_saved_once_that_is_sure():
    engine = Engine(loads_in_step=True)
    engine.half.set_handshakes([Handshake(["p"])])
    a = from_peer("a", PROMPT, 8)
    engine.half.check_request(a.source)
    assert engine.match(a) == (8, False)
    table = engine.allocate(a, 8)
    new = NewRequest(a.source, (), (table,), 8)
    jobs = engine.jobs(new_requests=[new], num_scheduled_tokens={"a": 4})
    assert len(jobs.loads) == 1
    assert jobs.loads[0].in_step
    assert jobs.saves == []  # what it computes from is not sure
    a.append(1)
    # Planned before the result of that step is known, of this request as of any other.
    b = request("b", range(50, 59))
    engine.allocate(b)
    beside = NewRequest(b.source, (), (engine.blocks["b"],), 0)
    engine.step = Executor.MAX_CONCURRENT_BATCHES
    assert engine.jobs(new_requests=[beside], num_scheduled_tokens={"b": 9}) is None
    engine.step += 1
    (save,) = engine.go_on(a, 14, 1)
    assert save.hashes == hashes_of(a, 3)[2:]
    (save,) = engine.go_on(b, 9, 1)
    assert save.hashes == hashes_of(b, 2)


def test_metadata_is_plain_data(engine, a):
    engine.loading(a, 3)
    engine.match(b := request("b", [1, *PROMPT]))
    engine.allocate(c := request("c", range(90, 99)))
    new = NewRequest(c.source, (), (engine.blocks["c"],), 0)
    jobs = engine.jobs(new_requests=[new], num_scheduled_tokens={"c": 9})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(jobs), type=Jobs) == jobs
    assert jobs.lookups == [Lookup(jobs.lookups[0].serial, hashes_of(b, 3))]
    assert len(jobs.saves) == 1
