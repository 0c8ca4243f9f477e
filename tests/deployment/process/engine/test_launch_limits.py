"""A child does not wait for ever if its parent stops in the middle of the launch."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest
from support.core.launch_harness import LIMIT_S

from hardpoint.process.child_processes import process as child_process
from hardpoint.process.child_processes.__main__ import LAUNCH_TIMEOUT_S, LENGTH
from hardpoint.process.child_processes.launch import Interpreter
from hardpoint.process.child_processes.process import FailureReport

PROGRAM = """
from hardpoint.process.child_processes import __main__ as entry
entry.LAUNCH_TIMEOUT_S = 0.1
entry.main(lambda launch, watch: None)
"""
FIRST = Interpreter.current().encode()


def half(frame: bytes) -> bytes:
    return LENGTH.pack(len(frame)) + frame[: len(frame) // 2]


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"", "launch: expected 8 bytes within 0.1 s, got 0"),
        (b"\0\0\0", "launch: expected 8 bytes within 0.1 s, got 3"),
        (half(b"x" * 100), "launch: expected 100 bytes within 0.1 s, got 50"),
        (
            LENGTH.pack(len(FIRST)) + FIRST + half(b"y" * 70_000),
            "launch: expected 70000 bytes within 0.1 s, got 35000",
        ),
    ],
    ids=["nothing", "half a length", "half of the first", "half of the second"],
)
def test_the_child_ends_by_itself(sent, words):
    ours, theirs = socket.socketpair()
    ours.settimeout(LIMIT_S)
    ours.sendall(sent)
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "--launch-fd", str(theirs.fileno()), "unused"],
        pass_fds=(theirs.fileno(),),
        stderr=subprocess.PIPE,
    )
    theirs.close()
    with ours:
        heard = b""
        while part := ours.recv(1 << 16):
            heard += part
        assert child.wait(LIMIT_S) == 1
    assert child.stderr.read() == b""
    child.stderr.close()
    failure = FailureReport.of(heard)
    assert failure.types[0] == "builtins:TimeoutError"
    assert failure.message == words


def test_the_first_frame_may_state_a_longer_limit():
    """A program that reads plugins and a tokenizer for minutes does not lose its process."""
    ours, theirs = socket.socketpair()
    ours.settimeout(LIMIT_S)
    first = Interpreter.current().encode(launch_seconds=3600.0)
    ours.sendall(LENGTH.pack(len(first)) + first)
    program = PROGRAM.replace("entry.main(", "entry._imported = late; entry.main(")
    child = subprocess.Popen(
        [sys.executable, "-c", LATE + program, "--launch-fd", str(theirs.fileno()), "unused"],
        pass_fds=(theirs.fileno(),),
        stdout=subprocess.PIPE,
    )
    theirs.close()
    with ours, child.stdout:
        assert child.stdout.readline() == b"past the limit\n"
        ours.sendall(LENGTH.pack(6) + b"launch")
        assert child.stdout.readline() == b"got b'launch'\n"
        assert child.wait(LIMIT_S) == 0


LATE = """
import time

def late(run, name):
    time.sleep(0.2)  # longer than the default limit, of 0.1 s
    print("past the limit", flush=True)
    return lambda channel, parent, launch, run, report: print("got", launch, flush=True), run
"""


def test_the_limit_is_longer_than_a_parent_takes():
    assert LAUNCH_TIMEOUT_S > child_process._SEND_TIMEOUT_S


def test_time_is_not_given_anew_with_every_byte():
    ours, theirs = socket.socketpair()
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "--launch-fd", str(theirs.fileno()), "unused"],
        pass_fds=(theirs.fileno(),),
    )
    theirs.close()
    with ours:
        ours.sendall(LENGTH.pack(1 << 20))
        until = time.monotonic() + LIMIT_S
        while child.poll() is None:
            assert time.monotonic() < until
            try:
                ours.sendall(b"x")
            except OSError:
                break
            time.sleep(0.02)
        assert child.wait(LIMIT_S) == 1
