"""Speculators in an engine: the same tokens, faults that cost drafts alone, choice by request."""

from __future__ import annotations

import itertools
import re

import pytest
from msgspec.structs import replace
from support.adapters import write_model
from support.cases import nightly_but
from support.driving import FINAL, alone, run
from support.internals import engine_of
from support.parallel import write_random_model
from support.plugins import speculating
from support.processes import ROOT

from hardpoint import LLM, RequestError, SamplingParams
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.kernels import cpu
from hardpoint.plugins.structured import StructuredOutputs
from hardpoint.testing import scripted_config, scripted_engine

HERE = "support.plugins.speculating"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, **FINAL)
BUILT_IN = ("ngram", "suffix")


def speculating_with(*use, options=None, **settings):
    table = {"speculation": {"use": list(use), "adaptive": False, **settings}}
    return table | {"plugin": options} if options else table


def replaying(jobs, expected, **options):
    """Settings of a speculator that drafts each job's earlier output, some of it wrong."""
    replies = [
        [prompt, tokens]
        for request_id, prompt, _ in jobs
        for _, tokens, *_ in expected[request_id][0]
    ]
    return {"scripted_speculator": {"right": 0.7, "replies": replies} | options}


@pytest.mark.parametrize("name", nightly_but(BUILT_IN, "ngram"))
def test_tokens_are_those_without_a_speculator(open_engine, jobs, expected, name):
    engine = open_engine(speculating_with(name))
    assert run(engine, jobs, per_step=3) == expected


@pytest.mark.parametrize("blocks", nightly_but([None, 24], 24))
def test_right_and_wrong_drafts_change_no_token(open_engine, jobs, expected, blocks):
    options = replaying(jobs, expected)
    config = speculating_with("hardpoint.testing:ScriptedSpeculator", options=options)
    if blocks is not None:
        config["kv_cache"] = {"num_blocks": blocks, "block_size": 8}
        config["max_model_len"] = 128
    engine = open_engine(config)
    assert run(engine, jobs, per_step=3) == expected
    stats = engine.call_utility("scheduler_stats")
    assert 0 < stats.num_accepted_drafts < stats.num_drafts
    assert (stats.num_preemptions > 0) == (blocks is not None)


@pytest.mark.parametrize(
    ("cache_dtype", "dtype"),
    nightly_but(
        itertools.product(("auto", "int8", "fp8"), ("bfloat16", "float32")),
        ("int8", "float32"),
    ),
)
def test_drafts_read_keys_and_values_as_the_cache_stores_them(tmp_path, jobs, cache_dtype, dtype):
    """Tokens and log-probabilities of a real model are equal without drafts, bit for bit."""
    try:
        cpu.load()
    except cpu.KernelsUnavailableError as cause:
        pytest.skip(f"sums depend on the other rows of a step without kernels, and they: {cause}")
    folder = write_random_model(tmp_path, "LlamaForCausalLM", hidden_size=96)
    base = {"dtype": dtype, "attention": {"use": "native_cpu"}, "max_model_len": 128}
    base |= {"kv_cache": {"dtype": cache_dtype, "block_size": 8}}
    few = [(name, prompt, replace(params, logprobs=2)) for name, prompt, params in jobs[:12]]
    engine = scripted_engine(folder, base)
    expected = alone(engine, few)
    engine.close()
    options = replaying(few, expected)
    config = speculating_with("hardpoint.testing:ScriptedSpeculator", options=options)
    engine = scripted_engine(folder, base | config)
    assert run(engine, few, per_step=3) == expected
    stats = engine.call_utility("scheduler_stats")
    assert 0 < stats.num_accepted_drafts < stats.num_drafts
    engine.close()


@pytest.mark.parametrize("use", nightly_but(["uniproc", "multiproc"], "uniproc"))
def test_steps_of_requests_without_a_speculator_are_planned_ahead(open_engine, jobs, expected, use):
    config = speculating_with(
        "hardpoint.testing:ScriptedSpeculator", options=replaying(jobs, expected)
    )
    config |= {"executor": {"use": use}, "scheduler": {"asynchronous": True}}
    engine = open_engine(config)
    without = [(name, prompt, replace(params, speculator="none")) for name, prompt, params in jobs]
    assert run(engine, without, per_step=3) == expected
    assert "speculation" not in engine.call_utility("scheduler_stats").num_waits_for_results
    assert run(engine, jobs, per_step=3) == expected
    stats = engine.call_utility("scheduler_stats")
    assert stats.num_waits_for_results["speculation"] > 10
    assert 0 < stats.num_accepted_drafts < stats.num_drafts


