"""One engine computes a prompt, another one goes on: the same tokens, whatever goes wrong."""

from __future__ import annotations

import threading
import time

import pytest
from support.builtins.split import (
    DECODE,
    PREFILL,
    REMOTE,
    Split,
    params,
    split_config,
    steps_until,
    tokens,
)
from support.internals import engine_of
from support.kv_stores import scripted_clock
from support.parallel import write_random_model
from support.waiting import wait_until

from hardpoint import LLM, ConfigError, RequestError, SamplingParams
from hardpoint.builtin_plugins.kv_connectors.jobs import TransferSource
from hardpoint.builtin_plugins.kv_connectors.planning import StoresScheduler
from hardpoint.builtin_plugins.kv_stores import p2p
from hardpoint.builtin_plugins.kv_stores.p2p import PeerToPeerStore
from hardpoint.builtin_plugins.kv_stores.p2p_pool import PeerBlocks
from hardpoint.plugins import EngineCoreRequest, KVConnectorContext, Request, SchedulerOutput
from hardpoint.plugins.config_tables import KVConnectorConfig
from hardpoint.plugins.kv_connector import KVSchedulerContext
from hardpoint.testing import scripted_config, write_scripted_model

HASTE = {"wait_seconds": 0.2, "connect_seconds": 0.2}
"""For what does not come."""
PROMPT = "The quick brown fox jumps over the lazy dog. " * 6  # 270 tokens
WHOLE = len(PROMPT) // 16 * 16
TOKEN = "0123456789abcdef" * 2
GOOD = {
    "do_remote_prefill": True,
    "remote_engine_id": PREFILL,
    "transfer_token": TOKEN,
    "num_tokens": 16,
}
HASHES = [bytes([number]) * 32 for number in range(4)]


def planner(*, clock, **config):
    """Return the scheduler half alone, of an engine that can reach the prefill engine."""
    half = StoresScheduler(
        KVConnectorContext(
            name="stores", options=None, config=KVConnectorConfig(stores=["p2p"], **config)
        ),
        KVSchedulerContext(block_size=16, block_hashes=lambda *_: HASHES, clock=clock),
        loads_in_step=False,
    )
    half.set_handshakes([{"peers": [PREFILL]}])
    return half


def incoming(name):
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=[1] * 33,
        params=SamplingParams(),
        kv_transfer_params=GOOD,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_scripted_model(tmp_path_factory.mktemp("split"), seed=3)


@pytest.fixture(scope="module")
def wanted(model):
    """The answer of an engine without a connector."""
    llm = LLM(str(model), config={**scripted_config(model), "kv_cache": {"num_blocks": 96}})
    yield lambda prompt=PROMPT, **fields: tokens(llm.generate([prompt], params(**fields))[0])
    llm.close()


@pytest.fixture(scope="module")
def pairs(model, tmp_path_factory):
    """Two engines that several tests use, by whether they load within steps, and for how long."""
    opened = {}

    def pair(*, in_step=False, p2p=None):
        key = in_step, str(p2p)
        if key not in opened:
            opened[key] = Split(model, tmp_path_factory.mktemp("pair") / "s")
            opened[key].both(load_in_step=in_step, p2p=p2p or {})
        for engine in opened[key].engines.values():
            engine.reset_prefix_cache()
        return opened[key]

    yield pair
    for split in opened.values():
        split.close_all()


@pytest.fixture
def offered(monkeypatch):
    """The keys of the blocks that were offered."""
    keys, offer = [], PeerToPeerStore.offer

    def noted(store, key, *arguments):
        try:
            return offer(store, key, *arguments)
        finally:
            keys.append(key)

    monkeypatch.setattr(PeerToPeerStore, "offer", noted)
    return keys


@pytest.fixture
def split(model, tmp_path):
    split = Split(model, tmp_path / "s")
    yield split
    split.close_all()


