"""Where tests run the package's Triton kernels."""

from __future__ import annotations

import os


def kernel_device() -> str:
    """Return "cpu" if Triton's interpreter runs the kernels, else "cuda"."""
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
