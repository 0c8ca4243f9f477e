"""Memory of the plugins that run the C++ kernels."""

from __future__ import annotations

import pytest
import torch

from hardpoint.builtin_plugins.native import Results
from hardpoint.kernels import cpu

LARGE = (1024, 1024)


@pytest.fixture
def results() -> Results:
    try:
        return Results(cpu.load())
    except cpu.KernelsUnavailableError as cause:
        pytest.skip(str(cause))


def test_memory_of_a_large_result_is_used_again(results: Results) -> None:
    first = results.empty(LARGE, torch.bfloat16)
    place = first.data_ptr()
    del first
    again = results.empty((1000, 1000), torch.bfloat16)
    assert again.data_ptr() == place
    assert again.shape == (1000, 1000)


def test_a_result_that_is_in_use_keeps_its_memory(results: Results) -> None:
    row = results.empty(LARGE, torch.float32)[7]
    row.fill_(3)
    others = [results.empty(LARGE, torch.float32).fill_(1) for _ in range(3)]
    assert row.eq(3).all()
    assert len({other.data_ptr() for other in others}) == 3


def test_recorded_results_are_not_used_again() -> None:
    try:
        library = cpu.load()
    except cpu.KernelsUnavailableError as cause:
        pytest.skip(str(cause))
    results = Results(library)
    lent = results.empty(LARGE, torch.float32)
    place = lent.data_ptr()
    del lent
    with library.record():
        assert results.empty(LARGE, torch.float32).data_ptr() != place


def test_pages_are_zero_and_their_own() -> None:
    first, second = cpu.allocate_pages(1 << 16), cpu.allocate_pages(1 << 16)
    first[:3] = b"abc"
    assert first[:4] == b"abc\0"
    assert second[:] == bytes(1 << 16)
