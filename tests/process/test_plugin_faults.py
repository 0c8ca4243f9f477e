"""One plugin's fault is its own, also where the engine is in another process."""

from __future__ import annotations

import os
import re
import sys
import types

import pytest
from support.driving import run, summary
from support.fault_cases import DENSE_MESSAGES, SPARSE_MESSAGES, jobs, run_all
from support.plugins.faulty import Dense
from support.process.harness import gone, open_engine, process_config
from support.strangers import open_site

from hardpoint import (
    LLM,
    RequestError,
    RequestOutputKind,
    SamplingParams,
    plugins,
)
from hardpoint.errors import EngineDeadError, PluginFaultError, PluginLoadError, PluginNotFoundError
from hardpoint.plugins import LogitsProcessor, Phase, hookimpl
from hardpoint.process.engine_process import EngineProcess

HERE = "support.plugins.faulty"
ALL = [f"{HERE}:{name}" for name in ("Dense", "Sparse", "Whole", "OnDevice")]
FINAL = {"output_kind": RequestOutputKind.FINAL_ONLY}


@pytest.fixture(scope="module")
def engine(scripted):
    """One engine for all the faults that end no engine."""
    engine = open_engine(scripted, {"plugins": {"enable": ALL, "quarantine_after": 0}})
    yield engine
    assert engine.health().ok
    engine.close()


@pytest.fixture(scope="module")
def without(engine):
    """The results of the 32 requests where no plugin is at fault."""
    return run(engine, jobs())


def undisturbed(finals, without, guilty=("r6",)) -> None:
    for request_id, expected in without.items():
        if request_id not in guilty:
            assert [summary(finals[request_id])] == expected, f"{request_id} was disturbed"


@pytest.mark.parametrize(
    ("name", "how", "fragment"),
    [("dense", how, fragment) for how, fragment in DENSE_MESSAGES.items()]
    + [("sparse", how, fragment) for how, fragment in SPARSE_MESSAGES.items()],
)
@pytest.mark.parametrize("using", ["one", "half", "all"])
def test_31_of_32_are_as_without_it(engine, without, name, how, fragment, using):
    """The plugin used by one, by half, by all, with one failing request."""
    users = {"one": (), "half": range(0, 32, 2), "all": range(32)}[using]
    faults = engine.call_utility("plugin_meters")[name].faults
    finals = run_all(engine, jobs(using=users, guilty={6}, name=name, how=how))
    guilty = finals["r6"].outputs[0]
    assert guilty.finish_reason == "error"
    assert f"plugin '{name}'" in guilty.error
    assert fragment in guilty.error
    undisturbed(finals, without)
    assert engine.call_utility("plugin_meters")[name].faults == faults + 1
    assert engine.health().faults[name] >= 1
    assert engine.call_utility("scheduler_stats").kv_cache_usage == 0


@pytest.mark.parametrize(
    ("how", "ended"), [("raise", {3, 6, 9}), ("nan", {6}), ("update", {3, 6, 9})]
)
def test_a_batch_level_fault_ends_all_of_its_users_and_no_other(engine, without, how, ended):
    work = jobs(using={3, 9}, guilty={6}, name="whole", how=how)
    engine.call_utility("pause", "keep")  # so that all of them are in the step that fails
    for job in work:
        engine.add_request(*job)
    engine.call_utility("resume")
    finals = run_all(engine, [])
    for index in ended:
        assert "plugin 'whole'" in finals[f"r{index}"].outputs[0].error
    undisturbed(finals, without, {f"r{index}" for index in ended})


def test_batch_level_state_follows_the_rows(engine, without):
    work = jobs(guilty=set(range(1, 32, 3)), name="whole", how="bias")
    results = run(engine, work, per_step=2)
    for index in range(32):
        if index % 3 == 1:
            assert results[f"r{index}"][0][0][1] == [70] * 12
        else:
            assert results[f"r{index}"] == without[f"r{index}"]


def test_device_state_is_contained(engine):
    def work(fail=()):
        for index in range(8):
            params = SamplingParams(
                temperature=0.0,
                logit_bias={70: 50.0, 71: 49.0},
                max_tokens=4 + index,
                plugin_args={"on_device": {"most": 2, "fail": index in fail}},
                **FINAL,
            )
            yield (f"r{index}", [index] * (index + 1), params)

    expected = run(engine, list(work()))
    finals = run_all(engine, list(work(fail={4})))
    assert "its advance_rows failed: RuntimeError: broken rows" in finals["r4"].outputs[0].error
    undisturbed(finals, expected, {"r4"})


