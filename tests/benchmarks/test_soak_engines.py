"""The soak of several engines tells lost requests from requests that a limit ends."""

from __future__ import annotations

import pytest
from http_streams import Timeline
from soak import print_report, slowed
from soak_load import Counts, times_of


def ended(text="", *, seconds=0.5, error="", written=1.0):
    first, end = written + 0.25, written + seconds
    gaps = [0.1]
    return Timeline(1.0, written, first=first, ended=end, gaps=gaps, error=error, text=text)


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
        ("quiet", 0.3, ended("ab", written=5.0), "quiet: deadline", {}, 0, 0),  # no connection
        ("quiet", 0.3, ended(error="408 timeout"), "quiet: deadline", {}, 0, 0),
        ("quiet", 0.3, ended(error="500 x"), "quiet: lost", {"quiet: 500 x": 1}, 0, 0),
        ("quiet", None, ended(error="429 x"), "quiet: lost", {"quiet: 429 x": 1}, 0, 0),
        ("flood", None, ended(error="429 x"), "flood: refused", {}, 0, 0),
        ("flood", None, ended(error="503 x"), "flood: lost", {"flood: 503 x": 1}, 0, 0),
    ],
)
def test_ends(key, timeout, timeline, ends, lost, num_wrong, num_late):
    counts = Counts()
    counts.record(key, 3, "abc", timeline, timeout=timeout, is_limited=key == "flood")
    assert dict(counts.ends) == {ends: 1}
    assert dict(counts.lost) == lost
    assert (len(counts.wrong), len(counts.late)) == (num_wrong, num_late)
    is_found = bool(num_wrong or num_late or lost or "refused" in ends)
    assert bool(counts.problems(0.0)) == is_found


def test_times_by_key(capsys):
    counts = Counts()
    for key in ("quiet", "flood"):
        counts.record(key, 3, "abc", ended("abc"))
    figures = counts.figures(2.0)
    assert figures["times"].keys() == {"quiet", "flood"}
    assert figures["rates"]["quiet"] == 0.5
    assert figures["compared"] == 2
    print_report({**figures, "client_cpu_share": 0.0, "problems": ["one", "two"]})
    output = capsys.readouterr().out
    assert "  0 wrong of 2 answers\n" in output
    assert "PROBLEM: one\nPROBLEM: two\n" in output


def test_times_of_answers():
    times = times_of(
        [Timeline(sent=1.0, first=1.25, last=1.45, ended=1.5, gaps=[0.1, 0.1], chunks=3)]
    )
    assert times["ttft"] == {"p50": 250.0, "p99": 250.0}
    for name, milliseconds in {"tpot": 100, "itl": 100, "e2e": 500}.items():
        assert times[name]["p99"] == pytest.approx(milliseconds)


def test_failing_requests_are_no_losses():
    counts = Counts()
    counts.record("all", 3, "abc", ended(error="stream: failed"), is_failing=True)
    counts.record("all", 3, "abc", ended("abc"), is_failing=True)
    assert (counts.failed, counts.ends) == ({"stream: failed": 1}, {"all: survived": 1})
    assert counts.timelines == {}
    assert counts.problems(0.0) == []


@pytest.mark.parametrize(("ratio", "problems"), [(3.0, 0), (1.5, 2)])
def test_slow_quiet_keys(ratio, problems, capsys):
    def result(milliseconds):
        return {"times": {"quiet": {name: {"p99": milliseconds} for name in ("ttft", "itl")}}}

    assert len(slowed({"with": result(20.0), "without": result(10.0)}, ratio)) == problems
    assert capsys.readouterr().out.count("without: 2.00") == 2
    assert slowed({"without": result(1.0)}, ratio) == []
