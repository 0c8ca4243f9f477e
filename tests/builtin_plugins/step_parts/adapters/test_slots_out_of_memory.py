"""Adapter slots on a device out of memory, which may be free again later."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hardpoint.builtin_plugins.step_parts.adapters.files import HostAdapter, LowRankUpdate
from hardpoint.builtin_plugins.step_parts.adapters.worker_half import _Slots

MATRIX = SimpleNamespace(rows=range(6), columns=range(8))
NAMES = ["first", "second", "third"]


def adapter(value, *names):
    change = LowRankUpdate(torch.full((2, 8), value), torch.full((6, 2), value), value)
    return HostAdapter(f"content {value}", dict.fromkeys(names, change), [])


@pytest.fixture
def slots():
    ops = SimpleNamespace(context=SimpleNamespace(dtype=torch.float32))
    loaded = SimpleNamespace(ops=ops, matrices=dict.fromkeys(NAMES, MATRIX))
    return _Slots(2, 4, loaded, torch.device("cpu"))


def values(slots, index):
    """Return the largest number of each matrix in a slot, while both are used."""
    slots.use([0, 1])
    return [max(float(part[index].max()) for part in slots.of(name)) for name in NAMES]


def test_slots_are_allocated_again_where_that_failed(slots, monkeypatch):
    real, calls = torch.zeros, []

    def zeros(*shape, **named):
        calls.append(shape)
        if len(calls) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*shape, **named)

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(torch.OutOfMemoryError):
        slots.fill(0, adapter(1.0, *NAMES))
    slots.fill(0, adapter(1.0, *NAMES))
    assert values(slots, 0) == [1.0] * 3


def test_nothing_is_left_of_an_adapter_that_was_copied_in_part(slots):
    slots.fill(0, adapter(1.0, "first"))
    slots.fill(1, adapter(4.0, *NAMES))
    broken = adapter(2.0, *NAMES)
    broken.changes["third"] = LowRankUpdate(torch.ones(2, 8), torch.ones(99, 2), 1.0)
    with pytest.raises(RuntimeError):
        slots.fill(0, broken)
    assert slots.contents == [None, "content 4.0"]
    slots.fill(0, adapter(3.0, "second"))
    assert values(slots, 0) == [0.0, 3.0, 0.0]
    assert values(slots, 1) == [4.0] * 3
