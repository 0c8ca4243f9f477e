"""Layers whose values are part of the keys, with backends that know of it and with others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.broken.attention import KeysAlone, Plain, WholeHeads

from hardpoint.builtin_plugins.attention.native_cpu import NativeAttention
from hardpoint.builtin_plugins.attention.torch import TorchAttention
from hardpoint.errors import PluginFaultError
from hardpoint.host.boundary.checked_attention import CheckedAttention
from hardpoint.host.boundary.layers.groups import LayerGroups
from hardpoint.plugins import AttentionBackend, AttentionContext, AttentionStep, KVSpec
from hardpoint.plugins.component import Source
from hardpoint.testing import load_ops

SPEC = KVSpec(num_heads=4, num_kv_heads=1, head_size=12, scale=0.4, value_size=8)
SOURCE = Source("attention", "x:Attention", "here", "0", "default")
TOKENS = 9
STEP = AttentionStep(
    query_starts=np.array([0, TOKENS]),
    seq_lens=np.array([TOKENS]),
    num_single=0,
    block_table=torch.tensor([[2, 0]]),
    slots=torch.cat([torch.arange(32, 48), torch.arange(16)])[:TOKENS],
    block_size=16,
)


def checked(kind: type[AttentionBackend], cache_dtype: str = "auto") -> CheckedAttention:
    context = AttentionContext(
        name="attention",
        options=None,
        device=torch.device("cpu"),
        dtype=torch.float32,
        block_size=16,
        cache_dtype=cache_dtype,
    )
    rotate = load_ops(torch.float32).rotate
    return CheckedAttention(kind(context), SOURCE, [SPEC], LayerGroups.single(1), rotate)


def attended(attention: CheckedAttention) -> torch.Tensor:
    """Return the result of one prompt whose first four elements are rotated."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(TOKENS, 4, 12, generator=generator)
    k = torch.randn(TOKENS, 1, 12, generator=generator)
    turns = torch.rand(TOKENS, 2, generator=generator)
    angles = torch.cat((turns.cos(), turns.sin()), 1)
    attend = attention.of_step(attention.allocate(3), [STEP])
    return attend(0, q, k, k, angles)


@pytest.mark.parametrize(
    ("kind", "elements"),
    [(Plain, 24), (KeysAlone, 12), (TorchAttention, 12), (NativeAttention, 12 + 16)],
)
def test_all_backends_attend_the_same(kind: type[AttentionBackend], elements: int) -> None:
    attention = checked(kind)
    assert attention.bytes_per_block == 16 * elements * 4
    out = attended(attention)
    assert out.shape == (TOKENS, 4, 8)
    assert (out - attended(checked(Plain))).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_codes_of_keys_and_of_values_are_stored(dtype: str) -> None:
    exact = attended(checked(Plain))
    results = [attended(checked(kind, dtype)) for kind in (TorchAttention, NativeAttention)]
    assert (results[0] - results[1]).abs().max() < 1e-4
    assert 0 < (results[0] - exact).abs().max() < 0.2


def test_whole_heads_are_no_values() -> None:
    message = r"its attend\(\) gave .* \[9, 4, 12\].*, expected a torch.float32 tensor \[9, 4, 8\]"
    with pytest.raises(PluginFaultError, match=message):
        attended(checked(WholeHeads))
