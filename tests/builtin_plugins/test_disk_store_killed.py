from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.processes import ROOT, run


def run_kills(*arguments: object) -> None:
    """Run support/builtins/disk_kills.py in a small process of its own, since it forks often."""
    command = [sys.executable, "-m", "support.builtins.disk_kills", *map(str, arguments)]
    run(*command, cwd=ROOT / "tests")


@pytest.mark.parametrize("step", [127, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_process_may_be_killed_in_any_line(tmp_path: Path, step: int) -> None:
    run_kills("lines", tmp_path, step)


@pytest.mark.parametrize("seconds", [0.2, pytest.param(30, marks=pytest.mark.nightly)])
def test_processes_that_share_a_path_are_killed(tmp_path: Path, seconds: float) -> None:
    run_kills("crowd", tmp_path / "kv", seconds)
