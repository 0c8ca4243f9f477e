"""Which components are on: defaults, enable, disable, replace, names and FQCNs."""

from __future__ import annotations

import pytest
from support.plugins.fake import component, on

from hardpoint.errors import PluginConflictError, PluginContractError, PluginNotFoundError
from hardpoint.host.registry.discovery import InstalledPlugin
from hardpoint.plugins import (
    ConfigError,
    KVConnector,
    KVEventPublisher,
    KVStore,
    LoadBalancer,
    LogitsProcessor,
    OutputParser,
    Sampler,
    SchedulingPolicy,
    StatSink,
)
from hardpoint.plugins.config import ConfigSources

DEFAULTS = {
    "logits_processors/top_k",
    "logits_processors/min_p",
    "models/LlamaForCausalLM",
    "loaders/gguf",
    "samplers/default",
    "schedulers/default",
    "scheduling_policies/fcfs",
    "eviction_policies/lru",
    "executors/uniproc",
    "attention_backends/torch",
    "communicators/auto",
    "ops/torch",
    "tokenizers/transformers",
}


class TestDefaults:
    def test_built_ins_are_on_and_of_one_kinds_the_configured_one(self, installed):
        assert set(on(installed.resolve())) == DEFAULTS

    def test_being_installed_enables_nothing(self, installed):
        installed.offer("logits_processors/dry", component(LogitsProcessor))
        installed.offer("models/OtherForCausalLM", component(LogitsProcessor))
        plugins = installed.resolve()
        assert set(on(plugins)) == DEFAULTS
        assert [found.name for found in plugins.not_enabled()] == ["dry", "OtherForCausalLM"]

    def test_a_kind_that_this_version_does_not_know_is_left_alone(self, installed):
        installed.offer("teleporters/beam", object())
        plugins = installed.resolve()
        assert set(on(plugins)) == DEFAULTS
        assert [found.kind for found in plugins.not_enabled()] == ["teleporters"]

    def test_what_is_not_imported_for_sure_is_not_imported(self, installed):
        """A broken model that is not named stops nothing."""
        installed.found.append(
            InstalledPlugin("models", "Broken", "no.such:Model", "hardpoint", "0.1.0")
        )
        plugins = installed.resolve()
        with pytest.raises(PluginNotFoundError, match="there is no module 'no'"):
            plugins.target(plugins.get("models", "Broken"))


class TestIdleDefault:
    """Where one engine serves, nothing of the balancer that nobody named is imported."""

    @pytest.fixture(autouse=True)
    def _balancers(self, installed):
        for name, value in (("least_cost", "no.such:Thing"), ("other", "no.such:Other")):
            installed.found.append(InstalledPlugin("balancers", name, value, "hardpoint", "0.1.0"))

    @pytest.mark.parametrize("parallel", [{}, {"balancer": "least_cost"}])
    def test_it_is_on_and_not_imported(self, installed, parallel):
        plugins = installed.resolve(parallel=parallel)
        assert set(on(plugins)) == DEFAULTS | {"balancers/least_cost"}
        assert plugins.loaded(plugins.one("balancers")) is None
        with pytest.raises(PluginNotFoundError, match="no module 'no'"):
            plugins.target(plugins.one("balancers"))

    def test_several_engines_need_it(self, installed):
        with pytest.raises(PluginNotFoundError, match="no module 'no'"):
            installed.resolve(parallel={"data": 2})

    def test_its_options_are_checked(self, installed):
        with pytest.raises(PluginNotFoundError, match="no module 'no'"):
            installed.resolve(plugin={"least_cost": {"in_flight_tokens": "x"}})

    def test_one_that_is_asked_for_is_checked(self, installed):
        with pytest.raises(PluginNotFoundError, match="no module 'no'"):
            installed.resolve(parallel={"balancer": "other"})
        with pytest.raises(PluginNotFoundError, match="no balancers component is called 'othr'"):
            installed.resolve(parallel={"balancer": "othr"})

    def test_it_is_imported_where_several_engines_serve(self, installed):
        value = installed.offer("balancers/mine", component(LoadBalancer))
        plugins = installed.resolve(parallel={"data": 2, "balancer": "mine"})
        assert on(plugins)["balancers/mine"] == value
        assert plugins.loaded(plugins.one("balancers")) is not None

    def test_the_core_alone_does_without(self, installed):
        installed.found = [found for found in installed.found if found.kind != "balancers"]
        assert set(on(installed.resolve())) == DEFAULTS
        with pytest.raises(PluginNotFoundError, match="no balancers component is called 'least_c"):
            installed.resolve(parallel={"data": 2})