def test_a_request_refused_in_prepare_never_reaches_the_engine(engine):
    for how, fragment in (
        ("refuse", "plugin_args.dense: not this one"),
        ("prepare", "its prepare failed: KeyError: 'prepare'"),
    ):
        with pytest.raises(RequestError) as error:
            engine.add_request("r", "x", SamplingParams(plugin_args={"dense": {"how": how}}))
        assert fragment in str(error.value)
    assert not engine.has_unfinished_requests()


def test_a_callable_in_the_parameters_is_refused_with_what_to_do(engine):
    params = SamplingParams(logits_processors=[lambda _ids, logits: logits])
    with pytest.raises(RequestError, match=r"logits_processors: .*process.*factory"):
        engine.add_request("r", "x", params)
    assert not engine.has_unfinished_requests()


def test_quarantine_by_distinct_requests(scripted):
    with LLM(config=process_config(scripted, enabled(quarantine_after=2))) as llm:
        bad = SamplingParams(n=3, plugin_args={"dense": {"how": "nan"}}, seed=1)
        llm.generate("x", bad)  # three completions of one request count once
        assert llm.plugins.health().faults == {"dense": 1}
        llm.generate("x", bad)
        assert "plugin 'dense'" in llm.plugins.health().quarantined["dense"]
        with pytest.raises(RequestError, match=r"plugin_args.dense: the plugin is quarantined"):
            llm.generate("x", SamplingParams(plugin_args={"dense": {}}))
        assert llm.generate("say abc", SamplingParams(temperature=0.0))[0].outputs[0].text


def enabled(**plugins):
    return {"plugins": {"enable": [f"{HERE}:Dense"], **plugins}}


# Faults that end the engine


def test_on_error_engine_ends_the_engine_and_names_the_plugin(scripted):
    engine = open_engine(scripted, enabled(on_error={"dense": "engine"}))
    pid = engine.parts.client.pid
    engine.add_request("other", "x", SamplingParams(max_tokens=400))
    engine.add_request("r", "x", SamplingParams(plugin_args={"dense": {"how": "raise"}}))
    with pytest.raises(EngineDeadError, match=r"plugin 'dense'.*its apply failed") as error:
        run_to_the_end(engine)
    assert isinstance(error.value.__cause__, PluginFaultError)
    assert f"In the engine process (pid {pid})" in "".join(notes_of(error.value))
    assert "broken apply" in "".join(notes_of(error.value))
    with pytest.raises(EngineDeadError):
        engine.add_request("later", "x", SamplingParams())


def test_a_faulty_sampler_ends_the_engine(scripted):
    engine = open_engine(scripted, {"sampler": {"use": f"{HERE}:NanSampler"}})
    engine.add_request("r", "x", SamplingParams())
    with pytest.raises(EngineDeadError, match=r"plugin 'nan_sampler'.*RuntimeError: broken samp"):
        run_to_the_end(engine)
    with pytest.raises(EngineDeadError):
        engine.step()


def run_to_the_end(engine) -> None:
    while engine.has_unfinished_requests():
        engine.step()


def notes_of(error: BaseException | None) -> list[str]:
    """The notes of an error and of its cause."""
    notes = []
    while error is not None:
        notes += getattr(error, "__notes__", [])
        error = error.__cause__
    return notes


# A hook in the engine


class Planned:
    """Fails where the engine is; reports where it was."""

    contract = 1

    @hookimpl
    def step_planned(self, record):
        raise RuntimeError(f"no room in {os.getpid()}")


def test_a_hook_that_raises_in_the_engine_is_counted_and_reported(scripted):
    hook = {"plugins": {"enable": ["test_plugin_faults:Planned"]}}
    with LLM(config=process_config(scripted, hook)) as llm:
        pid = llm.llm_engine.parts.client.pid
        (output,) = llm.generate("say abc", SamplingParams(temperature=0.0, max_tokens=20))
        assert output.outputs[0].text == " abc abc abc"
        fallback = llm.plugins.health().fallbacks["step_planned"]
    assert fallback.count >= len(output.outputs[0].token_ids)
    assert "plugin 'planned'" in fallback.message
    assert f"RuntimeError: no room in {pid}" in fallback.message


# Plugins that the engine process has not, or has otherwise


