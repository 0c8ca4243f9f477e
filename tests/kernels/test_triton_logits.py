"""Triton's kernels of logits choose and mask the very tokens that `Ops` defines."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.triton import kernel_device, kernel_examples

from hardpoint.kernels.triton import logits as logits_kernels
from hardpoint.plugins import Op, Ops
from hardpoint.testing import load_ops

TORCH = load_ops(torch.float32)
DEVICE = kernel_device()
# NumPy, which the interpreter computes with, warns of what other numbers may overflow to.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
VALUES = st.sampled_from([-math.inf, math.inf, math.nan, 0.0, -0.0, 1e-45, -1e-39, 3e38, -3e38])


@st.composite
def logits_of(draw, most_rows=3):
    """Rows of wider ones, of the kinds that sampling meets and of invalid kinds."""
    rows = draw(st.integers(1, most_rows))
    # The interpreter takes its time for the parts of a row: few have some.
    is_wide = draw(st.integers(0, 9)) == 9
    vocab = draw(st.integers(2040, 5000) if is_wide else st.integers(1, 140))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = draw(st.sampled_from([0.0, 1e-41, 0.01, 1.0, 4.0, 60.0]))
    logits = torch.randn(rows, vocab + draw(st.integers(0, 3)), generator=generator)[:, :vocab]
    logits *= scale
    if scale > 10:
        logits.round_()
    masked = draw(st.sampled_from([0.0, 0.0, 0.1, 0.95]))
    logits[torch.rand(rows, vocab, generator=generator) < masked] = -math.inf
    for value in draw(st.lists(VALUES, max_size=2)):
        row = int(torch.randint(rows, (1,), generator=generator))
        logits[row, torch.rand(vocab, generator=generator) < 0.1] = value
    return logits


def column(data, strategy, rows, dtype):
    values = data.draw(st.lists(strategy, min_size=rows, max_size=rows))
    return torch.tensor(values, dtype=dtype).unsqueeze(1)


def assert_equal(result, expected):
    """Compare bit for bit, but for the bits of NaN."""
    differs = result.view(torch.int32) != expected.view(torch.int32)
    assert not (differs & ~(result.isnan() & expected.isnan())).any()


def run(function, logits, *arguments, **options):
    """Call a kernel's function on parts of wider rows; return its result and the logits after."""
    wide = torch.nn.functional.pad(logits, (0, 3)).to(DEVICE)
    on_device = (x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in arguments)
    result = function(wide[:, :-3], *on_device, **options)
    assert not wide[:, -3:].any()
    return result if result is None else result.cpu(), wide[:, :-3].cpu()


def check(name, logits, *arguments):
    """Compare a kernel's function with the method of `Ops` of that name, on the CPU."""
    expected = logits.clone()
    wanted = getattr(Ops, name)(TORCH, expected, *arguments)
    first_arguments = arguments[:1] if name == "keep_top_k" else arguments
    result, after = run(getattr(logits_kernels, name), logits, *first_arguments)
    assert (result is None) == (wanted is None)
    if wanted is not None:
        assert torch.equal(result, wanted), name
    assert_equal(after, expected)


SHARES = st.floats(0, 1, width=32) | st.sampled_from([1e-7, 0.9, 0.999, 0.9999999, 1.0, 0.0])


@kernel_examples(20, 150)
@given(logits=logits_of(), data=st.data())
def test_choices(logits, data):
    check("argmax", logits)
    seeds = column(data, st.integers(-(2**63), 2**63 - 1), len(logits), torch.int64).flatten()
    greedy = column(data, st.booleans(), len(logits), torch.bool).flatten()
    check("draw", logits, seeds, seeds.abs() % 9999, greedy)


@kernel_examples(12, 150)
@given(logits=logits_of(most_rows=2), data=st.data(), name=st.sampled_from(["top_k", "top_p"]))
def test_selections(logits, data, name):
    rows, vocab = logits.shape
    if name == "top_p":
        check("keep_top_p", logits, column(data, SHARES, rows, torch.float32))
        return
    k = column(data, st.integers(-1, vocab + 2) | st.integers(1, 5), rows, torch.int64)
    if in_use := [each for each in k.flatten().tolist() if 0 < each < vocab]:
        check("keep_top_k", logits, k, max(in_use))


