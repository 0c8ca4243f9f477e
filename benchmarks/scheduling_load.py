"""The load of benchmarks/scheduler.py, the same for each engine, and its clock."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

BLOCK_SIZE = 16
MAX_MODEL_LEN = 65_536
VOCABULARY = 32_000
SHORTEST, WAITING_PROMPT = 64, 8
TOKEN = 5  # the token that every request samples
MICROSECONDS = 1e6


def prompt(index: int, length: int) -> list[int]:
    """Return a prompt that shares no block with those of other indices."""
    return random.Random(index).choices(range(VOCABULARY), k=length)


def running_prompts(count: int) -> Iterator[tuple[str, list[int]]]:
    """Yield ids and prompts, whose lengths reach block boundaries in different steps."""
    for index in range(count):
        yield f"running-{index}", prompt(index, SHORTEST + index % BLOCK_SIZE)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the microseconds of processor time that a call takes, and its result."""
    time.thread_time()  # warms the caches for the clock itself
    start = time.thread_time()
    result = call()
    return (time.thread_time() - start) * MICROSECONDS, result
