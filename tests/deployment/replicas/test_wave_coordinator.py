"""The rules of the coordinator of waves, by tables."""

from __future__ import annotations

import pytest

from hardpoint.replicas.waves.coordinator import Coordinator

FIRST = [("start", 0, True)]
RULES = {
    "a start is told once": [*FIRST, ("start", 0, False)],
    "the end of a wave comes before the next one": [*FIRST, ("end", 0, (1, False))],
    "an end of an older wave changes nothing": [
        *FIRST,
        ("end", 0, (1, False)),
        ("start", 1, True),
        ("end", 0, (1, True)),
    ],
    "a start of an older wave is not told": [
        *FIRST,
        ("end", 0, (1, False)),
        ("start", 0, False),
        ("start", 1, True),
    ],
    "a start of the next wave may overtake the end of this one": [
        *FIRST,
        ("start", 1, True),
        ("end", 0, (1, True)),
        ("end", 1, (2, False)),
    ],
    "the end of a later wave counts": [*FIRST, ("end", 4, (5, False)), ("start", 4, False)],
    "an end without a start counts": [("end", 0, (1, False)), ("start", 1, True)],
}


@pytest.mark.parametrize("messages", RULES.values(), ids=RULES)
def test_rules(messages):
    coordinator = Coordinator()
    for event, wave, expected in messages:
        if event == "start":
            assert coordinator.started(wave) is expected
            if expected:
                assert (coordinator.wave, coordinator.is_running) == (wave, True)
        else:
            coordinator.completed(wave)
            assert (coordinator.wave, coordinator.is_running) == expected
