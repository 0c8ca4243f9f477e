"""A conversation's terminal: the line editor for messages, and answers wrapped as they come."""

from __future__ import annotations

import contextlib
import os
import sys
import termios
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.data_structures import Size
from prompt_toolkit.document import Document
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import CompleteStyle
from wcwidth import wcswidth, wcwidth

__all__ = ["LineEditor", "WrappedOutput"]

_FENCES = ("```", "~~~")
_TAB = 8
_JOINER = "\u200d"
# Control characters of an answer, such as cursor movements, are shown instead of executed.
_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"}
_CONTROLS |= {0x0D: "", 0x7F: "\u2421"} | dict.fromkeys(range(0x80, 0xA0), "\ufffd")


class LineEditor:
    """Reads messages: pasted lines are one, Alt-Enter or a backslash at the end adds a line.

    Earlier messages are kept in memory alone: a conversation may be private.
    """

    def __init__(self, commands: Mapping[str, bool], terminal: TextIO) -> None:
        """Tab completes `commands`, and a path after a command with a true value."""
        # With `enable_cpr` it asks the terminal for the cursor's position, and warns if there is
        # no answer.
        self._output = Vt100_Output(
            terminal, lambda: _size(terminal), term=os.environ.get("TERM"), enable_cpr=False
        )
        self._session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            prompt_continuation="  ",
            key_bindings=_key_bindings(),
            completer=_CommandCompleter(commands),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            enable_suspend=True,
            output=self._output,
        )

    def read(self) -> str:
        """Return the next message.

        Raises:
            EOFError: Ctrl-D was typed.
            KeyboardInterrupt: Ctrl-C was typed.
        """
        try:
            return self._session.prompt()
        finally:  # text pasted during the answer is one message too
            self._output.enable_bracketed_paste()
            self._output.flush()

    @contextlib.contextmanager
    def input_hidden(self) -> Iterator[None]:
        """Keep input typed outside of `read` for the next call, without showing it."""
        stdin = sys.stdin.fileno()
        before = termios.tcgetattr(stdin)
        hidden = [*before]
        hidden[3] &= ~(termios.ECHO | termios.ICANON)
        termios.tcsetattr(stdin, termios.TCSANOW, hidden)
        try:
            yield
        finally:
            self._output.disable_bracketed_paste()
            self._output.flush()
            termios.tcsetattr(stdin, termios.TCSANOW, before)

    def typed(self) -> str:
        """Return the contents of the line when the last `read` ended."""
        return self._session.default_buffer.text


def _key_bindings() -> KeyBindings:
    bindings = KeyBindings()
    bindings.add("enter")(_send)
    bindings.add("escape", "enter")(_add_line)
    return bindings


def _send(event: KeyPressEvent) -> None:
    buffer = event.current_buffer
    if buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):
        buffer.delete_before_cursor()
        _add_line(event)
    else:
        buffer.validate_and_handle()


def _add_line(event: KeyPressEvent) -> None:
    event.current_buffer.newline(copy_margin=False)


class _CommandCompleter(Completer):
    def __init__(self, commands: Mapping[str, bool]) -> None:
        self._commands = commands
        self._paths = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        text = document.text_before_cursor
        name, space, path = text.partition(" ")
        if space and self._commands.get(name):
            yield from self._paths.get_completions(Document(path), complete_event)
        elif text.startswith("/") and not space:
            yield from (Completion(c, -len(text)) for c in self._commands if c.startswith(text))


class WrappedOutput:
    """Writes text to a terminal as it comes, and breaks lines at spaces.

    A word is held until it ends, so that it is never moved. Code blocks are not wrapped. Reasoning
    is dim, and ends with its line.
    """

    def __init__(self, terminal: TextIO, columns: int | None = None) -> None:
        """`columns`: of the terminal; None asks it for each word, as it may be resized."""
        self._terminal, self._columns = terminal, columns
        self._word, self._gap = "", ""
        self._column = 0
        self._width = 0
        self._line_is_empty = True
        self._in_reasoning = False
        self._fence = ""
        """Line that opened the code block, until it is closed."""

    def write(self, text: str, *, reasoning: bool = False) -> None:
        """Write a piece of text, but for its last word."""
        if reasoning is not self._in_reasoning:
            self.end()
            if reasoning:
                self._dim(True)
        for char in text.translate(_CONTROLS):
            if char in " \t\n":
                self._end_word()
                self._gap += char
                if char == "\n":
                    self._end_line()
            else:
                if self._is_break_before(char):
                    self._end_word()
                self._word += char
        self._terminal.flush()

    def end(self) -> None:
        """Write the last word, and end the line if something is on it."""
        self._end_word()
        if self._column:
            self._terminal.write("\n")
        if self._in_reasoning:
            self._dim(False)
        self._terminal.flush()
        self._column, self._gap, self._fence, self._line_is_empty = 0, "", "", True

    def _dim(self, on: bool) -> None:
        self._in_reasoning = on
        if not os.environ.get("NO_COLOR"):
            self._terminal.write("\x1b[2m" if on else "\x1b[0m")

    def _is_break_before(self, char: str) -> bool:
        """Return whether a line may be broken in a word: next to wide characters, as in Chinese."""
        if not self._word or wcwidth(char) == 0 or self._word[-1] == _JOINER:
            return False
        if unicodedata.category(char) in ("Pe", "Pf", "Po"):  # closing punctuation
            return False
        return wcwidth(char) == 2 or wcwidth(self._word[0]) == 2

    def _end_word(self) -> None:
        word, self._word = self._word, ""
        if not word:
            return
        if self._line_is_empty:
            self._line_is_empty = False
            self._see_fence(word)
        columns = self._terminal_columns()
        gap, self._gap = self._gap, ""
        width = max(0, wcswidth(word))
        gap_end = _advance(self._column, gap)
        if self._column and gap_end + width > columns and not self._fence:
            gap, gap_end = "\n", 0
        self._terminal.write(gap + word)
        self._column = gap_end + width
        if self._column > columns:  # the terminal has broken it
            self._column = (self._column - 1) % columns + 1

    def _end_line(self) -> None:
        """Write the end of a line, without the spaces before it unless in a code block."""
        self._terminal.write(self._gap if self._fence else "\n")
        self._gap, self._column, self._line_is_empty = "", 0, True

    def _see_fence(self, word: str) -> None:
        if self._fence:
            if word.startswith(self._fence) and not word.strip(self._fence[0]):
                self._fence = ""
        elif word.startswith(_FENCES):
            info = word.lstrip(word[0])
            self._fence = "" if word[0] in info else word.removesuffix(info)

    def _terminal_columns(self) -> int:
        columns = self._columns or _columns_of(self._terminal)
        if self._width not in (0, columns):  # it was resized, and has moved the text on the line
            self._column = min(self._column, columns)
        self._width = columns
        return columns


def _advance(column: int, gap: str) -> int:
    for char in gap:
        column += _TAB - column % _TAB if char == "\t" else 1
    return column


def _columns_of(terminal: TextIO) -> int:
    """Return a terminal's width; a very large one where it has none."""
    try:
        return os.get_terminal_size(terminal.fileno()).columns or sys.maxsize
    except (OSError, ValueError):
        return sys.maxsize


def _size(terminal: TextIO) -> Size:
    """Return a terminal's size; a usual one where it has none."""
    try:
        columns, rows = os.get_terminal_size(terminal.fileno())
    except OSError:
        columns = rows = 0
    return Size(rows=rows or 24, columns=columns or 80)
