"""Low-rank adapters in Triton equal `Ops.add_lora`, for any rows with one."""

from __future__ import annotations

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.triton import kernel_device, kernel_examples

from hardpoint.kernels.triton import lora
from hardpoint.plugins import Ops
from hardpoint.testing import load_ops

DEVICE = kernel_device()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TORCH = {dtype: load_ops(dtype, use="torch") for dtype in DTYPES}
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.01, torch.float16: 0.002}


@kernel_examples(5, 60)
@given(
    rows=st.integers(0, 9) | st.integers(60, 150),
    depth=st.integers(1, 300),
    columns=st.integers(1, 140),
    count=st.integers(0, 9),
    rank=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
@example(70, 2100, 20, 1, 16, torch.bfloat16, 1)
@example(5, 70, 20, 2, 80, torch.float32, 1)
def test_any_rows(rows, depth, columns, count, rank, dtype, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    wide, x = draw(rows, columns + 3), draw(rows, depth + 2)[:, 1 : 1 + depth]
    a, b = draw(count, rank + 1, depth)[:, :rank], draw(count, columns + 1, rank)[:, 1:]
    scales = torch.rand(count, generator=generator).to(DEVICE)
    adapters = torch.randint(-1, count + 1, (rows,), generator=generator).to(DEVICE)
    arguments = x, a, b, adapters, scales
    copies = [argument.clone() for argument in arguments]

    result, expected = wide.clone(), wide.cpu().clone()
    lora.add_lora(result[:, 1 : 1 + columns], *arguments)
    on_cpu = [argument.cpu() for argument in arguments]
    Ops.add_lora(TORCH[dtype], expected[:, 1 : 1 + columns], *on_cpu)
    limit = TOLERANCES[dtype] * float(expected.abs().max()) if rows else 0
    torch.testing.assert_close(result.cpu(), expected, rtol=0, atol=limit)
    is_none = (adapters < 0) | (adapters >= count)
    assert torch.equal(result[is_none], wide[is_none])
    for argument, before in zip(arguments, copies, strict=True):
        assert torch.equal(argument, before)


def test_other_adapters_are_not_read():
    """An adapter of NaN corrupts its own rows alone."""
    a, b = torch.ones(2, 3, 4, device=DEVICE), torch.ones(2, 5, 3, device=DEVICE)
    a[0], b[0] = torch.nan, torch.nan
    y, x, scales = (
        torch.zeros(3, 5).to(DEVICE),
        torch.ones(3, 4).to(DEVICE),
        torch.ones(2).to(DEVICE),
    )
    lora.add_lora(y, x, a, b, torch.tensor([1, 0, -1], device=DEVICE), scales)
    y = y.cpu()
    assert torch.equal(y[0], torch.full((5,), 12.0))
    assert y[1].isnan().all()
    assert not y[2].any()
