"""`hardpoint plugins`: what is on, why, and all about one."""

import json
import re
import sys
from pathlib import Path

import pytest
from support.strangers import open_site

from hardpoint.cli import main
from hardpoint.host.registry.kinds import KINDS

pytestmark = pytest.mark.usefixtures("folder")
LEAST_COST = "hardpoint.builtin_plugins.balancers.least_cost"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with open_site(tmp_path / "site", monkeypatch) as site:
        site.install_stranger()
        yield site


def listed(capsys, *settings):
    arguments = [part for setting in settings for part in ("--set", setting)]
    assert main(["plugins", "list", "--json", *arguments]) == 0
    components = json.loads(capsys.readouterr().out)
    return {(each["kind"], each["name"], each["class"]): each for each in components}


def find(components, kind, name, **fields):
    (found,) = [
        each
        for key, each in components.items()
        if key[:2] == (kind, name) and fields.items() <= each.items()
    ]
    return found


def show(capsys, name, *settings):
    arguments = [part for setting in settings for part in ("--set", setting)]
    assert main(["plugins", "show", name, *arguments]) == 0
    text = capsys.readouterr().out
    assert main(["plugins", "show", name, "--json", *arguments]) == 0
    return text, json.loads(capsys.readouterr().out)


def test_every_kind_is_listed_in_order_and_defaults_are_on(capsys):
    components = listed(capsys)
    with_builtins = [kind for kind in KINDS if kind not in ("activation_taps", "io_processors")]
    assert list(dict.fromkeys(kind for kind, _, _ in components)) == with_builtins
    assert find(components, "scheduling_policies", "fcfs")["why"] == "default"
    priority = find(components, "scheduling_policies", "priority")
    assert (priority["on"], priority["why"]) == (False, "not chosen by scheduler.policy (default)")
    assert priority["distribution"] == "hardpoint"


def test_logits_processors_are_in_the_order_in_which_they_run(capsys):
    chain = [each for (kind, _, _), each in listed(capsys).items() if kind == "logits_processors"]
    assert [each["place"] for each in chain] == list(range(1, len(chain) + 1))
    names = [each["name"] for each in chain]
    assert names.index("temperature") < names.index("top_k") < names.index("top_p")
    assert names.index("top_p") < names.index("min_p")
    assert chain[names.index("min_p")]["phase"] == "TRUNCATE"


def test_a_choice_names_its_origin(capsys, monkeypatch):
    monkeypatch.setenv("HARDPOINT__SCHEDULER__POLICY", "priority")
    components = listed(capsys)
    by = "environment HARDPOINT__SCHEDULER__POLICY"
    assert find(components, "scheduling_policies", "priority")["why"] == f"scheduler.policy ({by})"
    fcfs = find(components, "scheduling_policies", "fcfs")
    assert (fcfs["on"], fcfs["why"]) == (False, f"not chosen by scheduler.policy ({by})")


def test_a_default_without_work_is_listed_and_not_imported(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, LEAST_COST, raising=False)
    components = listed(capsys)
    default = find(components, "balancers", "least_cost")
    assert (default["on"], default["why"]) == (True, "default")
    assert LEAST_COST not in sys.modules
    other = find(components, "balancers", "two_choices")
    assert (other["on"], other["why"]) == (False, "not chosen by parallel.balancer (default)")
    several = listed(capsys, "parallel.data=2")
    assert find(several, "balancers", "least_cost")["on"]
    assert LEAST_COST in sys.modules


def test_what_is_not_enabled_is_listed_and_not_imported(site, capsys):
    components = listed(capsys)
    dry = find(components, "logits_processors", "dry")
    assert (dry["on"], dry["why"], dry["place"]) == (False, "not enabled", None)
    assert (dry["distribution"], dry["version"]) == ("stranger", "2.0")
    assert find(components, "novelties", "new")["why"] == "this Hardpoint has no novelties"
    assert "stranger" not in sys.modules


