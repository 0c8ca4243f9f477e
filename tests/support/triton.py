"""Where tests run the package's Triton kernels, and how they search."""

from __future__ import annotations

from hypothesis import Phase, settings

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


def kernel_examples(count: int, nightly: int) -> settings:
    """Return settings with so many examples in the profiles `ci` and `nightly`, not shrunk."""
    return settings(max_examples=nightly if searches_long() else count, phases=_PHASES)
