"""How the ranks of a group find each other: a private file on one host, a store between several."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from torch import distributed

from hardpoint.errors import ModelError
from hardpoint.plugins.parallel import CommunicatorContext

from .meeting import RankMissingError, check_abort, wait_for_listener

T = TypeVar("T")

dist: Any = distributed  # most of its annotations are missing

_LOOPBACK = "127.0.0.1"
_POLL_SECONDS = 0.005


class Rendezvous:
    """Where the ranks of a group meet.

    Attributes:
        address: address of this rank, the only one it listens on.
        store: key-value store of the group alone.
    """

    def __init__(self, context: CommunicatorContext) -> None:
        """Open the store.

        Raises:
            ModelError: it does not open; the message names it.
        """
        self._context = context
        self._deadline = time.monotonic() + context.timeout_seconds
        placement = context.placement
        if not placement.is_one_host and len(placement.addresses) != context.size:
            raise self._error(
                f"placement.addresses: expected an IP address per rank for ranks on several "
                f"hosts, got {list(placement.addresses)}"
            )
        self.address = _LOOPBACK if placement.is_one_host else placement.addresses[context.rank]
        self._place = placement.folder or placement.store
        store = self._file_store() if placement.folder else self._tcp_store()
        store.set_timeout(timedelta(seconds=context.timeout_seconds))
        self.store = dist.PrefixStore(context.group, store)

    def remaining(self) -> timedelta:
        """Return how long to wait at most, at least a moment."""
        return timedelta(seconds=max(self._deadline - time.monotonic(), 0.1))

    def agree(self, make: Callable[[], T], step: str) -> T:
        """Return the result of `make`, once it has returned in all ranks.

        Args:
            make: raises an error that keeps this rank from taking part.
            step: name of the step. Ranks agree on each name once.

        Raises:
            ModelError: it failed in a rank, or a rank did not come in time.
            CommunicationAbortedError: the meeting was aborted.
        """
        failure = ""
        made: list[T] = []
        try:
            made.append(make())
        except (RuntimeError, OSError) as error:
            failure = f"rank {self._context.rank}: {_first_line(error)}"
        try:
            self.store.set(f"{step}/{self._context.rank}", failure or "ready")
            failures = self._wait_for_all(step)
        except dist.DistError as error:
            raise self._error(
                f"the store at {self._place} has ended: {_first_line(error)}"
            ) from error
        if failures:
            raise self._error("; ".join(failures))
        return made[0]

    def _wait_for_all(self, step: str) -> list[str]:
        missing = list(range(self._context.size))
        failures = []
        while True:
            for rank in list(missing):
                if self.store.check([f"{step}/{rank}"]):
                    missing.remove(rank)
                    outcome = self.store.get(f"{step}/{rank}").decode()
                    failures += [outcome] if outcome != "ready" else []
            if not missing:
                return failures
            check_abort(self._context)
            if time.monotonic() > self._deadline:
                raise self._missing(
                    f"{', '.join(map(self._rank_name, missing))} did not come to {self._place} "
                    f"within {self._context.timeout_seconds:g} s"
                )
            time.sleep(_POLL_SECONDS)

    def _rank_name(self, rank: int) -> str:
        placement = self._context.placement
        if placement.is_one_host:
            return f"rank {rank}"
        return f"rank {rank} ({placement.hosts[rank]}, {placement.addresses[rank]})"

    def _file_store(self) -> Any:
        if not Path(self._place).is_dir():
            raise self._error(f"placement.folder: there is no folder {self._place!r}")
        return dist.FileStore(f"{self._place}/torch-{self._context.group}", self._context.size)

    def _tcp_store(self) -> Any:
        host, _, port = self._place.rpartition(":")
        if not host or not port.isdigit():
            raise self._error(
                f"placement.store: expected host:port where there is no folder, got {self._place!r}"
            )
        host = host.strip("[]")
        wait_for_listener(self._context, host, int(port), self._deadline)
        try:
            return dist.TCPStore(host, int(port), timeout=self.remaining(), wait_for_workers=False)
        except (RuntimeError, OSError) as error:
            raise self._error(f"the store at {self._place}: {_first_line(error)}") from error

    def _missing(self, text: str) -> RankMissingError:
        return RankMissingError(f"parallel: group {self._context.group!r}: {text}")

    def _error(self, text: str) -> ModelError:
        return ModelError(f"parallel: group {self._context.group!r}: {text}")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
