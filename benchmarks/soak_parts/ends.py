"""Counts how the requests of a soak ended: whole, by their deadline, refused, lost or wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from http_streams import Timeline

_LATE_S = 1.0
_REFUSED = ("429 ", "503 overloaded", "stream: overloaded")


@dataclass
class Counts:
    """The results of one run.

    Attributes:
        ends: how requests ended, by key and kind.
        lost, wrong, late: descriptions of such requests.
        first_s, gaps_s: times of the quiet key.
        events: kills and changes of the number of engines, with their results.
    """

    ends: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)

    def record(
        self, key: str, number: int, right: str, timeout: float | None, timeline: Timeline
    ) -> None:
        """Count a request that has ended."""
        seconds, error = timeline.ended - timeline.sent, timeline.error
        after_deadline = timeout is not None and seconds >= timeout
        if after_deadline and (error.startswith("408 ") or not error) and timeline.text != right:
            self.ends[f"{key}: deadline"] += 1
            if seconds > timeout + _LATE_S:
                self.late.append(f"{key}: {seconds:.1f} s of {timeout:g} s")
            right = right[: len(timeline.text)]
        elif error and key == "flood" and error.startswith(_REFUSED):
            self.ends["flood: refused"] += 1
            return
        elif error:
            self.ends[f"{key}: lost"] += 1
            self.lost[f"{key}: {error}"] += 1
            return
        else:
            self.ends[f"{key}: whole"] += 1
        if timeline.text != right:
            self.wrong.append(f"{key}: question {number}: {timeline.text!r} for {right!r}")
        if key == "quiet" and timeline.first:
            self.first_s.append(timeline.first - timeline.sent)
            self.gaps_s += timeline.gaps

    def figures(self) -> dict[str, Any]:
        """Return the counts as plain data, with percentiles of the times in milliseconds."""
        return {
            "ends": dict(self.ends),
            "lost": dict(self.lost),
            "wrong": self.wrong,
            "late": self.late,
            "events": dict(self.events),
            "first_token_ms": percentiles([1e3 * seconds for seconds in self.first_s]),
            "gap_ms": percentiles([1e3 * seconds for seconds in self.gaps_s]),
        }


def percentiles(times: list[float]) -> dict[str, float]:
    """Return p50 and p99; 0.0 without any time."""
    found = sorted(times) or [0.0]
    return {f"p{share}": found[len(found) * share // 100] for share in (50, 99)}


def print_run(run: dict[str, Any], minutes: float) -> None:
    """Print the figures of one run."""
    print(f"{'with' if run['flood'] else 'without'} the flood, {minutes:g} minutes")
    for kind in ("ends", "events", "lost"):
        for name, count in sorted(run[kind].items()):
            print(f"  {kind}: {name}: {count}")
    for kind in ("wrong", "late"):
        for description in run[kind][:10]:
            print(f"  {kind}: {description}")
    counts = sum(run["lost"].values()), len(run["wrong"]), len(run["late"])
    print("  {} lost, {} wrong, {} late".format(*counts))
    for name in ("first_token_ms", "gap_ms"):
        print(f"  quiet key, {name}: p50 {run[name]['p50']:.1f}, p99 {run[name]['p99']:.1f}")
