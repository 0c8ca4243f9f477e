"""One plugin's fault is its own: only the requests that it is guilty of end."""

from __future__ import annotations

import functools
import math

import msgspec
import pytest
from support.driving import run, summary
from support.fault_cases import DENSE_MESSAGES, LAYOUT_MESSAGES, SPARSE_MESSAGES, jobs, run_all
from support.internals import scheduler_of, worker_of
from support.plugins.faulty import Dense

from hardpoint import (
    ConfigError,
    EngineDeadError,
    RequestError,
    RequestOutputKind,
    SamplingParams,
)
from hardpoint.builtin_plugins.sampler import DefaultSampler
from hardpoint.errors import PluginFaultError
from hardpoint.plugins import Edits, Op
from hardpoint.testing import scripted_engine
from hardpoint.testing.scripted import ScriptedModel

HERE = "support.plugins.faulty"
NAN, INF = math.nan, math.inf


def engine_with(open_engine, *names, **extra):
    enable = [f"{HERE}:{name}" for name in names]
    extra.setdefault("plugins", {})["enable"] = enable
    return open_engine(extra)


@pytest.fixture(scope="module")
def without(scripted):
    """Results of the 32 requests where no plugin is at fault."""
    engine = engine_with(functools.partial(scripted_engine, scripted), "Dense", "Sparse", "Whole")
    yield run(engine, jobs())
    engine.close()


def check(results, without, guilty, words, plugin):
    for request_id, expected in without.items():
        found = results[request_id]
        if request_id in guilty:
            ((_, _, _, reason, _, _),) = found[0]
            assert reason == "error", f"{request_id} was to end with an error"
        else:
            assert found == expected, f"{request_id} was disturbed"


@pytest.mark.parametrize(
    ("name", "how", "words"),
    [("dense", how, words) for how, words in DENSE_MESSAGES.items()]
    + [("sparse", how, words) for how, words in SPARSE_MESSAGES.items()],
)
@pytest.mark.parametrize("using", ["one", "half", "all"])
def test_31_of_32_are_as_without_it(open_engine, without, name, how, words, using):
    """The plugin used by one, by half, by all, with one guilty."""
    check_one_guilty(open_engine, without, name, how, words, using)


@pytest.mark.parametrize(("how", "words"), LAYOUT_MESSAGES.items())
def test_a_changed_layout_of_the_whole_batch_disturbs_nobody(open_engine, without, how, words):
    check_one_guilty(open_engine, without, "dense", how, words, "all")


def check_one_guilty(open_engine, without, name, how, words, using):
    engine = engine_with(open_engine, "Dense", "Sparse", "Whole")
    users = {"one": (), "half": range(0, 32, 2), "all": range(32)}[using]
    finals = run_all(engine, jobs(using=users, guilty={6}, name=name, how=how))
    guilty = finals["r6"].outputs[0]
    assert guilty.finish_reason == "error"
    assert f"plugin '{name}'" in guilty.error
    assert words in guilty.error
    for request_id, expected in without.items():
        if request_id != "r6":
            assert [summary(finals[request_id])] == expected, f"{request_id} was disturbed"
    meters = engine.call_utility("plugin_meters")
    assert meters[name].faults == 1
    assert engine.health().faults == {name: 1}
    assert engine.health().ok
    cache = scheduler_of(engine).context.kv_cache
    assert cache.num_free_blocks == cache.num_blocks


def test_a_batch_level_fault_ends_all_of_its_users_and_nobody_else(open_engine, without):
    for how, ended in (("raise", {3, 6, 9}), ("nan", {6}), ("update", {3, 6, 9})):
        engine = engine_with(open_engine, "Dense", "Sparse", "Whole")
        work = jobs(using={3, 9}, guilty={6}, name="whole", how=how)
        finals = run_all(engine, work)
        for request_id, expected in without.items():
            if int(request_id[1:]) in ended:
                error = finals[request_id].outputs[0].error
                assert "plugin 'whole'" in error
            else:
                assert [summary(finals[request_id])] == expected, (how, request_id)
        engine.close()


