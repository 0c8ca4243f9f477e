"""`hardpoint bench startup`: its table and errors; options of commands that vary settings."""

from __future__ import annotations

import re

import pytest

from hardpoint.builtin_plugins.commands.loads.options import combinations, split_values
from hardpoint.cli import main
from hardpoint.plugins import ConfigError


def run(capsys, *arguments):
    """Return exit code, output and errors of a command line."""
    code = main(["bench", *arguments])
    found = capsys.readouterr()
    return code, found.out, found.err


@pytest.mark.parametrize("removed", ["serve", "sweep"])
def test_commands_without_a_load_generator(capsys, removed):
    code, _, err = run(capsys, removed)
    assert code == 2
    assert f"error: unknown command '{removed}'; the commands are startup\n" in err


class TestStartup:
    def test_the_table(self, capsys, monkeypatch):
        stages = ["interpreter", "engine", "to the first token"]
        values = {"median": 2.0, "low": 1.0, "high": 3.5}
        found = {
            "runs": 3,
            "seconds": dict.fromkeys(stages, values),
            "bytes": {"caller": {name: value * (1 << 20) for name, value in values.items()}},
        }
        records = [
            {"record": "progress", "run": 1, "of": 3, "caches": "cold"},
            {"record": "run", "caches": "cold", "seconds": {}, "bytes": {}},
            {
                "record": "result",
                "model": "x",
                "caches": {"cold": found, "warm": found},
                "interrupted": False,
            },
        ]
        monkeypatch.setattr("hardpoint.bench.measure_startup", lambda plan: iter(records))
        code, out, _ = run(capsys, "startup", "scripted")
        assert code == 0
        lines = [re.split(r"  +", line) for line in out.splitlines()]
        assert lines[0] == ["x: 3 cold, 3 warm starts; median, least and most"]
        assert lines[1] == ["STAGE", *["COLD", "LEAST", "MOST"], *["WARM", "LEAST", "MOST"]]
        assert lines[2] == ["interpreter, s", *["2.00", "1.00", "3.50"] * 2]
        assert lines[-1] == ["memory of the caller, MiB", *["2", "1", "4"] * 2]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["scripted", "--runs", "0"], "runs: expected a whole number"),
            (["scripted", "--caches", "hot"], "--caches: expected one of cold, warm, both"),
            (["scripted", "--set", "scheduler.policy=no"], "scheduler.policy: no scheduling_poli"),
        ],
        ids=range(3),
    )
    def test_what_is_wrong_is_named(self, capsys, arguments, message):
        code, out, err = run(capsys, "startup", *arguments)
        assert (code, out) == (2, "")
        assert re.search(f"error: {message}", err), err


def test_values_are_divided_by_commas_that_are_not_inside():
    assert split_values("fair,fcfs") == ["fair", "fcfs"]
    assert split_values('["a", "b"],[]') == ['["a", "b"]', "[]"]
    assert split_values('"a,b",{x = [1, 2], y = 3}') == ['"a,b"', "{x = [1, 2], y = 3}"]
    assert split_values("1") == ["1"]


@pytest.mark.nightly
def test_names_of_variants_have_what_differs():
    found = combinations({"a.b": ["1", "2"], "c": ["x"], "p": ["q", "r"]}, short=["p"])
    assert list(found) == ["a.b=1, q", "a.b=1, r", "a.b=2, q", "a.b=2, r"]
    assert found["a.b=1, q"] == {"a.b": "1", "c": "x", "p": "q"}
    assert combinations({}) == {"as configured": {}}
    with pytest.raises(ConfigError, match=r"^variants: 'c=1' is given twice"):
        combinations({"c": ["1", "1"]})
