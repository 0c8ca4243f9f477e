"""The KV canary finds nothing where nothing is wrong, and changes no token."""

from __future__ import annotations

import pytest
from support.driving import FINAL, alone, run, varied_jobs
from support.internals import core_of

from hardpoint import SamplingParams
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.testing import scripted_engine

CANARY = {"debug": {"kv_canary": True}}
SMALL = {"max_model_len": 128, "kv_cache": {"block_size": 8, "num_blocks": 20}}
LEVELS = {
    "prefix cache": {},
    "chunks": {"scheduler": {"max_num_batched_tokens": 24}},
    "few blocks": SMALL | {"scheduler": {"max_num_seqs": 6}},
    "n-grams": {"speculation": {"use": ["ngram"]}},
    "stores": SMALL | {"kv_connector": {"stores": ["memory"]}},
    "layer by layer": SMALL
    | {"kv_connector": {"stores": ["memory"]}, "plugin": {"stores": {"layer_groups": 2}}},
    "ahead": {"executor": {"use": "multiproc"}, "scheduler": {"asynchronous": True}},
    "tensor ranks": {"executor": {"use": "multiproc"}, "parallel": {"tensor": 2}},
    "stages": {"executor": {"use": "multiproc"}, "parallel": {"pipeline": 2}},
}


@pytest.fixture(scope="module")
def jobs():
    return varied_jobs(20)


@pytest.fixture(scope="module")
def expected(scripted, jobs):
    engine = scripted_engine(scripted)
    yield alone(engine, jobs)
    engine.close()


@pytest.mark.parametrize("level", LEVELS.values(), ids=LEVELS)
def test_tokens_are_those_without_it(scripted, jobs, expected, level):
    engine = scripted_engine(scripted, CANARY | level)
    assert run(engine, jobs, per_step=3) == expected
    engine.call_utility("reset_prefix_cache")
    assert run(engine, jobs, per_step=3) == expected
    engine.close()


def test_wrong_drafts_that_are_rejected_are_no_fault(scripted, jobs, expected):
    replies = [
        [prompt, tokens] for name, prompt, _ in jobs for _, tokens, *_ in expected[name][0]
    ]
    drafts = {
        "speculation": {"use": ["hardpoint.testing:ScriptedSpeculator"], "adaptive": False},
        "plugin": {"scripted_speculator": {"right": 0.6, "replies": replies}},
    }
    engine = scripted_engine(scripted, CANARY | drafts | SMALL)
    assert run(engine, jobs, per_step=3) == expected
    stats = engine.call_utility("scheduler_stats")
    assert 0 < stats.num_accepted_drafts < stats.num_drafts
    assert stats.num_preemptions > 0
    engine.close()


@pytest.mark.parametrize("level", [1, 2])
def test_requests_that_were_kept_in_a_sleep_go_on(scripted, jobs, expected, level):
    engine = scripted_engine(scripted, CANARY | LEVELS["stores"])
    assert run(engine, jobs[:4], per_step=3) == {x: expected[x] for x, *_ in jobs[:4]}
    for job in jobs[4:8]:
        engine.add_request(*job)
    for _ in range(3):
        engine.step()
    engine.call_utility("sleep", level, "keep")
    engine.call_utility("wake_up")
    left = run(engine, [])
    assert left and left == {name: expected[name] for name in left}
    engine.close()


def test_salts_share_nothing(scripted):
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, **FINAL)
    engine = scripted_engine(scripted, CANARY)
    prompt, found = list(range(60)), []
    for number, salt in enumerate(["a", "b", "a", None]):
        engine.add_request(f"r{number}", prompt, params, extras=RequestExtras(cache_salt=salt))
        while engine.has_unfinished_requests():
            found += [output for output in engine.step() if output.finished]
    assert [output.num_cached_tokens > 0 for output in found] == [False, False, True, False]
    assert len({tuple(output.outputs[0].token_ids) for output in found}) == 1
    engine.close()


def test_nothing_is_called_when_it_is_off(scripted):
    engine = scripted_engine(scripted)
    assert "kv_canary" not in [part.name for part in core_of(engine)._step_parts._parts]
    engine.close()
