"""`hardpoint config check`, `config init` and `info`."""

import json
import re
import tomllib

import msgspec
import pytest

from hardpoint.cli import main
from hardpoint.configuration.checking import unknown_variables
from hardpoint.configuration.loading import default_config_type


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


WRONG = """
modle = "x"
[scheduler]
policy = "fairr"
max_num_seqs = 0
[kv_cache]
block_sise = 3
[plugins]
enable = ["nowhere", "json", "neither"]
[plugin.fcfs]
zzz = 1
"""


def test_all_errors_at_once(folder, monkeypatch, capsys):
    (folder / "hardpoint.toml").write_text(WRONG)
    monkeypatch.setenv("HARDPOINT__SERVER__PORT", "-1")
    settings = ["--set", "grammar.use", "--set", "load.us=x"]
    assert main(["config", "check", *settings]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    paths = [re.sub("hardpoint: error: ([^: ]+):.*", r"\1", line) for line in err.splitlines()]
    assert paths == [
        "--set",
        "modle",
        "scheduler.max_num_seqs",
        "kv_cache.block_sise",
        "server.port",
        "load.us",
        "plugins.enable[0]",
        "plugins.enable[2]",
        "scheduler.policy",
        "plugin.fcfs.zzz",
    ]
    assert err.count("(from file hardpoint.toml)") == 7
    assert "(from environment HARDPOINT__SERVER__PORT)" in err
    assert "load.us: unknown field (did you mean 'use'?)" in err


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        ('["nonexistent_x", 5]', [1, 0]),
        ('["nowhere", "json", 5, "neither", {name = "x"}, 6]', [2, 4, 5, 0, 3]),
    ],
)
def test_each_wrong_item_of_a_list_is_named(folder, capsys, text, indices):
    (folder / "hardpoint.toml").write_text(f"plugins.enable = {text}\n")
    assert main(["config", "check"]) == 2
    found = re.findall(r"error: plugins\.enable\[(\d+)\]", capsys.readouterr().err)
    assert [int(index) for index in found] == indices


def test_a_value_that_is_set_twice(folder, monkeypatch, capsys):
    monkeypatch.setenv("HARDPOINT__SCHEDULER__POLICY", "fair")
    monkeypatch.setenv("HARDPOINT__scheduler__POLICY", "fcfs")
    assert main(["config", "check"]) == 2
    assert "scheduler.policy: set twice, by HARDPOINT__SCHEDULER__P" in capsys.readouterr().err


def test_a_file_that_is_no_toml_and_the_rest(folder, capsys):
    (folder / "hardpoint.toml").write_text("[scheduler\n")
    assert main(["config", "check", "--set", "seed=x"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "is not valid TOML" in first
    assert "seed: expected" in second


def test_a_valid_configuration(folder, capsys):
    (folder / "hardpoint.toml").write_text('[scheduler]\npolicy = "fair"\n')
    assert main(["config", "check"]) == 0
    assert capsys.readouterr() == ("The configuration is valid.\n", "")
    assert main(["config", "check", "-q"]) == 0
    assert capsys.readouterr() == ("", "")


def test_the_first_file_is_valid_and_complete(folder, capsys):
    assert main(["config", "init"]) == 0
    text = (folder / "hardpoint.toml").read_text()
    assert main(["config", "check"]) == 0
    assert main(["config", "init"]) == 2
    assert "FILE: hardpoint.toml exists, and is not replaced" in capsys.readouterr().err
    assert (folder / "hardpoint.toml").read_text() == text
    settings = re.sub(r"(?m)^# (\w+ = )(?!  # no default)", r"\1", text)
    given = tomllib.loads(settings)

    def without_none(value):
        if not isinstance(value, dict):
            return value
        return {key: without_none(item) for key, item in value.items() if item is not None}

    defaults = json.loads(msgspec.json.encode(default_config_type()()))
    assert given == without_none(defaults)


def test_the_first_file_on_standard_output(folder, capsys):
    assert main(["config", "init", "-"]) == 0
    assert capsys.readouterr().out.startswith("# The configuration of Hardpoint")
    assert list(folder.iterdir()) == []


def test_facts_for_a_bug_report(monkeypatch, capsys):
    monkeypatch.setenv("HARDPOINT_API_KEY", "secret-1")
    monkeypatch.setenv("HF_ENDPOINT", "http://me:secret-2@hub:80")
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "HARDPOINT_API_KEY=***" in out
    assert "secret" not in out
    assert main(["info", "--json", "--set", "modle=x"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["plugins"][0].startswith("error: modle: unknown field")
    for name in ("hardpoint", "python", "system", "processor", "kernels", "torch", "packages"):
        assert facts[name]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("HARDPOINT_KERNEL", "did you mean HARDPOINT_KERNELS?"),
        ("HARDPOINT_SCHEDULER__POLICY", "did you mean HARDPOINT__SCHEDULER__POLICY?"),
        ("HARDPOINT_MODEL", "did you mean HARDPOINT__MODEL?"),
        ("HARDPOINT_QQQQQQQQQQQQQQQQQQ", "settings begin with HARDPOINT__"),
    ],
)
def test_variables_that_name_nothing(name, hint):
    (warning,) = unknown_variables({name: "1", "HARDPOINT_API_KEY": "k", "HARDPOINT__MODEL": "m"})
    assert warning == f"environment: no variable {name} is read; {hint}"


def test_the_warning_of_a_command(monkeypatch, capsys):
    monkeypatch.setenv("HARDPOINT_KERNEL", "plain")
    assert main(["config", "show"]) == 0
    assert "no variable HARDPOINT_KERNEL is read" in capsys.readouterr().err
    assert main(["config", "show", "-q"]) == 0
    assert capsys.readouterr().err == ""
