"""The operations that `Ops` has in torch: on a device, they do not make the host wait."""

from __future__ import annotations

import math

import pytest
import torch
from support.device_stand_in import StandIn, fake_cuda

from hardpoint.plugins import Op, Ops
from hardpoint.testing import load_ops

OPS = load_ops(torch.float32)
LOGITS = torch.randn(3, 70, generator=torch.Generator().manual_seed(0)) * 3
PLACES = torch.tensor([1, 75, 69, 70])
MASKS = torch.tensor([[5, -1, 0], [-(2**31), 0, 63]], dtype=torch.int32)
COLUMN = torch.tensor([[0.5], [1.0], [0.9]])

CASES = {
    "argmax": (),
    "draw": (torch.tensor([1, 2, 3]), torch.tensor([0, 4, 9]), torch.tensor([False, True, False])),
    "keep_tokens": (torch.tensor([2, 0]), MASKS),
    "keep_top_k": (torch.tensor([[3], [0], [40]]), 40),
    "keep_top_p": (COLUMN,),
    "keep_min_p": (COLUMN,),
    "divide": (COLUMN,),
    "add_lora": (
        torch.ones(3, 4),
        torch.ones(2, 5, 4),
        torch.ones(2, 70, 5),
        torch.tensor([1, -1, 0]),
        torch.tensor([0.5, 2.0]),
    ),
    "edit add": (Op.ADD, PLACES, torch.ones(4)),
    "edit set": (Op.SET, PLACES, torch.tensor([1.0, 2.0, -math.inf, 3.0])),
    "edit keep only": (Op.KEEP_ONLY, PLACES, None, torch.tensor([0, 1])),
}


@pytest.mark.parametrize("case", CASES)
def test_on_a_device_they_do_the_same_without_waiting(case, monkeypatch):
    method = getattr(Ops, case.split()[0])
    expected = LOGITS.clone()
    wanted = method(OPS, expected, *CASES[case])
    assert wanted is not None or not torch.equal(expected, LOGITS)
    with fake_cuda(monkeypatch) as device:
        there = [_on_device(value) for value in (LOGITS, *CASES[case])]
        result = method(OPS, *there)
        assert not device.waits
    assert torch.equal(_on_host(there[0]), expected)
    assert result is wanted is None or torch.equal(_on_host(result), wanted)


def _on_device(value):
    return value.clone().as_subclass(StandIn) if isinstance(value, torch.Tensor) else value


def _on_host(value):
    return value.as_subclass(torch.Tensor)
