"""Checks that the plugins share which run this package's Triton kernels."""

from __future__ import annotations

import torch

from hardpoint.errors import install_command
from hardpoint.plugins import AttentionContext, ModelError, OpsContext

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def load_kernels(context: AttentionContext | OpsContext, path: str) -> bool:
    """Import the kernels for a component; return whether they are interpreted, on a CPU.

    Args:
        context: the component's.
        path: path in the configuration, which names the component.

    Raises:
        ModelError: they cannot run here, or there are none for the dtype.
    """
    if context.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ModelError(
            f"{path}: {context.name!r} computes in {names}, the model's dtype is "
            f"{str(context.dtype).removeprefix('torch.')}"
        )
    try:
        from hardpoint.kernels.triton import launch  # noqa: PLC0415 - few machines have it
    except ImportError as cause:
        raise ModelError(
            f"{path}: {context.name!r} needs triton, which cannot be imported ({cause}); "
            f"{install_command('gpu')}"
        ) from cause
    try:
        launch.check_device(context.device)
    except launch.TritonUnavailableError as cause:
        raise ModelError(f"{path}: {context.name!r} cannot be used: {cause}") from cause
    return launch.is_interpreted()
