"""The choice of `ops.use` and `attention.use` by default: the fastest that runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hardpoint.plugins import (
    AttentionBackend,
    AttentionContext,
    ModelError,
    Ops,
    OpsContext,
    Recorded,
    Wrapper,
    is_replayable,
)

if TYPE_CHECKING:
    import torch


class _Options(Wrapper.Options):
    """What is tried.

    Attributes:
        wraps: is used if it runs on the device, with the model's dtype.
        fallback: is used if that does not.
    """

    wraps: str = "native_cpu"
    fallback: str = "torch"


class _Auto:
    """What both choices share; named before their `Wrapper`."""

    def __init__(self, context: Any) -> None:
        """Build the component that is chosen."""
        super(Wrapper, self).__init__(context)  # type: ignore[misc] # which builds no other
        self.wrapped, self._description = _first_that_runs(context)

    @classmethod
    def wraps(cls, options: _Options) -> Sequence[str]:
        """Return both."""
        return (options.wraps, options.fallback)

    def describe(self) -> str:
        """Return what was chosen, and why."""
        return self._description


class AutoOps(_Auto, Wrapper[Ops], Ops):
    """The operations of `native_cpu` if they run here, else those of `torch`."""

    contract = 1
    devices = ("cpu", "cuda")
    Options = _Options
    context: OpsContext

    @property
    def replayable(self) -> bool:
        """Whether what was chosen can be recorded."""
        return is_replayable(self.wrapped)

    def record(self, run: Callable[[], torch.Tensor]) -> Recorded | None:
        """Let what was chosen record."""
        wrapped: Ops = self.wrapped
        return wrapped.record(run)


class AutoAttention(_Auto, Wrapper[AttentionBackend], AttentionBackend):
    """The backend `native_cpu` if it runs here, else `torch`."""

    contract = 1
    devices = ("cpu", "cuda")
    Options = _Options
    context: AttentionContext

    @property
    def replayable(self) -> bool:
        """Whether what was chosen can be recorded."""
        return is_replayable(self.wrapped)


def _first_that_runs(context: Any) -> tuple[Any, str]:
    """Return the component that runs, and its description.

    Raises:
        ModelError: the fallback does not run either.
    """
    options, device = context.options, context.device.type
    try:
        component = context.create(options.wraps)
        if device in component.devices:
            return component, component.describe()
        component.close()
        reason = f"{options.wraps!r} does not run on {device}"
    except ModelError as cause:
        reason = str(cause)
    component = context.create(options.fallback)
    return component, f"{component.describe()} ({reason})"
