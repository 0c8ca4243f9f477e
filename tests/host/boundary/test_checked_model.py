"""Models, attention backends and loaders that return what they may not are named."""

from __future__ import annotations

import math

import pytest
import torch
from support.samples import Sample

from hardpoint import LLM, SamplingParams
from hardpoint.builtin_plugins.loaders.dummy import DummyLoader
from hardpoint.errors import EngineFaultError, PluginFaultError
from hardpoint.plugins import KVSpec, ModelError
from hardpoint.plugins.quantization import QuantizedWeight
from hardpoint.testing import HistoryAttention, ScriptedModel, scripted_config


class Wrong:
    """Values that the methods of the plugins below return, or raise; a test sets them."""

    weights: object = None
    config: object = None
    weight_shapes: object = None
    kv_specs: object = None
    quantizable: object = None
    bytes_per_block: object = None
    allocate: object = None
    attend: object = None
    forward: object = None
    compute_logits: object = None


def wrong(name: str, right: object) -> object:
    value = getattr(Wrong, name)
    if isinstance(value, BaseException):
        raise value
    return right if value is None else value


class Loader(Sample, DummyLoader, contract=1):
    def config(self):
        return wrong("config", super().config())

    def weights(self, shapes):
        return wrong("weights", super().weights(shapes))


class Model(Sample, ScriptedModel, contract=1):
    def weight_shapes(self):
        return wrong("weight_shapes", super().weight_shapes())

    def kv_specs(self):
        return wrong("kv_specs", super().kv_specs())

    def quantizable(self):
        return wrong("quantizable", super().quantizable())

    def forward(self, batch):
        return wrong("forward", super().forward(batch))

    def compute_logits(self, hidden):
        return wrong("compute_logits", super().compute_logits(hidden))


class Attention(Sample, HistoryAttention, contract=1):
    def bytes_per_block(self, spec):
        return wrong("bytes_per_block", super().bytes_per_block(spec))

    def allocate(self, spec, num_blocks):
        return wrong("allocate", super().allocate(spec, num_blocks))

    def attend(self, spec, cache, plan, q, k, v):
        return wrong("attend", super().attend(spec, cache, plan, q, k, v))


def endless():
    while True:
        yield "unknown", torch.zeros(1)


WEIGHTS = "a name and a dense CPU tensor"


def stored(**changes):
    """Return weights: a stored matrix."""
    fields = {"scheme": "q", "shape": (4, 64), "tensors": {"x": torch.zeros(4, 8).byte()}}
    return [("a", QuantizedWeight(**(fields | changes)))]


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("config", {}, r"'loader' .*: its config\(\) gave \{\}, expected a ModelConfig"),
        ("config", KeyError("x"), "'loader' .*: KeyError: 'x'"),
        ("weights", 5, r"'loader' .*: its weights\(\) gave 5, expected weights one after"),
        ("weights", [("a", [0.0])], rf"its weights\(\) gave \[0.0\] for 'a', expected {WEIGHTS}"),
        ("weights", stored(scheme=7), rf"gave QuantizedWeight\(7, .* for 'a', expected {WEIGHTS}"),
        ("weights", stored(shape=None), r"gave QuantizedWeight\('q', None, {'x': torch\.uint8 \[4"),
        ("weights", stored(shape=(4,)), r"gave QuantizedWeight\('q', \(4,\), .* for 'a'"),
        ("weights", stored(tensors=None), r"\('q', \(4, 64\), None\) for 'a', expected"),
        ("weights", stored(tensors={"x": [1]}), r"\('q', \(4, 64\), {'x': \[1\]}\) for 'a', exp"),
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
        ("quantizable", 3, r"'Scripted.*: its quantizable\(\) gave 3, expected names$"),
        ("quantizable", "a", r"its quantizable\(\) gave 'a', expected names$"),
        ("quantizable", ["a"], r"its quantizable\(\) gave 'a', expected names of matrices in we"),
        ("kv_specs", 3, r"'Scripted.*: its kv_specs\(\) gave 3, expected a list of KVSpec"),
        ("kv_specs", [KVSpec(1, 1, -8, 1.0)], "expected a list of KVSpec of whole numbers >= 1"),
        ("kv_specs", [KVSpec(1, 1, 8, 1.0, value_size=9)], "value_size is at most head_size"),
        ("kv_specs", [KVSpec(3, 2, 8, 1.0)], "where num_kv_heads divides num_heads and value_size"),
        ("kv_specs", [KVSpec(2, 2, 8, 1.0, 0)], "window=0.*, expected a list of KVSpec of whole"),
        ("kv_specs", [KVSpec(1, 1, 2, 1.0, None, -2.0)], "softcap=-2.0.*, .* a softcap > 0 and"),
        (
            "kv_specs",
            [KVSpec(2, 2, 8, 1.0, sinks=torch.zeros(3))],
            r"expected a list of KVSpec .* and sinks float32 \[num_heads\]",
        ),
        ("kv_specs", [KVSpec(2, 2, 8, math.nan)], "scale=nan.*, expected .* a finite scale"),
        ("kv_specs", [KVSpec(2.0, 2, 8, 1.0)], "num_heads=2.0.*, expected a list of KVSpec"),
        (
            "bytes_per_block",
            0,
            r"'attention' .*: its bytes_per_block\(\) gave 0, expected an int >= 1",
        ),
        ("bytes_per_block", 64.0, r"its bytes_per_block\(\) gave 64.0, expected an int >= 1"),
        (
            "allocate",
            [torch.zeros(1, dtype=torch.int64).expand(1 << 30)],
            r"'attention' .*: its allocate\(\) took 8589934592 bytes for \d+ blocks, expected \d+",
        ),
        ("allocate", ZeroDivisionError("x"), "'attention' .*: ZeroDivisionError: x"),
    ],
)
def test_at_start(method, value, message, scripted, monkeypatch):
    monkeypatch.setattr(Wrong, method, value)
    with pytest.raises(PluginFaultError, match=message):
        LLM(config=config(scripted))