@pytest.mark.parametrize(
    ("enable", "name"), [('"dry"', "dry"), ('{ use = "stranger:Dry", name = "wet" }', "wet")]
)
def test_what_is_enabled_is_listed_once_under_its_name(site, capsys, enable, name):
    components = listed(capsys, f"plugins.enable=[{enable}]")
    mine = [each for (_, _, value), each in components.items() if value == "stranger:Dry"]
    (dry,) = mine
    assert (dry["name"], dry["on"], dry["phase"]) == (name, True, "PENALTY")
    assert dry["why"] == "plugins.enable[0] (argument --set plugins.enable)"


def test_replaced_and_disabled_defaults_name_the_setting(site, capsys):
    components = listed(capsys, "plugins.replace.min_p=stranger:Dry", 'plugins.disable=["top_k"]')
    new = find(components, "logits_processors", "min_p", on=True)
    assert new["class"] == "stranger:Dry"
    assert new["why"] == "plugins.replace.min_p (argument --set plugins.replace.min_p)"
    old = find(components, "logits_processors", "min_p", on=False)
    assert old["why"].startswith("replaced by stranger:Dry: plugins.replace.min_p (argument")
    top_k = find(components, "logits_processors", "top_k")
    assert top_k["why"] == "plugins.disable[0] (argument --set plugins.disable)"


def test_the_plain_table_is_aligned(capsys):
    assert main(["plugins", "list"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["KIND", "NAME", "FROM", "STATE", "ORDER", "WHY"]
    at = header.index("STATE")
    assert {line[at : at + 4].strip() for line in lines} == {"on", "off"}
    assert all(line[at - 1] == " " for line in lines)


def test_the_table_of_a_terminal_has_styles_and_the_same_text(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    assert main(["plugins", "list"]) == 0
    out = capsys.readouterr().out
    assert "\x1b[2m" in out  # what is off is dim
    lines = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines()]
    assert lines[0] == ["KIND", "NAME", "FROM", "STATE", "ORDER", "WHY"]
    assert ["scheduling_policies", "fcfs", "hardpoint", "0.1.0", "on", "default"] in lines


def test_a_class_of_no_distribution_is_listed_with_its_module(capsys):
    assert main(["plugins", "list", "--set", 'plugins.enable=["support.plugins.slow:Slow"]']) == 0
    (line,) = [each for each in capsys.readouterr().out.splitlines() if " slow " in each]
    assert "  module support.plugins.slow  on" in line


def test_show_a_built_in(capsys):
    text, data = show(capsys, "min_p")
    assert text.startswith("logits_processors/min_p\n  ")
    assert "interface  LogitsProcessor, contract 1" in text
    assert "from       hardpoint 0.1.0" in text
    assert "state      on: default" in text
    assert "phase      TRUNCATE" in text
    assert 'arguments of a request, under plugin_args["min_p"]' in text
    assert data["arguments_schema"]["$defs"]
    assert data["interface"] == "LogitsProcessor"


def test_show_describes_the_input_of_an_io_processor(capsys):
    enabled = 'plugins.enable=["support.plugins.io_processors:Nearest"]'
    text, data = show(capsys, "nearest", enabled)
    assert text.startswith("io_processors/nearest\n  Names rows of numbers")
    assert "input of a call, `data` over HTTP\n  rows     " in text
    assert "numbers from -1 to 1." in text
    assert "rows" in data["input_schema"]["$defs"]["Measurements"]["properties"]


def test_show_gives_options_with_their_values_and_origins(site, capsys):
    enabled = 'plugins.enable=["dry"]'
    text, data = show(capsys, "logits_processors/dry", enabled, "plugin.dry.weight=2.5")
    assert "Punish repetition." in text
    assert "More about it." not in text
    assert "  weight  a number; 2.5 from argument --set plugin.dry.weight" in text
    assert "          how much." in text
    assert "  base  a whole number; required" in text
    assert data["options"] == {"weight": 2.5}
    text, _ = show(capsys, "dry", enabled)
    assert "  weight  a number; default 1.0" in text


def test_show_leaves_out_the_userinfo_of_urls(capsys):
    url = "plugin.redis.url=redis://u:password@h/0"
    text, data = show(capsys, "redis", 'kv_connector.stores=["redis"]', url)
    assert data["options"]["url"] == "redis://***@h/0"
    assert '"redis://***@h/0" from argument --set plugin.redis.url' in text


def test_show_imports_one_that_is_off(site, capsys):
    text, data = show(capsys, "dry")
    assert "state      off: not enabled" in text
    assert (data["on"], data["options"], data["phase"]) == (False, {}, "PENALTY")


def test_show_hooks(site, capsys):
    text, data = show(capsys, "greeter")
    assert "hooks      cli_commands, engine_closing" in text
    assert data["options_schema"] is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("minp", "no installed plugin is called 'minp' (did you mean 'min_p'?)"),
        ("default", "'default' could be any of samplers/default, schedulers/default"),
        ("new", "novelties/new (stranger 2.0): this Hardpoint has no novelties; kinds here: "),
    ],
)
def test_show_explains_what_it_cannot_show(site, capsys, name, message):
    assert main(["plugins", "show", name]) == 2
    assert message in capsys.readouterr().err


