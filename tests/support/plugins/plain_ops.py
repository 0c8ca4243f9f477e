"""Operations with packed weights for the weight cache, on any processor."""

from __future__ import annotations

import torch.nn.functional as F

from hardpoint.plugins import Ops, Wrapper


class PlainOps(Wrapper[Ops], Ops):
    """Operations that keep matrices as they are, on any processor."""

    contract = 1
    devices = ("cpu",)

    class Options(Wrapper.Options):
        wraps: str = "torch"
        layout: str = "rows"

    @property
    def layout(self):
        return self.options.layout

    def pack(self, weight):
        return weight

    def linear(self, packed, shape, bias=None, *, out_dtype=None):
        if packed.shape != shape:
            raise ValueError(f"expected {shape}, got {packed.shape}")
        return lambda x: F.linear(x, packed, bias).to(out_dtype or x.dtype)