class TestEnable:
    def test_by_name(self, installed):
        value = installed.offer("logits_processors/dry", component(LogitsProcessor))
        plugins = installed.resolve(plugins={"enable": ["dry"]})
        assert on(plugins)["logits_processors/dry"] == value
        assert plugins.not_enabled() == []
        entry = plugins.get("logits_processors", "dry")
        assert (entry.distribution, entry.version) == ("acme-pack", "2.0")

    def test_by_fqcn_of_an_entry_point_has_its_name_and_distribution(self, installed):
        value = installed.offer("logits_processors/dry", component(LogitsProcessor))
        entry = installed.resolve(plugins={"enable": [value]}).get("logits_processors", "dry")
        assert (entry.value, entry.distribution, entry.version) == (value, "acme-pack", "2.0")

    def test_by_fqcn_without_an_entry_point(self, installed):
        installed.module("loose", DryPenalty=component(LogitsProcessor))
        entry = installed.resolve(plugins={"enable": ["loose:DryPenalty"]}).get(
            "logits_processors", "dry_penalty"
        )
        assert (entry.distribution, entry.version) == ("no distribution", "unversioned")
        assert str(entry.source) == (
            "plugin 'dry_penalty' (loose:DryPenalty), asked for by plugins.enable[0]"
        )

    def test_by_fqcn_with_a_name(self, installed):
        value = installed.offer("logits_processors/dry", component(LogitsProcessor))
        plugins = installed.resolve(plugins={"enable": [{"use": value, "name": "wet"}]})
        assert on(plugins)["logits_processors/wet"] == value
        assert "logits_processors/dry" not in on(plugins)

    def test_by_name_with_another_name(self, installed):
        value = installed.offer("logits_processors/dry", component(LogitsProcessor))
        plugins = installed.resolve(plugins={"enable": [{"use": "dry", "name": "wet"}]})
        assert on(plugins)["logits_processors/wet"] == value

    def test_a_nested_class(self, installed):
        outer = type("Outer", (), {"Inner": component(LogitsProcessor)})
        installed.module("nest.deep", Outer=outer)
        plugins = installed.resolve(plugins={"enable": ["nest.deep:Outer.Inner"]})
        assert on(plugins)["logits_processors/inner"] == "nest.deep:Outer.Inner"

    def test_twice_the_same_is_once(self, installed):
        value = installed.offer("logits_processors/dry", component(LogitsProcessor))
        plugins = installed.resolve(plugins={"enable": ["dry", value]})
        assert list(on(plugins)).count("logits_processors/dry") == 1

    def test_a_second_name_must_be_given(self, installed):
        value = installed.offer("logits_processors/dry", component(LogitsProcessor))
        named = {"use": value, "name": "wet"}
        plugins = installed.resolve(plugins={"enable": [value, named]})
        assert {"logits_processors/dry", "logits_processors/wet"} <= on(plugins).keys()
        with pytest.raises(PluginConflictError) as error:
            installed.resolve(plugins={"enable": [named, value]})
        assert str(error.value).startswith(
            f"plugins.enable[1]: {value} is enabled as logits_processors/wet already; to have it "
            f'twice, give this one a name, too: {{ use = "{value}", name = "dry" }} (from '
        )

    def test_a_model_by_architecture(self, installed):
        installed.offer("models/OtherForCausalLM", component(LogitsProcessor))
        with pytest.raises(PluginContractError, match="models must be classes derived from"):
            installed.resolve(plugins={"enable": ["OtherForCausalLM"]})

    def test_an_unknown_name_suggests_a_known_one_and_has_its_origin(self, installed):
        installed.offer("logits_processors/mirostat", component(LogitsProcessor))
        config_sources = ConfigSources({"plugins.enable": "file hardpoint.toml"})
        with pytest.raises(PluginNotFoundError) as error:
            installed.resolve(config_sources, plugins={"enable": ["mirrostat"]})
        message = str(error.value)
        assert message.startswith(
            "plugins.enable[0]: no installed component is called 'mirrostat' "
            "(did you mean 'mirostat'?); found: "
        )
        assert message.endswith("(from file hardpoint.toml)")

    @pytest.mark.parametrize("wrong", ["a b:C", "pkg:", ":C", "pkg:C-D", "pkg:C:D", "1:C"])
    def test_a_malformed_fqcn(self, installed, wrong):
        with pytest.raises(ConfigError, match=r"expected an FQCN like package.module:Class, got "):
            installed.resolve(plugins={"enable": [wrong]})

    @pytest.mark.parametrize("wrong", ["a/b", "a.b"])
    def test_a_name_that_would_be_read_as_a_path(self, installed, wrong):
        installed.offer("logits_processors/dry", component(LogitsProcessor))
        with pytest.raises(ConfigError, match=r"plugins.enable\[0\].name: .* without '/' or '.'"):
            installed.resolve(plugins={"enable": [{"use": "dry", "name": wrong}]})

    def test_a_component_of_which_there_is_one_is_chosen_elsewhere(self, installed):
        installed.offer("samplers/best", component(Sampler))
        with pytest.raises(ConfigError, match=r"'best' is of kind samplers.*with sampler.use"):
            installed.resolve(plugins={"enable": ["best"]})


