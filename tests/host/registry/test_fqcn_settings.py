"""Settings that name a component by name take an FQCN, too: it is enabled, checked and named."""

from __future__ import annotations

import json

import pytest
from support.plugins import named

from hardpoint import LLM, SamplingParams
from hardpoint.errors import (
    ConfigError,
    PluginConflictError,
    PluginContractError,
    PluginLoadError,
    PluginNotFoundError,
    RequestError,
)
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins import EngineConfig
from hardpoint.plugins.config import ConfigSources
from hardpoint.testing import scripted_config, write_scripted_model
from hardpoint.typed import convert

HERE = named.__name__
SETTINGS = {
    "reasoning.parser": ("reasoning_parsers", "Arrows"),
    "tools.parser": ("tool_parsers", "Arrows"),
    "grammar.use": ("grammars", "Twice"),
    "load.use": ("loaders", "FromNowhere"),
    "quantization.use": ("quantizations", "Halves"),
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
MESSAGES = [[{"role": "user", "content": "go"}]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=60)


def table(path, value):
    name, _, field = path.partition(".")
    return {name: {field: value}}


def resolve(path, value, **extra):
    sources = ConfigSources({path: "hardpoint.toml"})
    return resolve_plugins(convert({**table(path, value), **extra}, EngineConfig, path=""), sources)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    reply = "hm=>[f]{}"
    tools = f"tools: {json.dumps(TOOLS)}\n"
    replies = {"user: go\nassistant: ": reply, f"{tools}user: go\nassistant: ": reply}
    return write_scripted_model(tmp_path_factory.mktemp("named"), replies)


@pytest.mark.parametrize("path", SETTINGS)
def test_it_is_enabled_and_checked_as_any_other(path):
    kind, name = SETTINGS[path]
    plugins = resolve(path, f"{HERE}:{name}")
    (entry,) = [e for e in plugins.entries(kind) if e.value == f"{HERE}:{name}"]
    assert str(entry.source) == (
        f"plugin {entry.name!r} ({HERE}:{name}), asked for by {path} (hardpoint.toml)"
    )
    assert plugins.loaded(entry) is getattr(named, name)
    assert plugins.get(kind, entry.value) is plugins.get(kind, entry.name) is entry


@pytest.mark.parametrize("path", SETTINGS)
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("nothing:X", PluginNotFoundError, "there is no module 'nothing'"),
        (f"{HERE}:Missing", PluginNotFoundError, f"'{HERE}' has no 'Missing'"),
        (f"{HERE}:Unversioned", PluginContractError, "this is a class derived from object"),
        (f"{HERE}:plain", PluginContractError, "must be classes derived from hardpoint.plugins"),
        ("a b:C", ConfigError, "expected an FQCN like package.module:Class"),
        ("support.plugins.unimportable:X", PluginLoadError, "its import failed: ZeroDivision"),
    ],
)
def test_the_errors_are_those_of_other_references(path, value, error, message):
    with pytest.raises(error, match=message) as caught:
        resolve(path, value)
    assert path in str(caught.value)
    assert "hardpoint.toml" in str(caught.value)


def test_a_class_that_is_enabled_already_keeps_its_name():
    value = f"{HERE}:Arrows"
    enable = {"enable": [{"use": value, "name": "mine"}]}
    plugins = resolve("reasoning.parser", value, plugins=enable)
    entries = [e.name for e in plugins.entries("reasoning_parsers") if e.value == value]
    assert entries == ["mine"]
    assert plugins.get("reasoning_parsers", value).name == "mine"


def test_a_name_that_a_built_in_has_is_refused():
    with pytest.raises(PluginConflictError, match=r"two components are called tool_parsers/hermes"):
        resolve("tools.parser", f"{HERE}:Hermes")


def test_its_options_are_in_its_own_table():
    plugins = resolve("tools.parser", f"{HERE}:Arrows", plugin={"arrows": {"arrow": "->"}})
    assert plugins.get("tool_parsers", "arrows").options == {"arrow": "->"}
    with pytest.raises(ConfigError, match=r"plugin.arrows"):
        resolve("tools.parser", f"{HERE}:Arrows", plugin={"arrows": {"bow": 1}})


def test_an_engine_parses_and_checks_with_them(model):
    config = {"reasoning": {"parser": named.Arrows}, "tools": {"parser": f"{HERE}:Arrows"}}
    with LLM(config=scripted_config(model, {**config, "grammar": {"use": f"{HERE}:Twice"}})) as llm:
        (answer,) = llm.chat(MESSAGES, GREEDY, tools=TOOLS)[0].outputs
        assert (answer.reasoning, [call.name for call in answer.tool_calls]) == ("hm", ["f"])
        structured = SamplingParams(structured={"regex": "z"}, max_tokens=9)
        (output,) = llm.generate("x", structured)[0].outputs
        assert output.text == "zz"


def test_a_request_may_name_an_enabled_one_only(model):
    value = f"{HERE}:Arrows"
    chosen = SamplingParams(temperature=0.0, max_tokens=60, reasoning_parser=value)
    with LLM(config=scripted_config(model, {"plugins": {"enable": [value]}})) as llm:
        assert llm.chat(MESSAGES, chosen)[0].outputs[0].reasoning == "hm"
    with LLM(config=scripted_config(model, {})) as llm:
        with pytest.raises(RequestError, match=rf'{value}\'; add "{value}" to plugins.enable'):
            llm.chat(MESSAGES, chosen)
        other = SamplingParams(structured={"regex": "z", "backend": f"{HERE}:Twice"})
        with pytest.raises(RequestError, match=r'Twice\'; add ".*:Twice" to plugins.enable'):
            llm.generate("x", other)
