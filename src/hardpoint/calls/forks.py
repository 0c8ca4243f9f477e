"""Forks: copies of a request that go on with other outputs."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.plugins import EngineCoreRequest, RequestError

from .streams import RequestForks

if TYPE_CHECKING:
    from hardpoint.process.async_engine import Opened

__all__ = ["OpenRequests"]


class OpenRequests:
    """The requests with open streams, by the user's id; each may be forked."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._families: dict[str, collections.Counter[RequestForks]] = {}
        """Their open streams, counted; requests may share an id."""

    def opener(
        self, params: object, extras: RequestExtras, family: RequestForks | None = None
    ) -> Callable[[str, EngineCoreRequest], Opened]:
        """Return `opened` of a request with these parameters."""
        return functools.partial(self.opened, params, extras, family)

    @contextlib.contextmanager
    def opened(
        self,
        params: object,
        extras: RequestExtras,
        family: RequestForks | None,
        request_id: str,
        request: EngineCoreRequest,
    ) -> Iterator[None]:
        """Let a request be forked while its stream, or a fork's stream, is open.

        Args:
            params: its parameters as they were given.
            extras: its extras.
            family: source of the fork, whose stream may be closed; None begins a family.
            request_id: the user's.
            request: as it was sent.
        """
        if family is None:
            family = RequestForks(request, params, extras, self._clock)
        families = self._families.setdefault(request_id, collections.Counter())
        families[family] += 1
        try:
            yield
        finally:
            families[family] -= 1
            if not families[family]:
                del families[family]
            if not families and self._families.get(request_id) is families:
                del self._families[request_id]

    def aborted(self, request_ids: Iterable[str]) -> None:
        """Let requests have no further forks."""
        for request_id in request_ids:
            self._families.pop(request_id, None)

    def family(self, request_id: str) -> RequestForks:
        """Return an open request with its forks.

        Raises:
            RequestError: no request of that id is open, or several are.
        """
        families = self._families.get(request_id, ())
        if not families:
            raise RequestError(f"request_id: {request_id!r} is not the id of an open request")
        if len(families) > 1:
            raise RequestError(
                f"request_id: {request_id!r} is the id of {len(families)} open requests; give a "
                f"request an id of its own to fork it"
            )
        (family,) = families
        return family
