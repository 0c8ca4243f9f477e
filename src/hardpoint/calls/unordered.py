"""Completing any number of prompts, from an iterable that may be slow."""

from __future__ import annotations

import collections
import concurrent.futures
from collections.abc import Callable, Iterable, Iterator

from hardpoint.core.frontend.outputs.request_state import rejection
from hardpoint.errors import EngineDeadError, OverloadedError
from hardpoint.plugins import RequestError, RequestOutput, SamplingParams
from hardpoint.plugins.requests import Prompt
from hardpoint.requests import OpenCalls, Outputs, Request
from hardpoint.toolkit.requests.item_reader import ItemReader

__all__ = ["UnorderedCall"]

_Entry = tuple[Prompt, SamplingParams | None]

_GRACE_S = 0.002
"""Wait for an item of an iterable that is not slow, so that the first step has a full batch."""


class UnorderedCall:
    """Any number of prompts; as many are open as the engine has room for."""

    def __init__(
        self,
        calls: OpenCalls,
        entries: Iterable[_Entry],
        prepare: Callable[[Prompt, SamplingParams | None], Request | RequestError],
        window: int,
    ) -> None:
        """Add nothing yet.

        Args:
            entries: prompts with their parameters.
            prepare: returns the request of a prompt, or the error of a wrong one.
            window: requests that are open at the same time.
        """
        self._calls, self._prepare, self._window = calls, prepare, window
        self._source = _Source(entries)
        self._held: collections.deque[tuple[int, Request]] = collections.deque()
        """Those that were refused because too many wait."""
        self._outputs: Outputs = collections.deque()
        self._live: dict[str, tuple[int, Request]] = {}

    def outputs(self) -> Iterator[tuple[int, RequestOutput | RequestError]]:
        """Yield the output of each request, or why it was refused, with its position."""
        try:
            yield from self._fill()
            while self._live or not self._source.is_at_end:
                if self._live and self._has_output():
                    yield from self._next_output()
                yield from self._fill()
        finally:
            self._source.close()
            self._calls.drop_soon(list(self._live))

    def _has_output(self) -> bool:
        """Step until there is an output, or a prompt that there is room for."""
        has_room = len(self._live) < self._window and not self._held
        while not self._outputs:
            if has_room and self._source.is_ready:
                return False
            self._calls.step(self._outputs)
        return True

    def _next_output(self) -> Iterator[tuple[int, RequestOutput | RequestError]]:
        output = self._calls.next_output(self._outputs)
        self._calls.drop([output.request_id])
        entry, rejected = self._live.pop(output.request_id), rejection(output)
        if isinstance(rejected, OverloadedError):
            self._hold(entry, rejected)
        elif isinstance(rejected, RequestError):
            yield entry[0], rejected
        elif rejected is None or isinstance(rejected, EngineDeadError):
            yield entry[0], output
        else:
            raise rejected

    def _fill(self) -> Iterator[tuple[int, RequestError]]:
        """Add requests while there is room; yield rejected ones."""
        while len(self._live) < self._window:
            request: Request | RequestError
            if self._held:
                position, request = self._held.popleft()
            elif (entry := self._source.pop(waits=not self._live)) is not None:
                position, request = entry[0], self._prepare(*entry[1])
            else:
                return
            if isinstance(request, RequestError):
                yield position, request
                continue
            try:
                (request_id,) = self._calls.add([request], self._outputs)
            except OverloadedError as error:
                self._hold((position, request), error)
                return
            except RequestError as error:
                yield position, error
            else:
                self._live[request_id] = position, request

    def _hold(self, entry: tuple[int, Request], error: OverloadedError) -> None:
        if not self._live:
            raise error
        self._held.append(entry)


class _Source:
    """The prompts of an iterable with their positions; a thread reads an iterable that may be slow.

    Attributes:
        is_at_end: whether all were taken.
    """

    def __init__(self, entries: Iterable[_Entry]) -> None:
        self._entries = enumerate(entries)
        is_slow = not isinstance(entries, list | tuple)
        self._reader = ItemReader(self._entries) if is_slow else None
        self._next: concurrent.futures.Future[tuple[int, _Entry] | None] | None = None
        self.is_at_end = False

    @property
    def is_ready(self) -> bool:
        """Whether the thread has read a prompt, or has come to the end."""
        return self._next is not None and self._next.done()

    def pop(self, *, waits: bool) -> tuple[int, _Entry] | None:
        """Return the next prompt; None if there is none.

        Args:
            waits: whether to wait for a prompt, however long it takes.

        Raises:
            BaseException: raised by the iterable.
        """
        if self.is_at_end:
            return None
        if self._reader is None:
            entry = next(self._entries, None)
        else:
            timeout = 0.0
            if self._next is None:
                self._next, timeout = self._reader.ask(), _GRACE_S
            concurrent.futures.wait([self._next], None if waits else timeout)
            if not self._next.done():
                return None
            future, self._next = self._next, None
            entry = future.result()
        self.is_at_end = entry is None
        return entry

    def close(self) -> None:
        """End the thread, once the iterable lets it."""
        if self._reader is not None:
            self._reader.close()
