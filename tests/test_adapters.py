"""Logits processors in transformers' form inside a running engine."""

from __future__ import annotations

import pytest
from support.driving import alone, run

from hardpoint import SamplingParams
from hardpoint.cli import main
from hardpoint.testing import scripted_engine

nightly = pytest.mark.nightly
HERE = "support.plugins.transformers_processors"
GREEDY = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}


def engine_with(open_engine, target, options=None, name="thing", replies=None, **extra):
    options = {name: options} if options else {}
    if replies is not None:
        options["scripted_speculator"] = {"right": 0.7, "replies": replies}
    return open_engine(
        {
            "plugins": {"enable": [{"use": f"{HERE}:{target}", "name": name}]},
            "plugin": options,
            "scheduler": {"max_num_seqs": 5},
            **extra,
        },
    )


def tokens(engine, prompt="say abc", **fields):
    params = SamplingParams(**{**GREEDY, **fields})
    return run(engine, [("r", prompt, params)])["r"][0][0][1]


def mixed_jobs(arguments_of, count=32, **fields):
    """Requests of many lengths, every third with arguments, so that they join, leave and move."""
    jobs = []
    for index in range(count):
        params = {
            "temperature": 1.0,
            "seed": index,
            "ignore_eos": True,
            "max_tokens": 1 + (index * 7) % 11,
        } | fields
        if index % 3 == 0:
            params["plugin_args"] = {"thing": arguments_of(index)}
        jobs.append((f"r{index}", [1 + index % 5] * (1 + index % 4), SamplingParams(**params)))
    return jobs


@pytest.fixture
def plain(scripted):
    """An engine without anything foreign."""
    engine = scripted_engine(scripted, {"scheduler": {"max_num_seqs": 5}})
    yield engine
    engine.close()


@pytest.mark.parametrize(
    ("target", "arguments_of", "options"),
    [
        ("Repetition", lambda i: {}, {"args": {"penalty": 0.1}}),
        pytest.param("repetition", lambda i: {}, None, marks=nightly),
        ("Counting", lambda i: {}, None),
        pytest.param("counting", lambda i: {}, None, marks=nightly),
        pytest.param("both", lambda i: {}, None, marks=nightly),
    ],
)
def test_a_changing_batch_gives_what_each_request_gets_alone(
    open_engine, plain, target, arguments_of, options
):
    jobs = mixed_jobs(arguments_of)
    engine = engine_with(open_engine, target, options)
    together = run(engine, jobs, per_step=2)
    assert together == alone(engine, jobs)
    engine.close()
    without = run(plain, [(i, p, _bare(params)) for i, p, params in jobs], per_step=2)
    changed = {i for i, _, params in jobs if params.plugin_args}
    assert all(together[i] == without[i] for i, _, _ in jobs if i not in changed)
    assert sum(together[i] != without[i] for i in changed) > len(changed) / 2


def _bare(params):
    fields = ("temperature", "seed", "ignore_eos", "max_tokens")
    return SamplingParams(**{field: getattr(params, field) for field in fields})


def test_transformers_own_repetition_penalty_equals_the_built_in(open_engine):
    name = "transformers:RepetitionPenaltyLogitsProcessor"
    engine = open_engine(
        {
            "plugins": {"enable": [{"use": name, "name": "theirs"}]},
            "plugin": {"theirs": {"args": {"penalty": 0.2}}},
            "sampler": {"logprobs": "processed"},
        },
    )
    fields = {"temperature": 0.7, "max_tokens": 12, "ignore_eos": True, "logprobs": -1}
    theirs, ours = [], []
    for index in range(12):
        params = fields | {"seed": index}
        prompt = "say " * (1 + index % 3)
        theirs.append((f"r{index}", prompt, SamplingParams(**params, plugin_args={"theirs": {}})))
        ours.append((f"r{index}", prompt, SamplingParams(**params, repetition_penalty=0.2)))
    assert run(engine, theirs, per_step=2) == run(engine, ours, per_step=2)


def test_every_request_can_use_it(open_engine):
    engine = engine_with(open_engine, "Counting", {"every_request": True})
    assert tokens(engine, max_tokens=3) == [65, 66, 67]


def test_a_shared_object_keeps_its_state_per_request(open_engine):
    engine = engine_with(open_engine, "counting")
    for _ in range(2):
        assert tokens(engine, max_tokens=3, plugin_args={"thing": {}}) == [65, 66, 67]


def test_the_listing_names_the_adapter(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = ["--set", f'plugins.enable=["{HERE}:Counting"]']
    assert main(["plugins", "list", *settings]) == 0
    (line,) = [each for each in capsys.readouterr().out.splitlines() if "counting" in each]
    assert line.endswith("through adapter transformers LogitsProcessor")
    assert main(["plugins", "show", "counting", *settings]) == 0
    text = capsys.readouterr().out
    assert "adapter    transformers LogitsProcessor" in text
    assert "every_request" in text