class TestOne:
    def test_by_name(self, installed):
        value = installed.offer("scheduling_policies/fair", component(SchedulingPolicy))
        plugins = installed.resolve(scheduler={"policy": "fair"})
        assert on(plugins)["scheduling_policies/fair"] == value
        assert "scheduling_policies/fcfs" not in on(plugins)
        assert plugins.one("scheduling_policies").name == "fair"

    def test_by_fqcn(self, installed):
        installed.module("loose", Fair=component(SchedulingPolicy))
        plugins = installed.resolve(scheduler={"policy": "loose:Fair"})
        assert plugins.one("scheduling_policies").value == "loose:Fair"

    def test_by_name_qualified_with_its_kind(self, installed):
        value = installed.offer("samplers/fair", component(Sampler))
        installed.offer("scheduling_policies/fair", component(SchedulingPolicy))
        assert installed.resolve(sampler={"use": "samplers/fair"}).one("samplers").value == value

    def test_a_name_of_another_kind_is_unknown_here(self, installed):
        with pytest.raises(PluginNotFoundError) as error:
            installed.resolve(sampler={"use": "top_k"})
        assert "sampler.use: no samplers component is called 'top_k'" in str(error.value)
        assert "found: default" in str(error.value)

    def test_a_name_of_another_kind_that_a_setting_takes(self, installed):
        installed.offer("kv_stores/memory", component(KVStore))
        with pytest.raises(PluginNotFoundError) as error:
            installed.resolve(kv_connector={"use": "memory"})
        assert str(error.value) == (
            "kv_connector.use: no kv_connectors component is called 'memory'; kv_connector.stores "
            "takes the one of kind kv_stores; found: none (from default)"
        )

    def test_a_component_that_another_setting_chooses_is_reported(self, installed):
        installed.offer("kv_connectors/stores", component(KVConnector), "hardpoint", "0.1.0")
        installed.offer("kv_stores/memory", component(KVStore))
        sources = ConfigSources({"kv_connector.stores": "file x.toml"})
        plugins = installed.resolve(sources, kv_connector={"stores": ["memory"]})
        (connector,) = plugins.entries("kv_connectors")
        assert connector.origin == "kv_connector.stores (file x.toml)"

    def test_an_fqcn_of_another_kind_is_refused(self, installed):
        installed.module("loose", Fair=component(SchedulingPolicy))
        with pytest.raises(PluginContractError, match="samplers must be classes derived from"):
            installed.resolve(sampler={"use": "loose:Fair"})

    def test_the_same_name_twice_asks_for_an_fqcn(self, installed):
        installed.offer("samplers/best", component(Sampler), distribution="one")
        value = installed.offer("samplers/best", component(Sampler), distribution="two")
        with pytest.raises(
            PluginConflictError, match=r"one 2.0, .* and .*\(two 2.0, .*by its FQCN"
        ):
            installed.resolve(sampler={"use": "best"})
        assert installed.resolve(sampler={"use": value}).one("samplers").distribution == "two"


