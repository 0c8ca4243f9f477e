"""Kills processes that use a disk store, and checks the remaining files.

disk_kills.py lines FOLDER STEP           at each STEP-th line of what a store does
disk_kills.py crowd FOLDER SECONDS        at random moments, several at once
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from pathlib import Path

from hardpoint.builtin_plugins.kv_stores import disk_slab
from support.builtins.disk_harness import has, keep, kept, open_disk, run_killed

_BLOCKS = 8


def kill_at_lines(folder: Path, step: int) -> None:
    """Kill a process in each line that storing a block runs, with and without another engine."""
    for is_alone in (True, False):
        for name, action in _ACTIONS.items():
            path = folder / f"{name}-{is_alone}"
            killed = _kill_until_done(path, action, step, is_alone)
            assert killed >= 100 / step, name
        assert _kill(folder / f"torn-{is_alone}", _tear, sys.maxsize, is_alone)


def _kill_until_done(path: Path, action, step: int, is_alone: bool) -> int:
    """Return in how many lines the action was killed."""
    lines = itertools.count(1, step)
    killed = itertools.takewhile(lambda line: _kill(path, action, line, is_alone), lines)
    return len(list(killed))


def _kill(path: Path, action, line: int, is_alone: bool) -> bool:
    """Kill a process in a line; check that its store is as it was, or has the new block too."""
    before = open_disk(path, _BLOCKS)
    last_line, line = line, line % 1000
    old = [line * 100 + i for i in range(_BLOCKS)]
    assert all(keep(before, number) for number in old)
    new = line * 100 + 50
    # A new file of another process: a lock is of the opened file, and a fork has the same.
    other = None if is_alone else before
    if is_alone:
        before.close()
    was_killed = run_killed(lambda: action(path, new), last_line)
    after = other or open_disk(path, _BLOCKS)
    left = kept(after, old)
    assert len(left) >= _BLOCKS - 1, (line, left)
    has(after, new)  # whether it is there depends on the line; if so, it is the right one
    last = [line * 100 + 60 + i for i in range(_BLOCKS)]
    assert all(keep(after, number) for number in last), line
    assert kept(after, last) == last, line  # no slot is lost
    after.close()
    return was_killed


def _store(path: Path, number: int) -> None:
    keep(open_disk(path, _BLOCKS), number)


def _resize(path: Path, number: int) -> None:
    keep(open_disk(path, 4 * _BLOCKS), number)


def _tear(path: Path, number: int) -> None:
    """Be killed when a part of the block is written."""
    write = disk_slab.write_parts

    def write_half(descriptor, parts, start):
        write(descriptor, parts[:2], start)
        os.kill(os.getpid(), signal.SIGKILL)

    disk_slab.write_parts = write_half
    keep(open_disk(path, _BLOCKS), number)


_ACTIONS = {"store": _store, "resize": _resize}


def kill_crowd(folder: Path, seconds: float) -> None:
    """Let processes store and load the same blocks, and kill one after another."""
    end, generator = time.monotonic() + seconds, random.Random(0)
    children = [_fork(folder, seed) for seed in range(3)]
    kills = 0
    while time.monotonic() < end:
        time.sleep(generator.uniform(0.01, 0.1))
        victim = children.pop(0)
        os.kill(victim, signal.SIGKILL)
        _child, status = os.waitpid(victim, 0)
        assert os.WIFSIGNALED(status), "a block was wrong"
        kills += 1
        children.append(_fork(folder, 1000 + kills))
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    store = open_disk(folder, 16)
    assert os.stat(next(folder.glob("blocks-*/slab"))).st_size <= 16 * 8192
    assert all(keep(store, number) for number in range(1000, 1016))
    assert kept(store, range(1000, 1016)) == list(range(1000, 1016))
    store.close()


def _fork(folder: Path, seed: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        generator, store, hits = random.Random(seed), open_disk(folder, 16), 0
        while True:
            number = generator.randrange(24)
            if generator.random() < 0.5:
                keep(store, number)
            else:
                hits += has(store, number)
    finally:
        os._exit(1)


if __name__ == "__main__":
    ending, where, count = sys.argv[1:]
    if ending == "lines":
        kill_at_lines(Path(where), int(count))
    else:
        kill_crowd(Path(where), float(count))
