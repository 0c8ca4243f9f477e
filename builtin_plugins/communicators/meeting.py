"""A meeting of a group's ranks on one host, to exchange the names of shared memory.

The communicator "shared_memory" is built in it. A rank that cannot take part gives all others its
error, so that `auto` chooses the same communicator in every rank.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from hardpoint.errors import CommunicationAbortedError
from hardpoint.plugins import ModelError
from hardpoint.plugins.parallel import CommunicatorContext

_POLL_SECONDS = 0.002
_RETRY_SECONDS = 0.1
_CONNECT_SECONDS = 1.0  # of one try
_FAILED, _MADE = "!", "="


class RankMissingError(ModelError):
    """A rank did not come in time; nor would it to another communicator."""


def check_abort(context: CommunicatorContext) -> None:
    """End the waiting for other ranks if that has been aborted.

    Raises:
        CommunicationAbortedError: it has.
    """
    if (reason := context.abort_reason()) is not None:
        raise CommunicationAbortedError(
            f"rank {context.rank} waits no longer for the others of group {context.group!r}: "
            f"{reason}"
        )


def wait_for_listener(context: CommunicatorContext, host: str, port: int, deadline: float) -> None:
    """Wait until the worker of rank 0 serves the store.

    Torch would wait as well, but prints a stack with each try, and cannot be aborted.

    Raises:
        RankMissingError: it did not by the deadline.
        CommunicationAbortedError: the meeting was aborted.
    """
    while True:
        check_abort(context)
        try:
            seconds = min(max(deadline - time.monotonic(), 0.1), _CONNECT_SECONDS)
            socket.create_connection((host, port), seconds).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise RankMissingError(
                    f"parallel: group {context.group!r}: rank {context.rank} could not reach the "
                    f"store of rank 0 of the engine at {context.placement.store} within "
                    f"{context.timeout_seconds:g} s: {error}"
                ) from error
            time.sleep(_RETRY_SECONDS)
        else:
            return


class _Board(Protocol):
    """Texts that one rank puts up and others read."""

    def put(self, key: str, text: str) -> None:
        """Put up a text."""

    def get(self, key: str) -> str | None:
        """Return a text, None if it is not there yet."""


class _Files:
    """Texts in a folder, each a file."""

    def __init__(self, folder: Path, group: str) -> None:
        self._folder, self._prefix = folder, f"shared-{group}"

    def put(self, key: str, text: str) -> None:
        path = self._folder / f"{self._prefix}-{key}"
        part = path.with_suffix(".part")
        part.write_text(text)
        part.replace(path)  # whole at once

    def get(self, key: str) -> str | None:
        try:
            return (self._folder / f"{self._prefix}-{key}").read_text()
        except FileNotFoundError:
            return None


class _Store:
    """Texts in a TCPStore of torch, for engines on several hosts."""

    def __init__(self, context: CommunicatorContext, deadline: float) -> None:
        from torch import distributed  # noqa: PLC0415 - slow, and rarely needed

        dist: Any = distributed
        host, _, port = context.placement.store.rpartition(":")
        host = host.strip("[]")
        wait_for_listener(context, host, int(port), deadline)
        timeout = timedelta(seconds=context.timeout_seconds)
        store = dist.TCPStore(host, int(port), timeout=timeout, wait_for_workers=False)
        self._store = dist.PrefixStore(f"shared-{context.group}", store)

    def put(self, key: str, text: str) -> None:
        self._store.set(key, text)

    def get(self, key: str) -> str | None:
        return str(self._store.get(key).decode()) if self._store.check([key]) else None


class Meeting:
    """The ranks of a group while they start."""

    def __init__(self, context: CommunicatorContext) -> None:
        """Open the place where they meet.

        Raises:
            ModelError: there is none.
        """
        self._context = context
        self._deadline = time.monotonic() + context.timeout_seconds
        placement = context.placement
        self._place = placement.folder or placement.store
        if not self._place:
            raise self._error("placement.folder: expected a folder or a store to meet at, got none")
        if placement.folder and not os.path.isdir(placement.folder):
            raise self._error(f"placement.folder: there is no folder {placement.folder!r}")
        try:
            self._board: _Board = (
                _Files(Path(placement.folder), context.group)
                if placement.folder
                else _Store(context, self._deadline)
            )
        except (RuntimeError, OSError, ValueError) as cause:
            raise self._error(f"the store at {self._place} does not answer: {cause}") from cause

    def agree(self, step: str, make: Callable[[], str]) -> list[str]:
        """Return the results of `make` in each rank, once it has returned in all.

        Args:
            step: name of the step. Ranks agree on each name once.
            make: raises an error that keeps this rank from taking part.

        Raises:
            RankMissingError: a rank did not come in time.
            CommunicationAbortedError: the meeting was aborted.
            ModelError: `make` failed in a rank; all ranks get the error.
        """
        rank, size = self._context.rank, self._context.size
        cause: Exception | None = None
        try:
            text = _MADE + make()
        except (RuntimeError, OSError, ValueError, MemoryError) as error:
            cause, text = error, f"{_FAILED}rank {rank}: {error}"
        self._board.put(f"{step}-{rank}", text)
        texts = [self._wait_for(step, other) for other in range(size)]
        failures = [text[1:] for text in texts if text[0] == _FAILED]
        if failures:
            raise self._error("; ".join(failures)) from cause
        return [text[1:] for text in texts]

    def _wait_for(self, step: str, rank: int) -> str:
        while True:
            text = self._board.get(f"{step}-{rank}")
            if text is not None:
                return text
            check_abort(self._context)
            if time.monotonic() > self._deadline:
                missing = [
                    f"rank {other}"
                    for other in range(self._context.size)
                    if self._board.get(f"{step}-{other}") is None
                ]
                raise RankMissingError(
                    f"parallel: group {self._context.group!r}: {', '.join(missing)} did not come "
                    f"to {self._place} within {self._context.timeout_seconds:g} s"
                )
            time.sleep(_POLL_SECONDS)

    def _error(self, text: str) -> ModelError:
        return ModelError(
            f"parallel.communicator: {self._context.name!r} cannot be used for group "
            f"{self._context.group!r}: {text}"
        )
