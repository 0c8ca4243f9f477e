from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.processes import ROOT, run

CODE = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from support.builtins import disk_kills
disk_kills.{call}
"""


def run_kills(call: str) -> None:
    """Run a function of support/builtins/disk_kills.py in a process with one thread."""
    code = CODE.format(tests=str(ROOT / "tests"), call=call)
    run(sys.executable, "-c", code, cwd=ROOT)


@pytest.mark.parametrize("step", [83, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_process_may_be_killed_in_any_line(tmp_path: Path, step: int) -> None:
    run_kills(f"kill_at_lines(Path({str(tmp_path)!r}), {step})")


@pytest.mark.parametrize("seconds", [0.5, pytest.param(30, marks=pytest.mark.nightly)])
def test_processes_that_share_a_path_are_killed(tmp_path: Path, seconds: float) -> None:
    run_kills(f"kill_crowd(Path({str(tmp_path / 'kv')!r}), {seconds})")
