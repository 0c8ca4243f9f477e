"""Every built-in sampler and attention backend passes the public conformance kit."""

from __future__ import annotations

import torch
from support.searching import kit_examples

from hardpoint.builtin_plugins.attention.torch import TorchAttention
from hardpoint.builtin_plugins.sampler import DefaultSampler
from hardpoint.testing import (
    AttentionBackendSuite,
    HistoryAttention,
    SamplerSuite,
    history_hash,
)

pytest_plugins = ["hardpoint.testing"]


class TestDefaultSampler(SamplerSuite):
    examples = kit_examples()
    sampler = DefaultSampler


class TestTorchAttention(AttentionBackendSuite):
    examples = kit_examples()
    backend = TorchAttention


class TestHistoryAttention(AttentionBackendSuite):
    """Attention of another function, over whole numbers."""

    examples = kit_examples(0.3)
    backend = HistoryAttention
    dtypes = (torch.float32,)
    heads = ((1, 1),)
    head_sizes = (2,)
    windows = (None,)
    tolerance = 1e-9

    def draw(self, generator, shape):
        return torch.randint(0, 257, shape[:2], generator=generator)[..., None].expand(shape)

    def reference(self, spec, query, keys, values):
        value = history_hash(keys[:, 0, 0].long().tolist())
        return torch.tensor([[value >> 16, value & 0xFFFF]], dtype=torch.float64)
