"""The choice of `ops.use` and `attention.use` by default: the fastest that runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

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


class Auto:
    """What such choices share; named before their `Wrapper`.

    Attributes:
        final_errors: of the first that is tried, after which no other is.
    """

    final_errors: ClassVar[tuple[type[ModelError], ...]] = ()

    def __init__(self, context: Any) -> None:
        """Build the component that is chosen."""
        super(Wrapper, self).__init__(context)  # type: ignore[misc] # which builds no other
        self.wrapped, self._description = _first_that_runs(context, self.final_errors)

    @classmethod
    def wraps(cls, options: Any) -> Sequence[str]:
        """Return both."""
        return (options.wraps, options.fallback)

    def describe(self) -> str:
        """Return what was chosen, and why."""
        return self._description


class AutoOps(Auto, Wrapper[Ops], Ops):
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


class AutoAttention(Auto, Wrapper[AttentionBackend], AttentionBackend):
    """The backend `native_cpu` if it runs here, else `torch`."""

    contract = 1
    devices = ("cpu", "cuda")
    Options = _Options
    context: AttentionContext

    @property
    def replayable(self) -> bool:
        """Whether what was chosen can be recorded."""
        return is_replayable(self.wrapped)


def _first_that_runs(context: Any, final_errors: tuple[type[ModelError], ...]) -> tuple[Any, str]:
    """Return the component that runs, and its description.

    Raises:
        ModelError: the fallback does not run either, or the error of the first is final.
    """
    options, device = context.options, context.device.type
    try:
        component = context.create(options.wraps)
        if device in component.devices:
            return component, component.describe()
        component.close()
        reason = f"{options.wraps!r} does not run on {device}"
    except final_errors:
        raise
    except ModelError as cause:
        reason = str(cause)
    component = context.create(options.fallback)
    return component, f"{component.describe()} ({reason})"
