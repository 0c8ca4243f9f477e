"""The tap and the speculator pass the suites of the conformance kit."""

from __future__ import annotations

from acme_early_exit import ConfidenceExit, SelfSpeculation
from hypothesis import strategies as st

from hardpoint.testing import ActivationTapSuite, SpeculatorSuite


class TestConfidenceExit(ActivationTapSuite):
    tap = ConfidenceExit
    arguments = st.builds(
        dict,
        layers=st.lists(st.integers(0, 3), min_size=1),
        threshold=st.sampled_from([0.0, 0.2, 0.5]),
    )


class TestSelfSpeculation(SpeculatorSuite):
    speculator = SelfSpeculation
    options = {"num_layers": 1}
    budget_us_per_request = None  # it takes what the layers take
    num_uses = 100
