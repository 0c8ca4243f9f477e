"""benchmarks/bounds.py measures processors with and without oneDNN's bfloat16 instructions."""

from __future__ import annotations

import bounds
import pytest
import torch


@pytest.fixture
def size(monkeypatch):
    monkeypatch.setattr(bounds, "_SECONDS", 0.0)
    monkeypatch.setattr(bounds, "_ROWS", (4,))
    monkeypatch.setattr(bounds, "_READ_BYTES", 1 << 20)
    return bounds.ModelSize(layers=1, linears=((8, 16), (16, 8)), head=(32, 16), kv_bytes=64)


def test_rates_of_this_processor(size):
    machine = bounds.measure(size)
    assert machine.read > 0
    assert machine.gemm.keys() == {"bf16", "fp32"}
    assert min(machine.gemm.values()) > 0


@pytest.mark.parametrize("missing", [{torch.bfloat16}, {torch.bfloat16, torch.float32}])
def test_products_without_packed_weights(size, monkeypatch, missing):
    def refuse(*_):
        raise RuntimeError("bf16 path needs the cpu support avx_ne_convert or avx512bw")

    monkeypatch.setattr(bounds, "can_pack", lambda dtype: dtype not in missing)
    if torch.float32 in missing:
        monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    assert min(bounds.measure(size).gemm.values()) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_are_those_of_torch(dtype):
    torch.manual_seed(0)
    weight, x = torch.rand(16, 8).to(dtype), torch.rand(4, 8).to(dtype)
    expected = torch.nn.functional.linear(x, weight)
    torch.testing.assert_close(bounds.prepared(weight, 4)(x), expected)


def test_bfloat16_needs_the_instructions(monkeypatch):
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch has no oneDNN")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert not bounds.can_pack(torch.bfloat16)
    assert bounds.can_pack(torch.float32)
