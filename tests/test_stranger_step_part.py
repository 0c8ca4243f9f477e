"""A step part from outside: built, installed, enabled; it slows one tenant down and no other.

Everything happens in subprocesses that see the installed package, so this process never does.
"""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from support.processes import ROOT, run
from support.strangers import RESOLVE

# A program: runs requests, and prints their tokens and errors, the order in which they end, and the
# reasons why they waited for a part.
COMPLETE = """
import json, sys, time
from hardpoint import SamplingParams
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.errors import HardpointError
from hardpoint.plugins import WaitingFor
from hardpoint.testing import ScriptedClock, scripted_engine

def main():
    folder, extra, jobs = map(json.loads, sys.argv[1:])
    # An engine process has the clock of the machine.
    clock = ScriptedClock() if extra["engine"]["in_process"] else time.monotonic
    engine = scripted_engine(folder, extra, clock=clock)
    order, tokens, errors, reasons, seconds, most = [], {}, {}, {}, {}, 0
    began = clock()
    for number, (name, tenant) in enumerate(jobs):
        params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        extras = RequestExtras(tags={"tenant": tenant} if tenant else {})
        try:
            engine.add_request(name, [97 + number] * 5, params, extras)
        except HardpointError as error:
            errors[name] = str(error)
    while engine.has_unfinished_requests():
        if isinstance(clock, ScriptedClock):
            clock.advance(0.02)
        try:
            outputs = engine.step()
        except HardpointError as error:
            errors["engine"] = str(error)
            break
        for output in outputs:
            if output.finished:
                order.append(output.request_id)
                seconds[output.request_id] = clock() - began
                tokens[output.request_id] = output.outputs[0].token_ids
                if (error := output.outputs[0].error) is not None:
                    errors[output.request_id] = error
        running = 0
        for live in engine.call_utility("live_requests"):
            running += live.status == "running" and live.tags.get("tenant") == "big"
            if live.waits_for is not None and live.waits_for.waiting_for is WaitingFor.PART:
                reasons.setdefault(live.external_id, live.waits_for.message)
        most = max(most, running)
    faults = {} if "engine" in errors else engine.health().fallbacks
    engine.close()
    print(json.dumps({"order": order, "tokens": tokens, "errors": errors, "reasons": reasons,
                      "seconds": seconds, "most": most, "faults": sorted(faults)}))

if __name__ == "__main__":  # the engine's process imports this file
    main()
"""

JOBS = [["big1", "big"], ["big2", "big"], ["small1", "small"], ["free", None]]
THREE = [["big1", "big"], ["big2", "big"], ["free", None]]

# Two requests of ten tokens each: the second one waits a second for its tokens.
BUDGET = {"burst": 10, "tokens_per_second": 10.0}
SLOW = {**BUDGET, "tokens_per_second": 2.0}
"""The second one waits five seconds, which are enough for the first steps of an engine process."""
QUICK = {**BUDGET, "tokens_per_second": 100.0}
"""The second one waits a tenth of a second."""

BROKEN = """
from acme_tenant_budget import part

class Broken(part.TenantBudget):
    contract = 1

    def engine_half(self, context):
        return BrokenHalf(self.options, context.clock)

class BrokenHalf(part.Budgets):
    def METHOD(self, *args):
        raise ValueError("out of order")
"""
COST_OF_NINE = 'return {"slots of big": 9}'


@pytest.fixture
def python(acme_tenant_budget, tmp_path):
    """Runs a program where the package is installed; returns what it prints as JSON."""

    def run_it(code, *arguments):
        command = (sys.executable, "-c", code, *map(json.dumps, arguments))
        return json.loads(run(*command, path=acme_tenant_budget, cwd=tmp_path))

    return run_it


@pytest.fixture
def complete(python, scripted):
    """Runs requests with a part, or without any."""

    def run_it(jobs, use="tenant_budget", in_process=True, **options):
        extra = {"engine": {"in_process": in_process}}
        if use:
            extra["plugins"] = {"enable": [use]}
            extra["plugin"] = {"tenant_budget": options} if options else {}
        return python(COMPLETE, str(scripted), extra, jobs)

    return run_it


@pytest.fixture(scope="module")
def plain_tokens(acme_tenant_budget, scripted, tmp_path_factory):
    """The tokens of THREE requests without a part."""
    extra = {"engine": {"in_process": True}}
    given = map(json.dumps, (str(scripted), extra, THREE))
    command = (sys.executable, "-c", COMPLETE, *given)
    done = run(*command, path=acme_tenant_budget, cwd=tmp_path_factory.mktemp("plain"))
    return json.loads(done)["tokens"]


