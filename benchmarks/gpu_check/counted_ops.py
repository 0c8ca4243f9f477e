"""Operations that count what is recorded, and repeat it in Python where there are no graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from hardpoint.plugins import Ops, Recorded, Wrapper

USE = f"{__name__}:CountedOps"


class CountedOps(Wrapper[Ops], Ops):
    """Does what the wrapped operations do.

    Attributes:
        recorded: bytes of each step that was recorded, since it was cleared.
        repeated: number of steps that were repeated.
    """

    contract = 1
    devices = ("cpu", "cuda")
    recorded: ClassVar[list[int]] = []
    repeated: ClassVar[list[int]] = []

    class Options(Wrapper.Options):
        """What is wrapped.

        Attributes:
            wraps: the operations.
            fake: repeat recorded steps by Python, as no CPU has graphs.
        """

        wraps: str = "triton"
        fake: bool = False

    @property
    def replayable(self) -> bool:
        """Whether `record` works."""
        return True

    def record_sizes(self, max_num_seqs: int) -> Sequence[int]:
        """Return the sizes of recorded steps; those of the fake are few."""
        if self.context.options.fake:
            return [size for size in (1, 2, 4) if size <= max_num_seqs]
        sizes: Sequence[int] = self.wrapped.record_sizes(max_num_seqs)
        return sizes

    def record(self, run: Callable[[], torch.Tensor]) -> Recorded | None:
        """Record, and count."""
        is_fake = self.context.options.fake
        recorded = _Repeated(run) if is_fake else self.wrapped.record(run)
        if recorded is None:
            return None
        self.recorded.append(recorded.num_bytes)
        return _Counted(recorded, self.repeated)


class _Repeated:
    """Operations that are repeated by Python."""

    num_bytes = 0

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        self._run = run
        self._result = run()

    def __call__(self) -> torch.Tensor:
        return self._result.copy_(self._run())


class _Counted:
    """Recorded operations whose calls are counted."""

    def __init__(self, recorded: Recorded, calls: list[int]) -> None:
        self._recorded = recorded
        self._calls = calls
        self.num_bytes = recorded.num_bytes

    def __call__(self) -> torch.Tensor:
        self._calls.append(1)
        return self._recorded()