class TestDisable:
    @pytest.mark.parametrize("name", ["min_p", "logits_processors/min_p"])
    def test_switches_a_built_in_off(self, installed, name):
        plugins = installed.resolve(plugins={"disable": [name]})
        assert set(on(plugins)) == DEFAULTS - {"logits_processors/min_p"}
        assert plugins.not_enabled() == []

    def test_makes_room_for_another_of_that_name(self, installed):
        installed.module("loose", MinP=component(LogitsProcessor))
        enable = [{"use": "loose:MinP", "name": "min_p"}]
        plugins = installed.resolve(plugins={"disable": ["min_p"], "enable": enable})
        assert on(plugins)["logits_processors/min_p"] == "loose:MinP"

    def test_an_unknown_name(self, installed):
        with pytest.raises(PluginNotFoundError) as error:
            installed.resolve(plugins={"disable": ["minp"]})
        assert "plugins.disable[0]: no component 'minp' is enabled (did you mean 'min_p'?)" in str(
            error.value
        )

    def test_a_name_of_several_kinds_must_be_qualified(self, installed):
        installed.offer("loaders/min_p", component(LogitsProcessor), distribution="hardpoint")
        with pytest.raises(ConfigError) as error:
            installed.resolve(plugins={"disable": ["min_p"]})
        assert 'could be any of "logits_processors/min_p", "loaders/min_p"' in str(error.value)
        plugins = installed.resolve(plugins={"disable": ["loaders/min_p"]})
        assert "logits_processors/min_p" in on(plugins)


class TestReplace:
    @pytest.mark.parametrize("name", ["min_p", "logits_processors/min_p"])
    def test_takes_the_place_and_the_name(self, installed, name):
        value = installed.offer("logits_processors/better", component(LogitsProcessor))
        plugins = installed.resolve(plugins={"replace": {name: "better"}})
        assert on(plugins)["logits_processors/min_p"] == value
        assert "logits_processors/better" not in on(plugins)
        assert plugins.not_enabled() == []

    def test_by_fqcn(self, installed):
        installed.module("loose", MinP=component(LogitsProcessor))
        plugins = installed.resolve(plugins={"replace": {"min_p": "loose:MinP"}})
        assert on(plugins)["logits_processors/min_p"] == "loose:MinP"

    def test_something_of_another_kind_is_refused(self, installed):
        installed.module("loose", Fair=component(SchedulingPolicy))
        with pytest.raises(PluginContractError, match="logits_processors must be classes"):
            installed.resolve(plugins={"replace": {"min_p": "loose:Fair"}})

    def test_what_is_not_on_cannot_be_replaced(self, installed):
        with pytest.raises(PluginNotFoundError, match=r"plugins.replace.mini_p: no component"):
            installed.resolve(plugins={"replace": {"mini_p": "top_k"}})


