"""`hardpoint plugins check`: its records of packages, broken and right, and of built-ins."""

import json
import re
import socket
import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
from support.broken.packages import (
    ACTIVE,
    CONSTRAINED,
    EARLY,
    EXITS,
    IDLE,
    LACKING,
    NAMED,
    RUN,
    SUPPLIED,
    UNDRAWN,
    UNSEEN,
    UNUSED,
    Package,
)
from support.fake_generator import run_command
from support.process.forked_python import forked_python
from support.strangers import Site, open_site

from hardpoint.errors import PluginConflictError, PluginNotFoundError
from hardpoint.host.registry.kinds import KINDS
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins import EngineConfig
from hardpoint.plugins.config import ConfigSources
from hardpoint.testing.checking.made_suite import subject_of, suite_of
from hardpoint.testing.checking.parent import check_plugin
from hardpoint.typed import convert

LIMITS = {"seconds": 300, "memory_bytes": 16 << 30, "file_bytes": 1 << 30, "num_files": 1024}


def _fork(command, **options):
    return forked_python().popen(command[1:], is_torn_down=False, **options)


@pytest.fixture
def site(request, tmp_path, monkeypatch):
    """A site, and forked children of checks unless a test is marked `fresh_process`.

    To import Hardpoint takes most of a short check.
    """
    if request.node.get_closest_marker("fresh_process") is None:
        module = SimpleNamespace(Popen=_fork, PIPE=subprocess.PIPE)
        monkeypatch.setattr("hardpoint.testing.checking.parent.subprocess", module)
    monkeypatch.setenv("HARDPOINT_EXAMPLES", "0.05")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # by which kernels of a GPU take minutes
    with open_site(tmp_path / "site", monkeypatch) as opened:
        yield opened


def check(name, limits=None, options=None, against=None):
    """Return the records of a check by `record`, and the records of checks by name."""
    all_limits = {**LIMITS, **(limits or {})}
    config, sources = EngineConfig(), ConfigSources()
    records = list(check_plugin(config, sources, name, all_limits, options or {}, against))
    checks = {r["check"]: r for r in records if r["record"] == "check"}
    return {**{r["record"]: r for r in records}, "check": checks}


def assert_judged(package: Package, site: Site) -> dict:
    """Assert that a package gets the records that it should."""
    package.install(site)
    records = check(package.name, package.limits)
    result = records["result"]
    assert result["exit_code"] == package.exit_code, result
    assert package.problem in result["problem"]
    outcomes = {name: records["check"][name]["outcome"] for name in package.outcomes}
    assert outcomes == package.outcomes
    for name, part in package.messages.items():
        record = records["check"][name]
        assert part in f"{record['reason']} {record['evidence']}"
    return records


@pytest.mark.parametrize(
    "package",
    [EARLY[0], *(pytest.param(p, marks=pytest.mark.nightly) for p in EARLY[1:])],
    ids=lambda package: package.name,
)
def test_refused_packages(package, site):
    records = assert_judged(package, site)
    assert not records["check"]
    assert "plugin" not in records


def test_exit_in_a_check(site):
    records = assert_judged(EXITS, site)
    assert records["check"]["test_contract"]["proved"] is True
    assert records["check"]["test_resources"]["proved"] is False
    assert records["check"]["test_speed"]["proved"] is None


@pytest.mark.nightly
@pytest.mark.parametrize("package", RUN, ids=lambda package: package.name)
def test_broken_packages(package, site):
    records = assert_judged(package, site)
    assert records["plugin"]["suite"] == "StatSinkSuite"


@pytest.mark.nightly
@pytest.mark.parametrize("package", [UNUSED, LACKING], ids=lambda package: package.name)
def test_what_cannot_be_proved(package, site):
    records = assert_judged(package, site)
    assert not any(record["outcome"] == "failed" for record in records["check"].values())


def test_a_step_part_that_does_nothing_is_not_proved(site):
    records = assert_judged(IDLE, site)
    assert records["check"]["test_effect"]["reason"] == ""


@pytest.mark.nightly
@pytest.mark.parametrize("package", [UNSEEN, NAMED], ids=lambda package: package.name)
def test_effects_of_step_parts(package, site):
    assert_judged(package, site)


@pytest.mark.nightly
def test_constrained_arguments_are_drawn_within_their_limits(site):
    records = assert_judged(CONSTRAINED, site)
    assert records["cost"]["reason"] == ""


