"""Leftovers of tests: all of the engine, and none of other programs or libraries."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from pathlib import Path

import pytest
from support.process import harness
from support.shared_memory import our_shared_memory


@pytest.fixture
def make():
    """Make files of shared memory, which are removed in the end."""
    made = []

    def one(beginning):
        made.append(Path("/dev/shm") / f"{beginning}{uuid.uuid4().hex}")
        made[-1].write_bytes(b"content")
        return made[-1]

    yield one
    for path in made:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("beginning", ["hardpoint-", "psm_", "sem.mp-", "torch_"])
def test_what_no_other_program_has_is_ours(make, beginning):
    path = make(beginning)
    assert path.name in our_shared_memory()
    with path.open():
        assert path.name in our_shared_memory()
    path.unlink()
    assert path.name not in our_shared_memory()


def test_what_another_program_has_is_not(make):
    path = make("psm_")
    # It is nobody's child here, once the shell has ended.
    script = f"exec 3<{path}; sleep 60 >/dev/null 2>&1 & echo $!"
    other = int(subprocess.run(["sh", "-c", script], stdout=subprocess.PIPE, check=True).stdout)
    try:
        assert path.name not in our_shared_memory()
    finally:
        os.kill(other, signal.SIGKILL)


def test_files_of_other_names_are_not(make):
    assert make("other-program-").name not in our_shared_memory()


@pytest.mark.parametrize("grpc", ["event_engine", "lifeguard"])
def test_threads_of_the_pool_of_grpc_are_not(monkeypatch, grpc):
    monkeypatch.setattr(harness, "_native_threads", lambda: ["python3", grpc, "ZMQbg/IO/0", grpc])
    assert harness.holdings()["native threads"] == 2
