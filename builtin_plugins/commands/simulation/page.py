"""The results of simulations as one page of HTML, which needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hardpoint.builtin_plugins.commands.loads.document import (
    aside,
    document,
    key,
    remark,
    table,
    time_plots,
)

from .summary import remarks, tables

_EXPLANATION = (
    "TTFT: time to the first token; TPOT: mean time per further token; e2e: time to the last "
    "token. Schedulers, policies, caches and balancers are the real ones; the times of steps were "
    "measured."
)


def page(results: Mapping[str, Any], version: str) -> str:
    """Return the page.

    Args:
        results: output of `hardpoint simulate --json`.
        version: version of Hardpoint.
    """
    variants = results["variants"]
    reports = {name: results["report"] for name, results in variants.items()}
    shown = tables(reports, results["comparison"])
    parts = [
        aside(_about(results)),
        *map(remark, remarks(reports)),
        key(list(reports)),
        time_plots({name: results["curves"] for name, results in variants.items()}),
        *(table(title or "Variants", headers, rows) for title, headers, rows in shown),
        aside(f"{_EXPLANATION} Hardpoint {version}."),
    ]
    return document("Simulated requests", parts)


def _about(results: Mapping[str, Any]) -> str:
    load = results["load"]
    if "synthetic" in load:
        text = f"Synthetic load {json.dumps(load['synthetic'])}" if load["synthetic"] else ""
        text = text or "Synthetic load as it is by default"
    else:
        text = f"Trace {load['trace']}"
    if load["speed"] != 1:
        text += f", {load['speed']:g} times as fast"
    first = next(iter(results["variants"].values()))["report"]
    objective = first["objective"]
    return (
        f"{text}: {first['requests']} requests in {first['virtual_seconds']:.0f} s; times of steps "
        f"from {results['cost']}. Objective: first token within {1e3 * objective['ttft']:g} ms, "
        f"further ones in {1e3 * objective['tpot']:g} ms each."
    )
