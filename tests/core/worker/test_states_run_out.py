"""Where blocks for states are few, or those for keys, requests wait or are preempted; all end."""

from __future__ import annotations

import random

import pytest
from support.builtins.state_models import HybridModel, StateModel, state_config
from support.driving import alone, summary, varied_jobs
from support.internals import engine_of, scheduler_of

from hardpoint import LLM, SamplingParams
from hardpoint.plugins.cache_memory import CacheMemory
from hardpoint.testing import scripted_config, scripted_engine, write_scripted_model

NIGHTLY = pytest.mark.nightly
PROMPTS = ["a", "word " * 12, "word " * 12 + "and more", "x" * 32, "x" * 33, "word " * 25, "y" * 70]


def params(count: int = 20, n: int = 1) -> SamplingParams:
    return SamplingParams(n=n, temperature=0.0, max_tokens=count, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The tokens of the scripted model, which has no states."""
    folder = write_scripted_model(tmp_path_factory.mktemp("scripted"))
    with LLM(config=scripted_config(folder)) as llm:
        return {out.prompt: out.outputs[0].token_ids for out in llm.generate(PROMPTS, params(40))}


@pytest.fixture(scope="module")
def alone_outputs(tmp_path_factory):
    """Outputs of the varied jobs on the scripted model, each alone."""
    engine = scripted_engine(write_scripted_model(tmp_path_factory.mktemp("scripted")))
    found = alone(engine, varied_jobs(24))
    engine.close()
    return {name: outputs[0] for name, outputs in found.items()}


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Open an engine with so many blocks for keys and for states."""

    def open_engine(num_keys, num_states, model=HybridModel, **scheduler):
        monkeypatch.setattr(CacheMemory, "num_states", lambda _self, _num_blocks: num_states)
        cache = {"block_size": 4, "num_blocks": 1 + num_keys + num_states}
        scheduler = {"max_num_batched_tokens": 24} | scheduler
        extra = {"kv_cache": cache, "max_model_len": 160, "scheduler": scheduler}
        return LLM(config=state_config(tmp_path, model, extra))

    return open_engine


def check_all_free(llm, num_states):
    cache = scheduler_of(engine_of(llm)).context.kv_cache
    assert cache.num_free_blocks == cache.num_usable_blocks
    assert cache.num_free_states == num_states


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("num_keys", "num_states"),
    [
        pytest.param(400, 3, id="states of one request"),
        pytest.param(400, 4, id="few states"),
        pytest.param(40, 100, id="keys of one request"),
        pytest.param(60, 7, id="few of both"),
    ],
)
def test_tokens_are_the_same(opened, expected, num_keys, num_states, asynchronous):
    with opened(num_keys, num_states, asynchronous=asynchronous) as llm:
        for _ in range(2):
            for out in llm.generate(PROMPTS, params()):
                assert out.outputs[0].token_ids == expected[out.prompt][:20]
            check_all_free(llm, num_states)
        # Only those that generate lack keys; one that lacks states is not begun.
        assert (llm.engines.scheduler_stats().num_preemptions > 0) == (num_keys == 40)


def test_the_reason_of_a_request_that_waits_counts_states(opened):
    with opened(400, 3, max_num_batched_tokens=64) as llm:
        engine = engine_of(llm)
        first, second = (engine.add_request(name, name * 30, params()) for name in "ab")
        engine.step()
        assert engine.why_waiting(first)[0] is None
        assert engine.why_waiting(second)[0].message == (
            "it needs up to 11 KV blocks, 393 are free (1 for states of layers), 5 of them "
            "reserved for running requests"
        )


def test_a_prompt_in_pieces_is_not_begun_without_room_for_their_states(opened, expected):
    """Else it would be preempted after its first piece, again and again."""
    prompts = ["x" * 32, "word " * 12, "y" * 70]
    with opened(400, 6, max_num_batched_tokens=24) as llm:
        for out in llm.generate(prompts, params()):
            assert out.outputs[0].token_ids == expected[out.prompt][:20]
        assert llm.engines.scheduler_stats().num_preemptions == 0


@pytest.mark.parametrize("model", [HybridModel, pytest.param(StateModel, marks=NIGHTLY)])
@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(s, marks=NIGHTLY) for s in range(3, 12))])
def test_random_schedules(opened, alone_outputs, model, seed):
    """Requests come and are aborted at random; the others have what they have alone."""
    rng = random.Random(seed)
    num_keys, num_states = rng.choice([(300, 3), (300, 5), (300, 9), (64, 5), (48, 200)])
    if model is StateModel:
        num_keys = 0
    settings = {
        "max_num_batched_tokens": rng.choice([7, 24, 60]),
        "asynchronous": rng.random() < 0.5,
        "max_num_seqs": rng.choice([4, 16]),
    }
    jobs = varied_jobs(24)
    rng.shuffle(jobs)
    with opened(num_keys, num_states, model, **settings) as llm:
        engine, results, added, aborted = engine_of(llm), {}, set(), set()
        for _ in range(5_000):
            if jobs and rng.random() < 0.3:
                added.add(jobs[-1][0])
                engine.add_request(*jobs.pop())
            if rng.random() < 0.02 and (live := sorted(added - set(results) - aborted)):
                aborted.add(name := rng.choice(live))
                engine.abort_requests([name])
            results |= {out.request_id: out for out in engine.step() if out.finished}
            if not jobs and not engine.has_unfinished_requests():
                break
        assert not engine.has_unfinished_requests()
        check_all_free(llm, num_states)
    assert set(results) | aborted == set(alone_outputs)
    for name in set(results) - aborted:
        assert summary(results[name]) == alone_outputs[name]
