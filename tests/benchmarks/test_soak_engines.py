"""The soak of several engines tells lost requests from those that end by a limit."""

from __future__ import annotations

import pytest
from http_streams import Timeline
from soak_parts.ends import Counts, print_run


def ended(text="", *, seconds=0.5, error=""):
    return Timeline(sent=1.0, first=1.25, ended=1.0 + seconds, gaps=[0.1], error=error, text=text)


@pytest.mark.parametrize(
    ("key", "timeout", "timeline", "ends", "lost", "num_wrong", "num_late"),
    [
        ("quiet", None, ended("abc"), "quiet: whole", {}, 0, 0),
        ("quiet", None, ended("abx"), "quiet: whole", {}, 1, 0),
        ("quiet", None, ended("ab"), "quiet: whole", {}, 1, 0),
        ("quiet", 0.3, ended("ab"), "quiet: deadline", {}, 0, 0),
        ("quiet", 0.3, ended("xb"), "quiet: deadline", {}, 1, 0),
        ("quiet", 0.9, ended("ab"), "quiet: whole", {}, 1, 0),  # before its deadline
        ("quiet", 0.3, ended("ab", seconds=2.0), "quiet: deadline", {}, 0, 1),
        ("quiet", 0.3, ended(error="408 timeout"), "quiet: deadline", {}, 0, 0),
        ("quiet", 0.3, ended(error="500 x"), "quiet: lost", {"quiet: 500 x": 1}, 0, 0),
        ("quiet", None, ended(error="429 x"), "quiet: lost", {"quiet: 429 x": 1}, 0, 0),
        ("flood", None, ended(error="429 x"), "flood: refused", {}, 0, 0),
        ("flood", None, ended(error="503 x"), "flood: lost", {"flood: 503 x": 1}, 0, 0),
    ],
)
def test_ends(key, timeout, timeline, ends, lost, num_wrong, num_late):
    counts = Counts()
    counts.record(key, 3, "abc", timeout, timeline)
    assert dict(counts.ends) == {ends: 1}
    assert dict(counts.lost) == lost
    assert (len(counts.wrong), len(counts.late)) == (num_wrong, num_late)


def test_times_are_those_of_the_quiet_key(capsys):
    counts = Counts()
    for key in ("quiet", "flood"):
        counts.record(key, 3, "abc", None, ended("abc"))
    figures = counts.figures()
    assert figures["first_token_ms"] == {"p50": 250.0, "p99": 250.0}
    assert figures["gap_ms"]["p99"] == pytest.approx(100.0)
    print_run({"flood": True, **figures}, 10)
    assert "  0 lost, 0 wrong, 0 late\n" in capsys.readouterr().out
