"""Operations that count recorded and repeated calls."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hardpoint.plugins import Ops, OpsContext, Recorded, Wrapper


class CountedOps(Wrapper[Ops], Ops):
    """Delegates to the wrapped operations, and appends lines to a file."""

    contract = 1
    devices = ("cpu", "cuda")

    class Options(Wrapper.Options):
        """The wrapped component.

        Attributes:
            wraps: the operations.
            file: to append to.
        """

        wraps: str = "triton"
        file: str

    def __init__(self, context: OpsContext) -> None:
        """Open the wrapped operations."""
        super().__init__(context)
        self._file = Path(context.options.file)

    @property
    def replayable(self) -> bool:
        """Whether `record` works."""
        return True

    def record(self, run: Callable[[], torch.Tensor]) -> Recorded | None:
        """Record, and write that down."""
        recorded: Recorded | None = self.wrapped.record(run)
        if recorded is None:
            return None
        self._write({"bytes": recorded.num_bytes, "at": time.time()})
        return _Counted(recorded, lambda: self._write({}))

    def _write(self, line: dict[str, float]) -> None:
        with self._file.open("a") as file:
            print(json.dumps(line), file=file)


class _Counted:
    """Recorded operations with counted calls."""

    def __init__(self, recorded: Recorded, call: Callable[[], None]) -> None:
        self._recorded = recorded
        self._call = call
        self.num_bytes = recorded.num_bytes

    def __call__(self) -> torch.Tensor:
        self._call()
        return self._recorded()


@dataclass(frozen=True)
class Counts:
    """The contents of a file.

    Attributes:
        num_bytes: size in bytes of each recorded step.
        times: at which they were recorded.
        repeated: number of repeated steps.
    """

    num_bytes: list[int]
    times: list[float]
    repeated: int

    @classmethod
    def read(cls, file: Path) -> Counts:
        """Read a file."""
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        recorded = [line for line in lines if line]
        times = [line["at"] for line in recorded]
        return cls([line["bytes"] for line in recorded], times, len(lines) - len(recorded))


def counted(file: Path) -> dict[str, Any]:
    """Return the configuration of engines that count into a new file."""
    file.write_text("")
    use = f"{CountedOps.__module__}:{CountedOps.__qualname__}"
    return {"ops": {"use": use}, "plugin": {"counted_ops": {"file": str(file)}}}
