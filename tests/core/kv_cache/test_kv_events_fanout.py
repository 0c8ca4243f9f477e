"""Each step's events reach every publisher, whatever another one does."""

from __future__ import annotations

import signal

import pytest

from hardpoint.errors import PluginFaultError
from hardpoint.host.boundary.faults import StepFaults
from hardpoint.host.boundary.kv_cache import KVEventFanout
from hardpoint.plugins import (
    AllBlocksCleared,
    BlockRemoved,
    KVEventBatch,
    KVEventPublisher,
    PublisherContext,
)
from hardpoint.plugins.component import Source
from hardpoint.plugins.requests.engine_state import KVCacheChanges
from hardpoint.process.cache_changes import CacheChangeLog

REMOVED = BlockRemoved([b"a"])


class Recorder(KVEventPublisher):
    contract = 1

    def __init__(self, name, error=None):
        super().__init__(PublisherContext(name=name, options=None))
        self.seen, self.error, self.closed = [], error, 0

    def publish(self, batch):
        self.seen.append(batch)
        if self.error:
            raise self.error

    def close(self):
        self.closed += 1
        if self.error:
            raise self.error


def fanout(*publishers, ends_engine=(), rank=0, follow=None):
    """Return the fan-out and the books of faults; the clock reads 50, 51, 52, ..."""
    faults = StepFaults(ends_engine)
    pairs = []
    for publisher in publishers:
        source = Source(publisher.name, f"pkg:{publisher.name}", "dist", "1.0", "default")
        calls = faults.calls("kv_event_publishers", source)
        pairs.append((publisher, faults.reporter(source), calls))
    return KVEventFanout(pairs, iter(range(50, 100)).__next__, rank, follow), faults


def test_a_follower_and_publishers_get_the_same_events():
    publisher, log = Recorder("first"), CacheChangeLog()
    events, _ = fanout(publisher, follow=log.add)
    removed = BlockRemoved([b"a" * 32])
    events.publish([removed])
    events.publish([])
    assert [batch.events for batch in publisher.seen] == [[removed]]
    assert log.pop() == KVCacheChanges(first=0, last=0, removed={b"a" * 8})
    assert log.pop() is None


def test_a_step_is_one_batch_with_the_time_of_day():
    first, second = Recorder("first"), Recorder("second")
    events, _ = fanout(first, second, rank=3)
    events.publish([REMOVED, AllBlocksCleared()])
    events.publish([REMOVED])
    assert first.seen == second.seen
    assert first.seen == [
        KVEventBatch(50, [REMOVED, AllBlocksCleared()], 3),
        KVEventBatch(51, [REMOVED], 3),
    ]


def test_a_step_without_events_publishes_nothing_and_reads_no_clock():
    recorder = Recorder("recorder")
    events, _ = fanout(recorder)
    events.publish([])
    events.publish([REMOVED])
    assert [batch.timestamp for batch in recorder.seen] == [50]


def test_the_batch_keeps_its_events_when_the_list_is_used_again():
    recorder = Recorder("recorder")
    events, _ = fanout(recorder)
    step = [REMOVED]
    events.publish(step)
    step.clear()
    assert recorder.seen[0].events == [REMOVED]


def test_a_publisher_that_raises_is_named_and_counted_and_the_others_are_told():
    before, broken, after = Recorder("before"), Recorder("broken", OSError("full")), Recorder("b")
    events, faults = fanout(before, broken, after)
    events.publish([REMOVED])
    events.publish([REMOVED])
    assert len(before.seen) == len(after.seen) == 2
    (name, fault), *others = faults.report().items()
    assert (name, fault.count, others) == ("broken", 2, [])
    assert (
        fault.message == "plugin 'broken' (dist 1.0, pkg:broken): publish() failed: OSError: full"
    )


def test_a_publisher_whose_faults_end_the_engine_ends_it_after_all_were_told():
    broken, worse, after = (
        Recorder("broken", OSError("full")),
        Recorder("worse", OSError("gone")),
        Recorder("after"),
    )
    events, _ = fanout(broken, worse, after, ends_engine={"broken", "worse"})
    with pytest.raises(PluginFaultError, match="plugin 'broken' .*: publish.. failed: OSError"):
        events.publish([REMOVED])
    assert len(after.seen) == 1


def test_all_are_closed_even_if_one_fails():
    broken, after = Recorder("broken", OSError("stuck")), Recorder("after")
    events, faults = fanout(broken, after)
    events.close()
    assert (broken.closed, after.closed) == (1, 1)
    assert faults.report()["broken"].message.endswith("close() failed: OSError: stuck")


def test_an_interrupt_is_no_fault_of_a_publisher():
    class Interrupted(Recorder):
        contract = 1

        def publish(self, batch):
            signal.raise_signal(signal.SIGINT)

    events, faults = fanout(Interrupted("interrupted"))
    with pytest.raises(KeyboardInterrupt):
        events.publish([REMOVED])
    assert faults.report() == {}


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit(1), GeneratorExit])
def test_what_a_publisher_itself_raises_is_its_fault(error):
    events, faults = fanout(Recorder("broken", error))
    events.publish([REMOVED])
    assert faults.report()["broken"].count == 1
