"""Weights that are moved to other memory and back, as at level 1 of sleep on a GPU."""

from __future__ import annotations

import weakref

import pytest
import torch
from support.internals import core_of, worker_of

from hardpoint import HardpointError, SamplingParams
from hardpoint.host.system import memory
from hardpoint.host.system.memory import MovedWeights
from hardpoint.testing import scripted_engine


def test_tensors_have_no_memory_until_they_are_moved_back():
    with torch.inference_mode():
        whole, other = torch.arange(12.0).view(3, 4), torch.ones(5, dtype=torch.bfloat16)
        part, empty = whole[1:], torch.empty(0)
        held = MovedWeights([whole, part, other, empty])
        assert whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
        assert whole.shape == (3, 4)
        held.move_back()
        assert whole.tolist() == torch.arange(12.0).view(3, 4).tolist()
        assert part.data_ptr() == whole[1:].data_ptr()
        assert other.tolist() == [1] * 5


def test_nothing_is_moved_if_memory_is_short(monkeypatch):
    tensors = [torch.ones(3), torch.ones(4)]
    copied = torch.Tensor.copy_

    def copy(self, source):
        if len(source) == 16:
            raise MemoryError("no more")
        return copied(self, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    with pytest.raises(MemoryError):
        MovedWeights(tensors)
    assert [tensor.tolist() for tensor in tensors] == [[1] * 3, [1] * 4]


@pytest.fixture
def releases(monkeypatch):
    """How much of the copies is alive when torch's cache of pinned memory is emptied."""
    copies, alive = [], []

    def copied(tensor, host_copy=memory.host_copy):
        copy = host_copy(tensor)
        copies.append(weakref.ref(copy))
        return copy

    monkeypatch.setattr(memory, "host_copy", copied)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    release = lambda: alive.append(sum(copy() is not None for copy in copies))  # noqa: E731
    monkeypatch.setattr("torch._C._host_emptyCache", release, raising=False)
    return alive


def test_pinned_memory_is_released_after_the_last_copy(releases):
    moved = MovedWeights([torch.ones(3), torch.ones(4)])
    assert releases == []
    moved.move_back()
    assert releases == [0]


def test_without_such_a_call_of_torch_all_else_goes_on(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.delattr("torch._C._host_emptyCache", raising=False)
    weight = torch.ones(3)
    MovedWeights([weight]).move_back()
    assert weight.tolist() == [1] * 3


def test_a_worker_that_is_closed_while_it_sleeps_releases_it(scripted, releases):
    engine = scripted_engine(scripted)
    worker_of(engine).movable_weights = {"weight": torch.arange(6.0)}
    core_of(engine).sleep(1).result(0)
    assert releases == []
    engine.close()
    assert releases == [0]


def test_a_worker_moves_them_at_level_1(open_engine):
    """As on a GPU; here the scripted model is given weights to move."""
    engine = open_engine()
    core, worker = core_of(engine), worker_of(engine)
    weight = torch.arange(6.0)
    worker.movable_weights = {"weight": weight}
    core.sleep(1).result(0)
    assert weight.untyped_storage().nbytes() == 0
    with pytest.raises(
        HardpointError, match="expected weights before kv_cache, or both, after level 1"
    ):
        core.wake_up(["kv_cache"])
    core.wake_up(["weights"])
    assert weight.tolist() == list(range(6))
    core.wake_up(["kv_cache"])
    assert not core.is_sleeping()
    params = SamplingParams(temperature=0.0, max_tokens=4)
    engine.add_request("a", [1, 2], params)
    while engine.has_unfinished_requests():
        engine.step()
