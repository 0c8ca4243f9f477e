"""The delays of `scripts/test --stress`."""

from __future__ import annotations

import sys

from support.processes import run
from support.selection import ROOT

FORKED = """
import os
import threading

from support.stress import install

install("1")
if os.fork() == 0:
    install("2")
    ran = []
    threads = [threading.Thread(target=ran.append, args=[number]) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.write(1, str(sorted(ran) == list(range(12))).encode())
    os._exit(0)
os.wait()
"""


def test_threads_of_a_forked_process_run_once(tmp_path):
    """It inherits the delays of its parent."""
    assert run(sys.executable, "-c", FORKED, cwd=tmp_path, path=ROOT / "tests") == "True"
