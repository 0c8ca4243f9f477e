"""NormalFloat of four bits (QLoRA, arXiv:2305.14314), made when a model is loaded."""

from __future__ import annotations

from typing import Annotated

import torch
from msgspec import Meta

from hardpoint import plugins
from hardpoint.plugins import Quantization
from hardpoint.plugins.quantization import AffineCodes, QuantizedWeight

# Quantiles of the normal distribution, scaled to -1 to 1.
_VALUES = torch.tensor([
    -1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0,
    0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0,
]).bfloat16().float()  # fmt: skip


class NF4(Quantization):
    """Codes of four bits; in each group of columns, the largest weight is 1 or -1 times a scale."""

    contract = 1

    class Options(plugins.Options):
        """Options.

        Attributes:
            group: columns that share a scale, a multiple of 32.
        """

        group: Annotated[int, Meta(ge=32, multiple_of=32)] = 64

    options: Options

    def quantize(self, weight: torch.Tensor) -> AffineCodes:
        """Return the code of the nearest value for each weight."""
        rows, columns = weight.shape
        group = self.options.group
        groups = torch.nn.functional.pad(weight, (0, -columns % group)).view(rows, -1, group)
        scales = groups.abs().amax(2)
        limits = (_VALUES[1:] + _VALUES[:-1]) / 2
        unit = groups / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(2)
        codes = torch.bucketize(unit, limits, out_int32=True).to(torch.uint8)
        codes = codes.flatten(1)[:, :columns].contiguous()
        return AffineCodes(codes, 4, group, scales, values=_VALUES)

    def alignment(self, shape: tuple[int, int], stored: QuantizedWeight | None = None) -> int:  # noqa: ARG002
        """Return the size of the groups."""
        return self.options.group

    def stored_bytes(self, shape: tuple[int, int]) -> int:
        """Return the bytes of codes and scales."""
        rows, columns = shape
        return rows * (columns // 2 + 4 * -(-columns // self.options.group))