class TestDuplicates:
    def test_a_strangers_entry_point_with_a_built_ins_name_harms_no_other(self, installed):
        installed.offer("logits_processors/min_p", component(LogitsProcessor))
        plugins = installed.resolve()
        assert plugins.get("logits_processors", "min_p").distribution == "hardpoint"
        assert [found.distribution for found in plugins.not_enabled()] == ["acme-pack"]

    def test_enabling_it_by_name_asks_for_replace(self, installed):
        value = installed.offer("logits_processors/min_p", component(LogitsProcessor))
        with pytest.raises(PluginConflictError) as error:
            installed.resolve(plugins={"enable": ["min_p"]})
        message = str(error.value)
        assert "hardpoint 0.1.0" in message
        assert "acme-pack 2.0" in message
        assert f'plugins.replace = {{ min_p = "{value}" }}' in message

    def test_enabling_it_by_fqcn_asks_for_replace_too(self, installed):
        value = installed.offer("logits_processors/min_p", component(LogitsProcessor))
        with pytest.raises(PluginConflictError) as error:
            installed.resolve(plugins={"enable": [value]})
        assert "two components are called logits_processors/min_p" in str(error.value)
        assert f'plugins.replace = {{ min_p = "{value}" }}' in str(error.value)

    def test_replace_with_its_fqcn_works(self, installed):
        value = installed.offer("logits_processors/min_p", component(LogitsProcessor))
        plugins = installed.resolve(plugins={"replace": {"min_p": value}})
        assert plugins.get("logits_processors", "min_p").distribution == "acme-pack"

    def test_two_strangers_with_one_name(self, installed):
        first = installed.offer("logits_processors/dry", component(LogitsProcessor), "one")
        second = installed.offer("logits_processors/dry", component(LogitsProcessor), "two")
        with pytest.raises(PluginConflictError, match=r"'dry' is the name of .* by its FQCN"):
            installed.resolve(plugins={"enable": ["dry"]})
        with pytest.raises(PluginConflictError, match="two components are called"):
            installed.resolve(plugins={"enable": [first, second]})
        use = {"use": second, "name": "wet"}
        plugins = installed.resolve(plugins={"enable": [first, use]})
        assert on(plugins)["logits_processors/dry"] == first
        assert on(plugins)["logits_processors/wet"] == second

    def test_one_name_in_two_kinds_asks_for_the_kind(self, installed):
        installed.offer("logits_processors/fair", component(LogitsProcessor))
        installed.offer("scheduling_policies/fair", component(SchedulingPolicy))
        with pytest.raises(PluginConflictError, match=r'name one with its kind, as in ".*/fair"'):
            installed.resolve(plugins={"enable": ["fair"]})
        plugins = installed.resolve(plugins={"enable": ["logits_processors/fair"]})
        assert "logits_processors/fair" in on(plugins)


class TestLists:
    """A kind of which there are many, chosen by a list."""

    @pytest.fixture
    def publishers(self, installed):
        installed.offer("kv_event_publishers/zmq", component(KVEventPublisher))
        installed.offer("kv_event_publishers/null", component(KVEventPublisher))
        return installed

    def test_none_is_on_by_default(self, publishers):
        assert publishers.resolve().entries("kv_event_publishers") == []

    def test_those_that_the_list_names_are_on(self, publishers):
        on = publishers.resolve(kv_events={"publishers": ["null", "zmq"]})
        assert [e.name for e in on.entries("kv_event_publishers")] == ["null", "zmq"]

    def test_the_list_is_the_only_way_in(self, publishers):
        with pytest.raises(ConfigError, match="choose it with kv_events.publishers"):
            publishers.resolve(plugins={"enable": ["zmq"]})

    def test_a_wrong_name_is_reported_with_its_place(self, publishers):
        with pytest.raises(PluginNotFoundError) as error:
            publishers.resolve(kv_events={"publishers": ["null", "zqm"]})
        assert str(error.value).startswith(
            "kv_events.publishers[1]: no kv_event_publishers component is called 'zqm'"
        )

    @pytest.mark.parametrize("again", ["zmq", "kv_event_publishers/zmq", "FQCN"])
    def test_one_that_is_named_twice_is_refused(self, publishers, again):
        if again == "FQCN":
            again = on(publishers.resolve(kv_events={"publishers": ["zmq"]}))[
                "kv_event_publishers/zmq"
            ]
        config_sources = ConfigSources({"kv_events.publishers": "file hardpoint.toml"})
        with pytest.raises(ConfigError) as error:
            publishers.resolve(config_sources, kv_events={"publishers": ["zmq", "null", again]})
        assert str(error.value) == (
            f"kv_events.publishers[2]: {again!r} is named twice, here and by "
            "kv_events.publishers[0] (from file hardpoint.toml)"
        )

    def test_each_kind_has_a_list_of_its_own(self, installed):
        installed.offer("stat_sinks/log", component(StatSink))
        installed.offer("stat_sinks/file", component(StatSink))
        assert installed.resolve().entries("stat_sinks") == []
        plugins = installed.resolve(stats={"sinks": ["file", "stat_sinks/log"]})
        assert [e.name for e in plugins.entries("stat_sinks")] == ["file", "log"]
        with pytest.raises(ConfigError, match="choose it with stats.sinks"):
            installed.resolve(plugins={"enable": ["log"]})
        with pytest.raises(PluginNotFoundError, match=r"stats.sinks\[0\]: no stat_sinks component"):
            installed.resolve(stats={"sinks": ["lgo"]})