@kernel_examples(15, 150)
@given(logits=logits_of(), data=st.data())
def test_masks(logits, data):
    rows, vocab = logits.shape
    check("keep_min_p", logits, column(data, SHARES, rows, torch.float32))
    chosen = data.draw(st.lists(st.integers(0, rows - 1), unique=True, min_size=1))
    columns = -(-vocab // 32)
    patterns = st.sampled_from([0, 0, -1, 1, -(2**31), 0x5A5A0FF0])
    bits = data.draw(st.lists(patterns, min_size=columns, max_size=columns))
    bitmask = torch.tensor([bits[row:] + bits[:row] for row in chosen], dtype=torch.int32)
    check("keep_tokens", logits, torch.tensor(chosen), bitmask)


@kernel_examples(15, 150)
@given(logits=logits_of(), data=st.data(), op=st.sampled_from(Op))
def test_edits_and_divisors(logits, data, op):
    divisors = st.floats(2.0**-20, 2.0**100, width=32) | st.sampled_from([0.7, 1e-5, 1e30])
    check("divide", logits, column(data, divisors, len(logits), torch.float32))
    spots = st.lists(st.integers(0, logits.numel() - 1), unique=True, min_size=1, max_size=300)
    places = torch.tensor(data.draw(spots))
    values = torch.randn(len(places), generator=torch.Generator().manual_seed(1)) * 9
    rows = torch.unique(places // logits.shape[1])
    expected = logits.clone()
    Ops.edit(TORCH, expected, op, places, values, rows)
    if op is Op.KEEP_ONLY:
        _, result = run(logits_kernels.put_only, logits, places, rows)
    else:
        _, result = run(logits_kernels.put, logits, places, values, add=op is Op.ADD)
    assert_equal(result, expected)


def test_rows_of_several_parts():
    logits = torch.randn(2, 4500, generator=torch.Generator().manual_seed(0)) * 3
    logits[1] = logits[1].round()
    logits[:, 4499] = 8.0  # in the last part, and in the second row one of equals
    check("argmax", logits)
    check("draw", logits, torch.tensor([3, 4]), torch.tensor([0, 9]), torch.tensor([False, False]))
    check("keep_top_k", logits, torch.tensor([[2500], [40]]), 2500)
    check("keep_top_p", logits, torch.tensor([[0.999], [0.5]]))
    check("keep_min_p", logits, torch.tensor([[0.001], [1.0]]))


def test_no_rows():
    logits, none = torch.empty(0, 9), torch.empty(0, dtype=torch.int64)
    assert run(logits_kernels.argmax, logits)[0].shape == (0,)
    assert run(logits_kernels.draw, logits, none, none, none.bool())[0].dtype == torch.int64
    for name in ("keep_top_k", "keep_top_p", "keep_min_p", "divide"):
        run(getattr(logits_kernels, name), logits, torch.empty(0, 1))
    ones = torch.ones(2, 9)
    empty = torch.empty(0, 1, dtype=torch.int32)
    assert run(logits_kernels.keep_tokens, ones, none, empty)[1].equal(ones)
    assert run(logits_kernels.put, ones, none, torch.empty(0), add=True)[1].equal(ones)
    assert run(logits_kernels.put_only, ones, none, none)[1].equal(ones)


def test_logits_that_do_not_lie_in_one_piece():
    ops = load_ops(torch.float32, torch.device(DEVICE), "triton")
    logits = torch.randn(50, 3, generator=torch.Generator().manual_seed(1)).to(DEVICE).t()
    expected = logits.cpu().contiguous()
    places, rows = torch.tensor([7, 120, 121]), torch.tensor([0, 2])
    bitmask = torch.randint(-999, 999, (2, 2), generator=torch.Generator().manual_seed(2))
    bitmask = bitmask.int().t()
    shares = torch.full((3, 1), 0.5)
    steps = [
        ("divide", shares),
        ("edit", Op.ADD, places, torch.ones(3)),
        ("keep_min_p", shares / 50),
        ("keep_tokens", rows, bitmask),
        ("keep_top_p", shares),
        ("keep_top_k", torch.tensor([[2], [3], [0]]), 3),
        ("edit", Op.KEEP_ONLY, places, None, rows),
        ("argmax",),
    ]
    for name, *arguments in steps:
        wanted = getattr(Ops, name)(TORCH, expected, *arguments)
        on_device = (x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in arguments)
        result = getattr(ops, name)(logits, *on_device)
        assert_equal(logits.cpu().contiguous(), expected)
    assert torch.equal(result.cpu(), wanted)
