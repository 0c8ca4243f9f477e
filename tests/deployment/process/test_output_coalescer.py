"""Unread outputs of a request are merged into one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.searching import examples

from hardpoint.plugins import EngineCoreOutput, EngineCoreOutputs
from hardpoint.plugins.requests.engine_state import EngineLoad, KVCacheChanges
from hardpoint.process import output_coalescer
from hardpoint.process.output_coalescer import OutputCoalescer


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


def test_the_latest_load_counts():
    coalescer = OutputCoalescer()
    for running in (1, 2, None):
        load = running and EngineLoad(num_running=running, num_waiting=0, kv_cache_usage=0.0)
        coalescer.put(EngineCoreOutputs(load=load))
    assert coalescer.pop().load.num_running == 2


BLOCKS = st.sets(st.sampled_from([bytes([number]) * 8 for number in range(5)]))
STEPS = st.lists(st.tuples(st.booleans(), BLOCKS, BLOCKS) | st.none(), max_size=12)


def changed(blocks, changes):
    """The blocks after some changes."""
    assert not changes.stored & changes.removed
    return ((set() if changes.cleared else blocks) | changes.stored) - changes.removed


@examples(150)
@given(STEPS, BLOCKS)
def test_merged_changes_of_the_cache_have_the_same_result(steps, before):
    coalescer, expected, number = OutputCoalescer(), before, 0
    for step in steps:
        changes = None
        if step is not None:
            cleared, stored, removed = step
            removed = set() if cleared else removed - stored
            changes = KVCacheChanges(
                first=number, last=number, cleared=cleared, stored=stored, removed=removed
            )
            number += 1
            expected = changed(expected, changes)
        coalescer.put(EngineCoreOutputs(cache_changes=changes))
    if number:
        merged = coalescer.pop().cache_changes
        assert (merged.first, merged.last) == (0, number - 1)
        assert changed(before, merged) == expected


def test_changes_before_missing_ones_are_void():
    coalescer, key = OutputCoalescer(), b"a" * 8
    for number in (0, 1, 5):
        changes = KVCacheChanges(first=number, last=number, stored={key})
        coalescer.put(EngineCoreOutputs(cache_changes=changes))
    assert coalescer.pop().cache_changes == KVCacheChanges(first=5, last=5, stored={key})


def test_too_many_unread_changes_are_dropped_and_later_ones_follow(monkeypatch):
    monkeypatch.setattr(output_coalescer, "MOST_UNREAD", 2)
    coalescer = OutputCoalescer()
    every = [
        KVCacheChanges(first=number, last=number, stored={bytes([number]) * 8})
        for number in range(4)
    ]
    for changes in every[:3]:
        coalescer.put(EngineCoreOutputs(cache_changes=changes))
    coalescer.put(EngineCoreOutputs())
    coalescer.put(EngineCoreOutputs(cache_changes=every[3]))
    assert coalescer.pop().cache_changes == every[3]
    assert every[0].stored == {bytes(8)}
