"""How an engine process shows itself to people: its name in process lists, and its log lines."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

__all__ = ["engine_name", "log_as", "name_process"]

_COMM = Path("/proc/self/comm")


def engine_name(index: int) -> str:
    """Return the name of an engine: the first one of a program is just called EngineCore."""
    return f"EngineCore_DP{index}" if index else "EngineCore"


def name_process(name: str) -> None:
    """Have process lists show a name, cut to 15 characters; only on Linux."""
    with contextlib.suppress(OSError):  # other systems have no such file
        _COMM.write_text(name)


def log_as(index: int, level: str) -> None:
    """Write the log to stderr, every line with the engine's index and process id before it.

    Args:
        index: of the engine.
        level: of the logger "hardpoint".
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Labelled(f"[EngineCore {index}, pid {os.getpid()}] "))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("hardpoint").setLevel(level)


class _Labelled(logging.Formatter):
    def __init__(self, label: str) -> None:
        super().__init__("%(levelname)s: %(message)s")
        self._label = label

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(self._label + line for line in super().format(record).split("\n"))
