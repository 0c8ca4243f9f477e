"""Facts about the processor of this machine, from `/proc/cpuinfo`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

__all__ = ["processor_facts", "processor_flags"]


def processor_facts(system: Path = Path("/proc")) -> dict[str, str]:
    """Return the fields of the first processor; none if the system has no such file.

    Args:
        system: the folder of the system's facts.
    """
    facts: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in (system / "cpuinfo").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), value.strip())
    return facts


def processor_flags(facts: Mapping[str, str]) -> list[str]:
    """Return the names of instruction sets in the fields of a processor."""
    return facts.get("flags", facts.get("Features", "")).split()
