"""The books of decisions that plugins did not take."""

from __future__ import annotations

import logging

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.errors import PluginFaultError
from hardpoint.host.boundary.faults import StepFaults
from hardpoint.plugins import LogitsProcessor, Phase
from hardpoint.plugins.component import Source
from hardpoint.plugins.requests.stats import StepFault
from hardpoint.testing import scripted_config

SOURCE = Source("mine", "acme:Mine", "acme", "1.0", "scheduler.policy (argument)")


def test_faults_are_counted_and_the_first_is_logged(caplog):
    faults = StepFaults()
    report = faults.reporter(SOURCE)
    with caplog.at_level(logging.WARNING, "hardpoint"):
        report("key() failed", ValueError("no"))
        report("victim() returned None", None)
    who = "plugin 'mine' (acme 1.0, acme:Mine), asked for by scheduler.policy (argument)"
    assert faults.report() == {"mine": StepFault(2, f"{who}: key() failed: ValueError: no")}
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{who}: key() failed: ValueError: no; the engine goes on without it"
    )


def test_a_fault_that_ends_the_engine_is_raised_with_its_cause():
    report = StepFaults(["mine"]).reporter(SOURCE)
    cause = ValueError("no")
    with pytest.raises(PluginFaultError, match="plugin 'mine'.*: key.. failed: ValueError: no"):
        report("key() failed", cause)


def test_an_error_that_cannot_be_printed_is_survived():
    class Mute(Exception):  # noqa: N818
        def __str__(self):
            raise RuntimeError("mute")

    faults = StepFaults()
    faults.reporter(SOURCE)("key() failed", Mute())
    assert "key() failed: " in faults.report()["mine"].message
    assert "Mute" in faults.report()["mine"].message


class Breaks(LogitsProcessor):
    contract = 1
    phase = Phase.BIAS

    def apply(self, logits, rows):
        raise KeyError("a table of its own")


def test_the_first_fault_of_a_logits_processor_is_logged_with_its_traceback(scripted, caplog):
    config = {"plugins": {"enable": [f"{__name__}:Breaks"]}}
    with (
        caplog.at_level(logging.WARNING, "hardpoint"),
        LLM(config=scripted_config(scripted, config)) as llm,
    ):
        outputs = llm.generate(["a", "b"], SamplingParams(max_tokens=2))
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "error"]
    (record,) = [record for record in caplog.records if record.exc_info]
    assert "its apply failed: KeyError: 'a table of its own'; the request ends" in caplog.text
    assert 'raise KeyError("a table of its own")' in logging.Formatter().formatException(
        record.exc_info
    )
