"""The free file descriptors of this process, which are checked before it opens ZMQ sockets.

libzmq ends the whole program when it gets no descriptor.
"""

from __future__ import annotations

import errno
import os
import resource

from hardpoint.plugins import HardpointError

WANTED_DESCRIPTORS = 32
"""File descriptors that must be free before an engine opens sockets; it takes 18 at most."""


def check_descriptors() -> None:
    """Check that enough file descriptors are free.

    Raises:
        HardpointError: too few are free; the message has the numbers wanted, free and allowed.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = _used_descriptors(limit)
    if limit == resource.RLIM_INFINITY or used is None:
        return
    if (free := limit - used) < WANTED_DESCRIPTORS:
        raise HardpointError(
            f"file descriptors: expected at least {WANTED_DESCRIPTORS} free ones for the sockets "
            f"of an engine, got {free}: the program uses {used} of {limit}; raise its limit "
            "(`ulimit -n`, RLIMIT_NOFILE), or close files"
        )


def _used_descriptors(limit: int) -> int | None:
    try:
        numbers = os.listdir("/dev/fd")
    except OSError as cause:
        return limit if cause.errno == errno.EMFILE else None
    return sum(int(number) < limit for number in numbers) - 1  # one was the listing's own
