"""Track the content of an engine's KV cache through its events, as a router would.

    hardpoint.toml:  [kv_events]
                     publishers = ["zmq"]
                     [plugin.zmq]
                     endpoint = "tcp://127.0.0.1:5557"
                     replay_endpoint = "tcp://127.0.0.1:5558"

    python kv_events_subscriber.py --endpoint tcp://127.0.0.1:5557 \
        --replay-endpoint tcp://127.0.0.1:5558

Needs pyzmq and msgspec, but not Hardpoint. The messages are described in docs/kv-connectors.md.
"""

import argparse
import sys
import time
from collections import defaultdict

import msgspec
import zmq

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
REPLAY_TIMEOUT_MS = 2000


class CacheFollower:
    """The set of cached blocks of an engine.

    Attributes:
        blocks: (group, hash) of every block in the KV cache.
        tiers: the same of each tier of a KV connector, by its name: a store on disk, for example.
        expected: sequence number of the next batch.
        num_replayed: batches received by replay.
        num_resets: how often the set was cleared because batches were lost or the engine was
            restarted.
    """

    def __init__(self, replay=None):
        """`replay(start)` yields (sequence number, payload) of buffered batches from `start` on."""
        self.blocks = set()
        self.tiers = defaultdict(set)
        self.expected = 0
        self.num_replayed = 0
        self.num_resets = 0
        self._replay = replay or (lambda _start: ())
        self._last_live = -1

    def receive(self, number, payload):
        """Process a message of the live stream."""
        if number <= self._last_live:  # the engine was restarted and counts from 0
            self._reset(0)
        self._last_live = number
        if number > self.expected:
            for missed, missed_payload in self._replay(self.expected):
                self.num_replayed += missed >= self.expected
                self._apply(missed, missed_payload)
        self._apply(number, payload)

    def _apply(self, number, payload):
        if number < self.expected:
            return  # already received by replay
        if number > self.expected:
            self._reset(number)
        self.expected = number + 1
        _, events, _ = msgspec.msgpack.decode(payload)
        for kind, *fields in events:
            if kind == "AllBlocksCleared":
                self.blocks.clear()
            elif kind == "BlockStored":
                hashes, _parent, _tokens, _block_size, _lora, group, medium = fields
                self._blocks_of(medium).update((group, block) for block in hashes)
            elif kind == "BlockRemoved":
                hashes, group, medium = fields
                self._blocks_of(medium).difference_update((group, block) for block in hashes)

    def _blocks_of(self, medium):
        return self.blocks if medium is None else self.tiers[medium]

    def _reset(self, expected):
        """Clear the sets: removals may have been missed."""
        self.blocks.clear()
        self.tiers.clear()
        self.expected = expected
        self.num_resets += 1


def replay_from(context, endpoint):
    """Return a function that requests the batches from a sequence number on."""

    def replay(start):
        client = context.socket(zmq.DEALER)
        client.connect(endpoint)
        client.send_multipart([b"", start.to_bytes(8, "big")])
        try:
            while client.poll(REPLAY_TIMEOUT_MS):
                _, number, payload = client.recv_multipart()
                if number == END_OF_REPLAY:
                    return
                yield int.from_bytes(number, "big"), payload
        finally:
            client.close(linger=0)

    return replay


def follow(arguments):
    """Print a line for each batch."""
    context = zmq.Context()
    live = context.socket(zmq.SUB)
    live.connect(arguments.endpoint)
    live.subscribe(arguments.topic)
    replay = replay_from(context, arguments.replay_endpoint) if arguments.replay_endpoint else None
    follower = CacheFollower(replay)
    end = time.monotonic() + arguments.seconds if arguments.seconds else None
    try:
        while end is None or time.monotonic() < end:
            if not live.poll(100):
                continue
            _topic, number, payload = live.recv_multipart()
            follower.receive(int.from_bytes(number, "big"), payload)
            tiers = "".join(f", {len(held)} in {name}" for name, held in follower.tiers.items())
            print(
                f"batch {follower.expected - 1}: {len(follower.blocks)} blocks{tiers}, "
                f"{follower.num_replayed} batches replayed, {follower.num_resets} resets",
                flush=True,
            )
            if arguments.batches and follower.expected >= arguments.batches:
                return
    finally:
        context.destroy(linger=0)


def main():
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--endpoint", default="tcp://127.0.0.1:5557", help="the engine's endpoint")
    parser.add_argument("--replay-endpoint", help="the engine's replay endpoint")
    parser.add_argument("--topic", default="", help="prefix of the topics to receive")
    parser.add_argument("--batches", type=int, help="stop after so many batches")
    parser.add_argument("--seconds", type=float, help="stop after so many seconds")
    try:
        follow(parser.parse_args())
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
