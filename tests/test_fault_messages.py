"""Messages of simple faults of plugins to users are those of compatibility/fault_messages.toml.

Each method of each kind raises, or returns what it should not, in an engine of this process: the
consequence and its message are compared word for word, without paths, addresses and versions.
`PYTHONPATH=tests python -m support.faults.record` writes the file anew.
"""

from __future__ import annotations

import sys
import tomllib

import pytest
from support.faults.driving import cases, outcome, write_models
from support.faults.record import EXECUTORS, FILE
from support.faults.server import KIND, outcomes

from hardpoint.host.registry.kinds import KINDS

RECORDED = tomllib.loads(FILE.read_text())
LATER = {
    "activation_taps",
    "adapter_resolvers",
    "balancers",
    "component_adapters",
    "io_processors",
    "step_parts",
    "speculators",
    "poolers",
}
"""Kinds that came after the messages were recorded."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The folder of the checkpoints."""
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def environment(monkeypatch):
    """An executor of threads can be imported."""
    monkeypatch.syspath_prepend(str(EXECUTORS))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_executors"]:
        del sys.modules[name]


def test_every_kind_is_recorded():
    assert set(RECORDED) == {*KINDS, KIND} - LATER


@pytest.mark.parametrize(
    "raising",
    [pytest.param(True, id="raising"), pytest.param(False, id="others", marks=pytest.mark.nightly)],
)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in LATER])
def test_faults_have_the_recorded_consequences(kind, raising, models, environment):
    found = {
        case.key: outcome(case, models)
        for case in cases(kind)
        if (case.key[2] == "raises") == raising
    }
    assert found == {
        (kind, method, fault): consequences
        for method, faults in RECORDED[kind].items()
        for fault, consequences in faults.items()
        if (fault == "raises") == raising
    }


@pytest.mark.nightly
def test_faults_of_server_extensions_have_the_recorded_consequences():
    found = {}
    for (_, part, fault), outcome_of_it in outcomes():
        found.setdefault(part, {})[fault] = outcome_of_it
    assert found == RECORDED[KIND]