def test_show_names_a_plugin_that_does_not_load(site, capsys):
    site.install("broken", "import nowhere", {"samplers": {"bad": "broken:Bad"}})
    assert main(["plugins", "show", "bad"]) == 2
    err = capsys.readouterr().err
    assert "plugin 'bad' (broken 2.0, broken:Bad): its import failed: ModuleNotFoundError" in err


TWICE = """
from hardpoint.plugins import LogitsProcessor, Options, Phase

class Dry(LogitsProcessor):
    contract = 1
    phase = Phase.MASK
    before = ("min_p",)

    def apply(self, logits, rows):
        return logits

class Needy(LogitsProcessor):
    contract = 1
    phase = Phase.TRUNCATE

    class Options(Options):
        weight: float

    def apply(self, logits, rows):
        return logits
"""


def test_show_names_everyone_of_that_name(site, capsys):
    points = {"logits_processors": {"dry": "second:Dry", "needy": "second:Needy"}}
    site.install("second", TWICE, points)
    assert main(["plugins", "show", "dry"]) == 2
    assert (
        "'dry' is the name of several logits_processors; name one by its FQCN: second:Dry (second "
        "2.0) or stranger:Dry (stranger 2.0)"
    ) in capsys.readouterr().err
    text, data = show(capsys, "stranger:Dry")
    assert "also       second:Dry from second 2.0 has this name, and is off" in text
    assert [other["class"] for other in data["others"]] == ["second:Dry"]
    text, _ = show(capsys, "dry", 'plugins.enable=["second:Needy", "stranger:Dry"]',
                   "plugin.needy.weight=1.0")  # fmt: skip
    assert "class      stranger:Dry" in text


def test_show_checks_what_loading_checks(site, capsys):
    text, data = show(capsys, "dry")
    assert "checks     it passes all that loading checks" in text
    assert data["problem"] == ""
    site.install("second", TWICE, {"logits_processors": {"wet": "second:Dry", "n": "second:Needy"}})
    text, data = show(capsys, "wet")
    assert "checks     logits_processors: 'wet' (phase MASK) wants to run before 'min_p'" in text
    assert "of one phase only" in data["problem"]
    text, _ = show(capsys, "n")
    assert "checks     plugin.n" in text
    assert "weight" in text.split("checks")[1].splitlines()[0]
    for name in ("fcfs", "greeter"):
        text, _ = show(capsys, name)
        assert "checks     it passes all that loading checks" in text


def test_a_narrow_terminal_shows_blocks(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    assert main(["plugins", "list"]) == 0
    first = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert first[:2] == ["kind: logits_processors", "name: allowed_token_ids"]
    assert not any("\N{HORIZONTAL ELLIPSIS}" in line or "\x1b" in line for line in first)
