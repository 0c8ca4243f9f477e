"""A scheduling policy from outside: built, installed, named, and it changes who goes first.

Everything happens in subprocesses that see the installed package, so this process never does.
"""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from support.processes import ROOT, run
from support.strangers import RESOLVE

ORDER = """
import json, sys
from hardpoint import SamplingParams
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.testing import scripted_engine

folder, extra, jobs, swap_to = map(json.loads, sys.argv[1:])
engine = scripted_engine(folder, extra)
for number, (name, fields) in enumerate(jobs):
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    engine.add_request(name, [97 + number] * 5, params, RequestExtras(**fields))
order, tokens, most = [], {}, 0
while engine.has_unfinished_requests():
    for output in engine.step():
        if output.finished:
            order.append(output.request_id)
            tokens[output.request_id] = output.outputs[0].token_ids
    most = max(most, engine.call_utility("scheduler_stats").num_running)
    if swap_to:
        engine.set_policy(swap_to)
        swap_to = None
fallbacks = {name: fault.count for name, fault in engine.health().fallbacks.items()}
engine.close()
print(json.dumps({"order": order, "tokens": tokens, "most": most, "fallbacks": fallbacks}))
"""

DEADLINES = [["a", {}], ["b", {"timeout": 50.0}], ["c", {"timeout": 5.0}], ["d", {"timeout": 20.0}]]
TENANTS = [
    [f"{tenant}{n}", {"tags": {"tenant": tenant}}] for tenant in ("big", "small") for n in "123"
]


BY_CLASS = pytest.param("acme_scheduling:EarliestDeadline", marks=pytest.mark.nightly)


@pytest.fixture
def python(acme_scheduling, tmp_path):
    """Runs a program where the package is installed; returns what it prints as JSON."""

    def run_it(code, *arguments):
        command = (sys.executable, "-c", code, *map(json.dumps, arguments))
        return json.loads(run(*command, path=acme_scheduling, cwd=tmp_path))

    return run_it


@pytest.fixture
def complete(python, scripted):
    """Runs requests one at a time, or as many as are asked for, under a policy."""

    def run_it(jobs, policy, max_num_seqs=1, swap_to=None, **options):
        scheduler = {"policy": policy, "max_num_seqs": max_num_seqs}
        name = "tenant_cap" if "ap" in policy else "earliest_deadline"
        plugin = {name: options} if options else {}
        extra = {"scheduler": scheduler, "plugin": plugin}
        result = python(ORDER, str(scripted), extra, jobs, swap_to)
        assert result["fallbacks"] == {}
        return result

    return run_it


class TestThroughTheContract:
    def test_installed_is_not_enabled(self, python):
        result = python(RESOLVE, {})
        assert result["policy"][:3] == [
            "fcfs",
            "hardpoint.builtin_plugins.policies:FirstComeFirstServed",
            "hardpoint",
        ]
        assert result["not_enabled"] == [
            "scheduling_policies/ageing_shortest_first "
            "(acme-scheduling 1.0.0, acme_scheduling.ageing:AgeingShortestFirst)",
            "scheduling_policies/earliest_deadline "
            "(acme-scheduling 1.0.0, acme_scheduling.deadline:EarliestDeadline)",
            "scheduling_policies/tenant_cap (acme-scheduling 1.0.0, acme_scheduling.cap:TenantCap)",
        ]
        assert result["imported"] == []

    @pytest.mark.parametrize("named", ["tenant_cap", "acme_scheduling.cap:TenantCap"])
    def test_named_by_entry_point_or_fqcn(self, python, named):
        options = {"max_running": 2, "limits": {"gold": 3}}
        config = {"scheduler": {"policy": named}, "plugin": {"tenant_cap": options}}
        assert python(RESOLVE, config)["policy"] == [
            "tenant_cap",
            "acme_scheduling.cap:TenantCap",
            "acme-scheduling",
            "1.0.0",
            {"tag": "tenant", **options},
        ]

    def test_naming_it_under_enable_reports_where_it_belongs(self, python):
        result = python(RESOLVE, {"plugins": {"enable": ["tenant_cap"]}})
        assert result["error"] == "ConfigError"
        assert "choose it with scheduler.policy" in result["message"]

    def test_a_misspelt_name_is_refused_with_a_suggestion(self, python):
        result = python(RESOLVE, {"scheduler": {"policy": "tenant_kap"}})
        assert result["error"] == "PluginNotFoundError"
        assert "(did you mean 'tenant_cap'?)" in result["message"]

    def test_wrong_options_are_refused_with_their_path(self, python):
        config = {
            "scheduler": {"policy": "tenant_cap"},
            "plugin": {"tenant_cap": {"limits": {"a": 0}}},
        }
        result = python(RESOLVE, config)
        assert result["error"] == "ConfigError"
        assert (
            "plugin.tenant_cap.limits.a: expected a whole number >= 1, got 0" in result["message"]
        )

    def test_its_own_tests_pass(self, acme_scheduling, tmp_path):
        shutil.copytree(ROOT / "examples" / "acme_scheduling" / "tests", tmp_path / "tests")
        pytest_run = (sys.executable, "-m", "pytest", "-q", "tests")
        assert "passed" in run(*pytest_run, path=acme_scheduling, cwd=tmp_path, examples=0.1)


class TestThroughTheEngine:
    @pytest.mark.parametrize("named", ["earliest_deadline", BY_CLASS])
    def test_it_changes_the_order_and_no_token(self, complete, named):
        plain, changed = complete(DEADLINES, "fcfs"), complete(DEADLINES, named)
        assert plain["order"] == ["a", "b", "c", "d"]
        assert changed["order"] == ["c", "d", "b", "a"]
        assert changed["tokens"] == plain["tokens"]

    def test_its_options_count(self, complete):
        assert complete(DEADLINES, "earliest_deadline", horizon=1.0)["order"] == list("acdb")

    @pytest.mark.parametrize("named", ["earliest_deadline", BY_CLASS])
    def test_it_takes_over_while_requests_run(self, complete, named):
        """After the first step, in which one of them began."""
        plain, changed = complete(DEADLINES, "fcfs"), complete(DEADLINES, "fcfs", swap_to=named)
        assert changed["order"] == ["a", "c", "d", "b"]
        assert changed["tokens"] == plain["tokens"]

    def test_a_cap_lets_others_past(self, complete):
        plain = complete(TENANTS, "fcfs", max_num_seqs=2)
        capped = complete(TENANTS, "tenant_cap", max_num_seqs=2, max_running=1)
        assert plain["order"] == ["big1", "big2", "big3", "small1", "small2", "small3"]
        assert capped["order"] == ["big1", "small1", "big2", "small2", "big3", "small3"]
        assert capped["tokens"] == plain["tokens"]
        assert (plain["most"], capped["most"]) == (2, 2)

    def test_a_cap_leaves_slots_empty(self, complete):
        alone = [job for job in TENANTS if job[0].startswith("big")]
        assert complete(alone, "tenant_cap", max_num_seqs=8, max_running=2)["most"] == 2
