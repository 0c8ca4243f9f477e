"""Advice of messages about names: it parses as TOML, and works when it is followed literally."""

from __future__ import annotations

import re
import tomllib

import pytest
from support.plugins.fake import component, on

from hardpoint.errors import ConfigError, PluginConflictError, PluginNotFoundError
from hardpoint.plugins import LogitsProcessor, Sampler, StatSink, hookimpl
from hardpoint.plugins.config import ConfigSources

SETTING = re.compile(r'[\w.]+ = (?:\{.*?\}(?=[ ;,)]|$)|\[.*?\](?=[ ;,)]|$)|"[^"]*")')
FILE = ConfigSources(
    {"sampler.use": "file hardpoint.toml", "plugins.enable": "file hardpoint.toml"}
)


def advised(message: str) -> list[dict]:
    """Return the settings that a message advises."""
    return [tomllib.loads(setting) for setting in SETTING.findall(message)]


@pytest.fixture
def refusal(installed):
    """Resolves a configuration that is refused; returns the message."""

    def run(kind=PluginConflictError, **config):
        with pytest.raises(kind) as error:
            installed.resolve(FILE, **config)
        return str(error.value)

    return run


def offer_two(installed, path, interface):
    return [installed.offer(path, component(interface), name) for name in ("one", "two")]


def test_two_plugins_of_one_name_and_kind(installed, refusal):
    first, second = offer_two(installed, "logits_processors/dry", LogitsProcessor)
    message = refusal(plugins={"enable": ["dry"]})
    (setting,) = advised(message)
    assert on(installed.resolve(**setting))["logits_processors/dry"] == first
    message = refusal(plugins={"enable": [first, second]})
    (setting,) = advised(message)
    assert setting["plugins"]["enable"] == [{"use": second, "name": "dry_2"}]
    both = {"enable": [first, *setting["plugins"]["enable"]]}
    plugins = installed.resolve(plugins=both)
    assert on(plugins)["logits_processors/dry"] == first
    assert on(plugins)["logits_processors/dry_2"] == second


@pytest.mark.parametrize("name", ["min_p", "logits_processors/min_p"])
def test_a_plugin_with_the_name_of_a_built_in(installed, refusal, name):
    value = installed.offer("logits_processors/min_p", component(LogitsProcessor))
    message = refusal(plugins={"enable": [name]})
    assert "to put the one of acme-pack in the built-in's place, write instead" in message
    (setting,) = advised(message)
    assert setting == {"plugins": {"replace": {name: value}}}
    assert on(installed.resolve(**setting))["logits_processors/min_p"] == value
    for setting in advised(refusal(plugins={"enable": [value]})):
        assert value in on(installed.resolve(**setting)).values()


def test_one_of_which_there_is_one(installed, refusal):
    value = installed.offer("samplers/default", component(Sampler))
    (setting,) = advised(refusal(sampler={"use": "default"}))
    assert setting == {"sampler": {"use": value}}
    assert installed.resolve(**setting).one("samplers").value == value


def test_a_default_that_is_not_named_stays_the_built_in(installed):
    installed.offer("samplers/default", component(Sampler))
    assert installed.resolve().one("samplers").distribution == "hardpoint"


def test_two_of_one_name_in_a_list(installed, refusal):
    first, second = offer_two(installed, "stat_sinks/log", StatSink)
    (setting,) = advised(refusal(stats={"sinks": ["log"]}))
    assert setting == {"stats": {"sinks": [first]}}
    message = refusal(stats={"sinks": [first, second]})
    assert message.endswith("; remove one of them from stats.sinks")


def test_two_modules_of_hooks_with_one_name(installed, refusal):
    def engine_closing():
        """Nothing."""

    for name in ("one", "two"):
        module = installed.module(f"{name}_hooks", contract=1, hook=hookimpl(engine_closing))
        installed.offer("hooks/closing", module, name)
    (setting,) = advised(refusal(plugins={"enable": ["closing"]}))
    assert setting == {"plugins": {"enable": ["one_hooks"]}}
    assert on(installed.resolve(**setting))["hooks/closing"] == "one_hooks"


def test_a_second_use_needs_a_name(installed, refusal):
    value = installed.offer("logits_processors/dry", component(LogitsProcessor))
    named = {"use": value, "name": "wet"}
    message = refusal(plugins={"enable": [named, value]})
    (item,) = re.findall(r"\{ use = .*? \}", message)
    second = tomllib.loads(f"item = {item}")["item"]
    plugins = installed.resolve(plugins={"enable": [named, second]})
    assert {"logits_processors/wet", "logits_processors/dry"} <= on(plugins).keys()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "novelties/foo",
            ": 'novelties/foo': this Hardpoint has no novelties; kinds here: logits_",
        ),
        ("beam", "_beam:Thing): this Hardpoint has no teleporters; kinds here: logits_"),
        ("sampler/best", "no sampler (did you mean 'samplers'?); kinds here: logits_processors, "),
    ],
)
def test_a_kind_that_is_not_here_is_named(installed, refusal, name, expected):
    installed.offer("teleporters/beam", object())
    message = refusal(PluginNotFoundError, plugins={"enable": [name]})
    assert message.startswith("plugins.enable[0]: ")
    assert expected in message
    assert message.endswith("(from file hardpoint.toml)")


