"""Count how often the tests reach private attributes of other objects, against a falling budget.

The budget is `tool.hardpoint.private-access-in-tests` of pyproject.toml. Exits with 1 if there are
more; where there are fewer, it says to what the budget can be lowered.
"""

from __future__ import annotations

import collections
import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Compare the count of ruff's rule SLF001 with the budget; return the exit code."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    budget = project["tool"]["hardpoint"]["private-access-in-tests"]
    command = ["ruff", "check", "--select", "SLF001", "--exit-zero", "--output-format", "json"]
    result = subprocess.run([*command, "tests"], cwd=ROOT, check=True, capture_output=True)
    files = collections.Counter(each["filename"] for each in json.loads(result.stdout))
    count = files.total()
    if count < budget:
        print(f"{count} private accesses in tests; lower the budget of {budget} to that")
    if count <= budget:
        return 0
    print(f"{count} private accesses in tests, the budget is {budget}. The files with most:")
    for name, number in files.most_common(10):
        print(f"  {number:3d} {Path(name).relative_to(ROOT)}")
    print("Use a public name, or a function of tests/support/internals.py.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
