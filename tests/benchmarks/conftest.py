"""Makes the benchmarks' modules importable."""

from __future__ import annotations

import sys

from support.processes import ROOT

sys.path.insert(1, str(ROOT / "benchmarks"))
