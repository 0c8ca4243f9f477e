"""Writes tests/compatibility/fault_messages.toml: PYTHONPATH=tests python -m support.faults.record

With names of kinds, it prints theirs instead.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from support.faults.driving import (
    as_toml,
    cases,
    outcome,
    use_wheel,
    write_models,
)
from support.faults.kinds import SETUPS
from support.faults.server import KIND, outcomes
from support.installed_metadata import read_metadata_once
from support.processes import ROOT

FILE = ROOT / "tests" / "compatibility" / "fault_messages.toml"
EXECUTORS = next(FILE.parent.glob("contract_1/acme_executors-*.whl"))
HEAD = """\
# What users see of simple faults of plugins: kind, method, misbehaviour -> consequence -> message.
# It is written by PYTHONPATH=tests python -m support.faults.record

"""


def main() -> None:
    """Write the file, or print."""
    kinds = sys.argv[1:]
    use_wheel(EXECUTORS)
    read_metadata_once()
    table = {}
    with tempfile.TemporaryDirectory() as name:
        folder = write_models(Path(name))
        for kind in dict.fromkeys(setup.kind for setup in SETUPS):
            if kinds and kind not in kinds:
                continue
            began, count = time.process_time(), len(table)
            for case in cases(kind):
                table[case.key] = outcome(case, folder)
            seconds = time.process_time() - began
            print(f"# {kind}: {len(table) - count} cases, {seconds:.1f} s", file=sys.stderr)
    if not kinds or KIND in kinds:
        table |= dict(outcomes())
    if kinds:
        print(as_toml(table))
    else:
        FILE.write_text(HEAD + as_toml(table))


if __name__ == "__main__":
    main()
