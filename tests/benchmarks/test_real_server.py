"""The load scripts on a real server; the scripted model makes its answers exact."""

from __future__ import annotations

import json
import sys

import pytest
from support.processes import ROOT, run


@pytest.mark.nightly
def test_a_soak_of_a_real_server_passes(tmp_path):
    script = str(ROOT / "benchmarks" / "soak.py")
    short = ("--seconds", "10", "--streams", "32", "--json", "found.json")
    output = run(sys.executable, script, *short, cwd=tmp_path)
    print(f"\n[measured] {output}")
    assert output.rstrip().endswith("soak: PASSED: nothing is left, no answer is wrong")
    result = json.loads((tmp_path / "found.json").read_text())["without"]
    assert result["different"] == 0
    assert result["compared"] > 100
    assert len(result["left"]) == 5
    assert sum(result["failed"].values()) > 0
    assert {"requests running", "requests waiting", "KV cache usage"} <= result["metrics"].keys()