class TestTransfer:
    def test_the_decode_engine_computes_the_rest_alone(self, pairs, wanted):
        split = pairs()
        prefill, decode = split.engines.values()
        transfer = split.compute(PROMPT)
        assert transfer == {
            "do_remote_prefill": True,
            "remote_engine_id": PREFILL,
            "transfer_token": transfer["transfer_token"],
            "num_tokens": WHOLE,
        }
        output = split.go_on(PROMPT, transfer)
        assert (tokens(output), output.num_cached_tokens) == (wanted(), WHOLE)
        assert output.kv_transfer_params is None
        assert prefill.plugins.health().fallbacks == decode.plugins.health().fallbacks == {}

    @pytest.mark.parametrize(
        "fields",
        [{"temperature": 1.0, "seed": 7}, {"logprobs": 2}, {"stop": ["a"]}, {"max_tokens": 1}],
        ids=str,
    )
    def test_parameters_of_a_request_change_nothing(self, pairs, wanted, fields):
        split = pairs()
        transfer = split.compute(PROMPT, temperature=0.0)
        assert tokens(split.go_on(PROMPT, transfer, **fields)) == wanted(**fields)

    @pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33])
    def test_prompts_of_any_length(self, pairs, wanted, length):
        split = pairs()
        transfer = split.compute(PROMPT[:length])
        assert transfer["num_tokens"] == length // 16 * 16
        output = split.go_on(PROMPT[:length], transfer)
        assert tokens(output) == wanted(PROMPT[:length])
        assert output.num_cached_tokens == (length - 1) // 16 * 16

    def test_in_chunks_and_from_the_prefix_cache(self, split, wanted):
        chunks = {"base": {"scheduler": {"max_num_batched_tokens": 48}}}
        split.both(**chunks)
        for _ in range(3):  # the second time, the prompt is in both caches
            output = split.go_on(PROMPT, split.compute(PROMPT))
            assert (tokens(output), output.num_cached_tokens) == (wanted(), WHOLE)
            split.engines[DECODE].reset_prefix_cache()

    def test_a_longer_prompt_gets_what_there_is(self, pairs, wanted):
        split = pairs()
        transfer = split.compute(PROMPT[:100])
        output = split.go_on(PROMPT, transfer)
        assert (tokens(output), output.num_cached_tokens) == (wanted(), 96)

    def test_many_at_once(self, split, wanted):
        split.both(base={"kv_cache": {"num_blocks": 48}})  # some wait and are preempted
        prompts = [f"{number}: {PROMPT[: 40 + 17 * number]}" for number in range(12)]
        outputs = split.engines[PREFILL].generate(prompts, params(1), kv_transfer_params=REMOTE)
        transfers = [output.kv_transfer_params for output in outputs]
        answers = split.engines[DECODE].generate(prompts, params(30), kv_transfer_params=transfers)
        assert [tokens(answer) for answer in answers] == [wanted(p, max_tokens=30) for p in prompts]
        assert all(answer.num_cached_tokens for answer in answers)

    def test_both_ways(self, pairs, wanted):
        split = pairs()
        prefill, decode = split.engines.values()
        (output,) = decode.generate([PROMPT], params(1), kv_transfer_params=REMOTE)
        assert output.kv_transfer_params["remote_engine_id"] == DECODE
        (output,) = prefill.generate(
            [PROMPT], params(), kv_transfer_params=output.kv_transfer_params
        )
        assert (tokens(output), output.num_cached_tokens) == (wanted(), WHOLE)

    @pytest.mark.parametrize(
        ("ranks", "connector"),
        [
            ((1, 1), {"layer_groups": 3, "load_in_step": True}),
            pytest.param((1, 1), {"layer_groups": 3}, marks=pytest.mark.nightly),
            pytest.param((2, 1), {}, marks=pytest.mark.nightly),
            pytest.param((2, 1), {"load_in_step": True}, marks=pytest.mark.nightly),
            pytest.param((1, 3), {"load_in_step": True}, marks=pytest.mark.nightly),
        ],
        ids=str,
    )
    def test_of_several_layers_and_ranks(self, tmp_path, ranks, connector):
        folder = write_random_model(tmp_path / "m", "LlamaForCausalLM")
        base = {"dtype": "float32", "load": {"use": "dummy"}, "kv_cache": {"num_blocks": 96}}
        alone = LLM(str(folder), config=base)
        expected = tokens(alone.generate([PROMPT], params())[0])
        alone.close()
        tensor, pipeline = ranks
        base["parallel"] = {"tensor": tensor, "pipeline": pipeline}
        base["executor"] = {"use": "uniproc" if ranks == (1, 1) else "multiproc"}
        split = Split(folder, tmp_path / "s", base)
        split.both(**connector, p2p={"connect_seconds": 1.0})
        for _ in range(2):
            output = split.go_on(PROMPT, split.compute(PROMPT))
            assert (tokens(output), output.num_cached_tokens) == (expected, WHOLE), split.engines[
                DECODE
            ].plugins.health()
            split.engines[DECODE].reset_prefix_cache()
        transfer = split.compute(PROMPT)
        split.close(PREFILL)
        output = split.go_on(PROMPT, transfer)
        assert (tokens(output), output.num_cached_tokens) == (expected, 0)
        split.close_all()


