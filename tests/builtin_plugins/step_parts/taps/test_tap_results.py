"""Rows that taps have read of drafts: accepted ones are counted if the output has them."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from hardpoint.builtin_plugins.step_parts.taps.messages import TapReport, TapValues
from hardpoint.builtin_plugins.step_parts.taps.results import TapResults
from hardpoint.plugins import EngineCoreRequest, ModelRunnerOutput, SamplingParams, SchedulerOutput
from hardpoint.plugins.requests.plan import CachedRequests, NewRequest

REQUEST = EngineCoreRequest(request_id="r", prompt_token_ids=[1, 2], params=SamplingParams())
ROW_BYTES = 8


def results_of(max_bytes):
    components = SimpleNamespace(source=lambda kind, name: f"plugin {name!r}")
    taps = SimpleNamespace(of=lambda request: [], are_used=lambda request: True)
    taps.components = components
    results = TapResults("taps", taps, max_bytes)
    results.check(REQUEST)
    return results


def step(results, first, drafts, tokens):
    """Let a tap read all rows of a step; return the messages of faults."""
    count = len(drafts) + (1 if first else len(REQUEST.prompt_token_ids))
    plan = SchedulerOutput(
        new_requests=[] if first else [NewRequest(REQUEST, [], [[1]], 0)],
        cached_requests=CachedRequests(["r"], [first]) if first else CachedRequests(),
        num_scheduled_tokens={"r": count},
        draft_token_ids={"r": drafts} if drafts else {},
    )
    rows = np.arange(first, first + count, dtype=np.float64)
    values = TapValues("raw/0/layer_output", "<f8", [count], rows.tobytes())
    report = msgspec.msgpack.encode(TapReport(values={"r": [values]}))
    result = ModelRunnerOutput(sampled_token_ids={"r": tokens}, part_reports={"taps": {0: report}})
    return [fault.message for fault in results.result(plan, result).values()]


@pytest.mark.parametrize("max_rows", [3, 4, 5])
def test_accepted_drafts_count_if_the_request_goes_on(max_rows):
    """Whether the output has them all is known when the request has a further step."""
    results = results_of(max_rows * ROW_BYTES)
    assert not step(results, 0, [], [5])
    # Position 2, and the drafts at 3 (accepted) and 4 (rejected).
    assert not step(results, 2, [6, 7], [6, 8])
    positions = results.arrays("r")["raw/0/layer_output"].positions
    assert positions.tolist() == [0, 1, 2, 3]
    faults = step(results, 4, [], [9])
    assert len(faults) == (max_rows < 5)
    assert all(f"more than {max_rows * ROW_BYTES} bytes" in fault for fault in faults)


def test_rows_before_the_drafts_count_at_once():
    results = results_of(2 * ROW_BYTES)
    assert not step(results, 0, [], [5])
    (fault,) = step(results, 2, [6, 7], [6, 7, 8])
    assert "more than 16 bytes" in fault
