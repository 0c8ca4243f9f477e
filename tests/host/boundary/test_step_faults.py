"""The books of decisions that plugins did not take."""

from __future__ import annotations

import logging

import pytest

from hardpoint.errors import PluginFaultError
from hardpoint.host.boundary.faults import StepFaults
from hardpoint.plugins.component import Source
from hardpoint.plugins.requests.stats import StepFault

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
