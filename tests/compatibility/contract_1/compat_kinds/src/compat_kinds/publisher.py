"""A KV event publisher that writes lines of JSON."""

import json

from hardpoint import plugins
from hardpoint.plugins import AllBlocksCleared, BlockRemoved, BlockStored, KVEventPublisher


class CompatPublisher(KVEventPublisher):
    """Writes a line for each event."""

    contract = 1

    class Options(plugins.Options):
        path: str

    def __init__(self, context):
        super().__init__(context)
        self.file = open(context.options.path, "a")  # noqa: SIM115 - close() closes it

    def publish(self, batch):
        assert batch.timestamp > 0
        assert batch.data_parallel_rank == self.context.data_parallel_rank
        for event in batch.events:
            self.file.write(json.dumps(shown(event)) + "\n")
        self.file.flush()

    def close(self):
        self.file.close()


def shown(event):
    if isinstance(event, BlockStored):
        hashes = [content.hex() for content in event.block_hashes]
        parent = event.parent_hash and event.parent_hash.hex()
        assert event.medium is not None or len(event.token_ids) % event.block_size == 0
        return ["stored", hashes, parent, event.group, event.lora]
    if isinstance(event, BlockRemoved):
        return ["removed", [content.hex() for content in event.block_hashes], event.medium]
    assert isinstance(event, AllBlocksCleared)
    return ["cleared"]
