"""The program's standard streams: their encoding, and output of messages to them."""

from __future__ import annotations

import codecs
import io
import json
import logging
import os
import sys
import time
from types import TracebackType

from hardpoint.plugins import HardpointError, RequestError

__all__ = ["Messages", "discard_unwritten", "prepare_streams"]

_QUIET = "quiet"
_VERBOSE = "verbose"
_REFUSE = "hardpoint-refuse"
_VERBOSE_LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def prepare_streams() -> None:
    """Make the standard streams usable, whatever they are.

    One that was closed when the program started stands for /dev/null; its descriptor is taken too,
    so that no file gets what is meant for a standard stream. What the encoding of the output lacks
    is printed as escapes. Input that is no text raises a RequestError.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open to the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    codecs.register_error(_REFUSE, _refuse_bytes)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors=_REFUSE)


def discard_unwritten() -> None:
    """Make the interpreter's own last flush of the standard streams succeed."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _refuse_bytes(error: UnicodeError) -> tuple[str, int]:
    """Say which bytes of standard input are no text; a codec error handler."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    before = error.object[max(0, error.start - 20) : error.start].decode(error.encoding, "replace")
    raise RequestError(
        f"standard input: byte 0x{error.object[error.start]:02x} "
        f"{f'after {before!r}' if before else 'at the start'} is not {error.encoding}; convert the "
        "text, with iconv for one"
    )


class Messages:
    """The program's messages on standard error: errors and the log, in the form asked for."""

    def __init__(self, verbosity: str | None = None, log_format: str | None = None) -> None:
        """`verbosity`: "quiet", "verbose" or None. `log_format`: "json", "text" or None."""
        self.quiet = verbosity == _QUIET
        self._as_json = log_format == "json"
        self._handler = logging.StreamHandler()
        self._handler.setFormatter(
            _JsonLines()
            if self._as_json
            else logging.Formatter(
                _VERBOSE_LINE if verbosity == _VERBOSE else "hardpoint: %(message)s"
            )
        )
        self._log = logging.getLogger("hardpoint")
        self._level_before = self._log.level
        if verbosity is not None:
            self._log.setLevel(logging.ERROR if self.quiet else logging.DEBUG)
        elif log_format is not None:
            self._log.setLevel(logging.INFO)
        self._level_is_chosen = verbosity is not None or log_format is not None

    def __enter__(self) -> Messages:
        self._log.addHandler(self._handler)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._log.removeHandler(self._handler)
        self._log.setLevel(self._level_before)

    def show_log(self) -> None:
        """Show the engine's log at start, unless the command line has chosen otherwise."""
        if not self._level_is_chosen:
            self._log.setLevel(logging.INFO)

    def error(self, message: str, usage: str = "") -> None:
        """Write an error as one line, and below it the usage of a command."""
        line = " ".join(message.split())
        if self._as_json:
            record = logging.LogRecord("hardpoint", logging.ERROR, "", 0, line, None, None)
            text = _JsonLines().format(record)
        elif usage and not self.quiet:
            text = f"hardpoint: error: {line}\n{usage}"
        else:
            text = f"hardpoint: error: {line}"
        print(text, file=sys.stderr)

    def failed(self, error: HardpointError) -> int:
        """Write an error; return its exit code."""
        self.error(str(error), getattr(error, "usage", ""))
        return 2


class _JsonLines(logging.Formatter):
    """One JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)
