"""Parsers of the text between two markers, one for each kind of state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hardpoint.plugins.output_parser import (
    ContentText,
    MalformedText,
    OutputEvent,
    ParserRequest,
    ReasoningText,
    ToolCallBegin,
    ToolCallEnd,
)

__all__ = [
    "AfterCall",
    "BeforeAnswer",
    "Beginning",
    "Between",
    "Body",
    "Content",
    "Ignored",
    "Kind",
    "OpenOutput",
    "Reasoning",
    "ToolName",
    "Whole",
]


@dataclass
class OpenOutput:
    """State that the bodies of one output share.

    Attributes:
        request: request of the output.
        tool: name of the call that comes or is open; empty without one.
        call_id: id of that call, where the format has one.
        in_call: whether a call has begun and not ended.
        failed: why the call cannot go on; its text is content then, until something new starts.
        notes: data that a body leaves for another one.
        target: the state to which the marker leads that ends a body; None if the body chooses it.
        has_begun: whether there is a marker of a call that has neither ended nor failed.
    """

    request: ParserRequest
    tool: str = ""
    call_id: str | None = None
    in_call: bool = False
    failed: str = ""
    notes: dict[str, Any] = field(default_factory=dict)
    target: str | None = None
    has_begun: bool = False
    _text: list[str] = field(default_factory=list)  # of the call, before the piece being fed
    _piece: str = ""
    _from: int = 0  # where the call begins in the piece

    @property
    def schema(self) -> Mapping[str, Any]:
        """JSON schema of the arguments of `tool`; empty if the request does not have the tool."""
        return self.request.tools.get(self.tool, {})

    def begin_call(self, events: list[OutputEvent]) -> None:
        """Begin the call of `tool`, if the output has its name.

        Where no calls are to be found, it fails at once: its text is content. So does the call of a
        tool that the request does not have; some models write `functions.` before a name.
        """
        tools, short = self.request.tools, self.tool.removeprefix("functions.")
        if self.tool not in tools and short in tools:
            self.tool = short
        if "tools" not in self.request.roles:
            self.fail_call("", events)
        elif self.tool and tools and self.tool not in tools:
            self.fail_call(f"the request has no tool {self.tool[:100]!r}", events)
        elif self.tool:
            events.append(ToolCallBegin(self.tool, self.call_id))
            self.in_call = True
        self.call_id = None

    def end_call(self, events: list[OutputEvent], at: int = 0) -> None:
        """End the call, if one is open.

        Args:
            events: to add to.
            at: how much of the text that is being fed belongs to it.
        """
        if self.in_call:
            events.append(ToolCallEnd())
        self.in_call, self.tool, self.has_begun = False, "", False
        self._text, self._from = [], at

    def fail_call(self, reason: str, events: list[OutputEvent]) -> None:
        """End a call that cannot go on: its text is content, all that is being fed included."""
        text = "".join(self._text) + self._piece[self._from :]
        self.failed = f"a call is malformed: {reason}"
        if text or self.in_call:
            events.append(self._void(text))
        self._text, self._piece, self._from = [], "", 0
        self.in_call, self.tool, self.call_id, self.has_begun = False, "", None, False

    def warn(self, reason: str, events: list[OutputEvent], text: str = "") -> None:
        """Add the output's warning, and text that is content because of it.

        Where no calls are to be found, there is the text alone.
        """
        if "tools" in self.request.roles:
            events.append(MalformedText(text, reason))
        elif text:
            events.append(ContentText(text))

    def feed_call(self, body: Body, piece: str, events: list[OutputEvent]) -> int:
        """Feed the body of a call, and keep its text, which is content if the call fails."""
        if self.failed:
            events.append(self._void(piece))
            return len(piece)
        self._piece, self._from = piece, 0
        taken = body.feed(piece, events)
        if self.failed:
            return len(piece)
        self._text.append(piece[self._from : taken])
        self._piece, self._from = "", 0
        return taken

    def _void(self, text: str) -> OutputEvent:
        return (
            MalformedText(text, self.failed) if "tools" in self.request.roles else ContentText(text)
        )

    def enter(self, before: Body, body: Body, marker: str, events: list[OutputEvent]) -> None:
        """Go from one body to another, at a marker.

        A marker that starts a call is part of it, also of a failed one.
        """
        reasons = "reasoning" in self.request.roles
        if marker and self.failed and not (body.is_start and body.is_call):
            events.append(self._void(marker))
        elif (
            marker
            and not reasons
            and (isinstance(before, Reasoning) or isinstance(body, Reasoning))
        ):
            events.append(ContentText(marker))
        if body.is_start:
            self.failed = ""
        if body.is_call and not before.is_call:
            self.has_begun = True
        if not body.is_call:
            self._text = []
        elif not self.failed:
            self._text.append(marker)


class Body(ABC):
    """Reads the text of a state; a new one each time that the state is entered.

    Attributes:
        next: the state to go to when the body ends, or at a marker that leads to None.
        is_call: whether its text is part of a call, or may become one.
        is_start: whether a call, or something else, starts here: a failed call before it is over,
            and the marker before it is part of it.
    """

    next: str | None = None
    is_call: ClassVar[bool] = True
    is_start: ClassVar[bool] = False

    def __init__(self, output: OpenOutput) -> None:
        self.output = output

    def open(self, events: list[OutputEvent]) -> None:  # noqa: B027 - most need none
        """Add the events of entering the state."""

    @property
    def quotes(self) -> bool:
        """Whether the text so far ends inside a string; only special tokens are markers there."""
        return False

    @abstractmethod
    def feed(self, text: str, events: list[OutputEvent]) -> int:
        """Take text, and add its events.

        Returns:
            How many characters it took: fewer than all of them where the body ends.
        """

    def close(self, events: list[OutputEvent], *, cut: bool) -> None:  # noqa: B027 - as `open`
        """End the body.

        Args:
            events: to add to.
            cut: whether the output ends here, and no marker.
        """


class Content(Body):
    """Text of the answer."""

    is_call = False
    is_start = True

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        """Take all of it."""
        events.append(ContentText(text))
        return len(text)


class BeforeAnswer(Content):
    """White space before the reasoning or the answer; other text leads to the state `content`."""

    next = "content"

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        """Take white space."""
        space = len(text) - len(text.lstrip())
        if space:
            events.append(ContentText(text[:space]))
        return space


class AfterCall(Content):
    """The answer behind a call: white space before the next call, or at the end, is left out.

    Behind a call that is malformed it is kept: the text of that call is content, too.
    """

    def __init__(self, output: OpenOutput) -> None:
        super().__init__(output)
        self._space: list[str] | None = None if output.failed else []

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        """Process the whole text; white space is pending until the next character."""
        if self._space is None:
            return super().feed(text, events)
        self._space.append(text)
        if not text.isspace():
            waiting, self._space = "".join(self._space), None
            super().feed(waiting, events)
        return len(text)


class Reasoning(Body):
    """Text of the reasoning."""

    is_call = False
    is_start = True

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        """Take all of it."""
        is_found = "reasoning" in self.output.request.roles
        events.append(ReasoningText(text) if is_found else ContentText(text))
        return len(text)


class Beginning(Body):
    """White space at the beginning of an output; the next character selects the state.

    Attributes:
        begins: the state that each character leads to; any other one leads to `content`, to which
            the white space belongs then.
    """

    is_start = True
    begins: ClassVar[Mapping[str, str]]

    def __init__(self, output: OpenOutput) -> None:
        super().__init__(output)
        self._space: list[str] = []

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        """Take white space."""
        rest = text.lstrip()
        space = len(text) - len(rest)
        self._space.append(text[:space])
        if rest:
            self.next = self.begins.get(rest[0], "content")
            if self.next == "content":
                events.append(ContentText("".join(self._space)))
        return space

    def close(self, events: list[OutputEvent], *, cut: bool) -> None:
        """Give white space that nothing followed."""
        if cut:
            events.append(ContentText("".join(self._space)))


class Ignored(Body):
    """Text that belongs to nothing."""

    def feed(self, text: str, events: list[OutputEvent]) -> int:  # noqa: ARG002
        """Take all of it."""
        return len(text)


class Between(Body):
    """White space between calls or messages, which is left out; other text is malformed.

    Attributes:
        reason: the warning about other text.
    """

    reason: ClassVar[str] = "there is text where one is expected"

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        """Take all of it."""
        if not text.isspace():
            self.output.fail_call(self.reason, events)
        return len(text)


class Whole(Body):
    """Text that is needed as a whole: `finish` gets it when the body ends."""

    def __init__(self, output: OpenOutput) -> None:
        super().__init__(output)
        self._parts: list[str] = []

    def feed(self, text: str, events: list[OutputEvent]) -> int:  # noqa: ARG002
        """Take all of it."""
        self._parts.append(text)
        return len(text)

    @abstractmethod
    def finish(self, text: str, events: list[OutputEvent]) -> None:
        """Take the whole text, and add its events."""

    def close(self, events: list[OutputEvent], *, cut: bool) -> None:
        """Give the text, unless the output ends here."""
        if not cut:
            self.finish("".join(self._parts), events)


class Kind(Whole):
    """The kind of a tool, in formats that write it: `function`."""

    def finish(self, text: str, events: list[OutputEvent]) -> None:
        """Check the kind."""
        if text.strip() not in ("", "function"):
            self.output.fail_call(f"expected the kind function, got {text[:100]!r}", events)

    def close(self, events: list[OutputEvent], *, cut: bool) -> None:
        """Check the kind; a truncated kind is malformed."""
        super().close(events, cut=cut)
        if cut:
            self.output.fail_call("the output ended inside it", events)


class ToolName(Body):
    """The name of the tool before its arguments.

    Attributes:
        ends_at: a character that begins the arguments where no marker does.
    """

    is_start = True
    ends_at: str | None = None
    longest: ClassVar[int] = 256

    def __init__(self, output: OpenOutput) -> None:
        super().__init__(output)
        self._text = ""

    def parse(self, text: str) -> tuple[str, str | None]:
        """Return the tool's name, and the call's id if the text has one."""
        return text.strip(), None

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        """Read the name; an overlong name is malformed."""
        end = text.find(self.ends_at) if self.ends_at else -1
        end = end if end >= 0 else len(text)
        self._text += text[:end]
        if len(self._text) > self.longest:
            self.output.fail_call("its name is too long", events)
        return end

    def close(self, events: list[OutputEvent], *, cut: bool) -> None:
        """Leave the name and the id for the arguments."""
        name, call_id = self.parse(self._text)
        if name.split() == [name] and not cut:
            self.output.tool, self.output.call_id = name, call_id
        else:
            reason = "the output ended inside it" if cut else "it has no name"
            self.output.fail_call(reason, events)