def test_batch_level_books_follow_the_rows(open_engine, without):
    """Requests that join, leave and move: each gets its own treatment."""
    engine = engine_with(open_engine, "Dense", "Sparse", "Whole", scheduler={"max_num_seqs": 7})
    work = jobs(guilty=set(range(1, 32, 3)), name="whole", how="bias")
    results = run(engine, work, per_step=2)
    for index in range(32):
        found = results[f"r{index}"][0][0]
        if index % 3 == 1:
            assert found[1] == [70] * 12
        else:
            assert [results[f"r{index}"][0]] == without[f"r{index}"]


def test_a_request_refused_in_prepare_disturbs_nobody(open_engine):
    engine = engine_with(open_engine, "Dense")
    for how, words in (
        ("refuse", "plugin_args.dense: not this one"),
        ("prepare", "its prepare failed: KeyError: 'prepare'"),
    ):
        with pytest.raises(RequestError) as error:
            engine.add_request("r", "x", SamplingParams(plugin_args={"dense": {"how": how}}))
        assert words in str(error.value)
    assert not engine.has_unfinished_requests()


def test_quarantine_by_distinct_requests(open_engine):
    engine = engine_with(open_engine, "Dense", plugins={"quarantine_after": 2})
    bad = SamplingParams(n=3, plugin_args={"dense": {"how": "nan"}}, seed=1)
    run(engine, [("first", "x", bad)])  # three completions of one request count once
    assert engine.health().faults == {"dense": 1}
    assert engine.health().ok
    run(engine, [("second", "x", bad)])
    health = engine.health()
    assert not health.ok
    assert "plugin 'dense'" in health.quarantined["dense"]
    with pytest.raises(RequestError) as error:
        engine.add_request("third", "x", SamplingParams(plugin_args={"dense": {}}))
    assert str(error.value).startswith(
        "plugin_args.dense: the plugin is quarantined, for it ended 2 requests; the first: plugin"
    )
    assert run(engine, [("fourth", "say abc", SamplingParams(temperature=0.0))])


def test_a_built_in_is_never_quarantined(open_engine):
    engine = open_engine({"plugins": {"quarantine_after": 1}})
    (token,) = engine.parts.tokenizer.encode("F")
    clash = SamplingParams(allowed_token_ids=[token], bad_words=["FF"], temperature=0.0)
    final = run_all(engine, [("r", "x", clash)])["r"].outputs[0]
    assert final.finish_reason == "error"
    assert "it left no token to choose, after" in final.error
    assert engine.health().faults
    assert engine.health().ok


def test_on_error_engine_ends_the_engine_and_names_the_plugin(open_engine):
    engine = engine_with(open_engine, "Dense", plugins={"on_error": {"dense": "engine"}})
    engine.add_request("other", "x", SamplingParams())
    engine.add_request("r", "x", SamplingParams(plugin_args={"dense": {"how": "raise"}}))
    with pytest.raises(PluginFaultError, match=r"plugin 'dense'.*its apply failed"):
        engine.step()
    with pytest.raises(EngineDeadError):
        engine.add_request("later", "x", SamplingParams())


def test_a_faulty_sampler_ends_the_engine(scripted):
    engine = scripted_engine(scripted, {"sampler": {"use": f"{HERE}:NanSampler"}})
    engine.add_request("r", "x", SamplingParams())
    with pytest.raises(PluginFaultError, match=r"plugin 'nan_sampler'.*RuntimeError: broken samp"):
        engine.step()
    with pytest.raises(EngineDeadError):
        engine.step()