IN_STEP = pytest.mark.parametrize(
    "in_step",
    [
        pytest.param(False, id="before"),
        pytest.param(True, id="in the step", marks=pytest.mark.nightly),
    ],
)


@IN_STEP
class TestFailures:
    def check(self, split, wanted, output, *, cached=None):
        """Check an answer, and that nothing wrong was kept for the next one."""
        assert tokens(output) == wanted()
        if cached is not None:
            assert output.num_cached_tokens == cached
        decode = split.engines[DECODE]
        decode.reset_prefix_cache()
        (again,) = decode.generate([PROMPT], params())
        assert tokens(again) == wanted()

    def test_blocks_are_fetched_once(self, pairs, wanted, in_step):
        split = pairs(in_step=in_step, p2p=HASTE)
        transfer = split.compute(PROMPT)
        split.go_on(PROMPT, transfer)
        split.engines[DECODE].reset_prefix_cache()
        self.check(split, wanted, split.go_on(PROMPT, transfer), cached=0)

    def test_a_token_that_was_never_given(self, pairs, wanted, in_step):
        split = pairs(in_step=in_step, p2p=HASTE)
        transfer = {**split.compute(PROMPT), "transfer_token": "0" * 32}
        self.check(split, wanted, split.go_on(PROMPT, transfer), cached=0)

    def test_blocks_of_another_prompt(self, pairs, wanted, in_step):
        split = pairs(in_step=in_step, p2p=HASTE)
        transfer = split.compute("x" * len(PROMPT))
        self.check(split, wanted, split.go_on(PROMPT, transfer), cached=0)

    def test_a_lease_that_has_ended(self, split, wanted, in_step, offered, monkeypatch):
        clock = scripted_clock(monkeypatch, "kv_stores.p2p_pool")
        split.both(load_in_step=in_step, kv_connector={"lease_seconds": 30.0})
        transfer = split.compute(PROMPT)
        wait_until(lambda: len(offered) == WHOLE // 16)
        clock.advance(30.1)
        self.check(split, wanted, split.go_on(PROMPT, transfer), cached=0)

    def test_some_blocks_that_are_missing(self, split, wanted, in_step, monkeypatch, offered):
        split.both(load_in_step=in_step, save_threads=1, p2p={"wait_seconds": 0.4})
        offer = PeerToPeerStore.offer

        def forgetful(store, key, *arguments):
            if len(offered) in (7, 8):
                offered.append(key)
                return False
            return offer(store, key, *arguments)

        monkeypatch.setattr(PeerToPeerStore, "offer", forgetful)
        transfer = split.compute(PROMPT)
        wait_until(lambda: len(offered) == WHOLE // 16)
        output = split.go_on(PROMPT, transfer)
        self.check(split, wanted, output, cached=7 * 16)

    def test_a_prefill_engine_that_is_gone(self, split, wanted, in_step):
        split.both(load_in_step=in_step, p2p=HASTE)
        transfer = split.compute(PROMPT)
        split.close(PREFILL)
        began = time.monotonic()
        self.check(split, wanted, split.go_on(PROMPT, transfer), cached=0)
        assert time.monotonic() - began < 60
        fault = split.engines[DECODE].plugins.health().fallbacks["p2p"]
        assert fault.message == (
            "peer 'prefill': no engine listens at its address; its blocks are computed here"
        )
        assert fault.count >= 1

    def test_a_prefill_engine_that_was_restarted(self, split, wanted, in_step):
        split.both(load_in_step=in_step, p2p=HASTE)
        transfer = split.compute(PROMPT)
        split.close(PREFILL)
        split.open(PREFILL)
        self.check(split, wanted, split.go_on(PROMPT, transfer), cached=0)

    def test_an_error_if_that_is_configured(self, split, wanted, in_step):
        split.both(load_in_step=in_step, p2p=HASTE, kv_connector={"on_load_failure": "error"})
        transfer = split.compute(PROMPT)
        split.close(PREFILL)
        output = split.go_on(PROMPT, transfer)
        assert output.outputs[0].finish_reason == "error"
        assert "the keys and values of its prompt could not be loaded" in output.outputs[0].error
        (again,) = split.engines[DECODE].generate([PROMPT], params())
        assert tokens(again) == wanted()


def test_requests_whose_blocks_do_not_come_delay_no_other(split, wanted, monkeypatch):
    _, decode = split.both(threads=2, kv_connector={"stores": ["memory", "p2p"]})
    decode.generate([PROMPT], params())
    steps_until(
        decode,
        lambda: decode.engines.scheduler_stats().kv_tiers["memory"].stored_blocks >= WHOLE // 16,
    )
    come, waiting_for = threading.Event(), []

    def fetch(_store, _peer, key, *_):
        waiting_for.append(key)
        return come.wait(60) and False

    monkeypatch.setattr(PeerToPeerStore, "fetch", fetch)
    decode.reset_prefix_cache()
    prompts = [f"{number} {PROMPT[:50]}" for number in range(4)]
    transfers = [{**GOOD, "transfer_token": f"{number:032x}"} for number in range(4)]
    waiting = [
        decode.stream(prompt, params(), kv_transfer_params=transfer)
        for prompt, transfer in zip(prompts, transfers, strict=True)
    ]
    *_, last = decode.stream(PROMPT, params())
    assert waiting_for
    assert not come.is_set()
    come.set()
    assert last.num_cached_tokens == WHOLE
    for prompt, stream in zip(prompts, waiting, strict=True):
        assert [token for output in stream for token in tokens(output)] == wanted(prompt)


class TestRoom:
    def test_what_has_no_buffer_is_not_promised(self, split, wanted, monkeypatch):
        prefill, _ = split.both(save_bytes=1, save_threads=1, offer_wait_seconds=0.0)
        offer, go_on = PeerToPeerStore.offer, threading.Event()

        def slow(*args):
            assert go_on.wait(60)
            return offer(*args)

        monkeypatch.setattr(PeerToPeerStore, "offer", slow)
        transfer = split.compute(PROMPT)
        assert transfer["num_tokens"] == 16
        go_on.set()
        output = split.go_on(PROMPT, transfer)
        assert (tokens(output), output.num_cached_tokens) == (wanted(), 16)
        assert prefill.plugins.health().fallbacks

    def test_what_the_store_has_no_room_for_is_not_waited_for(self, split, wanted, monkeypatch):
        monkeypatch.setattr(p2p, "PeerBlocks", lambda _, *more: PeerBlocks(5, *more))
        prefill, _ = split.both(save_threads=1)
        transfer = split.compute(PROMPT)
        began = time.monotonic()
        output = split.go_on(PROMPT, transfer)
        assert time.monotonic() - began < 30, "it waited for a block that was not offered"
        assert (tokens(output), output.num_cached_tokens) == (wanted(), 5 * 16)
        steps_until(prefill, lambda: "no room to offer" in str(prefill.plugins.health().fallbacks))


class TestLeases:
    @pytest.mark.timing  # a lease may end while this process waits for a processor
    def test_what_a_waiting_request_needs_is_renewed(self, split, wanted):
        split.open(PREFILL, kv_connector={"lease_seconds": 1.0})
        decode = split.open(
            DECODE, kv_connector={"lease_seconds": 1.0}, base={"scheduler": {"max_num_seqs": 1}}
        )
        transfer = split.compute(PROMPT)
        first = decode.stream("a long answer", params(300))
        next(first)
        second = decode.stream(PROMPT, params(), kv_transfer_params=transfer)
        began = time.monotonic()
        for _ in first:
            time.sleep(0.008)
        assert time.monotonic() - began > 2.0
        outputs = list(second)
        assert [token for output in outputs for token in tokens(output)] == wanted()
        assert outputs[-1].num_cached_tokens == WHOLE

    def test_requests_that_do_not_wait_any_more_renew_nothing(self):
        now = [0.0]
        half = planner(clock=lambda: now[0], lease_seconds=3.0)
        for name in ("waits", "is refused", "is aborted"):
            half.check_request(incoming(name))
        half.request_refused("is refused")
        half.request_finished(Request(incoming("is aborted")), ((),))
        assert half.build_connector_meta(SchedulerOutput(step=0)) is None, "too early"
        for number in range(1, 4):
            now[0] += 1.1
            (renewal,) = half.build_connector_meta(SchedulerOutput(step=number)).renewals
            assert renewal.transfer == TransferSource(PREFILL, bytes.fromhex(TOKEN))
            assert renewal.hashes == HASHES[:1]

    def test_one_that_ends_early_offers_nothing(self, split):
        prefill = split.open(PREFILL, base={"scheduler": {"max_num_batched_tokens": 32}})
        stream = prefill.stream(PROMPT, params(1), timeout=0.3, kv_transfer_params=REMOTE)
        for _ in range(3):  # of nine
            engine_of(prefill).step()
        time.sleep(0.3)
        output = next(stream)
        assert output.outputs[0].finish_reason == "timeout"
        assert output.kv_transfer_params is None


WRONG = {
    "nothing": ({}, "expected one of do_remote_decode and do_remote_prefill to be true"),
    "both": ({**GOOD, **REMOTE}, "expected one of do_remote_decode and do_remote_prefill"),
    "an unknown field": ({**GOOD, "remote_host": "h"}, ".remote_host: unknown field"),
    "an address": ({**GOOD, "remote_engine_id": "tcp://x:1"}, "expected one of the configured pe"),
    "block ids": ({**GOOD, "remote_block_ids": [1]}, ".remote_block_ids: unknown field"),
    "itself": ({**GOOD, "remote_engine_id": DECODE}, "(prefill), got 'decode'"),
    "no token": (
        {name: value for name, value in GOOD.items() if name != "transfer_token"},
        "kv_transfer_params.transfer_token: expected together with do_remote_prefill",
    ),
    "a short token": ({**GOOD, "transfer_token": "ab"}, "kv_transfer_params.transfer_token: "),
    "a token of another kind": ({**GOOD, "transfer_token": 5}, "kv_transfer_params.transfer_toke"),
    "too many tokens": ({**GOOD, "num_tokens": 10**6}, "expected at most 270, the length of the"),
    "a negative number": ({**GOOD, "num_tokens": -1}, "kv_transfer_params.num_tokens: "),
    "a source with do_remote_decode": (
        {**REMOTE, "remote_engine_id": PREFILL},
        "kv_transfer_params.remote_engine_id: not expected together with do_remote_decode",
    ),
}


class TestRefusals:
    @pytest.fixture
    def decode(self, pairs):
        return pairs().engines[DECODE]

    @pytest.mark.parametrize(("transfer_params", "message"), WRONG.values(), ids=WRONG)
    def test_wrong_parameters_are_a_request_error(self, decode, transfer_params, message):
        with pytest.raises(RequestError) as error:
            decode.generate([PROMPT], params(), kv_transfer_params=transfer_params)
        assert message in str(error.value)
        assert str(error.value).startswith("kv_transfer_params")

    def test_several_completions_are_refused(self, decode):
        with pytest.raises(RequestError, match=r"expected n = 1 with it.*, got 2"):
            decode.generate([PROMPT], params(n=2), kv_transfer_params=GOOD)

    def test_without_an_id_an_engine_cannot_be_named(self, split):
        nameless = {"engine_id": None}
        with pytest.raises(ConfigError, match=r"kv_connector\.engine_id: expected the name of"):
            split.open(PREFILL, kv_connector=nameless)
        prefill = split.open(PREFILL, kv_connector=nameless, p2p={"peers": {}})
        with pytest.raises(RequestError, match=r"has no kv_connector\.engine_id"):
            prefill.generate([PROMPT], params(), kv_transfer_params=REMOTE)

    def test_without_peers_there_is_no_transfer(self, model, tmp_path):
        config = split_config(scripted_config(model), tmp_path, PREFILL)
        config["kv_connector"] = {"stores": ["memory"]}
        del config["plugin"]
        llm = LLM(str(model), config=config)
        with pytest.raises(RequestError, match="no store of kv_connector.stores exch.* in a chain"):
            llm.generate([PROMPT], params(), kv_transfer_params=REMOTE)
        llm.close()
