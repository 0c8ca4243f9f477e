"""Components that hooks provide, and plugins that a program hands over as objects."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import pytest
from support.plugins.fake import Installed, component, on

from hardpoint.configuration.handed_over import handed_over
from hardpoint.errors import (
    ConfigError,
    PluginConflictError,
    PluginContractError,
    PluginFaultError,
    PluginLoadError,
    PluginNotFoundError,
)
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins import (
    EngineConfig,
    LogitsProcessor,
    OutputParser,
    Sampler,
    SchedulingPolicy,
    hookimpl,
)
from hardpoint.plugins.config import ConfigSources
from hardpoint.typed import convert

HERE = __name__


def local(interface, name, **attributes):
    """Return a component of this module."""
    return component(interface, name, __module__=HERE, **attributes)


Bias = local(LogitsProcessor, "Bias")
Sharp = local(LogitsProcessor, "Sharp")
Gumbel = local(Sampler, "Gumbel")
LastFirst = local(SchedulingPolicy, "LastFirst")
Tags = local(OutputParser, "Tags", roles=("reasoning", "tools"))


class Pack:
    """Provides components."""

    contract = 1

    @staticmethod
    @hookimpl
    def hardpoint_components():
        return {"bias": Bias, "samplers/gumbel": Gumbel, "last_first": LastFirst, "tags": Tags}


class Quota:
    """Has a hook of requests."""

    contract = 1

    def __init__(self, limit=0):
        self.limit = limit
        self.seen = []

    @hookimpl
    def request_received(self, request):
        self.seen.append(request.request_id)


@dataclass
class EqualQuota:
    contract = 1
    seen: list[str] = field(default_factory=list)

    @hookimpl
    def request_received(self, request):
        self.seen.append(request.request_id)


def pack(components, **more):
    """Return a module of hooks that returns `components`."""
    module = ModuleType("acme_pack")
    module.contract = 1
    module.hardpoint_components = hookimpl(lambda: components)
    vars(module).update(more)
    return module


@pytest.fixture
def installed(monkeypatch):
    return Installed(monkeypatch)


def offered(installed, target, **config):
    """Return the plugins of a configuration where the entry point `pack` offers hooks."""
    installed.module(target.__name__, **vars(target))
    installed.offer("hooks/pack", target)
    return installed.resolve(**config)


def resolved(installed, *handed, **config):
    """Return the plugin set of a program that hands over `handed`."""
    plugins = handed_over(handed, "LLM")
    sources = ConfigSources({path: f"file {path}" for path in config})
    typed = convert(config, EngineConfig, path="")
    return resolve_plugins(typed, sources, installed.found, plugins)


class TestProvided:
    def test_enabling_the_plugin_offers_its_components_and_enables_none(self, installed):
        target = pack({"bias": Bias, "samplers/gumbel": Gumbel, "tags": Tags})
        plugins = offered(installed, target, plugins={"enable": ["pack"]})
        assert "logits_processors/bias" not in on(plugins)
        assert on(plugins)["samplers/default"]
        assert sorted(found.label for found in plugins.not_enabled()) == [
            f"logits_processors/bias (acme-pack 2.0, {HERE}:Bias)",
            f"reasoning_parsers/tags (acme-pack 2.0, {HERE}:Tags)",
            f"samplers/gumbel (acme-pack 2.0, {HERE}:Gumbel)",
            f"tool_parsers/tags (acme-pack 2.0, {HERE}:Tags)",
        ]

    def test_an_installed_plugin_that_is_not_enabled_is_not_imported(self, installed, monkeypatch):
        installed.offer("hooks/pack", pack({"bias": Bias}))
        monkeypatch.setitem(sys.modules, "acme_pack", None)
        installed.resolve()
        with pytest.raises(PluginNotFoundError, match="no installed component is called 'bias'"):
            installed.resolve(plugins={"enable": ["bias"]})

    @pytest.mark.parametrize("order", [["pack", "bias"], ["bias", "pack"]])
    def test_they_are_enabled_and_chosen_as_entry_points_are(self, installed, order):
        target = pack({"bias": Bias, "samplers/gumbel": Gumbel, "last_first": LastFirst})
        plugins = offered(
            installed,
            target,
            plugins={"enable": [*order, {"use": "logits_processors/bias", "name": "again"}]},
            sampler={"use": "gumbel"},
            scheduler={"policy": "last_first"},
        )
        assert on(plugins)["logits_processors/bias"] == f"{HERE}:Bias"
        assert on(plugins)["logits_processors/again"] == f"{HERE}:Bias"
        assert on(plugins)["samplers/gumbel"] == f"{HERE}:Gumbel"
        assert plugins.one("scheduling_policies").distribution == "acme-pack"
        assert plugins.one("scheduling_policies").version == "2.0"

    def test_they_take_the_place_of_a_builtin(self, installed):
        target = pack({"min_p": Bias, "sharp": Sharp})
        plugins = offered(installed, target, plugins={"enable": ["pack"]})
        assert on(plugins)["logits_processors/min_p"] != f"{HERE}:Bias"
        replaced = {"min_p": "sharp"}
        plugins = installed.resolve(plugins={"enable": ["pack"], "replace": replaced})
        assert on(plugins)["logits_processors/min_p"] == f"{HERE}:Sharp"
        with pytest.raises(PluginConflictError) as error:
            installed.resolve(plugins={"enable": ["pack", "min_p"]})
        assert "'min_p' is the name of logits_processors/min_p (hardpoint 0.1.0" in str(error.value)
        assert f'write instead plugins.replace = {{ min_p = "{HERE}:Bias" }}' in str(error.value)

    def test_a_component_that_is_installed_too_is_one(self, installed):
        installed.found.append(
            type(installed.found[0])("samplers", "gumbel", f"{HERE}:Gumbel", "other", "3")
        )
        target = pack({"gumbel": Gumbel})
        plugins = offered(
            installed, target, plugins={"enable": ["pack"]}, sampler={"use": "gumbel"}
        )
        assert plugins.one("samplers").distribution == "other"

    @pytest.mark.parametrize("value", [f"{HERE}:Pack", "acme.pack"], ids=["class", "module"])
    def test_the_plugin_may_be_named_by_its_fqcn(self, installed, value):
        installed.module("acme")
        installed.module("acme.pack", **vars(pack({"bias": Bias})))
        plugins = installed.resolve(plugins={"enable": [value, "bias"]})
        assert on(plugins)["logits_processors/bias"] == f"{HERE}:Bias"
        assert on(plugins)["hooks/pack"] == value

    def test_a_dotted_name_that_is_no_module_is_named(self, installed):
        with pytest.raises(PluginNotFoundError) as error:
            installed.resolve(plugins={"enable": ["acme.missing"]})
        assert str(error.value) == (
            "plugin 'missing' (acme.missing), asked for by plugins.enable[0]: there is no module "
            "'acme'"
        )

    def test_two_plugins_that_provide_one_name(self, installed):
        offered(installed, pack({"gumbel": Gumbel}))
        other = ModuleType("other_pack")
        vars(other).update(vars(pack({"gumbel": local(Sampler, "Gumbel")})) | {"__name__": "x"})
        other.__name__ = "other_pack"
        sys.modules[HERE].Other = local(Sampler, "Other")
        other.hardpoint_components = hookimpl(lambda: {"gumbel": sys.modules[HERE].Other})
        installed.module("other_pack", **vars(other))
        installed.offer("hooks/second", other, distribution="other", version="1")
        with pytest.raises(PluginConflictError) as error:
            installed.resolve(plugins={"enable": ["pack", "second"]}, sampler={"use": "gumbel"})
        assert str(error.value).startswith(
            f"sampler.use: 'gumbel' is the name of samplers/gumbel (acme-pack 2.0, {HERE}:Gumbel) "
            f"and samplers/gumbel (other 1, {HERE}:Other); name one by its FQCN"
        )


class TestWrong:
    @pytest.mark.parametrize(
        ("components", "error", "message"),
        [
            (["a"], PluginContractError, r"returned \['a'\], expected a mapping of names to clas"),
            (
                {"a.b": Bias},
                PluginContractError,
                "returned the name 'a.b', expected a name without",
            ),
            ({3: Bias}, PluginContractError, "returned the name 3, expected a name without '.'"),
            (
                {"sampler/gumbel": Gumbel},
                PluginNotFoundError,
                "'sampler/gumbel', and there is no kind 'sampler' .did you mean 'samplers'",
            ),
            (
                {"samplers/bias": Bias},
                PluginContractError,
                f"gives {HERE}:Bias as 'samplers/bias', and it is of kind logits_processors",
            ),
            ({"pack": Pack}, PluginContractError, f"gives {HERE}:Pack, which has hooks itself"),
            (
                {"lost": component(Sampler, "Lost", __module__=HERE)},
                PluginLoadError,
                f"its component 'lost': {HERE}:Lost cannot be found, for its module has no such",
            ),
            (
                {"made": lambda params: None},
                PluginLoadError,
                "its component 'made': .*<lambda> exists only inside a function, where neither an "
                "import nor another process can find it; define it with a name",
            ),
            ({"x": dict}, PluginContractError, "it is no plugin: it derives from no interface"),
        ],
    )
    def test_it_is_named_with_its_plugin(self, installed, components, error, message):
        with pytest.raises(error, match=message) as caught:
            offered(installed, pack(components), plugins={"enable": ["pack"]})
        assert "acme-pack 2.0" in str(caught.value) or "builtins:dict" in str(caught.value)

    def test_a_hook_that_raises(self, installed):
        target = pack({})
        target.hardpoint_components = hookimpl(lambda: {}["x"])
        with pytest.raises(PluginFaultError, match="hook hardpoint_components failed: KeyError"):
            offered(installed, target, plugins={"enable": ["pack"]})

    def test_a_method_of_a_class_would_need_an_object(self, installed):
        class Late:
            contract = 1

            @hookimpl
            def hardpoint_components(self):
                return {}

        installed.offer("hooks/late", Late)
        with pytest.raises(PluginContractError, match="write @staticmethod above its @hookimpl"):
            installed.resolve(plugins={"enable": ["late"]})

    def test_the_kinds_own_checks_hold(self, installed):
        sys.modules[HERE].Old = local(Sampler, "Old", contract=7)
        with pytest.raises(PluginContractError, match="for version 7 of the samplers contract"):
            offered(
                installed,
                pack({"old": sys.modules[HERE].Old}),
                plugins={"enable": ["pack"]},
                sampler={"use": "old"},
            )


class TestHandedOver:
    def test_those_of_many_are_on_and_the_others_are_offered(self, installed):
        plugins = resolved(installed, Pack)
        bias = plugins.get("logits_processors", "bias")
        assert bias.value == f"{HERE}:Bias"
        assert bias.origin == "plugins= of LLM, item 0"
        assert str(bias.source) == (
            f"plugin 'bias' ({HERE}:Bias), asked for by plugins= of LLM, item 0"
        )
        assert plugins.get("reasoning_parsers", "tags")
        assert plugins.get("tool_parsers", "tags")
        assert plugins.one("samplers").name == "default"
        assert resolved(installed, Pack, sampler={"use": "gumbel"}).one("samplers").name == "gumbel"

    def test_options_and_places_are_those_of_the_configuration(self, installed):
        plugins = resolved(installed, Pack, plugins={"enable": [{"use": "bias", "name": "b"}]})
        assert [e.name for e in plugins.entries("logits_processors") if e.value.endswith("Bias")]
        assert not plugins.find("logits_processors", "bias")
        replaced = resolved(installed, Pack, plugins={"replace": {"min_p": "bias"}})
        assert on(replaced)["logits_processors/min_p"] == f"{HERE}:Bias"
        assert not replaced.find("logits_processors", "bias")
        with pytest.raises(ConfigError, match=r"plugin.bias.x: unknown field"):
            resolved(installed, Pack, plugin={"bias": {"x": 1}})

    def test_a_component_alone(self, installed):
        assert on(resolved(installed, Bias))["logits_processors/bias"] == f"{HERE}:Bias"

    def test_the_very_object_gets_its_hooks(self, installed):
        first, second = Quota(1), Quota(2)
        plugins = resolved(installed, first, second)
        names = [(e.name, e.value, e.stays) for e in plugins.entries("hooks")]
        assert names == [("quota", f"{HERE}:Quota()", True), ("quota_2", f"{HERE}:Quota()", True)]
        plugins.hooks().call("request_received", request=SimpleNamespace(request_id="r"))
        assert (first.seen, second.seen) == (["r"], ["r"])

    def test_equal_objects_are_refused(self, installed):
        with pytest.raises(PluginContractError, match="'equal_quota_2'.*: it equals 'equal_quota'"):
            resolved(installed, EqualQuota(), EqualQuota()).hooks()

    def test_what_is_installed_keeps_its_name_and_distribution(self, installed, monkeypatch):
        module = installed.module("acme_pack", **vars(pack({"bias": Bias})))
        installed.offer("hooks/pack", module)
        monkeypatch.setattr("hardpoint.configuration.handed_over.discover", lambda: installed.found)
        plugins = resolved(installed, module)
        assert plugins.get("hooks", "pack").distribution == "acme-pack"
        assert plugins.get("logits_processors", "bias").distribution == "acme-pack"
        twice = resolved(installed, module, plugins={"enable": ["pack", "bias"]})
        assert on(twice) == on(plugins)

    def test_one_name_twice_is_refused_with_both(self, installed):
        sys.modules[HERE].MinP = local(LogitsProcessor, "MinP")
        with pytest.raises(PluginConflictError) as error:
            resolved(installed, sys.modules[HERE].MinP)
        assert "two components are called logits_processors/min_p: " in str(error.value)
        assert f"({HERE}:MinP), asked for by plugins= of LLM, item 0" in str(error.value)

    def test_an_object_that_an_engine_process_needs_is_refused(self, installed):
        class Steps:
            contract = 1

            @hookimpl
            def step_planned(self, record):
                """Nothing."""

        assert resolved(installed, Steps()).entries("hooks")
        with pytest.raises(PluginLoadError) as error:
            resolved(installed, Steps(), engine={"in_process": False})
        message = str(error.value)
        assert message.startswith("plugin 'steps' (")
        assert (
            "asked for by plugins= of LLM, item 0: the engine's process calls its step_" in message
        )
        assert "no module has this object of" in message
        assert message.endswith("or run the engine in this process (engine.in_process)")

    @pytest.mark.parametrize(
        ("plugins", "message"),
        [
            (
                "acme",
                r"^plugins: expected a list of modules, classes or objects, got .acme.",
            ),
            (
                ["acme"],
                r"^plugins\[0\]: expected a module, .* names and FQCNs go to plugins.enable",
            ),
            ([Pack, Pack], r"^plugins\[1\]: .* is in the list twice \(from argument LLM"),
        ],
    )
    def test_a_wrong_list(self, plugins, message):
        with pytest.raises(ConfigError, match=message):
            handed_over(plugins, "LLM")

    def test_something_else_is_no_plugin(self):
        with pytest.raises(PluginContractError, match=r"plugins= of LLM, item 0: it is no plugin"):
            handed_over([dict], "LLM")


class TestOff:
    """`plugins.disable` takes what a program hands over as it takes built-ins."""

    @pytest.mark.parametrize("name", ["bias", "logits_processors/bias", f"{HERE}:Bias"])
    def test_a_component_that_is_handed_over_itself(self, installed, name):
        plugins = resolved(installed, Bias, Sharp, plugins={"disable": [name]})
        assert on(plugins).keys() >= {"logits_processors/sharp"}
        assert "logits_processors/bias" not in on(plugins)

    @pytest.mark.parametrize("name", ["bias", "logits_processors/bias", f"{HERE}:Bias"])
    def test_a_component_that_its_hook_provides(self, installed, name):
        plugins = resolved(installed, Pack, plugins={"disable": [name]})
        assert "logits_processors/bias" not in on(plugins)
        assert {"reasoning_parsers/tags", "hooks/pack"} <= set(on(plugins))

    def test_a_plugin_of_hooks_with_all_that_it_provides(self, installed):
        plugins = resolved(installed, Pack, plugins={"disable": ["pack"]})
        assert not {"hooks/pack", "logits_processors/bias"} & set(on(plugins))

    def test_an_object(self, installed):
        plugins = resolved(installed, Quota(), plugins={"disable": ["hooks/quota"]})
        assert "hooks/quota" not in on(plugins)

    def test_a_built_in_makes_room_for_one_of_its_name(self, installed):
        plugins = resolved(installed, pack({"min_p": Bias}), plugins={"disable": ["min_p"]})
        assert on(plugins)["logits_processors/min_p"] == f"{HERE}:Bias"

    def test_one_of_two_kinds(self, installed):
        both = {"reasoning_parsers/tags", "tool_parsers/tags"}
        assert not both & set(on(resolved(installed, Pack, plugins={"disable": ["tags"]})))
        off = {"disable": ["tool_parsers/tags"]}
        assert both & set(on(resolved(installed, Pack, plugins=off))) == {"reasoning_parsers/tags"}

    def test_a_name_of_two_components(self, installed):
        handed = pack({"bias": Bias, "tool_parsers/bias": Tags})
        with pytest.raises(ConfigError) as error:
            resolved(installed, handed, plugins={"disable": ["bias"]})
        assert 'could be any of "logits_processors/bias", "tool_parsers/bias"' in str(error.value)

    def test_one_that_is_chosen_elsewhere(self, installed):
        with pytest.raises(ConfigError) as error:
            resolved(installed, Pack, plugins={"disable": ["gumbel"]})
        assert "'gumbel' is of kind samplers, which allows one; choose it with" in str(error.value)

    def test_one_that_the_configuration_enables(self, installed):
        with pytest.raises(ConfigError) as error:
            resolved(installed, Pack, plugins={"disable": ["bias"], "enable": ["bias"]})
        assert "plugins.disable[0]: plugins.enable names 'bias', too; remove one of the two" in str(
            error.value
        )
