"""The example that follows an engine's cache."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time

import msgspec
from support.builtins.kv_events_harness import batch, sent
from support.processes import ROOT

from hardpoint.plugins import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

EXAMPLE = ROOT / "examples" / "kv_events_subscriber.py"

PATIENTLY = """
import kv_events_subscriber
kv_events_subscriber.REPLAY_TIMEOUT_MS = 60_000
kv_events_subscriber.main()
"""


def example():
    spec = importlib.util.spec_from_file_location("kv_events_subscriber", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def encoded(*events):
    return msgspec.msgpack.encode(KVEventBatch(0.0, list(events)))


def stored(*names, group=0):
    return BlockStored([name.encode() for name in names], None, [1] * len(names), 1, None, group)


def removed(*names, group=0):
    return BlockRemoved([name.encode() for name in names], group)


def names_of(follower):
    return sorted(f"{block.decode()}{group}" for group, block in follower.blocks)


def test_the_example_follows_what_is_stored_removed_and_cleared():
    follower = example().CacheFollower()
    follower.receive(0, encoded(stored("a", "b"), stored("a", group=1)))
    follower.receive(1, encoded(removed("a"), stored("c")))
    assert names_of(follower) == ["a1", "b0", "c0"]
    follower.receive(2, encoded(AllBlocksCleared(), stored("d")))
    assert names_of(follower) == ["d0"]
    assert follower.num_resets == 0


def test_the_example_keeps_tiers_apart():
    follower = example().CacheFollower()
    disk = BlockStored([b"a", b"b"], None, [], 1, medium="disk")
    follower.receive(0, encoded(stored("a"), disk))
    follower.receive(1, encoded(AllBlocksCleared(), BlockRemoved([b"b"], medium="disk")))
    assert names_of(follower) == []
    assert dict(follower.tiers) == {"disk": {(0, b"a")}}
    follower.receive(7, encoded(stored("c")))
    assert dict(follower.tiers) == {}  # a removal may have been missed


def test_the_example_fills_gaps_and_forgets_what_it_cannot_know():
    history = {number: encoded(stored("abcdef"[number])) for number in range(6)}
    starts = []

    def replay(start):
        starts.append(start)
        return [(number, history[number]) for number in sorted(history) if number >= start]

    follower = example().CacheFollower(replay)
    follower.receive(2, history[2])  # came late
    follower.receive(3, history[3])
    assert starts == [0]
    assert names_of(follower) == ["a0", "b0", "c0", "d0", "e0", "f0"]
    follower.receive(4, history[4])
    follower.receive(5, history[5])
    assert (follower.num_replayed, follower.num_resets) == (6, 0)
    history.clear()
    follower.receive(9, encoded(stored("x")))  # 6 to 8 are lost: anything may have been removed
    assert names_of(follower) == ["x0"]
    follower.receive(0, encoded(stored("y")))  # the engine was restarted
    assert names_of(follower) == ["y0"]
    assert follower.num_resets == 2


def test_the_example_runs_next_to_an_engine(context, open_publisher):
    publisher = open_publisher(replay_endpoint="tcp://127.0.0.1:*")
    sent(context, publisher, 300)
    command = [sys.executable, "-c", PATIENTLY, "--endpoint", publisher.endpoint]
    command += ["--replay-endpoint", publisher.replay_endpoint, "--batches", "301"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=EXAMPLE.parent
    ) as process:
        number, deadline = 300, time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            publisher.publish(batch(number))
            number += 1
            time.sleep(0.02)
        process.kill()
        output = process.stdout.read()
    assert process.returncode == 0
    assert "batches replayed, 0 resets" in output.splitlines()[-1]
    blocks = int(output.splitlines()[-1].split()[2])
    assert blocks > 300  # those of before it was there too


def test_the_example_explains_itself():
    done = subprocess.run([sys.executable, EXAMPLE, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "--replay-endpoint" in done.stdout
