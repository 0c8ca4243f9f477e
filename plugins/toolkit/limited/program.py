"""The main module of a limited process: sets limits, loads a program, passes requests to it.

A program is a file with a function `start`, which takes the settings of the program and returns a
function from a request to its answer, both bytes. It is run by its path, so it imports no package
of ours unless it asks for one, and starts quickly.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import math
import os
import signal
import struct
import sys
from collections.abc import Callable
from typing import IO, Any

_LENGTH = struct.Struct("<Q")
_PR_SET_PDEATHSIG = 1

Answer = Callable[[bytes], bytes]


def main(program: str, seconds: float, max_bytes: int, settings: dict[str, Any]) -> None:
    """Answer requests until the standard input ends.

    Args:
        program: path of its file.
        seconds: after which a request that is not yet answered ends the process.
        max_bytes: memory that the process may use.
        settings: given to the program.
    """
    if hasattr(signal, "SIGINT"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the caller's
    _continue_after_parent()
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of a library is not an answer
    answer = _load(program)(settings)
    _limit_memory(max_bytes)
    write_frame(answers, b"")
    while (request := read_frame(requests)) is not None:
        _alarm(math.ceil(seconds) + 1)  # the caller ends it earlier, unless it has ended itself
        write_frame(answers, answer(request))
        _alarm(0)


def read_frame(stream: IO[bytes], max_bytes: int | None = None) -> bytes | None:
    """Return the bytes that `write_frame` wrote; None if the stream ends before, or is longer."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    if max_bytes is not None and length > max_bytes:
        return None
    content = stream.read(length)
    return content if len(content) == length else None


def write_frame(stream: IO[bytes], *parts: bytes) -> None:
    """Write bytes after their length."""
    stream.write(_LENGTH.pack(sum(map(len, parts))))
    for part in parts:
        stream.write(part)
    stream.flush()


def _load(program: str) -> Callable[[dict[str, Any]], Answer]:
    specification = importlib.util.spec_from_file_location("limited_program", program)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    start: Callable[[dict[str, Any]], Answer] = module.start
    return start


def _limit_memory(max_bytes: int) -> None:
    try:
        import resource  # noqa: PLC0415
    except ImportError:  # another system than Unix
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    within = max_bytes if hard == resource.RLIM_INFINITY else min(max_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (within, hard))


def _continue_after_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGCONT))


def _alarm(seconds: int) -> None:
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    sys.path[:] = arguments.pop("path")
    main(**arguments)