def test_what_needs_arguments_that_are_not_drawn_is_not_proved(site):
    records = assert_judged(UNDRAWN, site)
    assert not any(record["outcome"] == "failed" for record in records["check"].values())


def test_options_that_the_suite_of_an_author_supplies(site):
    records = assert_judged(SUPPLIED, site)
    assert records["enabling"]["problem"] == ""
    assert "refused" not in records["cost"]["reason"]


@pytest.mark.nightly
def test_options_of_a_call_replace_those_of_a_suite(site):
    SUPPLIED.install(site)
    records = check(SUPPLIED.name, options={"limit": 0})
    assert records["result"]["exit_code"] == 2
    assert (
        "plugin.supplied.limit: expected a whole number >= 1, got 0" in records["result"]["problem"]
    )


@pytest.mark.fresh_process  # a fork has imported what a package would
def test_what_a_package_does(site):
    ACTIVE.install(site)
    site.install("acme_twin", ACTIVE.source, {"stat_sinks": {"active": "acme_twin:Sink"}})
    records = check("acme_active:Sink")
    assert records["result"]["exit_code"] == 0, records["result"]
    activity = records["activity"]
    assert activity["imported"] == ["numpy", "tqdm", "yaml"]
    assert "its temporary folder/acme_written" in activity["wrote"]
    assert activity["connected"] == ["127.0.0.1:9"]
    assert any(command.startswith(sys.executable) for command in activity["started"])
    enabling = records["enabling"]
    assert (enabling["problem"], enabling["order"]) == ("", ["active"])
    assert enabling["others_of_its_name"] == ["acme_twin:Sink (acme_twin 2.0)"]
    assert records["cost"]["us_per_step"] > 0 < records["cost"]["us_per_step_without"]
    assert records["check"]["test_statistics"]["evidence"].endswith(" cases")
    assert records["check"]["test_statistics"]["claim"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_samples_are_needed(name, site):
    """The second lacks a tokenizer with its special tokens, too."""
    parser = check(f"tool_parsers/{name}")
    assert parser["result"]["exit_code"] == 0
    outcomes = {record["outcome"] for record in parser["check"].values()}
    assert "not_proved" in outcomes
    reasons = {r["reason"] for r in parser["check"].values() if r["outcome"] == "not_proved"}
    assert any(reason.startswith("needs `samples`") for reason in reasons)
    assert all(reason.startswith("needs ") for reason in reasons)


@pytest.mark.nightly
def test_a_server_that_is_not_there(site):
    pytest.importorskip("redis")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{unused.getsockname()[1]}/0"
        records = check("kv_stores/redis", options={"url": url})
    assert records["result"]["exit_code"] == 0, records["result"]
    record = records["check"]["test_content"]
    assert record["outcome"] == "not_proved"
    assert re.match("this machine lacks a requirement: .*Connection refused", record["reason"])


_OPTIONS = {
    "kv_stores/memory": {"size_bytes": 2 << 20},
    "kv_stores/disk": {"size_bytes": 2 << 20},
}


_NEEDS = {
    "executors/ray": "ray",
    "kv_stores/redis": "redis",
    "attention_backends/triton": "a GPU",
    "ops/triton": "a GPU",
}
"""Built-ins that may lack what they need, by what that is: they are refused by that name."""


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    sorted(
        f"{kind}/{point.name}"
        for kind in KINDS
        for point in entry_points(group=f"hardpoint.{kind}")
        if point.value.startswith("hardpoint.")
    ),
)
def test_builtins(name, site):
    records = check(name, options=_OPTIONS.get(name))
    result = records["result"]
    is_unset = result["exit_code"] == 2 and "missing, and it has no default" in result["problem"]
    is_lacking = name in _NEEDS and result["exit_code"] == 2
    assert is_unset or is_lacking or result["exit_code"] == 0, records


def test_suites_that_builtins_name_exist():
    named = {}
    for kind in KINDS.values():
        for point in entry_points(group=kind.group):
            if point.value.startswith("hardpoint."):
                target = point.load()
                if getattr(target, "conformance_suite", None) is not None:
                    named[point.name] = suite_of(kind, target).__name__
    assert named == {
        "round_robin": "RoundRobinSuite",
        "suffix": "SuffixSuite",
        "two_choices": "TwoChoicesSuite",
    }


def test_another_contract():
    records = check("min_p", against=7)
    assert records["result"]["exit_code"] == 3
    assert records["result"]["problem"].endswith("states contract 1 of logits_processors, not 7")