@pytest.mark.parametrize("in_process", nightly_but([True, False], True))
def test_a_text_that_repeats_itself_takes_fewer_steps(scripted, in_process):
    config = scripted_config(scripted, {"engine": {"in_process": in_process}})
    text = "say abc"
    params = SamplingParams(temperature=0.0, max_tokens=20)
    tokens = {}
    for use in ([], ["ngram"]):
        with LLM(config=config | {"speculation": {"use": use}}) as llm:
            (output,) = llm.generate([text], params)
            stats = llm.engines.scheduler_stats()
        tokens[bool(use)] = output.outputs[0].token_ids
    assert tokens[True] == tokens[False]
    assert stats.num_accepted_drafts >= 6


@pytest.fixture(scope="module")
def without_drafts(scripted):
    """Three jobs, and the output of each."""
    jobs = [(f"r{n}", [n, n + 1], GREEDY) for n in range(3)]
    engine = scripted_engine(scripted)
    yield jobs, run(engine, jobs)
    engine.close()


FAULTS = {
    "start": r"start\(\) of request 'r.*' failed: AssertionError",
    "propose": r"propose\(\) failed: ValueError: no drafts today",
    "count": r"propose\(\) returned \[\[1\], \[1\].*, expected token ids for each of \d requests",
    "length": r"propose\(\) returned \[1, .*\], expected at most \d drafts of a request",
    "vocabulary": r"propose\(\) returned 100000, expected token ids from 0 to 256",
    "verified": r"verified\(\) of request 'r.*' failed: AssertionError",
    "ended": r"ended\(\) of request 'r.*' failed: AssertionError",
}


@pytest.mark.parametrize(("fails_in", "message"), FAULTS.items(), ids=FAULTS)
def test_a_fault_costs_the_drafts_of_its_requests(open_engine, without_drafts, fails_in, message):
    jobs, expected = without_drafts
    config = speculating_with(f"{HERE}:Failing", options={"failing": {"fails_in": fails_in}})
    engine = open_engine(config)
    assert run(engine, jobs) == expected
    assert run(engine, [("r9", [3], GREEDY)])["r9"]  # which reports what failed at the end
    fault = engine.health().fallbacks["failing"]
    assert re.search(f"failing.*: its {message}", fault.message), fault.message


def test_a_request_chooses_its_speculator_and_gives_it_arguments(scripted):
    speculating.CALLS.clear()
    config = speculating_with("ngram", f"{HERE}:Recorder", num_draft_tokens=2)
    engine = scripted_engine(scripted, config)
    chosen = SamplingParams(
        temperature=0.0,
        max_tokens=4,
        ignore_eos=True,
        speculator="recorder",
        plugin_args={"recorder": {"token": 70}},
        **FINAL,
    )
    none = SamplingParams(temperature=0.0, max_tokens=4, speculator="none", **FINAL)
    run(engine, [("chosen", [1, 2], chosen), ("default", [3], GREEDY), ("none", [4], none)])
    engine.close()
    calls = speculating.CALLS
    assert [call[0] for call in calls].count("start") == 1
    assert calls[0][1].startswith("chosen")
    assert {tuple(call[1]) for call in calls if call[0] == "verified"} == {(70, 70), (70,)}
    assert next(call[1:] for call in calls if call[0] == "propose") == (2, 1)
    assert max(call[1] + call[2] for call in calls if call[0] == "propose") == 3
    assert calls[-1][0] == "ended"


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ([], r'speculator: expected "none", because speculation.use is empty, got \'nothing\''),
        (["ngram"], r'speculator: expected "none" or an enabled speculator \(ngram\), got \'noth'),
    ],
)
def test_an_unknown_speculator_is_refused(open_engine, use, message):
    engine = open_engine(speculating_with(*use))
    with pytest.raises(RequestError, match=message):
        engine.add_request("r", [1], SamplingParams(speculator="nothing"))


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_drafts_that_a_grammar_refuses_are_not_computed(scripted, backend, monkeypatch):
    pytest.importorskip(backend)
    speculating.CALLS.clear()
    enabled = {}
    if backend == "xgrammar":
        monkeypatch.syspath_prepend(ROOT / "examples" / "hardpoint_xgrammar" / "src")
        enabled = {
            "plugins": {"enable": [{"use": "hardpoint_xgrammar:XGrammar", "name": backend}]},
            "grammar": {"compile_seconds": 300.0},  # its process has to start on a busy machine
        }
    config = speculating_with(f"{HERE}:Recorder", num_draft_tokens=3) | enabled
    engine = scripted_engine(scripted, config)
    a, b, c = 64, 65, 66  # of the scripted tokenizer
    results = {}
    for token in (None, a, b, c):
        params = SamplingParams(
            max_tokens=14,
            temperature=1.0,
            seed=3,
            structured=StructuredOutputs(regex="b{9,40}a+", backend=backend),
            speculator="none" if token is None else "recorder",
            plugin_args={} if token is None else {"recorder": {"token": token}},
            **FINAL,
        )
        before = engine.call_utility("scheduler_stats").num_verified_drafts
        (results[token],) = run(engine, [("r", [7, 8], params)]).values()
        verified = engine.call_utility("scheduler_stats").num_verified_drafts - before
        assert results[token] == results[None]
        assert (verified > 0) == (token in (a, b)), token
        assert verified < 9 or token != a  # none before the last b that has to come
    engine.close()
    assert results[None][0][0][1][:9] == [b] * 9


