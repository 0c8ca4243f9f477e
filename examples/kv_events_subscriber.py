"""Follow what the KV cache of an engine holds, as a router would.

    hardpoint.toml:  [kv_events]
                     publishers = ["zmq"]
                     [plugin.zmq]
                     endpoint = "tcp://127.0.0.1:5557"
                     replay_endpoint = "tcp://127.0.0.1:5558"

    python kv_events_subscriber.py --endpoint tcp://127.0.0.1:5557 \
        --replay-endpoint tcp://127.0.0.1:5558

Needs pyzmq and msgspec, and nothing of Hardpoint. What is published is described in
docs/kv-events.md.
"""

import argparse
import sys
import time

import msgspec
import zmq

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
REPLAY_TIMEOUT_MS = 2000


class CacheFollower:
    """The blocks that can be found in an engine's cache.

    Attributes:
        blocks: (group, hash) of each.
        expected: sequence number of the next batch.
        num_replayed: batches that were had by replay.
        num_resets: how often everything had to be forgotten, because batches were lost for good
            or the engine started anew.
    """

    def __init__(self, replay=None):
        """`replay(start)` yields (sequence number, payload) of batches that are still to be had."""
        self.blocks = set()
        self.expected = 0
        self.num_replayed = 0
        self.num_resets = 0
        self._replay = replay or (lambda _start: ())
        self._last_live = -1

    def receive(self, number, payload):
        """Take a message of the live stream."""
        if number <= self._last_live:  # the engine started anew and counts from 0
            self._reset(0)
        self._last_live = number
        if number > self.expected:
            for missed, old in self._replay(self.expected):
                self.num_replayed += missed >= self.expected
                self._take(missed, old)
        self._take(number, payload)

    def _take(self, number, payload):
        if number < self.expected:
            return  # it came by replay, and now again
        if number > self.expected:
            self._reset(number)
        self.expected = number + 1
        _, events, _ = msgspec.msgpack.decode(payload)
        for kind, *fields in events:
            if kind == "AllBlocksCleared":
                self.blocks.clear()
            elif kind == "BlockStored":
                hashes, _parent, _tokens, _block_size, _lora, group = fields
                self.blocks.update((group, block) for block in hashes)
            elif kind == "BlockRemoved":
                hashes, group = fields
                self.blocks.difference_update((group, block) for block in hashes)

    def _reset(self, expected):
        """Forget everything: something may be gone that nobody told of."""
        self.blocks.clear()
        self.expected = expected
        self.num_resets += 1


def replay_from(context, endpoint):
    """Return the function that asks an engine for the batches from a sequence number on."""

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
    ends = time.monotonic() + arguments.seconds if arguments.seconds else None
    try:
        while ends is None or time.monotonic() < ends:
            if not live.poll(100):
                continue
            _topic, number, payload = live.recv_multipart()
            follower.receive(int.from_bytes(number, "big"), payload)
            print(
                f"batch {follower.expected - 1}: {len(follower.blocks)} blocks, "
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
    parser.add_argument("--endpoint", default="tcp://127.0.0.1:5557", help="of the engine")
    parser.add_argument("--replay-endpoint", help="where to ask for what was missed")
    parser.add_argument("--topic", default="", help="only messages whose topic begins so")
    parser.add_argument("--batches", type=int, help="end after this many were published")
    parser.add_argument("--seconds", type=float, help="end after so long")
    try:
        follow(parser.parse_args())
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
