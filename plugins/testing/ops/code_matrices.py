"""Random matrices of codes, of every form that operations may get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hardpoint.plugins.quantization import AffineCodes


@dataclass(frozen=True)
class CodesKind:
    """A form of `AffineCodes`.

    Attributes:
        name: name in messages.
        bits, group: bits of a code, and columns that share a scale.
        dtype: dtype of scales; 8 bits have outer ones.
        has_offsets: whether there are offsets, in the dtype of scales.
        has_values: whether codes stand for numbers of a table.
    """

    name: str
    bits: int
    group: int
    dtype: torch.dtype
    has_offsets: bool = False
    has_values: bool = False

    def draw(self, rows: int, columns: int, generator: torch.Generator) -> AffineCodes:
        """Return a random matrix."""
        low, high = (-127, 128) if self.bits == 8 else (0, 1 << self.bits)
        codes = torch.randint(low, high, (rows, columns), generator=generator)
        groups, outer = (-(-columns // per) for per in (self.group, AffineCodes.OUTER_COLUMNS))
        fields: dict[str, Any] = {}
        for name, stays_away in (("scales", 0.1), ("offsets", 0.0)):
            if name == "offsets" and not self.has_offsets:
                continue
            factors = torch.randn((rows, groups), generator=generator)
            if not self.dtype.is_floating_point:
                least = -32 if self.dtype == torch.int8 else 0
                factors = torch.randint(least, 64, (rows, groups), generator=generator)
                outers = torch.randn((rows, outer), generator=generator) / 16 + stays_away
                fields[f"outer_{name}"] = outers.half()
            fields[name] = factors.to(self.dtype)
        if self.has_values:
            values = torch.randn(1 << self.bits, generator=generator)
            fields["values"] = values.bfloat16().float()
        dtype = torch.int8 if self.bits == 8 else torch.uint8
        return AffineCodes(codes.to(dtype), self.bits, self.group, **fields)


FORMS = (
    CodesKind("8 bits", 8, 32, torch.float16),
    CodesKind("8 bits with offsets", 8, 128, torch.float32, has_offsets=True),
    CodesKind("4 bits", 4, 32, torch.float16),
    CodesKind("4 bits with offsets", 4, 64, torch.float32, has_offsets=True),
    CodesKind("4 bits of a table", 4, 32, torch.float32, has_values=True),
    CodesKind("4 bits with two levels of scales", 4, 32, torch.uint8, has_offsets=True),
    CodesKind("5 bits with two levels of scales", 5, 32, torch.uint8, has_offsets=True),
    CodesKind("5 bits of a table", 5, 16, torch.float16, has_offsets=True, has_values=True),
    CodesKind("6 bits with two levels of scales", 6, 16, torch.int8),
    CodesKind("6 bits with offsets", 6, 96, torch.float16, has_offsets=True),
)
