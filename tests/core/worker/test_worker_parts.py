"""Worker halves of step parts: called in steps with data for them; their faults."""

from __future__ import annotations

import logging

import pytest
from support.plugins import step_parts
from support.plugins.step_parts import CHOSEN, Shift, Worker

from hardpoint import LLM, SamplingParams
from hardpoint.errors import EngineFaultError, PluginFaultError
from hardpoint.testing import scripted_config, write_scripted_model

PARAMS = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_scripted_model(tmp_path_factory.mktemp("model"))


def open_llm(folder, part, **engine):
    use = {"use": f"{step_parts.__name__}:{part}", "name": "shift"}
    return LLM(config=scripted_config(folder, {"plugins": {"enable": [use]}, "engine": engine}))


def ends(llm, tags):
    return [output.outputs[0] for output in llm.generate(["a", "b"], PARAMS, tags=[{}, tags])]


@pytest.mark.parametrize("in_process", [True, False], ids=["in-process", "own-process"])
def test_a_part_changes_the_requests_that_use_it_and_no_other(folder, in_process):
    with open_llm(folder, "Shift", in_process=in_process) as llm:
        without = ends(llm, {})
        other, own = ends(llm, {"part": "1"})
    assert other.token_ids == without[0].token_ids
    assert own.token_ids == [CHOSEN] * 3
    assert own.token_ids != without[1].token_ids


def test_its_halves_exchange_data_and_reports_and_are_closed(folder):
    closed = Worker.closed
    with open_llm(folder, "Shift", in_process=True) as llm:
        llm.generate("a", PARAMS, tags={"part": "1"})
        llm.generate("b", PARAMS)  # nobody uses it
    (prefill, *decodes) = Shift.engine.reports
    assert len(decodes) == 2
    assert prefill.startswith(b"['")
    assert b"[0" in prefill
    assert Worker.closed == closed + 1


def test_a_fault_ends_the_requests_that_use_the_part(folder):
    with open_llm(folder, "BadLogits", in_process=True) as llm:
        other, own = ends(llm, {"part": "1"})
        assert len(other.token_ids) == 3
        assert own.error.endswith("its logits() failed: ValueError: broken logits")
        assert "plugin 'shift'" in own.error


def test_what_is_no_tensor_of_that_shape_is_a_fault(folder):
    with open_llm(folder, "ShortLogits", in_process=True) as llm:
        _, own = ends(llm, {"part": "1"})
        assert "its logits() gave a tensor [" in own.error
        assert "or None" in own.error


def test_a_part_of_scope_step_is_left_out_of_the_step_and_counted(folder):
    with open_llm(folder, "SkippedLogits", in_process=True) as llm:
        without = ends(llm, {})
        assert [end.token_ids for end in ends(llm, {"part": "1"})] == [
            end.token_ids for end in without
        ]
        assert llm.plugins.health().fallbacks["shift"].count == 3


def test_a_part_of_scope_engine_ends_the_engine(folder):
    with (
        open_llm(folder, "EndingLogits", in_process=True) as llm,
        pytest.raises(EngineFaultError, match="its logits\\(\\) failed: ValueError"),
    ):
        ends(llm, {"part": "1"})


def test_a_half_of_a_wrong_type_is_an_error_at_the_start(folder):
    with pytest.raises(PluginFaultError, match="gave 'a half', expected a WorkerHalf or None"):
        open_llm(folder, "NoHalf", in_process=True)


def test_a_misspelled_hook_is_an_error_at_the_start_that_names_both(folder):
    expected = r"'shift'.*: its worker_half\(\) gave a NearHooks whose logit is not a hook"
    with pytest.raises(PluginFaultError, match=expected + r" \(did you mean 'logits'\?\)"):
        open_llm(folder, "Misnamed", in_process=True)


def test_a_half_that_derives_from_the_class_with_all_hooks_runs_with_a_warning(folder, caplog):
    with (
        caplog.at_level(logging.WARNING, "hardpoint"),
        open_llm(folder, "OldMisnamed", in_process=True) as llm,
    ):
        _, own = ends(llm, {"part": "1"})
    assert own.token_ids == [CHOSEN] * 3
    assert "gave a OldNearHooks whose sample is not a hook (did you mean 'sampled'?)" in caplog.text


def test_a_part_without_a_half_in_the_engine_goes_around_the_model(folder, caplog):
    with caplog.at_level(logging.INFO, "hardpoint"), open_llm(folder, "Shift") as llm:
        expected = ends(llm, {})
    step_parts.Around.calls.clear()
    with caplog.at_level(logging.INFO, "hardpoint"), open_llm(folder, "Around") as llm:
        assert [end.token_ids for end in ends(llm, {})] == [end.token_ids for end in expected]
        llm.sleep(1)
        llm.wake_up()
        ends(llm, {})
    calls = step_parts.Around.calls
    assert calls[:3] == ["memory", "1 groups", "forward"]
    assert calls.count("forward") == 6
    assert "finished" in calls
    again = calls.index("released")
    assert calls[again + 1] == "1 groups"
    assert calls[-1] == "released"
    assert "working memory" in caplog.text
    assert ", notes 3 MiB; this process may use" in caplog.text
