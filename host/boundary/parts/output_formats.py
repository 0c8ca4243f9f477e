"""The formats of a request's outputs, which step parts have, and the readers of its completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from hardpoint.errors import PluginFaultError, shown
from hardpoint.plugins import (
    CompletionOutput,
    EngineCoreOutput,
    EngineCoreRequest,
    Finish,
    ReasoningMarkers,
    RequestOutput,
)
from hardpoint.plugins.requests import PoolingRequestOutput
from hardpoint.plugins.text import OutputFormat, OutputReader, RequestedCalls

AnyOutput = RequestOutput | PoolingRequestOutput
"""The outputs that users get."""


class BoundFormat(NamedTuple):
    """A format, with the name of its part and the description of the part's faults."""

    part: str
    format: OutputFormat
    describe: Callable[[str, BaseException], str]


class BoundReader:
    """A reader with faults that name its part.

    Attributes:
        special, may_end: see `OutputReader`.
    """

    def __init__(self, bound: BoundFormat, reader: OutputReader) -> None:
        self._bound, self._reader = bound, reader
        self.special, self.may_end = reader.special, reader.may_end

    @property
    def has_calls(self) -> bool:
        """Whether the completion has a complete call of a tool."""
        return self._reader.has_calls

    def update(self, output: EngineCoreOutput) -> None:
        """Observe an output of the engine."""
        self._call("update", output)

    def mark(self, token_id: int, piece: str, end: int) -> None:
        """Observe a special token."""
        self._call("mark", token_id, piece, end)

    def read(self, text: str) -> Finish | None:
        """Read text; return an end of the request."""
        finish: Finish | None = self._call("read", text)
        return finish

    def complete(self, completion: CompletionOutput, *, finished: bool) -> None:
        """Set fields of an output."""
        self._call("complete", completion, finished=finished)

    def result(self, output: RequestOutput) -> AnyOutput | None:
        """Return the replacement of an output."""
        replacement = self._call("result", output)
        if isinstance(replacement, RequestOutput | PoolingRequestOutput | None):
            return replacement
        cause = TypeError(f"expected an output or None, got {shown(replacement)}")
        raise _fault(self._bound, "result", cause)

    def _call(self, method: str, *args: Any, **named: Any) -> Any:
        try:
            return getattr(self._reader, method)(*args, **named)
        except PluginFaultError:  # of a component that the part asks
            raise
        except BaseException as cause:
            raise _fault(self._bound, method, cause) from cause


class OutputFormats:
    """The formats of one request's outputs, for as long as somebody holds them.

    Attributes:
        markers, calls, answer: see `OutputFormat`; of the first format that has some.
        requested: the tools of the request; None without any.
    """

    def __init__(
        self,
        formats: Sequence[BoundFormat],
        markers: ReasoningMarkers | None = None,
        requested: RequestedCalls | None = None,
    ) -> None:
        self._formats, self._holders = formats, 1
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
            try:
                reader = bound.format.open(request)
                if reader is not None and not isinstance(reader, OutputReader):
                    raise TypeError(f"expected an OutputReader or None, got {shown(reader)}")
            except PluginFaultError:
                raise
            except BaseException as cause:
                raise _fault(bound, "open", cause) from cause
            if reader is not None:
                readers.append(BoundReader(bound, reader))
        return readers

    def hold(self) -> OutputFormats:
        """Return them to another holder, who closes them too: a completion, for example."""
        self._holders += 1
        return self

    def close(self) -> None:
        """Close the formats, once the last holder has closed them."""
        self._holders -= 1
        if self._holders == 0:
            with ExitStack() as stack:
                for bound in self._formats:
                    stack.callback(bound.format.close)


def _fault(bound: BoundFormat, method: str, cause: BaseException) -> PluginFaultError:
    """Return the fault of a method; raise the cause if it is not a fault."""
    fault = PluginFaultError(bound.describe(method, cause))
    fault.plugin = bound.part
    return fault
