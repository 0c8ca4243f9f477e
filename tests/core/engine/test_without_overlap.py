"""Causes that keep `scheduler.asynchronous = "auto"` from overlapping steps, in log and stats."""

from __future__ import annotations

import logging

import pytest
import torch

from hardpoint.core.engine.prepare import prepare_worker
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins import EngineConfig
from hardpoint.plugins.component.base import no_progress
from hardpoint.plugins.config import ConfigSources
from hardpoint.testing import scripted_config
from hardpoint.typed import convert

SINGLE = "support.plugins.observing:TwoBatches"
RANKS = {"executor": {"use": "multiproc"}, "parallel": {"tensor": 2}}
EXPERTS = {"parallel": {"data": 2, "expert": True}}
ON_CUDA = [
    ({}, []),
    ({"executor": {"use": "multiproc"}}, []),
    ({"executor": {"use": SINGLE}}, ["executor 'two_batches'"]),
    ({**RANKS}, ["several ranks"]),
    ({**EXPERTS}, ["experts in several engines"]),
    (
        {"executor": {"use": SINGLE}, **EXPERTS},
        ["executor 'two_batches'", "experts in several engines"],
    ),
]


@pytest.fixture
def prepared(scripted):
    def prepare(tables):
        config = convert(scripted_config(scripted, tables), EngineConfig, path="")
        sources = ConfigSources()
        return prepare_worker(config, resolve_plugins(config, sources), sources, no_progress)

    return prepare


@pytest.mark.parametrize(("tables", "causes"), ON_CUDA)
def test_on_cuda_the_log_names_each_cause(prepared, monkeypatch, caplog, tables, causes):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    caplog.set_level(logging.INFO)
    spec = prepared(tables)
    assert list(spec.without_overlap) == causes
    assert spec.config.scheduler.asynchronous is (not causes)
    lines = [record.message for record in caplog.records if "asynchronous" in record.message]
    expected = f"scheduler.asynchronous: false, because of {', '.join(causes)}"
    assert lines == ([expected] if causes else [])


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_stated_value_has_no_cause(prepared, asynchronous):
    spec = prepared({"scheduler": {"asynchronous": asynchronous}})
    assert list(spec.without_overlap) == []
    assert spec.config.scheduler.asynchronous is asynchronous


@pytest.mark.parametrize(
    ("tables", "causes"),
    [
        ({}, {"device 'cpu'": 1}),
        ({"executor": {"use": SINGLE}}, {"device 'cpu'": 1, "executor 'two_batches'": 1}),
        ({"scheduler": {"asynchronous": False}}, {}),
    ],
)
def test_statistics_name_each_cause(open_engine, tables, causes):
    assert open_engine(tables).call_utility("scheduler_stats").num_without_overlap == causes
