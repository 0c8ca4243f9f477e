"""What the plugins that run this package's C++ kernels share."""

from __future__ import annotations

from hardpoint.kernels import cpu
from hardpoint.plugins import AttentionContext, ModelError, OpsContext


def load_kernels(context: AttentionContext | OpsContext, path: str) -> cpu.Library:
    """Load the kernels for a component.

    Args:
        context: the component's.
        path: of the configuration, which names the component.

    Raises:
        ModelError: they cannot run here, or there are none for the dtype.
    """
    if context.dtype not in cpu.DTYPES:
        raise ModelError(
            f"{path}: {context.name!r} computes in {', '.join(cpu.DTYPES.values())}, the model's "
            f"dtype is {str(context.dtype).removeprefix('torch.')}"
        )
    try:
        return cpu.load()
    except cpu.KernelsUnavailableError as cause:
        raise ModelError(f"{path}: {context.name!r} cannot be used: {cause}") from cause
