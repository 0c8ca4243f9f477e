"""Samplers with states of requests, and observed distributions."""

from __future__ import annotations

import math

import pytest
from support.driving import FINAL, alone, drafting, run

from hardpoint import PluginError, SamplingParams
from hardpoint.plugins import Sampler
from hardpoint.testing import scripted_engine
from hardpoint.testing.engine_access import check_plugin_class

HERE = "support.plugins.sampling_states"
SAMPLERS = {"mirostat": f"{HERE}:Mirostat", "every_third": f"{HERE}:EveryThird"}


def _params(**fields):
    defaults = {"temperature": 1.0, "seed": 3, "max_tokens": 20, "ignore_eos": True}
    return SamplingParams(**defaults | fields, **FINAL)


def _jobs(name):
    arguments = {"mirostat": {"tau": 0.5}, "every_third": {"tokens": 9}}[name]
    return [
        ("seeded", [1, 2, 3], _params()),
        ("several", [4] * 30, _params(n=2, seed=8)),
        ("own", [5] * 9, _params(plugin_args={name: arguments})),
        ("greedy", [6], _params(temperature=0.0, logprobs=2)),
    ]


@pytest.fixture(scope="module")
def expected(scripted):
    results = {}
    for name, use in SAMPLERS.items():
        engine = scripted_engine(scripted, {"sampler": {"use": use}})
        results[name] = alone(engine, _jobs(name))
        engine.close()
    return results


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"kv_cache": {"block_size": 8, "num_blocks": 12}, "max_model_len": 64},
        {"executor": {"use": "support.plugins.observing:TwoBatches"}},
        {"scheduler": {"asynchronous": True}},
    ],
    ids=["plain", "small pool", "two batches", "ahead"],
)
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_batch_equals_requests_alone(open_engine, expected, name, extra):
    engine = open_engine({"sampler": {"use": SAMPLERS[name]}} | extra)
    assert run(engine, _jobs(name), 1) == expected[name]


def test_a_wrapper_keeps_the_states_of_its_sampler(open_engine, expected, tmp_path):
    use = {"use": f"{HERE}:LoggedMirostat"}
    options = {"logged_mirostat": {"wraps": SAMPLERS["mirostat"], "log": str(tmp_path / "log")}}
    engine = open_engine({"sampler": use, "plugin": options})
    jobs = [job for job in _jobs("mirostat") if job[0] != "own"]
    results = run(engine, jobs, 1)
    assert results == {name: expected["mirostat"][name] for name, *_ in jobs}


@pytest.mark.parametrize("name", SAMPLERS)
def test_drafts_change_nothing(open_engine, expected, name):
    jobs = _jobs(name)
    engine = open_engine({"sampler": {"use": SAMPLERS[name]}} | drafting(jobs, expected[name]))
    assert run(engine, jobs, 1) == expected[name]
    assert engine.call_utility("scheduler_stats").num_accepted_drafts > 10


def test_states_matter(expected, scripted):
    engine = scripted_engine(scripted)
    plain = run(engine, [("own", [5] * 9, _params()), ("greedy", [6], _params(temperature=0.0))])
    engine.close()
    assert all(plain["own"] != results["own"] for results in expected.values())


def test_a_sampler_ends_a_request(open_engine):
    engine = open_engine({"sampler": {"use": SAMPLERS["every_third"]}})
    engine.add_request("own", [5], _params(plugin_args={"every_third": {"tokens": 9}}))
    while engine.has_unfinished_requests():
        outputs = engine.step()
    (completion,) = outputs[0].outputs
    assert len(completion.token_ids) == 9
    assert completion.stop_reason == {"plugin": "every_third", "reason": "tokens"}


def test_distribution_is_that_of_the_token(open_engine):
    engine = open_engine({"plugins": {"enable": [f"{HERE}:EntropyStop"]}})
    params = _params(plugin_args={"entropy_stop": {"nats": 0.0}}, logprobs=-1, temperature=1.0)
    engine.add_request("one", [9, 8], params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    (completion,) = outputs[0].outputs
    assert len(completion.token_ids) == 1
    assert completion.stop_reason["reason"] == "entropy"
    entropy, below, *top = map(float, completion.stop_reason["stop_reason"].split())
    logprobs = {token: entry.logprob for token, entry in completion.logprobs[0].items()}
    known = [math.exp(value) for value in logprobs.values() if value > -math.inf]
    assert entropy == pytest.approx(-sum(p * math.log(p) for p in known if p), abs=1e-5)
    (token,) = completion.token_ids
    lower = [math.exp(value) for other, value in logprobs.items() if other < token]
    assert below == pytest.approx(sum(lower), abs=1e-5)
    assert top == pytest.approx(sorted(logprobs.values(), reverse=True)[: len(top)], abs=1e-5)


class _Plain(Sampler):
    contract = 1

    def sample(self, logits, rows):
        return logits.argmax(-1)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"advance": lambda self, state, token: state}, "advance but no start"),
        (
            {"observe": lambda self, state, token, logprob: state},
            "it has observe, so it needs start",
        ),
        (
            {
                "start": lambda self, request: b"",
                "observe": lambda self, state, token, logprob, distribution=None: state,
                "State": bytes,
                "max_state_bytes": 8,
            },
            "expected supports_resume = False",
        ),
    ],
)
def test_a_wrong_declaration_is_refused(members, words):
    cls = type("Derived", (_Plain,), {"contract": 1, **members})
    with pytest.raises(PluginError, match=words):
        check_plugin_class(cls, "samplers", "derived")