@pytest.mark.parametrize("end", [{}, {"stop": ["b c"]}, {"n": 2}])
def test_a_request_may_include_the_figures_of_its_drafts(scripted, end):
    config = scripted_config(scripted, speculating_with("ngram"))
    asking = SamplingParams(temperature=0.0, max_tokens=20, include=["speculation"], **end)
    with LLM(config=config) as llm:
        (plain,) = llm.generate(["say abc"], SamplingParams(temperature=0.0, max_tokens=20))
        before = llm.engines.scheduler_stats()
        (output,) = llm.generate(["say abc"], asking)
        after = llm.engines.scheduler_stats()
    assert plain.outputs[0].part_figures is None
    figures = [completion.part_figures["speculation"] for completion in output.outputs]
    for name in ("num_drafts", "num_accepted_drafts", "num_verified_drafts"):
        total = getattr(after, name) - getattr(before, name)
        assert sum(counts[name] for counts in figures) == total
        assert total > 0
    for counts in figures:
        by_position = counts["num_accepted_by_position"]
        assert sum(by_position) == counts["num_accepted_drafts"]
        assert sorted(by_position, reverse=True) == by_position
        assert counts["num_verified_drafts"] >= by_position[0]


def test_figures_of_drafts_that_there_are_none_of_are_refused(scripted):
    include = ["timings", "speculation"]
    cases = [
        ([], None, "speculation.use is empty"),
        (["ngram"], "none", 'its speculator is "none"'),
    ]
    for use, speculator, why in cases:
        asking = SamplingParams(max_tokens=2, include=include, speculator=speculator)
        config = scripted_config(scripted, speculating_with(*use))
        with LLM(config=config) as llm, pytest.raises(RequestError) as error:
            llm.generate(["say"], asking)
        assert str(error.value) == (
            f"include: expected no 'speculation' in a request without drafts ({why}), got "
            f"{include!r}"
        )


def test_a_batch_level_processor_and_a_speculator_are_refused_together(scripted):
    config = speculating_with("ngram") | {"plugins": {"enable": ["support.plugins.faulty:Whole"]}}
    with pytest.raises(Exception, match="'whole'.*supports_drafts.* together with speculation"):
        scripted_engine(scripted, config)


def test_scopes_differ_by_salt(scripted):
    speculating.CALLS.clear()
    engine = scripted_engine(scripted, speculating_with(f"{HERE}:Recorder"))
    for number, salt in enumerate([None, "a", "a", "b"]):
        engine.add_request(f"r{number}", [1], GREEDY, RequestExtras(cache_salt=salt))
    while engine.has_unfinished_requests():
        engine.step()
    engine.close()
    scopes = [call[2] for call in speculating.CALLS if call[0] == "start"]
    assert len(scopes) == 4
    assert len(set(scopes)) == 3
    assert scopes[1] == scopes[2]


@pytest.mark.parametrize("chunk", [64, 4])
def test_hidden_states_are_those_of_the_tokens_since_the_last_call(scripted, chunk):
    speculating.CALLS.clear()
    config = speculating_with(f"{HERE}:ReadsHidden", num_draft_tokens=3)
    config["scheduler"] = {"max_num_batched_tokens": chunk}
    engine = scripted_engine(scripted, config)
    prompt = list(range(9))
    run(engine, [("r", prompt, GREEDY)])
    engine.close()
    shown = [call[1:] for call in speculating.CALLS if call[0] == "hidden"]
    assert len(shown) > 5
    seen = 0
    for rows, _, length in shown:
        seen += rows
        assert seen == len(prompt) + length - 1


@pytest.mark.parametrize("level", [1, 2])
def test_requests_that_are_kept_have_drafts_after_a_sleep(tmp_path, level):
    write_model(tmp_path / "m")
    config = {**speculating_with("ngram"), "kv_cache": {"num_blocks": 64}}
    params = replace(GREEDY, max_tokens=100)
    with LLM(str(tmp_path / "m"), config=config) as llm:
        engine = engine_of(llm)
        engine.add_request("a", {"prompt_token_ids": [1, 2, 3, 4] * 20}, params)
        for _ in range(10):
            engine.step()
        before = llm.engines.scheduler_stats().num_drafts
        llm.sleep(level, mode="keep")
        llm.wake_up()
        while engine.has_unfinished_requests():
            engine.step()
        assert llm.engines.scheduler_stats().num_drafts > before > 0
