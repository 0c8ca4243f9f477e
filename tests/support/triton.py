"""Where tests run the package's Triton kernels, and how they search."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import Phase, settings

from hardpoint.plugins import Ops, OpsContext
from support.searching import searches_long
from support.triton_interpreter import speed_up

# Shrinking calls a kernel some hundred times, which takes minutes in the interpreter, and on a GPU,
# where each size may be compiled again. What was found is printed as it is.
_PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


def kernel_device() -> str:
    """Return "cpu" if Triton's interpreter runs the kernels, else "cuda"."""
    from hardpoint.kernels.triton.launch import is_interpreted

    if not is_interpreted():
        return "cuda"
    speed_up()
    return "cpu"


def triton_ops(dtype: torch.dtype, **options: Any) -> Ops:
    """Return the operations `triton`, with options, where kernels run."""
    from hardpoint.builtin_plugins.ops.triton import TritonOps

    context = OpsContext(
        name="triton",
        options=TritonOps.Options(**options),
        device=torch.device(kernel_device()),
        dtype=dtype,
    )
    return TritonOps(context)


def kernel_examples(count: int, nightly: int) -> settings:
    """Return settings with so many examples in the profiles `ci` and `nightly`, not shrunk."""
    return settings(max_examples=nightly if searches_long() else count, phases=_PHASES)
