"""Scripted models that keep the hash of the history in a state, beside attention or instead."""

from __future__ import annotations

import dataclasses
import json

import torch

from hardpoint.plugins import TensorSpec
from hardpoint.testing import ScriptedModel, scripted_config, write_scripted_model
from hardpoint.testing.scripted import HISTORY_BASE, HISTORY_MODULUS


class StateModel(ScriptedModel):
    """Without attention; it gives the tokens of the scripted model."""

    contract = 1
    parallelism = ("tensor", "pipeline")

    def kv_specs(self):
        return []

    def state_specs(self):
        return [(TensorSpec((1,), "int64"),)]

    def forward(self, batch):
        def attend(_layer, _q, ids, _v, _angles=None):
            return batch.recur(0, advance, ids)

        return super().forward(dataclasses.replace(batch, attend=attend))


class HybridModel(ScriptedModel):
    """With attention and a state, which have to agree."""

    contract = 1
    parallelism = ("tensor", "pipeline")

    def state_specs(self):
        return [(TensorSpec((1,), "int64"),)]

    def forward(self, batch):
        def attend(layer, q, ids, v, angles=None):
            attended = batch.attend(layer, q, ids, v, angles).reshape(-1, 2)
            return 2 * batch.recur(0, advance, ids) - attended

        return super().forward(dataclasses.replace(batch, attend=attend))


def advance(states, starts, ids):
    """Return the hash of the history with each token, in two halves, and the last ones."""
    (hashes,), rows = states, []
    tokens = ids[:, 0, 0].long().tolist()
    for row in range(len(hashes)):
        value = int(hashes[row])
        for token in tokens[starts[row] : starts[row + 1]]:
            value = (value * HISTORY_BASE + token + 1) % HISTORY_MODULUS
            rows.append((value >> 16, value & 0xFFFF))
        hashes[row] = value
    return torch.tensor(rows, dtype=torch.float32), (hashes,)


def state_config(folder, model=HybridModel, extra=None, **fields):
    """Write a checkpoint of a model, and return the configuration that loads it."""
    write_scripted_model(folder, **fields)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [model.__name__]}))
    use = {"use": f"support.builtins.state_models:{model.__name__}", "name": model.__name__}
    extra = dict(extra or {})
    plugins = extra.get("plugins", {})
    extra["plugins"] = plugins | {"enable": [use, *plugins.get("enable", [])]}
    return scripted_config(folder, extra)