@pytest.mark.parametrize(
    "config",
    [{"disable": ["min_p", "min_p"]}, {"disable": ["min_p"], "replace": {"min_p": "top_k"}}],
)
def test_a_disabled_plugin_is_reported_with_the_setting(refusal, config):
    message = refusal(PluginNotFoundError, plugins=config)
    assert "'min_p' is off, by plugins.disable[0]; remove one of the two" in message


@pytest.mark.parametrize("disable", ["min_p", "logits_processors/min_p"])
@pytest.mark.parametrize(
    "enable",
    ["min_p", "logits_processors/min_p", {"use": "min_p"}, {"use": "min_p", "name": "min_p"}],
)
def test_what_is_disabled_is_not_enabled_as_well(refusal, disable, enable):
    message = refusal(ConfigError, plugins={"disable": [disable], "enable": [enable]})
    assert message.startswith(("plugins.enable[0]: ", "plugins.disable[0]: "))
    assert "; remove one of the two (from " in message


def test_a_disabled_plugin_gives_its_name_to_another_one(installed):
    value = installed.offer("logits_processors/min_q", component(LogitsProcessor))
    use = {"use": value, "name": "min_p"}
    plugins = installed.resolve(plugins={"disable": ["min_p"], "enable": [use]})
    assert on(plugins)["logits_processors/min_p"] == value


def test_a_neighbour_that_nothing_has_is_a_warning(installed):
    wishes = {"before": ("top_k", "top_q"), "after": ("nobody",)}
    installed.offer("logits_processors/dry", component(LogitsProcessor, **wishes))
    plugins = installed.resolve(plugins={"enable": ["dry"]})
    one, other = plugins.warnings
    assert one.endswith(
        "its before names 'top_q', and no logits processor of that name is enabled or installed "
        "(did you mean 'top_k'?)"
    )
    assert "plugin 'dry' (acme-pack 2.0, " in other
    assert "its after names 'nobody', and no logits processor" in other
    assert installed.resolve(plugins={"disable": ["top_k"]}).warnings == []  # min_p names it


def test_the_same_plugin_twice_is_a_warning(installed):
    value = installed.offer("logits_processors/dry", component(LogitsProcessor))
    plugins = installed.resolve(FILE, plugins={"enable": ["dry", value]})
    assert plugins.warnings == [
        f"plugins.enable[1]: {value!r} is named twice, here and by plugins.enable[0]; "
        f"it is enabled once (from file hardpoint.toml)"
    ]
    assert installed.resolve(plugins={"enable": ["min_p"]}).warnings == []


def test_a_plugin_that_is_not_on_is_offered_by_a_name_that_works(installed):
    installed.offer("logits_processors/odd", component(LogitsProcessor))
    installed.offer("models/odd", component(LogitsProcessor))
    assert 'add "logits_processors/odd"' in installed.resolve().hint("odd", "logits_processors")
    value = installed.offer("logits_processors/odd", component(LogitsProcessor), "other")
    hint = installed.resolve().hint("odd", "logits_processors")
    (reference,) = re.findall(r'add "(.*?)"', hint)
    assert value != reference
    assert reference in on(installed.resolve(plugins={"enable": [reference]})).values()


def test_advice_is_found_where_there_is_some():
    """The pattern of this page sees the settings that messages hold."""
    assert (
        len(advised('say a.b = { "x/y" = "p:C" }; or c = [{ use = "p:C", name = "n" }] (f)')) == 2
    )


@pytest.mark.parametrize("name", ["{value}", "logits_processors/dry"])
def test_faults_of_a_component_by_another_reference(installed, refusal, name):
    value = installed.offer("logits_processors/dry", component(LogitsProcessor))
    name = name.format(value=value)
    enable = [value]
    message = refusal(ConfigError, plugins={"enable": enable, "on_error": {name: "engine"}})
    assert f"no enabled plugin {name!r} has faults that end less than the engine" in message
    assert f"; {name} is enabled as 'dry', so write dry (from" in message
    installed.resolve(plugins={"enable": enable, "on_error": {"dry": "engine"}})


def test_a_table_of_options_by_fqcn(installed, refusal):
    value = installed.offer("logits_processors/dry", component(LogitsProcessor))
    enable = [{"use": value, "name": "é-dry"}]
    message = refusal(ConfigError, plugins={"enable": enable}, plugin={value: {"x": 1}})
    assert f"plugin.{value}: no plugin {value!r} is enabled; {value} is enabled as 'é-dry', " in (
        message
    )
    assert 'so write "é-dry" (from' in message


def test_an_fqcn_disables(installed):
    value = installed.resolve().get("logits_processors", "min_p").value
    plugins = installed.resolve(plugins={"disable": [value]})
    assert "logits_processors/min_p" not in on(plugins)
