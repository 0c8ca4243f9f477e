"""to_device: the same result as torch.tensor, without a wait on a CUDA device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.device_stand_in import DEVICE, StandIn, fake_cuda

from hardpoint.plugins.device import to_device

CPU = torch.device("cpu")
VALUES = {
    "ints": [3, 1, 2],
    "floats": [0.5, -1],
    "bools": [True, False],
    "rows": [[1, 2], [3, 4]],
    "tuple": (5, 6),
    "range": range(4),
    "empty": [],
    "array": np.arange(3),
    "strided": np.arange(8, dtype=np.int32)[::2],
    "empty-array": np.empty(0, np.int64),
    "tensor": torch.arange(3.0),
    "turned": torch.arange(6).view(2, 3).T,
}


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.int64])
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_it_gives_what_torch_gives(values, dtype, monkeypatch):
    expected = torch.as_tensor(values, dtype=dtype)
    here = to_device(values, CPU, dtype)
    assert here.dtype == expected.dtype
    assert torch.equal(here, expected)
    with fake_cuda(monkeypatch) as stand_in:
        there = to_device(values, DEVICE, dtype)
        assert type(there) is StandIn
        assert not stand_in.waits
    assert there.dtype == expected.dtype
    assert torch.equal(there.as_subclass(torch.Tensor), expected)


def test_other_devices_get_a_copy():
    assert to_device([1, 2], torch.device("meta")).device.type == "meta"


def test_memory_is_shared_on_the_cpu_alone(monkeypatch):
    array = np.arange(3)
    here = to_device(array, CPU)
    with fake_cuda(monkeypatch):
        there = to_device(array, DEVICE)
    array[0] = 9
    assert int(here[0]) == 9
    assert int(there[0]) == 0


def test_each_call_has_pinned_memory_of_its_own(monkeypatch):
    # The copy may run long after the call.
    made = []
    empty = torch.empty

    def noted(*args, **options):
        made.append(options.get("pin_memory"))
        return empty(*args, **options)

    with fake_cuda(monkeypatch):
        monkeypatch.setattr(torch, "empty", noted)
        to_device([1], DEVICE)
        to_device([1], DEVICE)
    assert made == [True, True]
