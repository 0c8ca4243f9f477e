"""Unread outputs of a request are merged into one."""

from __future__ import annotations

import numpy as np

from hardpoint.core.protocol.output_coalescer import OutputCoalescer
from hardpoint.plugins import EngineCoreOutput, EngineCoreOutputs


def test_experts_of_later_positions_follow_the_earlier_ones():
    steps = [np.full((count, 2, 2), count, np.int32) for count in (3, 1, 2)]
    coalescer = OutputCoalescer()
    for rows in (None, steps[0], None, *steps[1:]):
        output = EngineCoreOutput(request_id="a", new_token_ids=[1], routed_experts=rows)
        coalescer.put(EngineCoreOutputs(outputs=[output]))
    (merged,) = coalescer.pop().outputs
    assert merged.new_token_ids == [1] * 5
    assert np.array_equal(merged.routed_experts, np.concatenate(steps))
    assert len(steps[0]) == 3
