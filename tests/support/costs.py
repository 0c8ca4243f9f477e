"""Files of `hardpoint calibrate`, made up."""

from __future__ import annotations

from typing import Any

from hardpoint.simulation import CostFile


def made_up_cost(**fields: Any) -> CostFile:
    """Return a cost with the given fields and defaults for the rest."""
    plain: dict[str, Any] = {
        "format": "hardpoint step cost",
        "version": 1,
        "model": "m",
        "machine": "here",
        "hardpoint": "1",
        "made": "now",
        "block_size": 16,
        "tokens": [(1, 5.0), (101, 10.0)],
        "single_query": 0.1,
        "context_token": 0.0,
        "prompt": 0.2,
        "prompt_pair": 0.0,
    }
    return CostFile(**{**plain, **fields})
