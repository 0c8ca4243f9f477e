"""The request of the parent to a child, the limits of the child, and the record of a check."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from typing import Any

import msgspec

OK, FAILED, CANNOT_LOAD, OTHER_CONTRACT = range(4)
"""Exit codes of a check, from the best to the worst but for the last."""


class CheckLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a child, and of each process that it starts.

    Attributes:
        seconds: for everything, from the start of its interpreter.
        memory_bytes: private memory.
        file_bytes: size of the largest file that it writes.
        num_files: number of files that are open at once.
    """

    seconds: float
    memory_bytes: int
    file_bytes: int
    num_files: int

    def apply(self) -> None:
        """Limit this process by all but the time."""
        for name, limit in (
            (resource.RLIMIT_DATA, self.memory_bytes),
            (resource.RLIMIT_FSIZE, self.file_bytes),
            (resource.RLIMIT_NOFILE, self.num_files),
        ):
            hard = resource.getrlimit(name)[1]
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(name, (limit, limit))


class CheckRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One component to check.

    Attributes:
        kind: name of its kind; empty to find it out.
        name: under which it is enabled.
        value: its FQCN.
        reference: its name in commands, for replays.
        distribution, version: its package.
        config: the current configuration, as plain data.
        config_sources: source of each value of it.
        options: as an operator would set them, instead of the configured ones.
        against: version of the contract that it has to state; None is any that is accepted.
        folder: the child's own.
        sys_path: `sys.path` of the parent.
        limits: limits of the child.
    """

    kind: str
    name: str
    value: str
    reference: str
    distribution: str
    version: str
    config: dict[str, Any]
    config_sources: dict[str, str]
    options: Mapping[str, Any]
    against: int | None
    folder: str
    sys_path: list[str]
    limits: CheckLimits

    @property
    def label(self) -> str:
        """Names it in reports."""
        return f"{self.kind}/{self.name}" if self.kind else self.value


def check_record(
    name: str, claim: str, outcome: str, *, reason: str = "", evidence: str = "", seconds: float = 0
) -> dict[str, Any]:
    """Return the record of one check."""
    proved = {"proved": True, "failed": False, "expected_failure": False}.get(outcome)
    return {
        "record": "check",
        "check": name,
        "claim": claim,
        "outcome": outcome,
        "proved": proved,
        "reason": reason,
        "evidence": evidence,
        "seconds": round(seconds, 3),
    }
