"""The results of checks, written to a file one by one, so that a part that is ended keeps them."""

from __future__ import annotations

import contextlib
import enum
import json
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


class Status(enum.StrEnum):
    """How a check ended."""

    PASSED = enum.auto()
    FAILED = enum.auto()
    SKIPPED = enum.auto()
    FAKED = enum.auto()
    """It ran with a fake in place of what only a GPU has, and shows nothing of that."""


@dataclass
class Check:
    """One check.

    Attributes:
        part: the part that it belongs to.
        name: what is checked.
        status: how it ended.
        seconds: its duration.
        detail: what was found.
        faked: what stood in for what only a GPU has.
        problems: why it failed.
        facts: counts and names.
        figures: what was measured, with units in the names; None is not measured.
        aims: aims of the figures.
    """

    part: str
    name: str
    status: Status = Status.PASSED
    seconds: float = 0.0
    detail: str = ""
    faked: str = ""
    problems: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, float | None] = field(default_factory=dict)
    aims: list[dict[str, Any]] = field(default_factory=list)
    is_dry: bool = False

    def expect(self, condition: bool, problem: str) -> None:
        """Let the check fail with `problem` unless the condition holds."""
        if not condition:
            self.problems.append(problem)

    def set_detail(self, detail: str) -> None:
        """Replace the detail, but for the stand-in of a GPU."""
        self.detail = "; ".join(filter(None, [self.faked, detail]))

    def measured(self, **figures: float) -> None:
        """Add figures; in a dry run, that they were not measured."""
        self.figures.update(dict.fromkeys(figures) if self.is_dry else figures)

    def aim(self, name: str, figure: str, at_least: float, *, is_judged: bool = True) -> None:
        """State the target of one of the figures; not judged on a device that it is not for."""
        value = self.figures[figure]
        reached = None if value is None or not is_judged else value >= at_least
        self.aims.append(
            {"name": name, "figure": figure, "at_least": at_least, "value": value}
            | {"reached": reached}
        )

    def fake(self, subject: str) -> None:
        """In a dry run, record the stand-in of a part that needs a GPU."""
        if self.is_dry:
            self.status = Status.FAKED
            self.faked = f"{subject} replaced by a fake"
            self.set_detail("")


class Recorder:
    """Writes the checks of a part to a file, as lines of JSON; threads may share one."""

    def __init__(self, part: str, file: Path, *, is_dry: bool) -> None:
        """Append to a file.

        Args:
            part: name of a part of all checks.
            file: to write.
            is_dry: whether fakes stand in for a GPU.
        """
        self._part = part
        self._file = file
        self._is_dry = is_dry
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def check(self, name: str) -> Iterator[Check]:
        """Give a check for the body to fill, and write it; an exception of the body fails it."""
        check = Check(self._part, name, is_dry=self._is_dry)
        self._write({"begins": name})
        start = time.perf_counter()
        try:
            yield check
        except Exception as error:
            traceback.print_exc()
            check.problems.append(f"{type(error).__name__}: {error}")
        if check.problems:
            check.status = Status.FAILED
        check.seconds = time.perf_counter() - start
        self._write({"check": asdict(check)})

    def skip(self, name: str, why: str) -> None:
        """Write a check that cannot be made."""
        self._write({"check": asdict(Check(self._part, name, Status.SKIPPED, detail=why))})

    def end(self) -> None:
        """Write that the part has come to its end."""
        self._write({"ends": True})

    def _write(self, line: dict[str, Any]) -> None:
        with self._lock, self._file.open("a") as file:
            print(json.dumps(line), file=file)


@dataclass
class Lines:
    """The checks that a part has written so far.

    Attributes:
        checks: checks that ended.
        running: the names of those that have begun and not ended.
        has_ended: whether the part has come to its end.
    """

    checks: list[Check] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    has_ended: bool = False

    @property
    def where(self) -> str:
        """In which checks a process ended, as the rest of a sentence."""
        return f", in {', '.join(map(repr, self.running))}" if self.running else ""

    def read(self, lines: Sequence[str]) -> None:
        """Add lines of the file."""
        for line in map(json.loads, lines):
            if "begins" in line:
                self.running.append(line["begins"])
            elif "check" in line:
                fields = line["check"]
                self.checks.append(Check(**{**fields, "status": Status(fields["status"])}))
                if fields["name"] in self.running:
                    self.running.remove(fields["name"])
            else:
                self.has_ended = True
