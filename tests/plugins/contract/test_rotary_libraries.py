"""RoPE of scaled variants needs transformers; without it, an error names the package to install."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from hardpoint.plugins import ModelError
from hardpoint.toolkit.layers.rotary import RotaryEmbedding

HF = {"max_position_embeddings": 64}
LINEAR = {**HF, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}


def rotary(fields):
    context = SimpleNamespace(
        config=SimpleNamespace(hf=fields), max_model_len=64, ops=SimpleNamespace(gather_rows=None)
    )
    return RotaryEmbedding(8, context, source="config.json")


def test_a_scaled_variant_without_transformers_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    message = (
        "config.json: rope_type: 'linear' needs transformers, which is not installed: "
        "pip install transformers"
    )
    with pytest.raises(ModelError) as caught:
        rotary(LINEAR)
    assert str(caught.value) == message
    rotary(HF)  # the default variant needs nothing