def test_nan_from_the_model_names_the_model(open_engine):
    engine = open_engine()
    model = worker_of(engine).runner.model
    original = model.compute_logits
    model.compute_logits = lambda hidden: original(hidden) * NAN
    final = run_all(engine, [("r", "x", SamplingParams())])["r"].outputs[0]
    assert (final.finish_reason, final.error) == (
        "error",
        "the model gave logits that are NaN, infinite or all -inf",
    )
    assert engine.health().faults == {}


def test_device_state_is_kept_moved_and_contained(open_engine):
    """Each token at most twice, however rows move; a fault ends the guilty alone."""
    engine = engine_with(open_engine, "OnDevice", scheduler={"max_num_seqs": 5})

    def work(fail=()):
        for index in range(12):
            params = SamplingParams(
                temperature=0.0,
                logit_bias={70: 50.0, 71: 49.0},
                max_tokens=4 + index,
                plugin_args={"on_device": {"most": 2, "fail": index in fail}},
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            yield (f"r{index}", [index] * (index + 1), params)

    together = run(engine, list(work()), per_step=2)
    one_by_one = {}
    for job in work():
        one_by_one.update(run(engine, [job]))
    assert together == one_by_one
    assert sorted(together["r3"][0][0][1][:4]) == [70, 70, 71, 71]
    finals = run_all(engine, list(work(fail={4})))
    assert "its advance_rows failed: RuntimeError: broken rows" in finals["r4"].outputs[0].error
    for request_id, expected in together.items():
        if request_id != "r4":
            assert [summary(finals[request_id])] == expected


def test_the_meter_counts_steps_rows_and_time(open_engine):
    engine = engine_with(open_engine, "Dense")
    run(engine, jobs(count=4, using={0, 1}))
    meter = engine.call_utility("plugin_meters")["dense"]
    assert meter.steps == 12
    assert meter.rows == 24
    assert 0 < meter.seconds < 5
    assert engine.call_utility("plugin_meters")["min_p"].steps == 0


def test_processed_logprobs_on_request(scripted):
    for kind, rank in (("raw", 1), ("processed", 2)):
        engine = scripted_engine(scripted, {"sampler": {"logprobs": kind}})
        first = run_all(engine, [("a", "x", SamplingParams(temperature=0.0, max_tokens=1))])["a"]
        token = first.outputs[0].token_ids[0]
        params = SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=-1, logit_bias={token: -100.0}
        )
        entry = run_all(engine, [("b", "x", params)])["b"].outputs[0].logprobs[0]
        assert (entry[token].rank == 1) == (kind == "raw")
        assert rank >= 1
        params = msgspec.structs.replace(params, logprobs=None, logprob_token_ids=[token])
        named = run_all(engine, [("c", "x", params)])["c"].outputs[0].logprobs[0]
        assert named[token].logprob == entry[token].logprob
        engine.close()


def test_edits_keep_only_and_set():
    import torch

    from hardpoint.host.boundary.logits.edits import compile_edits
    from hardpoint.testing import load_ops

    logits = torch.zeros(3, 4)
    edits = Edits([0, 0], [1, 2], (), Op.KEEP_ONLY)
    compile_edits(edits, [2], logits, load_ops(torch.float32))(logits)
    assert logits[2].tolist() == [-INF, 0, 0, -INF]
    assert logits[:2].tolist() == [[0] * 4] * 2


def test_on_error_for_a_plugin_that_is_not_on(open_engine):
    with pytest.raises(
        ConfigError, match=r"plugins.on_error.dens: no enabled plugin 'dens' has faults"
    ):
        engine_with(open_engine, "Dense", plugins={"on_error": {"dens": "engine"}})


def test_a_wish_that_raises_refuses_the_request_and_names_the_plugin(open_engine, monkeypatch):
    def uses(cls, params):
        raise LookupError("cannot tell")

    monkeypatch.setattr(Dense, "uses", classmethod(lambda cls, params: False))
    engine = engine_with(open_engine, "Dense")
    monkeypatch.setattr(Dense, "uses", classmethod(uses))
    with pytest.raises(RequestError, match=r"plugin 'dense'.*its uses failed: LookupError: cannot"):
        engine.add_request("r", "x", SamplingParams())


