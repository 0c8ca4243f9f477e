"""The page that a person reads."""

from __future__ import annotations

import textwrap
from collections import Counter
from typing import Any

from .recorder import Check, Status

WIDTH = 100
_NOT_MEASURED = "not measured"
_NOT_JUDGED = "not judged on this GPU"


def page(about: dict[str, Any], parts: dict[str, list[Check]], seconds: dict[str, float]) -> str:
    """Return the page.

    Args:
        about: the machine and the program.
        parts: their checks.
        seconds: duration of each part that ran.
    """
    checks = [check for part_checks in parts.values() for check in part_checks]
    lines = [*_head(about, checks), ""]
    for part, part_checks in parts.items():
        lines += _part(part, part_checks, seconds.get(part))
    lines += show_figures(checks) + show_aims(checks) + _limits(about, checks, parts, seconds)
    return "\n".join(lines).rstrip() + "\n"


def counts(checks: list[Check]) -> dict[str, int]:
    """Return how many checks ended in each way."""
    counter = Counter(check.status for check in checks)
    return {str(status): counter[status] for status in Status}


def _head(about: dict[str, Any], checks: list[Check]) -> list[str]:
    where = about.get("gpu") or "no GPU: a dry run on the CPU, kernels interpreted, sizes tiny"
    versions = [
        f"{name} {about[name]}" for name in ("torch", "cuda", "triton", "driver") if about.get(name)
    ]
    total = counts(checks)
    result = "FAILED" if total["failed"] else "passed"
    return [
        f"gpu-check: {result}; " + ", ".join(f"{n} {name}" for name, n in total.items() if n),
        where,
        ", ".join([*versions, f"commit {about.get('commit') or 'unknown'}", str(about["date"])]),
    ]


def _part(part: str, checks: list[Check], seconds: float | None) -> list[str]:
    """Return a part with its checks."""
    if seconds is None:
        return [f"{part}: not run", ""]
    lines = [f"{part} ({seconds:.0f} s)"]
    for check in checks:
        lines += _wrapped(f"  {check.status:8}", f"{check.name}: {check.detail}".rstrip(": "))
        for problem in check.problems:
            lines += _wrapped("          ! ", problem)
    return [*lines, ""]


def show_figures(checks: list[Check]) -> list[str]:
    """Return the measurements, by check."""
    lines = []
    for check in checks:
        if check.figures:
            lines.append(f"  {check.name}")
        lines += [f"    {name:<44} {_figure_text(n):>14}" for name, n in check.figures.items()]
    return ["Figures", *lines, ""] if lines else []


def show_aims(checks: list[Check]) -> list[str]:
    """Return the aims, and whether they were reached."""
    lines = []
    for aim in (aim for check in checks for aim in check.aims):
        unknown = _NOT_MEASURED if aim["value"] is None else _NOT_JUDGED
        outcome = {True: "reached", False: "NOT reached", None: unknown}[aim["reached"]]
        value = "" if aim["value"] is None else f" ({_figure_text(aim['value'])})"
        lines.append(f"  {aim['name']}, at least {_figure_text(aim['at_least'])}: {outcome}{value}")
    return ["Aims", *lines, ""] if lines else []


def _limits(
    about: dict[str, Any],
    checks: list[Check],
    parts: dict[str, list[Check]],
    seconds: dict[str, float],
) -> list[str]:
    """Return the limits of the run: facts that it could not show."""
    lines = [f"the part {part} did not run" for part in parts if part not in seconds]
    lines += [
        f"{check.name}: {check.faked or check.detail}"
        for check in checks
        if check.status in (Status.SKIPPED, Status.FAKED)
    ]
    if about.get("gpu") is None:
        lines.append("any speed, and whether kernels are right where a GPU runs them: no GPU")
    if any(check.status is Status.FAILED for check in checks):
        lines.append("comparisons of failed checks after they failed")
    lines.append("several GPUs, GPUs of other kinds, and models with trained weights but SmolLM2")
    return [
        "Not shown by this run",
        *(text for line in lines for text in _wrapped("  - ", line)),
    ]


def _wrapped(first: str, text: str) -> list[str]:
    """Return a text of lines that fit on the page."""
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=" " * len(first)) or [
        first
    ]


def _figure_text(value: float | None) -> str:
    """Return a figure with three significant digits."""
    if value is None:
        return _NOT_MEASURED
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
