"""Signals come at any moment, also while their own handler or the loop is at the queue."""

from __future__ import annotations

import json
import subprocess
import sys

STORM = """
import json, queue, signal
from hardpoint.process.engine.loop import LoopQueues, Wakeup

WANTED = 5000
queues, counts = LoopQueues(), {"handled": 0, "woken": 0, "own": 0, "put": 0, "blocked": 0}

def handle(number, frame):
    counts["handled"] += 1
    queues.input.put(Wakeup())

def take(message):
    counts["woken" if isinstance(message, Wakeup) else "own"] += 1

signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
while counts["handled"] < WANTED or counts["blocked"] < 100:
    for _ in range(counts["handled"] % 40):
        queues.input.put(["own"])
        counts["put"] += 1
    try:
        while counts["handled"] % 3:
            take(queues.input.get_nowait())
    except queue.Empty:
        pass
    if queues.input.empty():
        take(queues.input.get(timeout=60))  # as an idle loop does; a signal ends it
        counts["blocked"] += 1
signal.setitimer(signal.ITIMER_REAL, 0)
while not queues.input.empty():
    take(queues.input.get_nowait())
print(json.dumps(counts))
"""


def test_thousands_while_the_queue_is_read_and_written():
    run = subprocess.run(
        [sys.executable, "-c", STORM], capture_output=True, text=True, timeout=300, check=True
    )
    counts = json.loads(run.stdout)
    assert counts["handled"] >= 5000
    assert counts["woken"] == counts["handled"]
    assert counts["own"] == counts["put"]
    assert counts["blocked"] > 50
