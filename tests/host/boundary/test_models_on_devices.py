"""Models at the limits of what the engine asks, and on a GPU, with a stand-in for one."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from support.broken.media_models import Seeing
from support.broken.models import HIDDEN
from support.builtins.model_harness import build_model, load_model, open_loader
from support.device_stand_in import StandIn

from hardpoint.builtin_plugins.loaders.dummy import DummyLoader
from hardpoint.builtin_plugins.models.llama import Llama
from hardpoint.errors import PluginFaultError
from hardpoint.host.boundary.checked_model import CheckedModel
from hardpoint.plugins.component import Source

SOURCE = Source("model", "x:Model", "here", "0", "default")
LENGTH = 8
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def test_a_trial_step_may_have_more_tokens_than_a_sequence(tmp_path):
    """On a GPU one has as many as a step has sequences; a model has no positions beyond its end."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    loader = open_loader(DummyLoader, tmp_path)
    model = load_model(Llama, loader, dtype=torch.float32, max_model_len=LENGTH)
    given, forward = [], model.forward

    def noting(batch):
        given.append(batch.positions.tolist())
        return forward(batch)

    model.forward = noting
    CheckedModel(model, SOURCE).run_trial(2 * LENGTH + 3, 1)
    assert given == [[*range(LENGTH), *range(LENGTH), 0, 1, 2]]


def test_embeddings_of_media_are_where_the_media_are(tmp_path, monkeypatch):
    """An engine on its only GPU calls it `cuda`, and torch calls that of a tensor `cuda:0`."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    config = open_loader(DummyLoader, tmp_path).config()
    model = build_model(Seeing, config, dtype=torch.float32)
    model.context = dataclasses.replace(model.context, device=torch.device("cuda"))
    checked = CheckedModel(model, SOURCE)
    items = [torch.zeros(2, 2).as_subclass(StandIn)]
    found = torch.zeros(3, HIDDEN)
    monkeypatch.setattr(model, "encode_media", lambda *_: [found])
    with pytest.raises(PluginFaultError, match=rf"1 tensors \[length, {HIDDEN}\] on cuda:0"):
        checked.encode_media("image", items)
    found = found.as_subclass(StandIn)
    assert checked.encode_media("image", items)[0] is found
