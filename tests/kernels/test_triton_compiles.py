"""The constants of Triton's kernels do not change with the rows of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.triton import kernel_device, triton_ops

pytest.importorskip("triton")

from hardpoint.kernels.triton import code_tiles, layers
from hardpoint.kernels.triton import logits as logits_kernels
from hardpoint.plugins import Op
from hardpoint.plugins.model.logits_ops import warm_up
from hardpoint.testing.ops.code_matrices import FORMS

DEVICE = torch.device(kernel_device())
ROWS = (3, 16, 32)
"""Numbers that Triton takes for different kinds; one row of x has kernels of its own."""
SPLIT = code_tiles.Tile(16, 32, 2, 4, 1, 512)


def numbers_of(kernel: Any, arguments: tuple[Any, ...]) -> dict[str, str]:
    """Return the whole numbers of a launch that Triton takes for constant, by argument."""
    left_alone = getattr(kernel, "kwargs", {}).get("do_not_specialize")
    if left_alone is None:
        left_alone = getattr(kernel, "do_not_specialize", None) or ()
    return {
        name: "1" if value == 1 else f"multiple of 16: {value % 16 == 0}"
        for name, value in zip(kernel.arg_names, arguments, strict=False)
        if isinstance(value, int) and name not in left_alone
    }


@pytest.fixture
def launches(monkeypatch):
    """Collects how kernels would be compiled, and runs none: name, constants, kinds of numbers."""
    calls = []
    kind = type(logits_kernels.VARIANTS[0].kernel)

    def recorded(self, *args, **kwargs):
        constants = {k: v for k, v in kwargs.items() if k not in ("grid", "warmup")}
        calls.append((self.__name__, str(constants), str(numbers_of(self, args))))

    monkeypatch.setattr(kind, "run", recorded)
    return calls


def whole(*shape):
    return torch.ones(shape, dtype=torch.int64, device=DEVICE)


def run_logits(ops, rows):
    logits = torch.zeros(rows, 50, device=DEVICE)
    share = torch.full((rows, 1), 0.5, device=DEVICE)
    ops.argmax(logits)
    ops.draw(logits, whole(rows), whole(rows), torch.zeros(rows, dtype=torch.bool, device=DEVICE))
    ops.divide(logits, share)
    ops.keep_top_k(logits, whole(rows, 1), 1)
    ops.keep_top_p(logits, share)
    ops.keep_min_p(logits, share)


def run_edits(ops, rows):
    logits = torch.zeros(rows, 50, device=DEVICE)
    index = torch.arange(rows, device=DEVICE)
    ops.keep_tokens(logits, index, torch.zeros(rows, 2, dtype=torch.int32, device=DEVICE))
    ops.edit(logits, Op.ADD, index * 50, torch.ones(rows, device=DEVICE))
    ops.edit(logits, Op.KEEP_ONLY, index * 50, rows=index)


def run_layers(ops, rows):
    x, delta = torch.zeros(2, rows, 38, device=DEVICE)
    weight = torch.ones(38, device=DEVICE)
    ops.rms_norm(x, weight, 1e-5)
    ops.add_rms_norm(x, delta, weight, 1e-5)
    ops.rotate(x.view(rows, 1, 38), torch.zeros(rows, 38, device=DEVICE))
    ops.scale(x, 2.0)
    ops.add(x, delta)
    ops.silu_and_mul(x)


def run_products(ops, rows):
    generator = torch.Generator().manual_seed(1)
    x, hidden, width = torch.zeros(rows, 600, device=DEVICE), 600, 5
    matrix = ops.pack_codes([FORMS[0].draw(5, hidden, generator)])
    ops.linear(matrix, (5, hidden))(x)
    always = triton_ops(torch.float32, few_row_products="always")
    always.linear(torch.zeros(5, hidden, device=DEVICE), (5, hidden))(x)
    ops.embedding(matrix, (5, hidden))(whole(rows))
    chosen, weights = whole(rows, 2), torch.ones(rows, 2, device=DEVICE)
    sizes = (2 * width, hidden), (hidden, width)
    codes = ([ops.pack_codes([FORMS[0].draw(*size, generator)])] * 3 for size in sizes)
    ops.experts(*codes, (hidden, width))(x, chosen, weights)
    dense = ([torch.zeros(size, device=DEVICE)] * 3 for size in sizes)
    ops.experts(*dense, (hidden, width))(x, chosen, weights)
    a, b = torch.zeros(2, 3, hidden, device=DEVICE), torch.zeros(2, 5, 3, device=DEVICE)
    y, scales = torch.zeros(rows, 5, device=DEVICE), torch.ones(2, device=DEVICE)
    ops.add_lora(y, x, a, b, whole(rows), scales)


@pytest.mark.parametrize("run", [run_logits, run_edits, run_layers, run_products])
def test_numbers_of_rows_are_no_constants(run, launches, monkeypatch):
    monkeypatch.setattr(code_tiles, "INTERPRETED", (SPLIT, SPLIT))
    ops, compiled = triton_ops(torch.float32), {}
    for rows in ROWS:
        launches.clear()
        run(ops, rows)
        for name, constants, numbers in launches:
            compiled.setdefault((name, constants), set()).add(numbers)
    assert len(compiled) >= 5
    assert {key: sorted(kinds) for key, kinds in compiled.items() if len(kinds) > 1} == {}


def test_a_first_top_p_compiles_few_kernels(launches):
    logits_kernels.keep_top_p(torch.zeros(1, 50, device=DEVICE), torch.ones(1, 1) / 2)
    assert len([name for name, *_ in launches if name == "_select_kernel"]) == 8
    assert len({launch for launch in launches if launch[0] == "_select_kernel"}) == 3


def test_what_warms_up_is_what_requests_need(launches):
    ops = triton_ops(torch.float32)
    warm_up(ops, 50, DEVICE)
    warm = set(launches)
    launches.clear()
    run_logits(ops, 3)
    assert len(set(launches)) >= 10
    assert set(launches) <= warm


def test_the_numbers_that_are_compared_are_those_of_launches(launches):
    x = torch.zeros(16, 38, device=DEVICE)
    layers.scale(x, 2.0)
    ((name, _, numbers),) = launches
    assert name == "_scale_kernel"
    assert numbers == str({"size": "multiple of 16: False", "x_stride": "multiple of 16: False"})
