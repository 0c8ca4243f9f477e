"""Plugins inside a running engine: hooks, faulty processors, replaced built-ins, progress."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import tokenizers
from support.driving import run
from support.engines import build_engine

from hardpoint import (
    ConfigError,
    ModelError,
    PluginError,
    RequestError,
    SamplingParams,
    plugins,
    typed,
)
from hardpoint.errors import PluginFaultError, PluginLoadError
from hardpoint.plugins import EngineConfig, LogitsProcessor, Phase, hookimpl
from hardpoint.testing import scripted_config, scripted_engine

HERE = "test_plugins_in_engine"
GREEDY = {"temperature": 0.0, "max_tokens": 20}


class Recorder:
    """Hooks that remember what they were told, and fail on request."""

    contract = 1
    seen: ClassVar[list] = []

    @hookimpl
    def engine_started(self, info):
        self.seen.append(("started", info["model"], info["max_model_len"]))

    @hookimpl
    def engine_closing(self):
        self.seen.append(("closing",))

    @hookimpl
    def request_received(self, request):
        if request.params.seed == 13:
            raise ValueError("13 is unlucky")
        if request.params.seed == 14:
            raise KeyError("lost")
        self.seen.append(("received", request.external_req_id, request.child_index))

    @hookimpl
    def request_finished(self, output):
        if output.prompt == "long":
            raise RuntimeError("no room in the log")
        self.seen.append(("finished", output.request_id))


class FailingStart:
    contract = 1

    @hookimpl
    def engine_started(self):
        raise RuntimeError("not today")


class BadConstructor(LogitsProcessor):
    contract = 1
    phase = Phase.MASK

    def __init__(self, context):
        raise OSError("no such thing")

    def apply(self, logits, rows):
        return logits


class MinPByTwo(LogitsProcessor):
    """In the place of min_p: only token 65 survives."""

    contract = 1
    phase = Phase.TRUNCATE
    params_fields = ("min_p",)

    class Arguments(plugins.Arguments):
        min_p: float

    def apply(self, logits, rows):
        kept = logits[:, 65].clone()
        logits.fill_(-math.inf)
        logits[:, 65] = kept
        return logits


class ForEverybody(LogitsProcessor):
    """Has no Arguments: once on, every request uses it."""

    contract = 1
    phase = Phase.FORCE

    class Options(plugins.Options):
        token: int

    def apply(self, logits, rows):
        logits[:, self.options.token] = 1e9
        return logits


def engine_with(open_engine, *enable, **extra):
    return open_engine({"plugins": {"enable": list(enable)}, **extra})


def text_of(engine, prompt="say abc", **fields):
    params = SamplingParams(**{**GREEDY, **fields})
    return run(engine, [("r", prompt, params)])["r"][0][0]


def test_hooks_see_the_life_of_a_request(scripted, open_engine):
    Recorder.seen.clear()
    engine = engine_with(open_engine, f"{HERE}:Recorder")
    assert text_of(engine)[2] == " abc abc abc"
    text_of(engine, n=2)
    engine.close()
    assert Recorder.seen == [
        ("started", str(scripted), 512),
        ("received", "r", 0),
        ("finished", "r"),
        ("received", "r", 0),
        ("received", "r", 1),
        ("finished", "r"),
        ("closing",),
    ]


def test_a_hook_refuses_or_breaks_one_request_only(open_engine):
    engine = engine_with(open_engine, f"{HERE}:Recorder")
    with pytest.raises(RequestError, match="^13 is unlucky$"):
        engine.add_request("bad", "x", SamplingParams(seed=13))
    with pytest.raises(
        RequestError, match=r"plugin 'recorder' .* its hook request_received failed: KeyError"
    ):
        engine.add_request("bad", "x", SamplingParams(seed=14))
    assert not engine.has_unfinished_requests()
    broken = text_of(engine, "long")
    assert broken[3] == "error"
    assert text_of(engine)[2:4] == (" abc abc abc", "stop")


def test_a_hook_that_fails_at_start_closes_the_engine(open_engine):
    with pytest.raises(
        PluginFaultError, match=r"'failing_start'.*engine_started failed.*not today"
    ):
        engine_with(open_engine, f"{HERE}:FailingStart")


def test_a_constructor_that_fails_is_named(open_engine):
    with pytest.raises(
        PluginLoadError,
        match=r"plugin 'bad_constructor' .*its constructor failed: OSError: no such",
    ):
        engine_with(open_engine, f"{HERE}:BadConstructor")


def test_a_built_in_can_be_replaced(open_engine):
    engine = open_engine({"plugins": {"replace": {"min_p": f"{HERE}:MinPByTwo"}}})
    params = {"temperature": 1.0, "seed": 1, "max_tokens": 3}
    assert text_of(engine, "x", **params, min_p=0.5)[2] == _byte(65) * 3
    assert text_of(engine, "x", **params)[2] != _byte(65) * 3


def test_a_processor_without_arguments_is_for_everybody(open_engine):
    engine = engine_with(
        open_engine, f"{HERE}:ForEverybody", plugin={"for_everybody": {"token": 70}}
    )
    assert text_of(engine, max_tokens=3)[1] == [70, 70, 70]


def test_options_are_checked_with_their_origin(open_engine):
    with pytest.raises(ConfigError, match=r"plugin.for_everybody.token: missing, and it has no"):
        engine_with(open_engine, f"{HERE}:ForEverybody", plugin={"for_everybody": {}})
    with pytest.raises(ConfigError, match=r"plugin.nobody: no plugin 'nobody' is enabled"):
        engine_with(open_engine, plugin={"nobody": {}})


@pytest.mark.parametrize(
    ("extra", "error", "words"),
    [
        ({"max_model_len": 1000}, ConfigError, "max_model_len: expected at most 512, the"),
        ({"kv_cache": {"memory_bytes": 100}}, ConfigError, "not even one block fits"),
        ({"model": "no/such-model-here"}, ModelError, "the Hugging Face hub did not give it"),
        ({"model": "smollm3"}, ModelError, "found no model 'smollm3'"),
        ({"load": {"use": "pickle"}}, PluginError, "loaders: no component 'pickle' is enabled"),
        ({"scheduler": {"policy": "lifo"}}, PluginError, "is called 'lifo'"),
        ({"sampler": {"use": "nowhere:Sampler"}}, PluginError, "there is no module 'nowhere'"),
        ({"attention": {"use": f"{HERE}:ForEverybody"}}, PluginError, "attention_backends must be"),
    ],
)
def test_what_cannot_be_opened_is_refused_with_the_reason(scripted, extra, error, words):
    with pytest.raises(error) as raised:
        scripted_engine(scripted, extra)
    assert words in str(raised.value)


def test_an_unsupported_architecture_is_named(scripted):
    config = scripted_config(scripted)
    config["plugins"] = {}
    with pytest.raises(ModelError) as error:
        build_engine(typed.convert(config, EngineConfig, path=""))
    assert "architecture 'ScriptedForCausalLM' is not supported" in str(error.value)
    assert "LlamaForCausalLM" in str(error.value)


def _byte(token: int) -> str:
    """The text of a token of the scripted model."""
    return sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[token]
