"""Running programs in tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.process.forked_python import forked_python

ROOT = Path(__file__).parents[2]

_FORKED = ("-c", "-m hardpoint", "-m pytest", "example.py")
_SCRIPTS = str(ROOT / "benchmarks")
"""Programs that may run in a fork of an interpreter, by name or folder; others get one each."""


def run(*command: str, path: Path | None = None, cwd: Path, examples: float = 1.0) -> str:
    """Run a command; return its standard output, or fail with all its output.

    Args:
        path: PYTHONPATH; None leaves it.
        examples: scales what conformance suites try, but with --all.
    """
    environment = dict(os.environ)
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    from support.searching import searches_long  # hypothesis needs a working directory

    if not searches_long():
        environment["HARDPOINT_EXAMPLES"] = str(examples)
    program = " ".join(command[1:3] if command[1] == "-m" else command[1:2])
    is_ours = program in _FORKED or program.startswith(_SCRIPTS)
    if command[0] == sys.executable and is_ours:
        done = forked_python().run(list(command[1:]), cwd, environment)
    else:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, f"{command[:4]}\n{done.stdout}\n{done.stderr}"
    return done.stdout
