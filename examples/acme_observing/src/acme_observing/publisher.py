"""The publisher: events of the KV cache as lines of JSON."""

import threading
from collections import deque

import msgspec

from hardpoint import plugins
from hardpoint.plugins import KVEventBatch, KVEventPublisher, PublisherContext


class EventLines(KVEventPublisher):
    """Appends each batch of events to a file, in a thread of its own."""

    contract = 1

    class Options(plugins.Options):
        """Options.

        Attributes:
            path: the file; `{rank}` in it is the engine's data-parallel rank.
            max_queue: batches that wait at most; of more, the oldest are lost.
        """

        path: str = "kv-events-{rank}.jsonl"
        max_queue: int = 10_000

    options: Options

    def __init__(self, context: PublisherContext) -> None:
        """Open the file, and start the thread."""
        super().__init__(context)
        path = self.options.path.format(rank=context.data_parallel_rank)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed in close
        self._waiting: deque[KVEventBatch] = deque(maxlen=self.options.max_queue)
        self._ready, self._closing = threading.Event(), False
        self._thread = threading.Thread(target=self._write, name=self.name, daemon=True)
        self._thread.start()

    def publish(self, batch: KVEventBatch) -> None:
        """Hand a batch to the thread: a step waits for this."""
        self._waiting.append(batch)
        self._ready.set()

    def close(self) -> None:
        """Write the pending events, and end the thread; a second call does nothing."""
        self._closing = True
        self._ready.set()
        self._thread.join()
        self._file.close()

    def _write(self) -> None:
        while not self._closing or self._waiting:
            self._ready.wait()
            self._ready.clear()
            while self._waiting:
                self._file.write(msgspec.json.encode(self._waiting.popleft()) + b"\n")