class TestThroughTheContract:
    def test_installed_is_not_enabled(self, python):
        result = python(RESOLVE, {})
        assert result["not_enabled"] == [
            "step_parts/tenant_budget "
            "(acme-tenant-budget 1.0.0, acme_tenant_budget.part:TenantBudget)"
        ]
        assert result["imported"] == []

    def test_enabled_by_its_name(self, python):
        config = {"plugins": {"enable": ["tenant_budget"]}, "plugin": {"tenant_budget": BUDGET}}
        value, distribution, version, options, _ = python(RESOLVE, config)["on"][
            "step_parts/tenant_budget"
        ]
        assert value == "acme_tenant_budget.part:TenantBudget"
        assert (distribution, version) == ("acme-tenant-budget", "1.0.0")
        assert options == {"tag": "tenant", **BUDGET, "rates": {}, "running": {}}

    def test_wrong_options_are_refused_with_their_path(self, python):
        config = {
            "plugins": {"enable": ["tenant_budget"]},
            "plugin": {"tenant_budget": {"rates": {"a": 0}}},
        }
        result = python(RESOLVE, config)
        assert result["error"] == "ConfigError"
        assert "plugin.tenant_budget.rates.a: expected" in result["message"]

    def test_its_own_tests_pass(self, acme_tenant_budget, tmp_path):
        shutil.copytree(ROOT / "examples" / "acme_tenant_budget" / "tests", tmp_path / "tests")
        pytest_run = (sys.executable, "-m", "pytest", "-q", "tests")
        assert "passed" in run(*pytest_run, path=acme_tenant_budget, cwd=tmp_path)


class TestThroughTheEngine:
    @pytest.mark.parametrize(
        ("in_process", "budget"),
        [(True, BUDGET), pytest.param(False, SLOW, marks=pytest.mark.nightly)],
    )
    def test_one_tenant_waits_and_no_token_changes(self, complete, in_process, budget):
        plain = complete(JOBS, use=None)
        slowed = complete(JOBS, in_process=in_process, **budget)
        rate = budget["tokens_per_second"]
        assert slowed["errors"] == {}
        assert slowed["tokens"] == plain["tokens"]
        assert slowed["order"][-1] == "big2"
        assert slowed["seconds"]["big2"] >= 9 / rate
        assert "tenant 'big' has " in slowed["reasons"]["big2"]
        cost = f" tokens left, the request costs 10; {rate:g} come per second"
        assert cost in slowed["reasons"]["big2"]
        assert slowed["reasons"].keys() == {"big2"}

    @pytest.mark.parametrize("in_process", [True, False])
    def test_a_fault_ends_the_requests_that_use_it(self, complete, tmp_path, in_process):
        (tmp_path / "broken.py").write_text(BROKEN.replace("METHOD", "gate"))
        result = complete(
            JOBS, use={"use": "broken:Broken", "name": "tenant_budget"}, in_process=in_process
        )
        assert sorted(result["errors"]) == ["big1", "big2", "small1"]
        for message in result["errors"].values():
            assert "its gate() failed: ValueError: out of order" in message
        assert result["tokens"]["free"] == complete(JOBS, use=None)["tokens"]["free"]
        assert result["faults"] == ["tenant_budget"]


def test_resources_limit_who_runs_at_the_same_time(complete):
    jobs = [[f"big{number}", "big"] for number in "123"]
    plain, limited = complete(jobs), complete(jobs, running={"big": 1})
    assert (plain["most"], limited["most"]) == (3, 1)
    assert limited["tokens"] == plain["tokens"]
    assert limited["order"] == ["big1", "big2", "big3"]
    assert limited["reasons"]["big2"] == ("tenant_budget: needs 1 of slots of big, 0 of 1 are free")


def test_what_costs_more_than_the_capacity_is_refused(complete, tmp_path):
    (tmp_path / "broken.py").write_text(
        BROKEN.replace("METHOD", "cost").replace('raise ValueError("out of order")', COST_OF_NINE)
    )
    use = {"use": "broken:Broken", "name": "tenant_budget"}
    result = complete([["big1", "big"], ["free", None]], use=use, running={"big": 3})
    assert result["errors"].keys() == {"big1"}
    assert "needs 9 of slots of big, expected at most 3" in result["errors"]["big1"]


@pytest.mark.parametrize(
    "method",
    [
        "check",
        "begin",
        "wait",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("cost", "result", "ended")),
    ],
)
def test_who_does_not_use_it_survives_its_faults(complete, plain_tokens, tmp_path, method):
    (tmp_path / "broken.py").write_text(BROKEN.replace("METHOD", method))
    use = {"use": "broken:Broken", "name": "tenant_budget"}
    result = complete(THREE, use=use, **QUICK)
    assert result["errors"].keys() <= {"big1", "big2"}
    assert result["tokens"]["free"] == plain_tokens["free"]
