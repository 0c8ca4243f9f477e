"""Mixtures of experts in Triton equal `Ops.experts`, for any choices of rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.moving import move_memory
from support.triton import kernel_device, kernel_examples

from hardpoint.kernels.triton import experts
from hardpoint.kernels.triton.addresses import Addresses
from hardpoint.plugins import ClampedSwiGLU, Ops
from hardpoint.testing import load_ops

DEVICE = kernel_device()
CLAMPED = ClampedSwiGLU(1.702, 1.0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TORCH = {dtype: load_ops(dtype, use="torch") for dtype in DTYPES}
ROUNDINGS = 3  # of a term to the dtype: both results of gate_up, and the activation


def choices(generator, rows, count, per_row, missing):
    """Return experts of rows; some of the numbers stand for no expert."""
    scores = torch.rand(rows, count + per_row, generator=generator)
    scores[:, count:] -= 1 - missing
    chosen = scores.topk(per_row).indices
    return torch.where(chosen < count, chosen, torch.where(chosen % 2 == 0, -chosen, chosen * 9))


def matrices(generator, count, rows, columns, dtype):
    drawn = torch.randn(count, rows, columns, generator=generator) / columns**0.5
    return list(drawn.to(dtype).unbind())


def there(side):
    return [matrix.to(DEVICE) for matrix in side]


def largest_error(sides, biases, clamped, x, chosen, weights):
    """Return the largest difference of two correct results, [rows, hidden].

    Each rounding to the dtype may fall to either neighbor, and float32 sums have any order. All of
    this is relative to the absolute values of the terms, which may cancel each other.
    """
    (gate_up, down), rounding = sides, torch.finfo(x.dtype).eps
    (rows, hidden), width = x.shape, len(gate_up[0]) // 2
    summing = torch.finfo(torch.float32).eps * (hidden + width)
    error = torch.zeros(rows, hidden, dtype=torch.float64)
    for expert, (enter, leave) in enumerate(zip(gate_up, down, strict=True)):
        weight = (weights.double() * (chosen == expert)).sum(1, keepdim=True)
        results, terms = x.double() @ enter.double().T, x.double().abs() @ enter.double().abs().T
        if biases is not None:
            bias = biases[0][expert].double()
            results, terms = results + bias, terms + bias.abs()
        (gate, up), (gate_terms, up_terms) = results.abs().chunk(2, 1), terms.chunk(2, 1)
        if clamped is not None:  # it multiplies by up + 1
            up, up_terms = up + 1, up_terms + 1
        # |silu(gate)| is at most |gate|, and its derivative at most 1.1.
        products = ROUNDINGS * rounding * gate * up
        products = 1.1 * (products + summing * (gate * up_terms + gate_terms * up))
        error += weight * (products @ leave.double().abs().T)
        if biases is not None:
            error += weight * summing * biases[1][expert].double().abs()
    return error


@kernel_examples(3, 60)
@given(
    rows=st.integers(0, 9) | st.integers(60, 90),
    hidden=st.integers(1, 90),
    width=st.integers(1, 90),
    count=st.integers(1, 6),
    per_row=st.integers(1, 4),
    missing=st.sampled_from([0.0, 0.3, 0.9, 2.0]),
    form=st.tuples(st.sampled_from(DTYPES), st.booleans()),
    seed=st.integers(0, 2**31),
)
@example(140, 130, 70, 2, 2, 0.2, (torch.bfloat16, False), 1)
@example(140, 33, 64, 2, 1, 0.2, (torch.float32, True), 1)
@example(79, 57, 14, 6, 3, 0.0, (torch.bfloat16, False), 254)
@example(1, 1, 54, 1, 1, 0.3, (torch.bfloat16, False), 968)
def test_any_choice(rows, hidden, width, count, per_row, missing, form, seed):
    dtype, is_gpt_oss = form
    generator = torch.Generator().manual_seed(seed)
    per_row = min(per_row, count)
    gate_up = matrices(generator, count, 2 * width, hidden, dtype)
    down = matrices(generator, count, hidden, width, dtype)
    wide = torch.randn(rows, hidden + 3, generator=generator).to(dtype)
    x = wide.to(DEVICE)[:, 1 : 1 + hidden]
    chosen = choices(generator, rows, count, per_row, missing).to(DEVICE)
    weights = torch.rand(rows, per_row, generator=generator).to(DEVICE)
    copies = [part.clone() for part in (x, chosen, weights)]

    biases = clamped = None
    if is_gpt_oss:
        sides = (torch.randn(count, size, generator=generator) for size in (2 * width, hidden))
        biases, clamped = tuple(list(side.to(dtype).unbind()) for side in sides), CLAMPED
    kernels = experts.ExpertSum(
        *(there(gate_up), there(down), (hidden, width)),
        biases and tuple(there(side) for side in biases),
        clamped and (clamped.alpha, clamped.limit),
    )
    result = kernels(x, chosen, weights).cpu()
    reference = Ops.experts(
        TORCH[dtype], gate_up, down, (hidden, width), biases=biases, clamped=clamped
    )
    expected = reference(x.cpu(), chosen.cpu(), weights.cpu())
    assert result.dtype == dtype
    inputs = x.cpu(), chosen.cpu(), weights.cpu()
    limit = largest_error((gate_up, down), biases, clamped, *inputs)
    limit += torch.finfo(dtype).eps * expected.abs() + torch.finfo(dtype).tiny
    assert ((result - expected).abs() <= limit).all()
    has_none = ~((chosen >= 0) & (chosen < count)).any(1)
    assert not result[has_none.cpu()].any()
    for part, before in zip((x, chosen, weights), copies, strict=True):
        assert torch.equal(part, before)


@kernel_examples(5, 60)
@example(40, 130, 3, 0.2, 16, 0)
@given(
    rows=st.integers(0, 40) | st.integers(1000, 1500),
    count=st.integers(1, 20),
    per_row=st.integers(1, 4),
    missing=st.sampled_from([0.0, 0.9, 2.0]),
    tile_rows=st.sampled_from([16, 64]),
    seed=st.integers(0, 2**31),
)
def test_lists_of_pairs(rows, count, per_row, missing, tile_rows, seed):
    generator = torch.Generator().manual_seed(seed)
    chosen = choices(generator, rows, count, min(per_row, count), missing).contiguous()
    chosen = chosen.to(DEVICE)
    tiles = experts.list_tiles(chosen, count, tile_rows)
    number = int(tiles.table[0, 0]) if chosen.numel() else 0
    assert number <= tiles.bound
    listed = []
    for expert, first, end in tiles.table[1 : 1 + number].tolist():
        assert first == len(listed)
        assert 0 < end - first <= tile_rows
        listed += [(expert, pair) for pair in tiles.order[first:end].tolist()]
    flat = chosen.flatten().tolist()
    assert listed == sorted((e, pair) for pair, e in enumerate(flat) if 0 <= e < count)


def test_sums_are_in_the_order_of_experts():
    """Numbers with a sum that depends on the order, chosen in another order."""
    parts = torch.tensor([[2.0**24], [-(2.0**24)], [1.0], [7.0]]).repeat(1, 3).to(DEVICE)
    for chosen in ([3, 4, 5, -1], [3, 5, 4, 9], [4, 5, 3, -1], [5, 3, 4, 6]):
        y = torch.empty(1, 3, device=DEVICE)
        experts.sum_pairs(parts, torch.tensor([chosen], device=DEVICE), 6, y)
        order = sorted(range(3), key=lambda place: chosen[place])
        expected = torch.zeros(3, device=DEVICE)
        for place in order:
            expected += parts[place]
        assert torch.equal(y[0], expected), chosen


def test_columns_in_parts(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    gate_up = matrices(generator, 2, 6, 1030, torch.float32)
    down = matrices(generator, 2, 1030, 3, torch.float32)
    layer = experts.ExpertSum(there(gate_up), there(down), (1030, 3))
    x = torch.randn(3, 1030, generator=generator).to(DEVICE)
    chosen = torch.tensor([[0, 1], [1, 5], [1, 0]], device=DEVICE)
    weights = torch.rand(3, 2, generator=generator).to(DEVICE)
    whole = layer(x, chosen, weights)
    monkeypatch.setattr(experts, "_BUFFER", 1)
    assert torch.equal(layer(x, chosen, weights), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_matrices_that_are_parts_of_others(dtype):
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(40, 7, generator=generator).to(DEVICE, dtype)
    gate_up, down = [whole[1:11], whole[11:21]], [whole.T[:, 30:35], whole.T[:, 31:36]]
    x, chosen = whole[:4], torch.tensor([[0, 1], [1, 5], [1, 0], [-1, -1]], device=DEVICE)
    weights = torch.rand(4, 2, generator=generator).to(DEVICE)
    result = experts.ExpertSum(gate_up, down, (7, 5))(x, chosen, weights)
    expected = Ops.experts(TORCH[dtype], gate_up, down, (7, 5))(x, chosen, weights)
    torch.testing.assert_close(result, expected, rtol=0.01, atol=0.05)


def test_matrices_whose_memory_moved():
    generator = torch.Generator().manual_seed(0)
    gate_up = there([part.clone() for part in matrices(generator, 3, 8, 16, torch.float32)])
    down = there([part.clone() for part in matrices(generator, 3, 16, 4, torch.float32)])
    layer = experts.ExpertSum(gate_up, down, (16, 4))
    x = torch.randn(3, 16, generator=generator).to(DEVICE)
    chosen = torch.tensor([[0, 1], [2, 0], [1, 2]], device=DEVICE)
    weights = torch.rand(3, 2, generator=generator).to(DEVICE)
    expected = layer(x, chosen, weights)
    move_memory([gate_up[1], down[2]])
    assert torch.equal(layer(x, chosen, weights), expected)
    move_memory([gate_up[1]])
    assert torch.equal(layer(x, chosen, weights), expected)


def test_addresses_stay_in_one_tensor():
    """A graph that was recorded reads it; and of parts of a whole, all move."""
    whole = torch.zeros(8, 4, device=DEVICE)
    addresses = Addresses([(whole[0], whole[1]), (whole[5], torch.zeros(3, device=DEVICE))])
    table = addresses.table()
    copy = table.clone()
    assert addresses.table() is table
    move_memory([whole])
    assert addresses.table() is table
    assert table[0].tolist() == [whole[0].data_ptr(), whole[1].data_ptr()]
    assert (table != copy).tolist() == [[True, True], [True, False]]
