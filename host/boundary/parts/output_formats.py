"""The formats of a request's outputs, which step parts have, and the readers of its completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import msgspec

from hardpoint.errors import PluginFaultError, shown
from hardpoint.plugins import EngineCoreRequest, FinishReason, ReasoningMarkers, RequestOutput
from hardpoint.plugins.requests import PoolingRequestOutput
from hardpoint.plugins.text import OutputFormat, OutputReader, RequestedCalls

AnyOutput = RequestOutput | PoolingRequestOutput
"""The outputs that users get."""


class BoundFormat(NamedTuple):
    """A format, with the name of its part and the description of the part's faults."""

    part: str
    format: OutputFormat
    describe: Callable[[str, BaseException], str]

    def call(
        self, target: OutputFormat | OutputReader, method: str, *args: Any, **more: Any
    ) -> Any:
        """Return the result of a method of the format or of a reader.

        Raises:
            PluginFaultError: it failed.
        """
        try:
            return getattr(target, method)(*args, **more)
        except PluginFaultError:  # of a component that the part asks
            raise
        except BaseException as cause:
            raise self.fault(method, cause) from cause

    def fault(self, method: str, cause: BaseException) -> PluginFaultError:
        """Return the fault of a method; raise the cause if it is not a fault."""
        fault = PluginFaultError(self.describe(method, cause))
        fault.plugin = self.part
        return fault


class BoundReader:
    """A reader with faults that name its part.

    Attributes:
        special, may_end, update, mark, read, complete: see `OutputReader`.
    """

    def __init__(self, bound: BoundFormat, reader: OutputReader) -> None:
        self._bound, self._reader = bound, reader
        self.special, self.may_end = reader.special, reader.may_end
        self.update, self.mark, self.read, self.complete = (
            partial(bound.call, reader, method) for method in ("update", "mark", "read", "complete")
        )

    @property
    def has_calls(self) -> bool:
        """Whether the completion has a complete call of a tool."""
        return self._reader.has_calls

    def result(self, output: RequestOutput) -> AnyOutput | None:
        """Return the replacement of an output."""
        replacement = self._bound.call(self._reader, "result", output)
        if isinstance(replacement, RequestOutput | PoolingRequestOutput | None):
            return replacement
        cause = TypeError(f"expected an output or None, got {shown(replacement)}")
        raise self._bound.fault("result", cause)


class OutputFormats:
    """The formats of one request's outputs, for as long as somebody holds them.

    Attributes:
        markers, calls, answer: see `OutputFormat`; of the first format that has some. Without
            tools, there are no marks of calls.
        requested: the tools of the request; None without any.
    """

    def __init__(
        self,
        formats: Sequence[BoundFormat],
        markers: ReasoningMarkers | None = None,
        requested: RequestedCalls | None = None,
    ) -> None:
        self._formats, self._holders = formats, 1
        self._reasons = set[FinishReason | None]()
        if markers is not None and requested is None:
            markers = msgspec.structs.replace(markers, calls=())
        self.markers, self.requested = markers, requested
        with_calls = (bound.format for bound in formats if bound.format.calls is not None)
        finding = next(with_calls, OutputFormat())
        self.calls, self.answer = finding.calls, finding.answer

    def open(self, request: EngineCoreRequest) -> list[BoundReader]:
        """Return the readers of one completion.

        Raises:
            PluginFaultError: a format failed.
        """
        readers = []
        for bound in self._formats:
            reader = bound.call(bound.format, "open", request)
            if reader is not None:
                if not isinstance(reader, OutputReader):
                    cause = TypeError(f"expected an OutputReader or None, got {shown(reader)}")
                    raise bound.fault("open", cause)
                readers.append(BoundReader(bound, reader))
        return readers

    def hold(self) -> OutputFormats:
        """Return them to another holder, who closes them too: a completion, for example."""
        self._holders += 1
        return self

    def close(self, reason: FinishReason | None = None) -> None:
        """End and close the formats, once the last holder has closed them.

        Args:
            reason: why the completion ended, if the holder is one.

        Raises:
            PluginFaultError: a format failed; all were closed.
        """
        self._reasons.add(reason)
        self._holders -= 1
        if self._holders == 0:
            with ExitStack() as stack:
                for bound in self._formats:
                    stack.callback(bound.call, bound.format, "close")
                    stack.callback(bound.call, bound.format, "end", _outcome(self._reasons))


def _outcome(reasons: set[FinishReason | None]) -> str:
    """Return how a request ended, from the reasons of its completions; it has none if rejected."""
    if FinishReason.ERROR in reasons or reasons == {None}:
        return "failed"
    early = (FinishReason.ABORT, FinishReason.TIMEOUT)
    return "finished" if reasons.isdisjoint(early) else "aborted"
