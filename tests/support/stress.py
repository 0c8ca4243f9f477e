"""Delays at random, for `scripts/test --stress`: they make races of threads and processes show.

Thread starts, socket reads and process starts take up to 30 ms longer, in the processes of tests
and in engine processes. Three busy processes compete for the processors. The delays depend on the
seed and on the test, so that a failed test gets the same delays when it runs alone.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import zmq

SEED = "HARDPOINT_TEST_STRESS"
"""Environment variable with the seed, by which child processes of tests delay, too."""
LONGEST_S = 0.03
SHARE_OF_READS = 0.05
"""Part of the socket reads that are delayed: a test has thousands of them."""
BUSY_PROCESSES = 3

_RANDOM = random.Random()
# It ends with the process that started it.
_BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(1_000_000))"


class Stress:
    """A pytest plugin: busy processes beside the run, and delays in it."""

    def __init__(self, seed: int) -> None:
        """Install the delays, here and in child processes."""
        self._seed = seed
        self._busy: list[subprocess.Popen[bytes]] = []
        os.environ[SEED] = str(seed)
        if "PYTEST_XDIST_WORKER" not in os.environ:
            command = [sys.executable, "-c", _BUSY]
            self._busy = [subprocess.Popen(command) for _ in range(BUSY_PROCESSES)]
        install(str(seed))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Draw the delays of a test from its name and the seed."""
        _RANDOM.seed(f"{self._seed}:{item.nodeid}")

    def pytest_unconfigure(self) -> None:
        """End the busy processes."""
        for process in self._busy:
            process.kill()
            process.wait()


def install(seed: str) -> None:
    """Delay thread starts, socket reads and process starts of this process, each once.

    A process that was forked from one with delays has them already, and draws others.
    """
    _RANDOM.seed(f"{seed}:{os.getpid()}")
    start = threading.Thread.start
    if hasattr(start, "__wrapped__"):
        return

    @wraps(start)
    def start_late(thread: threading.Thread) -> None:
        """Let the thread begin late, or its starter go on late."""
        if _RANDOM.random() < 0.5:
            run = thread.run

            def run_late() -> None:
                del thread.run  # type: ignore[misc]  # else the thread refers to itself
                _delay()
                run()

            thread.run = run_late  # type: ignore[method-assign]
            start(thread)
        else:
            start(thread)
            _delay()

    threading.Thread.start = start_late  # type: ignore[method-assign]
    for read in ("recv", "recv_into", "recvmsg"):
        setattr(socket.socket, read, _delayed(getattr(socket.socket, read), SHARE_OF_READS))
    zmq.Socket.recv = _delayed(zmq.Socket.recv, SHARE_OF_READS)  # type: ignore[method-assign]
    subprocess.Popen.__init__ = _delayed(subprocess.Popen.__init__)  # type: ignore[method-assign]


def install_in_child() -> None:
    """Delay in a child process of a test, by the seed of its parent."""
    install(os.environ[SEED])


def _delayed(function: Callable[..., Any], share: float = 1.0) -> Callable[..., Any]:
    """Return a function that begins late in a share of its calls."""

    @wraps(function)
    def late(*arguments: Any, **options: Any) -> Any:
        if share == 1.0 or _RANDOM.random() < share:
            _delay()
        return function(*arguments, **options)

    return late


def _delay() -> None:
    time.sleep(_RANDOM.uniform(0.0, LONGEST_S))