def test_a_plugin_that_only_the_parent_can_import(scripted, monkeypatch):
    ghost = types.ModuleType("ghost")
    monkeypatch.setitem(sys.modules, "ghost", ghost)
    ghost.Dense = type("Dense", (Dense,), {"__module__": "ghost", "contract": 1})
    config = process_config(scripted, {"plugins": {"enable": ["ghost:Dense"]}})
    with pytest.raises(PluginNotFoundError) as error:
        LLM(config=config)
    fragment = str(error.value)
    assert "plugin 'dense'" in fragment
    assert "ghost:Dense" in fragment
    assert "asked for by plugins.enable[1]" in fragment
    assert "there is no module 'ghost'" in fragment
    (note,) = [note for note in notes_of(error.value) if "In the engine process" in note]
    assert "ModuleNotFoundError" in note


def test_a_plugin_that_is_another_version_where_the_engine_is(scripted, tmp_path, monkeypatch):
    """The distribution is replaced after the frontend has looked at it."""
    tell = EngineProcess.launch
    with open_site(tmp_path / "site", monkeypatch) as site:
        site.install_stranger()
        info = tmp_path / "site" / "stranger-2.0.dist-info"

        def replaced(process, launch):
            info.rename(tmp_path / "site" / "stranger-3.1.dist-info")
            metadata = tmp_path / "site" / "stranger-3.1.dist-info" / "METADATA"
            metadata.write_text(metadata.read_text().replace("2.0", "3.1"))
            tell(process, launch)

        monkeypatch.setattr(EngineProcess, "launch", replaced)
        with pytest.raises(PluginLoadError) as error:
            LLM(config=process_config(scripted, {"plugins": {"enable": ["dry"]}}))
    fragment = str(error.value)
    assert "plugin 'dry'" in fragment
    assert "version 2.0 was found where the engine was asked for" in fragment
    assert "version 3.1 is installed in the engine process" in fragment


def test_a_plugin_whose_constructor_fails_in_the_engine_is_named(scripted):
    config = process_config(scripted, {"plugins": {"enable": ["test_plugin_faults:Unbuildable"]}})
    with pytest.raises(PluginLoadError, match=r"plugin 'unbuildable'.*OSError: no such thing"):
        LLM(config=config)


class Unbuildable(Dense):
    contract = 1

    def __init__(self, context):
        raise OSError("no such thing")


def test_a_plugin_that_ends_the_process_is_reported_by_its_exit_code(scripted):
    """Not an exception but an end: `os._exit` inside of a step."""
    engine = open_engine(scripted, {"plugins": {"enable": ["test_plugin_faults:Exits"]}})
    engine.add_request("r", "x", SamplingParams(plugin_args={"exits": {}}))
    with pytest.raises(EngineDeadError, match="exited with code 41"):
        run_to_the_end(engine)
    gone(engine.parts.client.pid)


class Exits(LogitsProcessor):
    contract = 1
    phase = Phase.MASK

    def apply(self, logits, rows):
        os._exit(41)


# Arguments that only the engine's process refuses


class Elsewhere(LogitsProcessor):
    """Its arguments are right in the process of the tests only."""

    contract = 1
    phase = Phase.MASK

    class Arguments(plugins.Arguments):
        how: str = ""

        def __post_init__(self):
            if os.environ["TESTS_PID"] != str(os.getpid()):
                if self.how == "refuse":
                    raise ValueError("how: not in this process")
                raise LookupError("nothing here")

    def apply(self, logits, rows):
        return logits


@pytest.mark.parametrize(
    ("how", "fragment"),
    [
        ("refuse", r"^plugin_args\.elsewhere: how: not in this process"),
        ("break", r"^plugin 'elsewhere'.*: its Arguments failed: LookupError: nothing here$"),
    ],
)
def test_arguments_that_are_wrong_in_the_engine_only(scripted, monkeypatch, how, fragment):
    monkeypatch.setenv("TESTS_PID", str(os.getpid()))
    enable = [f"{__name__}:Elsewhere"]
    settings = {"plugins": {"enable": enable, "quarantine_after": 2}}
    with LLM(config=process_config(scripted, settings)) as llm:
        for times in (1, 2):
            bad = SamplingParams(plugin_args={"elsewhere": {"how": how}})
            final = llm.generate(["x", "say abc"], [bad, SamplingParams(temperature=0.0)])
            (broken,), (well,) = (output.outputs for output in final)
            assert broken.finish_reason == "error"
            assert re.search(fragment, broken.error)
            assert well.text == " abc abc abc"
            assert llm.plugins.health().faults == {"elsewhere": times}
        with pytest.raises(RequestError, match=r"plugin_args\.elsewhere: the plugin is quarant"):
            llm.generate("x", bad)