@pytest.mark.nightly
def test_cost_of_a_logits_processor(site):
    records = check("min_p")
    assert records["result"]["exit_code"] == 0, records
    assert records["cost"]["metered"]["rows"] > 0
    assert " us allowed" in records["check"]["test_speed"]["evidence"]


def test_names(site):
    for package in (EARLY[0], ACTIVE):
        package.install(site)
    with pytest.raises(PluginNotFoundError, match="no installed plugin or package is called 'mni'"):
        check("mni")
    site.install("acme_min_p", ACTIVE.source, {"stat_sinks": {"min_p": "acme_min_p:Sink"}})
    with pytest.raises(PluginConflictError, match=r"'min_p' could be any of logits_processors/"):
        check("min_p")


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_every_kind_has_a_suite_with_a_subject(kind):
    import hardpoint.testing

    suite = getattr(hardpoint.testing, kind.suite)
    assert subject_of(suite) not in ("kind", "options", "samples", "config")


def test_command(capsys):
    seen = []

    def answer(*args):
        seen.append(args)
        yield {"record": "result", "component": "x/a", "exit_code": 1, "problem": "p"}
        yield {"record": "result", "component": "x/b", "exit_code": 3, "problem": "q"}

    arguments = ["check", "a", "--json", "--option", "n=3", "--against", "2", "--seconds", "9"]
    assert run_command("plugins", arguments, check_plugin=answer) == 3
    assert [json.loads(line)["problem"] for line in capsys.readouterr().out.splitlines()] == [
        "p",
        "q",
    ]
    ((_, _, name, limits, options, against),) = seen
    assert (name, options, against, limits["seconds"]) == ("a", {"n": 3}, 2, 9.0)


def _records_of_two():
    for component, outcomes in (("x/a", ("proved", "not_proved")), ("x/b", ("proved",))):
        for number, outcome in enumerate(outcomes):
            yield {
                **{"record": "check", "component": component, "check": f"test_{number}"},
                **{"outcome": outcome, "reason": "", "evidence": "", "seconds": 0},
            }
        counts = dict.fromkeys(("failed", "expected_failure", "not_applicable"), 0)
        counts |= {"proved": 1, "not_proved": len(outcomes) - 1}
        yield {
            **{"record": "result", "component": component, "exit_code": 0, "problem": ""},
            **{"seconds": 0, **counts},
        }


def test_what_is_not_proved_was_not_tested(capsys):
    assert run_command("plugins", ["check", "a"], check_plugin=lambda *_: _records_of_two()) == 0
    out = capsys.readouterr().out
    assert out.count("checks that are not proved were not run") == 1  # x/b has nothing that is not
    assert 'conformance_suite = "package.module:Class"' in out
    assert "--require-proof" not in out


def test_proof_can_be_required(capsys):
    arguments = ["check", "a", "--require-proof"]
    assert run_command("plugins", arguments, check_plugin=lambda *_: _records_of_two()) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "--require-proof: not proved: x/a: test_1"

    arguments = [*arguments, "--json"]
    assert run_command("plugins", arguments, check_plugin=lambda *_: _records_of_two()) == 1
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    codes = {r["component"]: r["exit_code"] for r in records if r["record"] == "result"}
    assert codes == {"x/a": 1, "x/b": 0}
    assert records[-1] == {"record": "unproved", "checks": {"x/a": ["test_1"]}}


def test_proof_of_all_is_enough():
    def proved(*_):
        return (record for record in _records_of_two() if record["component"] == "x/b")

    assert run_command("plugins", ["check", "a", "--require-proof"], check_plugin=proved) == 0


@pytest.mark.nightly
def test_an_fqcn_is_called_as_the_engine_calls_it_and_replayed_as_given(site):
    source = """
from hardpoint.plugins import SchedulingPolicy

class SoloPolicy(SchedulingPolicy):
    contract = 1

    def key(self, request):
        return request.arrival_time

    def victim(self, running, load):
        return None
"""
    (site.folder / "solo.py").write_text(source)
    records = check("solo:SoloPolicy")
    assert records["plugin"]["component"] == "scheduling_policies/solo_policy"
    selected = resolve_plugins(
        convert({"scheduler": {"policy": "solo:SoloPolicy"}}, EngineConfig, path=""),
        ConfigSources(),
    )
    assert selected.one("scheduling_policies").name == "solo_policy"
    failed = records["check"]["test_victim"]
    assert failed["outcome"] == "failed"
    (replay,) = re.findall(r"replay: HARDPOINT_SEED=\d+ .*", failed["evidence"])
    assert replay.endswith(" hardpoint plugins check solo:SoloPolicy")
