"""Work of threads that changes the folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *arguments: object) -> T:
    """Return the result of a function that a thread runs.

    A task that is cancelled waits for its end all the same: nothing is left half-way, and what the
    task held is held until no thread uses it.

    Raises:
        Exception: raised by the function.
    """
    work = asyncio.get_running_loop().run_in_executor(None, function, *arguments)
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return work.result()