def test_an_attention_backend_without_soft_caps_refuses_models_that_have_them(
    scripted, monkeypatch
):
    specs = [KVSpec(1, 1, 2, 1.0), KVSpec(1, 1, 2, 1.0, softcap=50.0)]
    monkeypatch.setattr(Wrong, "kv_specs", specs)
    message = (
        r"^attention.use: .*'attention' .* has no soft cap of attention scores \("
        r"softcaps = False in its class\), which layer 1 needs; choose another attention backend "
        r"for this model"
    )
    with pytest.raises(ModelError, match=message):
        LLM(config=config(scripted))


def test_an_attention_backend_without_sinks_refuses_models_that_have_them(scripted, monkeypatch):
    specs = [KVSpec(1, 1, 2, 1.0), KVSpec(1, 1, 2, 1.0, sinks=torch.zeros(1))]
    monkeypatch.setattr(Wrong, "kv_specs", specs)
    message = (
        r"^attention.use: .*'attention' .* has no sinks of attention \(has_sinks = "
        r"False in its class\), which layer 1 needs; choose another attention backend"
    )
    with pytest.raises(ModelError, match=message):
        LLM(config=config(scripted))


class Attends(Model):
    """Calls attend as a test sets: layers, and the shape, dtype and device of q, k and v."""

    calls = ()

    def forward(self, batch):
        for layer, *tensors in self.calls:
            batch.attend(layer, *tensors)
        return super().forward(batch)


RIGHT = torch.zeros(2, 1, 2)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([(1, RIGHT, RIGHT, RIGHT)], r"called attend for layer 1, expected 0\.\.0$"),
        ([(-1, RIGHT, RIGHT, RIGHT)], r"called attend for layer -1, expected 0\.\.0$"),
        ([(0, RIGHT, RIGHT, RIGHT)], "called attend for layer 0 twice$"),
        (
            [(0, RIGHT, RIGHT.expand(2, 3, 2), RIGHT)],
            r"called attend for layer 0 with k = a torch.float32 tensor \[2, 3, 2\] .*, expected a "
            r"torch.float32 tensor \[2, 1, 2\] on cpu, by kv_specs\(\)$",
        ),
        ([(0, RIGHT.double(), RIGHT, RIGHT)], r"with q = a torch.float64 tensor \[2, 1, 2\]"),
        ([(0, RIGHT, RIGHT, RIGHT.to("meta"))], r"with v = .* on meta\), expected .* on cpu,"),
        ([(0, RIGHT, RIGHT, None)], "with v = None, expected a torch.float32 tensor"),
    ],
)
def test_attention_is_called_as_the_specs_declare(calls, message, scripted, monkeypatch):
    monkeypatch.setattr(Attends, "calls", calls)
    with pytest.raises(PluginFaultError, match=rf"'Scripted.*: its forward\(\) .*{message}"):
        LLM(config=config(scripted, "Attends"))