def test_of_several_batch_level_processors_the_guilty_is_named(open_engine, without):
    engine = engine_with(open_engine, "Dense", "Sparse", "Whole", "Indifferent")
    finals = run_all(engine, jobs(guilty={6}, name="whole", how="nan"))
    assert "plugin 'whole'" in finals["r6"].outputs[0].error
    assert "its apply failed: it made logits NaN" in finals["r6"].outputs[0].error
    assert engine.call_utility("plugin_meters")["indifferent"].faults == 0
    for request_id, expected in without.items():
        if request_id != "r6":
            assert [summary(finals[request_id])] == expected


def test_lost_books_are_opened_again(open_engine, without):
    """A batch-level processor whose update_state failed serves the next requests."""
    engine = engine_with(open_engine, "Whole", plugins={"quarantine_after": 0})
    work = jobs(count=8, guilty={2}, using={5}, name="whole", how="update")
    finals = run_all(engine, work[:3])
    assert "its update_state failed: RuntimeError: broken books" in finals["r2"].outputs[0].error
    results = run(engine, jobs(count=8, guilty={1, 4}, name="whole", how="bias"), per_step=1)
    assert results["r1"][0][0][1] == results["r4"][0][0][1] == [70] * 12
    assert results["r3"] == without["r3"]


def test_bystanders_with_different_arguments_keep_their_own(open_engine):
    """A step that is run again row by row must not mix up what processors remember of rows."""
    engine = engine_with(open_engine, "Dense")

    def work(how):
        for index in range(6):
            params = SamplingParams(
                temperature=0.0,
                max_tokens=6,
                ignore_eos=True,
                logit_bias={70 + index: 100.0},
                top_k=index + 1,
                allowed_token_ids=[70 + index, 80 + index],
                bad_words=["a"],
                plugin_args={"dense": {"how": how if index == 2 else ""}},
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            yield (f"r{index}", [index + 1], params)

    for how in ("nan", "raise", "spill"):
        finals = run_all(engine, list(work(how)))
        assert finals["r2"].outputs[0].finish_reason == "error"
        for index in (0, 1, 3, 4, 5):
            assert finals[f"r{index}"].outputs[0].token_ids == [70 + index] * 6


def test_a_sampler_that_returns_something_else_is_named(scripted):
    engine = scripted_engine(scripted, {"sampler": {"use": f"{HERE}:NoneSampler"}})
    engine.add_request("r", "x", SamplingParams())
    with pytest.raises(PluginFaultError, match=r"sampler 'none_sampler': expected token ids int64"):
        engine.step()


def test_16_bit_logits_are_kept_in_float32_and_computed_again_after_a_fault(
    open_engine, monkeypatch
):
    """The memory that steps share is not that in which the others' logits are computed again."""
    compute_logits = ScriptedModel.compute_logits
    pointers = set()

    def sample(sampler, logits, rows):
        pointers.add(logits.data_ptr())
        return original(sampler, logits, rows)

    original = DefaultSampler.sample
    monkeypatch.setattr(DefaultSampler, "sample", sample)
    results = []
    for convert in (lambda x: x.bfloat16(), lambda x: x.bfloat16().float()):
        monkeypatch.setattr(
            ScriptedModel, "compute_logits", lambda *args, c=convert: c(compute_logits(*args))
        )
        for how in ("", "raise", "nan"):
            pointers.clear()
            engine = engine_with(open_engine, "Dense")
            finals = run_all(engine, jobs(using=range(8), guilty={6}, how=how))
            engine.close()
            results.append({name: summary(final) for name, final in finals.items()})
            if len(results) == 1:
                assert len(pointers) < 4  # 12 steps
    assert results[:3] == results[3:]
    whole, *with_fault = [{k: v for k, v in r.items() if k != "r6"} for r in results[:3]]
    assert with_fault == [whole, whole]
