"""Where Triton's kernels run, and the types and parameters with which they are compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

__all__ = ["TritonUnavailableError", "Variant", "check_device", "is_interpreted", "power_of_2"]

INTERPRETER = "TRITON_INTERPRET"
"""Environment variable of Triton: with 1 (or "true", "on", "yes"), an interpreter runs kernels."""


class TritonUnavailableError(Exception):
    """Triton's kernels cannot run on a device; the message gives the reason."""


@dataclass(frozen=True)
class Variant:
    """One way to compile a kernel; `VARIANTS` of each module lists the ones that matter.

    Attributes:
        name: in the table of compiled kernels, "rms_norm, bf16, 4096 columns" for example.
        kernel: a function that `triton.jit` decorates.
        types: types of its arguments that are not constants, by name: "*bf16", "*i64", "i32",
            "fp32". Pointers are taken to be divisible by 16, and numbers that end in ":16", too.
        constants: values of its `tl.constexpr` arguments.
        num_warps, num_stages: as for the launch.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2


def is_interpreted() -> bool:
    """Return whether kernels are run by Triton's interpreter, on a CPU, slowly."""
    return bool(triton.knobs.runtime.interpret)


def check_device(device: torch.device) -> None:
    """Check that kernels can run on tensors of a device; on a GPU, load Triton's driver.

    Raises:
        TritonUnavailableError: they cannot.
    """
    if is_interpreted() != (device.type == "cpu"):
        if device.type == "cpu":
            message = f"they run on GPUs, and on a CPU in Triton's interpreter ({INTERPRETER}=1)"
        else:
            message = f"{INTERPRETER}=1 has the CPU interpret them, and the device is {device}"
        raise TritonUnavailableError(message)
    if device.type not in ("cpu", "cuda"):
        raise TritonUnavailableError(f"they run on cuda, and the device is {device}")
    if device.type == "cuda":
        try:
            triton.runtime.driver.active.get_current_target()
        except Exception as cause:  # a compiler fails in many ways
            raise TritonUnavailableError(
                "Triton cannot load its driver for the GPU, for which it needs a C compiler and "
                f"Python's headers (Python.h): {type(cause).__name__}: {cause}"
            ) from cause


def power_of_2(count: int) -> int:
    """Return the smallest power of 2 that is at least `count`."""
    return int(triton.next_power_of_2(count))
