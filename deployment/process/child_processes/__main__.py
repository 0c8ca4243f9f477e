"""The program of a child process.

The parent starts this file by its path rather than with `-m`: until the parent's `sys.path` has
arrived over the launch socket, the interpreter may find another Hardpoint, or none. So nothing
but the standard library is imported before that.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

LENGTH = struct.Struct("!Q")
"""The header of each frame on the launch socket: its length in bytes."""

LAUNCH_TIMEOUT_S = 120.0
"""Within which the parent must send the launch, unless its first frame states another limit."""

_PR_SET_PDEATHSIG = 1

_MAX_CHARACTERS = 16_000  # of a message or a traceback, so that a report fits the socket's buffer


def main(run: Callable[..., None] | None = None) -> None:
    """Run a child process.

    An exception is reported to the parent, which raises it; it is not printed here.

    Args:
        run: called with the encoded launch and the parent watch; None is the function that the
            command line names.
    """
    if sys.argv[1:2] != ["--launch-fd"] or not sys.argv[3:4]:
        sys.exit("This program is started by Hardpoint itself.")
    _continue_after_parent()
    channel, name = socket.socket(fileno=int(sys.argv[2])), sys.argv[3]
    channel.set_inheritable(False)
    try:
        began = time.monotonic()
        first = json.loads(_frame(channel, began, LAUNCH_TIMEOUT_S))
        parent = _prepare(first)
        serve, run = _imported(run, name)  # takes seconds, in which the parent prepares the launch
        launch = _frame(channel, began, max(LAUNCH_TIMEOUT_S, first.get("launch_seconds", 0.0)))
        channel.settimeout(None)
        serve(channel, parent, launch, run, functools.partial(_report, channel))
    except SystemExit:
        raise
    except BaseException as error:
        _report(channel, error)
        sys.exit(1)


def _continue_after_parent() -> None:
    """Let the system continue this process, if it is stopped, when its parent has ended.

    It then finds the launch socket closed. Once it has its launch, `parent_death` does more.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGCONT))


def _imported(
    run: Callable[..., None] | None, name: str
) -> tuple[Callable[..., None], Callable[..., None]]:
    from hardpoint.host.system.threads import short_spin  # noqa: PLC0415 - needs the parent's path

    with short_spin():
        from hardpoint.process.child_processes.child import serve  # noqa: PLC0415

        if run is None:
            module, _, function = name.partition(":")
            run = getattr(importlib.import_module(module), function)
        return serve, run


def _prepare(interpreter: dict[str, Any]) -> int:
    sys.path[:] = interpreter["path"]
    sys.argv[:] = interpreter["argv"]
    # Blocked and ignored signals are inherited, and a child relies on these.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    return int(interpreter["pid"])


def _frame(channel: socket.socket, began: float, limit_s: float) -> bytes:
    (length,) = LENGTH.unpack(_read(channel, LENGTH.size, began, limit_s))
    return _read(channel, length, began, limit_s)


def _read(channel: socket.socket, size: int, began: float, limit_s: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        channel.settimeout(max(began + limit_s - time.monotonic(), 0.001))
        try:
            part = channel.recv(min(size - len(data), 1 << 20))
        except TimeoutError:
            raise TimeoutError(
                f"launch: expected {size} bytes within {limit_s:g} s, got {len(data)}"
            ) from None
        if not part:
            sys.exit(1)  # the parent has ended
        data += part
    return bytes(data)


def _text(value: object) -> str:
    try:
        return str(value)[:_MAX_CHARACTERS]
    except BaseException as error:
        return f"(its __str__ raised {type(error).__name__})"


def _report(channel: socket.socket, error: BaseException) -> None:
    """Send the parent an exception; print it only if the parent has ended."""
    formatted = traceback.TracebackException.from_exception(error)
    text, last = "".join(formatted.format()), "".join(formatted.format_exception_only())
    failure = {
        "types": [f"{t.__module__}:{t.__qualname__}" for t in type(error).__mro__],
        "message": _text(error),
        "notes": [_text(note) for note in getattr(error, "__notes__", [])[:3]],
        "traceback": text.removesuffix(last)[-_MAX_CHARACTERS:],
    }
    data = json.dumps(failure).encode()
    try:
        channel.sendall(LENGTH.pack(len(data)) + data)
    except OSError:
        traceback.print_exception(error)


if __name__ == "__main__":
    main()
