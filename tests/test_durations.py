"""The closing lines of a run of all tests, from the records of its parts."""

from __future__ import annotations

import importlib
import json
import subprocess

import pytest
from support.durations import Durations
from support.processes import ROOT

PROGRAM = ROOT / "scripts" / "durations"


def closing_lines(*files):
    arguments = [PROGRAM, *files, "--summary", "--checks", "12", "--log", "the log"]
    done = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()


def record_of(path, outcomes, wall=60.0):
    """Record tests of two seconds each, in a run of `wall` seconds."""
    durations = Durations(path)
    for test, outcome in outcomes.items():
        durations.pytest_runtest_logreport(
            pytest.TestReport(
                f"tests/a/test_a.py::{test}",
                ("tests/a/test_a.py", 1, test),
                {},
                outcome,
                None,
                "call",
                duration=2.0,
            )
        )
    durations.pytest_sessionfinish()
    record = json.loads(path.read_text()) | {"wall": wall}
    path.write_text(json.dumps(record))
    return path


def test_of_a_test_that_ran_again_the_last_outcome_counts(tmp_path):
    main = record_of(tmp_path / "main.json", {"x": "passed", "y": "skipped"})
    timing = record_of(tmp_path / "timing.json", {"slow": "failed", "fast": "failed"})
    again = record_of(tmp_path / "again.json", {"slow": "passed", "fast": "failed"})
    assert closing_lines(main, timing, again) == [
        "tests run: 3, failed: 1",
        "tests skipped: 1",
        "checks: 12 s",
        "tests: 180 s, 12 s in all processes",
        "slowest folder: tests/a, 12 s",
        "log: the log",
    ]


@pytest.mark.parametrize(("wall", "warnings"), [(9999.0, 1), (60.0, 0)])
def test_a_run_of_everything_above_its_limit_warns(monkeypatch, capsys, tmp_path, wall, warnings):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    module = importlib.import_module("durations")
    record = record_of(tmp_path / "durations.json", {"x": "passed"}, wall)
    monkeypatch.setattr(module, "DURATIONS", record)
    monkeypatch.chdir(tmp_path)
    for name in ("durations.json", "other.json"):
        (tmp_path / name).write_text(record.read_text())
        monkeypatch.setattr("sys.argv", ["durations", name, "--summary"])
        module.main()
    assert capsys.readouterr().out.count("warning: checks and tests took") == warnings
