"""An error that ends the engine names the plugin whose method failed, and no other."""

from __future__ import annotations

import pytest
import torch
from support.driving import FINAL
from support.fault_cases import run_all

from hardpoint import RequestError, SamplingParams, plugins
from hardpoint.core.worker.input_batch import InputBatch
from hardpoint.errors import EngineDeadError, EngineFaultError
from hardpoint.plugins import LogitsProcessor, Phase, Sampler, SchedulingPolicy
from hardpoint.testing import scripted_engine
from hardpoint.testing.scripted import ScriptedModel

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, **FINAL)


class MuteError(ValueError):
    def __str__(self):
        raise RuntimeError("no text")


def mute(*_):
    raise MuteError


class Outside(Sampler):
    contract = 1

    class Options(plugins.Options):
        token: int

    def sample(self, logits, rows):
        return torch.full((len(logits),), self.options.token)


class MuteLogits(LogitsProcessor):
    contract = 1
    phase = Phase.BIAS

    class Arguments(plugins.Arguments):
        how: str

    @classmethod
    def prepare(cls, arguments, context):
        return mute() if arguments.how == "refuse" else arguments

    apply = mute


class MutePolicy(SchedulingPolicy):
    contract = 1
    key = mute


def fails(scripted, config=None):
    return fault_of(scripted_engine(scripted, config or {}))


def fault_of(engine):
    engine.add_request("a", "say abc", GREEDY)
    with pytest.raises(EngineDeadError) as error:
        run_all(engine, [])
    return error.value


def test_a_fault_of_the_engine_itself_is_not_the_executors(scripted, monkeypatch):
    def broken(self, *_):
        raise KeyError("row 7")

    monkeypatch.setattr(InputBatch, "prepare", broken)
    error = fails(scripted)
    assert not isinstance(error, EngineFaultError)
    expected = "the engine failed in its own code, not in a plugin's: KeyError: 'row 7'"
    assert str(error) == expected


@pytest.mark.parametrize("error", [MuteError, SystemExit(0)])
def test_a_model_that_fails_is_named(scripted, monkeypatch, error):
    def broken(self, *_):
        raise error

    engine = scripted_engine(scripted)
    monkeypatch.setattr(ScriptedModel, "forward", broken)
    reported = fault_of(engine)
    assert isinstance(reported, EngineFaultError)
    assert str(reported).startswith("plugin 'ScriptedForCausalLM'")


@pytest.mark.parametrize("token", [-1, 257, 2**40])
def test_a_sampler_that_chooses_no_token_of_the_vocabulary_is_named(scripted, token):
    config = {"sampler": {"use": f"{__name__}:Outside"}, "plugin": {"outside": {"token": token}}}
    error = fails(scripted, config)
    assert isinstance(error, EngineFaultError)
    assert f"sampler 'outside': expected token ids in 0..256, got {token}" in str(error)


def test_an_exception_without_a_text_is_contained(open_engine):
    config = {
        "plugins": {"enable": [f"{__name__}:MuteLogits"]},
        "scheduler": {"policy": f"{__name__}:MutePolicy"},
    }
    engine = open_engine(config)
    bad = SamplingParams(max_tokens=8, plugin_args={"mute_logits": {"how": ""}}, **FINAL)
    finals = run_all(engine, [("bad", "say abc", bad), ("good", "say abc", GREEDY)])
    words = "failed: MuteError: (its __str__ raised RuntimeError)"
    assert words in finals["bad"].outputs[0].error
    assert finals["good"].outputs[0].text == " abc abc"
    assert words in engine.health().fallbacks["mute_policy"].message


def test_a_refusal_without_a_text_refuses_all_the_same(open_engine):
    engine = open_engine({"plugins": {"enable": [f"{__name__}:MuteLogits"]}})
    bad = SamplingParams(plugin_args={"mute_logits": {"how": "refuse"}})
    with pytest.raises(RequestError, match=r"mute_logits: \(its __str__ raised RuntimeError\)$"):
        engine.add_request("bad", "say abc", bad)
