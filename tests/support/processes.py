"""Running programs in tests."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*command: str, path: Path | None = None, cwd: Path) -> str:
    """Run a command; return its standard output, or fail with all that it said."""
    environment = dict(os.environ)
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{command[:4]}\n{done.stdout}\n{done.stderr}"
    return done.stdout
