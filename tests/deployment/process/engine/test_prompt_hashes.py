"""Block hashes of prompts are computed by the thread that reads, not by the loop."""

from __future__ import annotations

import threading

import pytest
from support.core.engine_harness import Rig, expected, request

from hardpoint.builtin_plugins.scheduling import DefaultScheduler
from hardpoint.core.kv_cache import BlockManager
from hardpoint.core.kv_cache.block_hashes import BlockHashes
from hardpoint.plugins import Request
from hardpoint.plugins.requests import LoRARequest
from hardpoint.process.protocol import RequestType

PROMPT = list(range(1, 18))  # four blocks of four, and one token


@pytest.fixture
def hashed(monkeypatch):
    """Note who hashes: (thread, first block, blocks)."""
    seen, extend = [], BlockHashes._extend

    def note(self, request, hashes):
        first = len(hashes)
        extend(self, request, hashes)
        seen.append((threading.current_thread().name, first, len(hashes) - first))

    monkeypatch.setattr(BlockHashes, "_extend", note)
    return seen


class Late:
    """Hashes prompts with the cache of a rig that is not there yet."""

    cache = None

    def __call__(self, request):
        if request.cache_salt == "bad":
            raise ZeroDivisionError("a number")
        return self.cache.hash_prompt(request)


@pytest.fixture
def served(serve):
    late = Late()
    served = serve(hash_prompt=late)
    late.cache = served.rig.cache
    return served


def test_the_reader_hashes_the_prompt_and_the_loop_only_what_follows(served, hashed):
    (client,) = served.clients
    for name in ("a", "b"):
        client.send(RequestType.ADD, request(name, prompt=PROMPT, max_tokens=8))
        client.until(lambda name=name: name in client.ends)
        assert client.tokens[name] == expected(PROMPT, 8)
    assert [(first, count) for thread, first, count in hashed if thread == "EngineInput"] == [
        (0, 4),
        (0, 4),
    ]
    others = [first for thread, first, _ in hashed if thread != "EngineInput"]
    assert others
    assert min(others) == 4
    assert served.rig.cache.stats().hit_tokens == 16


def test_what_cannot_be_hashed_is_refused_alone(served):
    (client,) = served.clients
    client.send(RequestType.ADD, request("bad", prompt=PROMPT, cache_salt="bad"))
    client.send(RequestType.ADD, request("a", prompt=PROMPT))
    client.until(lambda: len(client.ends) == 2)
    assert client.ends == {"bad": "error", "a": "length"}
    assert "ZeroDivisionError: a number" in client.errors["bad"]


@pytest.mark.parametrize(
    "fields",
    [{}, {"cache_salt": "s"}, {"lora": LoRARequest("poems", 1)}, {"prompt": [1, 2]}],
)
def test_they_are_those_that_the_cache_would_compute(fields):
    source = request("a", **({"prompt": PROMPT} | fields))
    cache, hashes = BlockManager(8, 4), BlockHashes(4)
    blocks = len(source.prompt_token_ids) // 4
    assert cache.hash_prompt(source) == hashes.of(Request(source), blocks)
    assert len(cache.hash_prompt(source)) == blocks


def test_without_prefix_caching_nothing_is_hashed(hashed):
    cache = BlockManager(8, 4, prefix_caching=False)
    assert cache.hash_prompt(request("a", prompt=PROMPT)) == []
    assert hashed == []


def test_nothing_is_kept_of_requests_that_ended_or_were_refused():
    rig = Rig()
    for source in (request("a", prompt=PROMPT), request("never", prompt=PROMPT)):
        rig.core.add_request(source, rig.cache.hash_prompt(source))
    assert len(rig.cache._hashes) == 2
    source = request("a", prompt=PROMPT)
    with pytest.raises(ValueError, match="is the id of a live request"):
        rig.core.add_request(source, rig.cache.hash_prompt(source))
    rig.core.abort_requests(["never"])
    rig.run()
    assert len(rig.cache._hashes) == 0


def test_a_scheduler_that_shows_no_live_requests_hashes_itself(hashed):
    class Shy(DefaultScheduler):
        contract = 1

        def live_request(self, request_id):
            raise NotImplementedError

    rig = Rig(scheduler=Shy)
    source = request("a", prompt=PROMPT, max_tokens=2)
    rig.core.add_request(source, rig.core.hash_prompt(source))
    assert rig.run()["a"] == expected(PROMPT, 2)
    assert [(first, count) for _, first, count in hashed] == [(0, 4), (0, 4)]