def test_values_that_are_part_of_keys_come_as_keys(scripted, monkeypatch):
    monkeypatch.setattr(Wrong, "kv_specs", [KVSpec(1, 1, 2, 1.0, value_size=1)])
    monkeypatch.setattr(Attends, "calls", [(0, RIGHT, RIGHT, RIGHT.clone())])
    message = "layer 0 with v that is not k, expected one tensor, as .* value_size 1$"
    with pytest.raises(PluginFaultError, match=message):
        LLM(config=config(scripted, "Attends"))


def test_a_trial_step_is_no_longer_than_the_model_allows(scripted, monkeypatch):
    given = []

    def forward(self, batch):
        given.append(batch.positions.tolist())
        return ScriptedModel.forward(self, batch)

    monkeypatch.setattr(Model, "forward", forward)
    for length in (1, 64):
        LLM(config=config(scripted) | {"max_model_len": length}).close()
    assert given == [[0], [0, 1]]


def test_each_layer_attends(scripted, monkeypatch):
    monkeypatch.setattr(Model, "forward", lambda *_: torch.zeros(2, 2))
    with pytest.raises(
        PluginFaultError, match=r"for no layer 0, though kv_specs\(\) has 1 layers$"
    ):
        LLM(config=config(scripted))


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        (
            "forward",
            torch.zeros(3, 2),
            r"forward\(\) gave .*, expected hidden states \[2, hidden\]",
        ),
        ("forward", KeyError("x"), r"its forward\(\) failed in a trial step: KeyError: 'x'"),
        (
            "compute_logits",
            torch.zeros(2, 100),
            r"\[2, 100\] .*, expected floating logits \[2, 257\]",
        ),
        ("compute_logits", SystemExit(3), r"its compute_logits\(\) failed in a trial step: System"),
    ],
)
def test_a_trial_step_ends_the_start(method, value, message, scripted, monkeypatch):
    monkeypatch.setattr(Wrong, method, value)
    with pytest.raises(PluginFaultError, match=rf"plugin 'Scripted.*{message}"):
        LLM(config=config(scripted))


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        (
            "forward",
            torch.zeros(1, 3),
            r"gave a torch.float32 tensor \[1, 3\] .* states \[7, 2\]",
        ),
        ("forward", torch.zeros(7, 3), r"\[7, 3\] .*, expected hidden states \[7, 2\] on cpu"),
        ("forward", "x", r"its forward\(\) gave 'x', expected hidden states \[7, 2\] on cpu"),
        ("compute_logits", torch.zeros(1, 5), r"expected floating logits \[1, 257\]"),
        ("compute_logits", torch.zeros(1, 257).long(), r"gave a torch.int64 tensor \[1, 257\]"),
        ("attend", "x", r"its attend\(\) gave 'x', expected a torch.float32 tensor \[7, 1, 2\]"),
        ("attend", torch.zeros(7, 1, 2).half(), r"its attend\(\) gave a torch.float16 tensor"),
        ("attend", torch.zeros(7, 1), r"its attend\(\) gave .* tensor \[7, 1\]"),
        ("attend", ZeroDivisionError("x"), "ZeroDivisionError: x"),
    ],
)
def test_in_a_step(method, value, message, scripted, monkeypatch):
    name = "attention" if method == "attend" else "ScriptedForCausalLM"
    with LLM(config=config(scripted)) as llm:
        monkeypatch.setattr(Wrong, method, value)
        with pytest.raises(EngineFaultError, match=f"plugin '{name}' .*{message}"):
            llm.generate("say abc", SamplingParams(temperature=0.0))


def config(folder, model="Model"):
    found = scripted_config(
        folder, {"load": {"use": "loader"}, "attention": {"use": f"{__name__}:Attention"}}
    )
    found["plugins"] = {
        "enable": [
            {"use": f"{__name__}:{model}", "name": "ScriptedForCausalLM"},
            {"use": f"{__name__}:Loader", "name": "loader"},
        ]
    }
    return found
