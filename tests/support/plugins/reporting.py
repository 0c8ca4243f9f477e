"""Plugins that report the process that they run in."""

from __future__ import annotations

import gc
import json
import os
import threading

from hardpoint import plugins
from hardpoint.core.kv_cache.block_hashes import BlockHashes
from hardpoint.plugins import LogitsProcessor, Phase

HASHED_IN: list[str] = []
"""The threads that hashed blocks."""


def watch_hashing() -> None:
    """Note who hashes blocks from now on."""
    extend = BlockHashes._extend

    def note(self, request, hashes):
        HASHED_IN.append(threading.current_thread().name)
        extend(self, request, hashes)

    BlockHashes._extend = note


class Tells(LogitsProcessor):
    """Fails with a description of its environment."""

    contract = 1
    phase = Phase.PENALTY

    class Arguments(plugins.Arguments):
        variable: str

    def __init__(self, context):
        super().__init__(context)
        watch_hashing()

    def apply(self, logits, rows):
        (arguments,) = rows.arguments()
        seen = {
            "pid": os.getpid(),
            "frozen": gc.get_freeze_count(),
            "hashed_in": HASHED_IN,
            "variable": os.environ.get(arguments.variable),
        }
        raise RuntimeError(f"<{json.dumps(seen)}>")
