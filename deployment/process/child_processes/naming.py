"""How a child process shows itself: its name in process lists, and the label of its log."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

_COMM = Path("/proc/self/comm")


def name_process(name: str) -> None:
    """Set the name in process lists, cut to 15 characters; only on Linux."""
    with contextlib.suppress(OSError):  # other systems have no such file
        _COMM.write_text(name)


def log_to_stderr(label: str, level: str) -> None:
    """Write the log to stderr; each line begins with a label and the process id.

    Args:
        label: names the process: "EngineCore 0" for example.
        level: level of the logger "hardpoint".
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Labelled(f"[{label}, pid {os.getpid()}] "))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("hardpoint").setLevel(level)


class _Labelled(logging.Formatter):
    def __init__(self, label: str) -> None:
        super().__init__("%(levelname)s: %(message)s")
        self._label = label

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(self._label + line for line in super().format(record).split("\n"))