KINDS = ("reasoning_parsers", "tool_parsers")
BOTH = ("reasoning", "tools")


def parser(*roles):
    return component(OutputParser, roles=roles)


class TestRoles:
    """An output parser of both roles is one component of two kinds."""

    def offer(self, installed, distribution="acme-pack", name="plan"):
        installed.offer(f"tool_parsers/{name}", parser(*BOTH), distribution=distribution)
        value = installed.found[-1].value
        installed.found.append(
            InstalledPlugin(KINDS[0], name, value, distribution, installed.found[-1].version)
        )
        return value

    @pytest.mark.parametrize("by_name", [True, False])
    def test_it_is_enabled_under_each(self, installed, by_name):
        value = self.offer(installed)
        plugins = installed.resolve(plugins={"enable": ["plan" if by_name else value]})
        assert [on(plugins).get(f"{kind}/plan") for kind in KINDS] == [value, value]
        plugins = installed.resolve(plugins={"enable": ["tool_parsers/plan"]})
        assert [f"{kind}/plan" in on(plugins) for kind in KINDS] == [False, True]

    def test_by_fqcn_without_an_entry_point(self, installed):
        installed.module("loose", Plan=parser(*BOTH), Tools=parser("tools"))
        enable = ["loose:Plan", {"use": "loose:Tools", "name": "calls"}]
        plugins = installed.resolve(plugins={"enable": enable})
        found = set(on(plugins)) - DEFAULTS
        assert found == {"reasoning_parsers/plan", "tool_parsers/plan", "tool_parsers/calls"}

    def test_it_is_disabled_and_replaced_as_one(self, installed):
        self.offer(installed, "hardpoint")
        installed.module("loose", Better=parser(*BOTH), Tools=parser("tools"))
        plugins = installed.resolve(plugins={"disable": ["plan"]})
        assert set(on(plugins)) == DEFAULTS
        plugins = installed.resolve(plugins={"disable": ["tool_parsers/plan"]})
        assert set(on(plugins)) == DEFAULTS | {"reasoning_parsers/plan"}
        plugins = installed.resolve(plugins={"replace": {"plan": "loose:Better"}})
        assert {on(plugins)[f"{kind}/plan"] for kind in KINDS} == {"loose:Better"}
        with pytest.raises(PluginContractError, match="as one of reasoning_parsers it needs"):
            installed.resolve(plugins={"replace": {"plan": "loose:Tools"}})

    def test_a_group_whose_role_it_lacks_is_refused(self, installed):
        installed.offer("reasoning_parsers/calls", parser("tools"))
        expected = "as one of reasoning_parsers it needs 'reasoning' among its roles, got"
        with pytest.raises(PluginContractError, match=expected):
            installed.resolve(plugins={"enable": ["calls"]})
