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
        wraps: is used on a CPU, if it runs there with the model's dtype.
        gpu: is used on a GPU, if it runs there with the model's dtype.
        fallback: is used if that does not.
    """

    wraps: str = "native_cpu"
    gpu: str = "triton"
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
        names = self.candidates(context)
        self.wrapped, self._description = _first_that_runs(context, names, self.final_errors)

    @staticmethod
    def candidates(context: Any) -> tuple[str, str]:
        """Return what is tried, and what is used if that does not run."""
        return context.options.wraps, context.options.fallback

    @classmethod
    def wraps(cls, options: Any) -> Sequence[str]:
        """Return what may be chosen."""
        return (options.wraps, options.fallback)

    def describe(self) -> str:
        """Return what was chosen, and why."""
        return self._description


class _ByDevice(Auto):
    """Those whose choice depends on the device."""

    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    @staticmethod
    def candidates(context: Any) -> tuple[str, str]:
        """Return those of the device."""
        options = context.options
        return options.wraps if context.device.type == "cpu" else options.gpu, options.fallback

    @classmethod
    def wraps(cls, options: Any) -> Sequence[str]:
        """Return what may be chosen."""
        return (options.wraps, options.gpu, options.fallback)


class AutoOps(_ByDevice, Wrapper[Ops], Ops):
    """The operations of `native_cpu` on a CPU, of `triton` on a GPU, else those of `torch`."""

    contract = 1
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


class AutoAttention(_ByDevice, Wrapper[AttentionBackend], AttentionBackend):
    """The backend `native_cpu` on a CPU, `triton` on a GPU, else `torch`."""

    contract = 1
    Options = _Options
    context: AttentionContext

    @property
    def replayable(self) -> bool:
        """Whether what was chosen can be recorded."""
        return is_replayable(self.wrapped)


def _first_that_runs(
    context: Any, names: tuple[str, str], final_errors: tuple[type[ModelError], ...]
) -> tuple[Any, str]:
    """Return the component that runs, and its description.

    Args:
        context: builds them.
        names: of what is tried first, and of the fallback.
        final_errors: of the first, after which the fallback is not tried.

    Raises:
        ModelError: the fallback does not run either, or the error of the first is final.
    """
    device, (first, fallback) = context.device.type, names
    try:
        component = context.create(first)
        if device in component.devices:
            return component, component.describe()
        component.close()
        reason = f"{first!r} does not run on {device}"
    except final_errors:
        raise
    except ModelError as cause:
        reason = str(cause)
    component = context.create(fallback)
    return component, f"{component.describe()} ({reason})"
