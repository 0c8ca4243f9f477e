"""Classes of hooks have options, and get them with their context."""

from __future__ import annotations

from types import ModuleType
from typing import Annotated

import pytest
from msgspec import Meta
from support.plugins.fake import Installed

import hardpoint.plugins
from hardpoint.configuration.catalog import Catalog
from hardpoint.errors import ConfigError, PluginContractError, PluginLoadError
from hardpoint.plugins import EngineConfig, HookContext, hookimpl
from hardpoint.plugins.config import ConfigSources


class Limit:
    """Refuses long prompts."""

    contract = 1

    class Options(hardpoint.plugins.Options):
        """Its options.

        Attributes:
            tokens: longest prompt.
        """

        tokens: Annotated[int, Meta(ge=1)] = 100

    def __init__(self, context: HookContext) -> None:
        self.context = context

    @hookimpl
    def engine_closing(self):
        return self.context


@pytest.fixture
def installed(monkeypatch):
    return Installed(monkeypatch)


def enabled(installed, target, **config):
    installed.offer("hooks/limit", target)
    sources = ConfigSources({"plugin.limit": "file hardpoint.toml"})
    return installed.resolve(sources, plugins={"enable": ["limit"]}, **config)


def test_a_class_gets_its_options(installed):
    plugins = enabled(installed, Limit, plugin={"limit": {"tokens": 7}})
    (context,) = plugins.hooks().call("engine_closing")
    assert (context.name, context.options) == ("limit", Limit.Options(tokens=7))
    assert str(context.source).startswith("plugin 'limit' (acme-pack 2.0, ")
    assert plugins.get("hooks", "limit").options == {"tokens": 7}
    (default,) = installed.resolve(plugins={"enable": ["limit"]}).hooks().call("engine_closing")
    assert default.options.tokens == 100


def test_wrong_options_stop_the_program(installed):
    with pytest.raises(ConfigError) as error:
        enabled(installed, Limit, plugin={"limit": {"tokens": 0}})
    assert str(error.value) == (
        "plugin.limit.tokens: expected a whole number >= 1, got 0 (from file hardpoint.toml)"
    )


def test_they_are_shown(installed):
    plugins = enabled(installed, Limit, plugin={"limit": {"tokens": 7}})
    config = EngineConfig(plugin={"limit": {"tokens": 7}})
    details = Catalog(plugins, config, ConfigSources()).details("limit")
    assert details.options == {"tokens": 7}
    assert [field.name for field in details.option_fields] == ["tokens"]
    assert "longest prompt" in str(details.options_schema)


@pytest.mark.parametrize("form", ["module", "object"])
def test_what_is_no_class_has_no_options(installed, form):
    target = ModuleType("acme_limit")
    target.contract, target.Options = 1, Limit.Options
    target.engine_closing = hookimpl(lambda: None)
    if form == "object":
        target = type("Plain", (), {"contract": 1, "engine_closing": Limit.engine_closing})()
    else:
        installed.module("acme_limit", **vars(target))
    assert enabled(installed, target).get("hooks", "limit").options == {}
    with pytest.raises(ConfigError) as error:
        installed.resolve(plugins={"enable": ["limit"]}, plugin={"limit": {"tokens": 7}})
    article = "a module" if form == "module" else "an object"
    assert str(error.value).startswith(
        f"plugin.limit: only classes have options, and this plugin is {article}; put its hooks "
        f"into a class with `Options` and `__init__(self, context)`"
    )


def test_options_that_nothing_takes_are_refused(installed):
    deaf = type("Deaf", (Limit,), {"contract": 1, "__init__": lambda self: None})
    with pytest.raises(PluginContractError, match="has Options and its constructor takes no cont"):
        enabled(installed, deaf)


def test_options_of_another_type_are_refused(installed):
    odd = type("Odd", (Limit,), {"contract": 1, "Options": dict})
    with pytest.raises(PluginContractError, match="its Options must derive from hardpoint.plugins"):
        enabled(installed, odd)


@pytest.mark.parametrize("parameters", ["self", "self, limit=3", "self, *more, **rest"])
def test_a_constructor_without_context_gets_none(installed, parameters):
    made = {}
    exec(f"def __init__({parameters}): made.update(locals())", {"made": made}, scope := {})
    body = {"contract": 1, "engine_closing": Limit.engine_closing, **scope}
    enabled(installed, type("Plain", (), body)).hooks()
    assert made.get("limit", 3) == 3
    assert not made.get("more")


def test_a_constructor_that_fails_is_named(installed):
    def fail(self, context):
        raise KeyError(context.options.tokens)

    with pytest.raises(PluginLoadError, match="its constructor failed: KeyError: 100"):
        enabled(installed, type("Bad", (Limit,), {"contract": 1, "__init__": fail})).hooks()
