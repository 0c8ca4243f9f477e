"""Models and weight loaders that return what they may not: the error names the plugin."""

from __future__ import annotations

import pytest
import torch

from hardpoint import LLM, SamplingParams
from hardpoint.builtin_plugins.loaders.dummy import DummyLoader
from hardpoint.plugins import KVSpec
from hardpoint.plugins.errors import EngineFaultError, PluginFaultError
from hardpoint.testing import ScriptedModel, scripted_config


class Wrong:
    """What the methods of the plugins below return, or raise; a test sets it."""

    weights: object = None
    config: object = None
    weight_shapes: object = None
    kv_specs: object = None
    forward: object = None
    compute_logits: object = None


def wrong(name: str, right: object) -> object:
    value = getattr(Wrong, name)
    if isinstance(value, BaseException):
        raise value
    return right if value is None else value


class Loader(DummyLoader):
    contract = 1

    def config(self):
        return wrong("config", super().config())

    def weights(self, shapes):
        return wrong("weights", super().weights(shapes))


class Model(ScriptedModel):
    contract = 1

    def weight_shapes(self):
        return wrong("weight_shapes", super().weight_shapes())

    def kv_specs(self):
        return wrong("kv_specs", super().kv_specs())

    def forward(self, batch):
        return wrong("forward", super().forward(batch))

    def compute_logits(self, hidden):
        return wrong("compute_logits", super().compute_logits(hidden))


def endless():
    while True:
        yield "unknown", torch.zeros(1)


WEIGHTS = "a name and a dense CPU tensor"


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("config", {}, r"'loader' .*: its config\(\) gave \{\}, expected a ModelConfig"),
        ("config", KeyError("x"), "'loader' .*: KeyError: 'x'"),
        ("weights", 5, r"'loader' .*: its weights\(\) gave 5, expected weights one after"),
        ("weights", [("a", [0.0])], rf"its weights\(\) gave \('a', \[0.0\]\), expected {WEIGHTS}"),
        ("weights", [("a", torch.zeros(2, device="meta"))], f"expected {WEIGHTS}"),
        ("weights", [("a", torch.zeros(2).to_sparse())], f"expected {WEIGHTS}"),
        ("weights", endless(), r"'loader' .*: its weights\(\) gave 'unknown' twice"),
        ("weights", SystemExit(3), "'loader' .*: SystemExit: 3"),
        (
            "weight_shapes",
            ["a"],
            r"'Scripted.*its weight_shapes\(\) gave \['a'\], expected a shape",
        ),
        (
            "weight_shapes",
            {"a": (-5,)},
            r"its weight_shapes\(\) gave .*, expected a shape per name",
        ),
        ("kv_specs", 3, r"'Scripted.*: its kv_specs\(\) gave 3, expected a list of KVSpec"),
        ("kv_specs", [KVSpec(1, 1, -8, 1.0)], "expected a list of KVSpec with numbers >= 1"),
    ],
)
def test_at_start(method, value, message, scripted, monkeypatch):
    monkeypatch.setattr(Wrong, method, value)
    with pytest.raises(PluginFaultError, match=message):
        LLM(config=config(scripted))


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        (
            "forward",
            torch.zeros(1, 3),
            r"gave a torch.float32 tensor \[1, 3\] .* states \[7, hidden",
        ),
        ("forward", "x", r"its forward\(\) gave 'x', expected hidden states \[7, hidden\]"),
        ("compute_logits", torch.zeros(1, 5), r"expected floating logits \[1, 257\]"),
        ("compute_logits", torch.zeros(1, 257).long(), r"gave a torch.int64 tensor \[1, 257\]"),
    ],
)
def test_in_a_step(method, value, message, scripted, monkeypatch):
    with LLM(config=config(scripted)) as llm:
        monkeypatch.setattr(Wrong, method, value)
        with pytest.raises(EngineFaultError, match=f"plugin 'ScriptedForCausalLM' .*{message}"):
            llm.generate("say abc", SamplingParams(temperature=0.0))


def config(folder):
    found = scripted_config(folder, {"load": {"use": "loader"}})
    found["plugins"] = {
        "enable": [
            {"use": f"{__name__}:Model", "name": "ScriptedForCausalLM"},
            {"use": f"{__name__}:Loader", "name": "loader"},
        ]
    }
    return found
