"""Operations by their formulas."""

import torch
import torch.nn.functional as F

from hardpoint.plugins import Ops


class CompatOps(Ops):
    """Computes in float32 and rounds once; matrices are packed as columns."""

    contract = 1
    devices = ("cpu",)

    def describe(self):
        return f"{self.name} ({self.context.device.type}, {self.context.dtype})"

    def pack(self, weight):
        return weight.T.contiguous()

    def linear(self, packed, shape, bias=None, *, out_dtype=None):
        assert tuple(packed.shape) == (shape[1], shape[0])
        matrix = packed.float()
        added = 0.0 if bias is None else bias.float()
        dtype = out_dtype or self.context.dtype

        def multiply(x):  # row by row, so that no row depends on how many there are
            rows = [row.float() @ matrix + added for row in x]
            return torch.stack(rows).to(dtype) if rows else x.new_empty(0, shape[0], dtype=dtype)

        return multiply

    def gather_rows(self, table, ids):
        return table.index_select(0, ids)

    def rms_norm(self, x, weight, eps):
        wide = x.float()
        scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        return (wide * scale * weight.float()).to(x.dtype)

    def add_rms_norm(self, x, delta, weight, eps):
        self.add(x, delta)
        return self.rms_norm(x, weight, eps)

    def rotate(self, x, angles):
        cos, sin = angles.unsqueeze(1).chunk(2, -1)
        a, b = x.float().chunk(2, -1)
        x.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))

    def silu_and_mul(self, x):
        gate, up = x.float().chunk(2, -1)
        return (F.silu(gate) * up).to(x.dtype)

    def gelu_and_mul(self, x):
        gate, up = x.float().chunk(2, -1)
        return (F.gelu(gate, approximate="tanh") * up).to(x.dtype)

    def keep_min_p(self, logits, p):
        best = logits.amax(-1, keepdim=True)
        keep = (logits >= best + p.log()) | (p <= 0) | ~best.isfinite()
        logits.masked_fill_(~keep, float("-inf"))
