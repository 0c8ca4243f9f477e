"""Reports of loads, of timelines that are made by hand."""

from __future__ import annotations

from hardpoint.bench.answers import RequestTimeline
from hardpoint.bench.client import LoadMeasurements
from hardpoint.bench.measures import report
from hardpoint.simulation import Objective


def test_a_conversation_with_a_failed_turn_does_not_meet_the_objective():
    def timeline(session, error=""):
        return RequestTimeline(
            sent=0.0, first=0.1, last=0.2, ended=0.2, error=error, session=session
        )

    timelines = [timeline("a"), timeline("a"), timeline("b"), timeline("b", "500"), timeline(None)]
    timelines += [timeline("c", "500"), timeline(None, "500")]
    found = report([LoadMeasurements(timelines=timelines)], Objective())[0].conversations
    assert (found.count, found.turns, found.goodput_share) == (3, 5 / 3, 1 / 3)
    assert [(one.session, one.turns) for one in found.longest] == [("a", 2), ("b", 1)]
    alone = report([LoadMeasurements(timelines=[timeline("c", "500")])], Objective())[
        0
    ].conversations
    assert (alone.count, alone.turns, alone.goodput_share, alone.longest) == (1, 1.0, 0.0, [])
