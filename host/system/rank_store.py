"""The store by which ranks on several hosts find each other, served by the worker of rank 0."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import distributed

from hardpoint.errors import HardpointError, ModelError
from hardpoint.plugins.parallel import Placement

_READING_SECONDS = 0.5


@contextmanager
def served_store(rank: int, placement: Placement | None) -> Iterator[None]:
    """Serve the placement's store while the ranks meet; do nothing in other ranks than 0.

    If the body fails, the others have a moment to read why in the store.

    Raises:
        HardpointError: this process cannot listen on the address.
    """
    if rank != 0 or placement is None or not placement.store:
        yield
        return
    host, _, port = placement.store.rpartition(":")
    host = host.strip("[]")
    try:
        # A store that opens its socket by itself listens on all interfaces.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, int(port)), family=family)
    except (OSError, ValueError, OverflowError) as error:
        raise HardpointError(
            f"parallel: rank 0 cannot listen on {placement.store!r}, where the ranks of all hosts "
            f"are to meet: {error}"
        ) from error
    dist: Any = distributed  # its annotations lack TCPStore
    store = dist.TCPStore(
        host,
        int(port),
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    try:
        yield
    except ModelError:
        time.sleep(_READING_SECONDS)
        raise
    finally:
        del store  # which closes the socket
