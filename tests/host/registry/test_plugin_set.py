"""The resolved set: whose options are whose, and looking components up."""

from __future__ import annotations

import msgspec
import pytest
from support.plugins.fake import component

from hardpoint.errors import PluginNotFoundError
from hardpoint.host.live.settings import Settings
from hardpoint.plugins import (
    ConfigError,
    EngineConfig,
    LogitsProcessor,
    Options,
    SchedulingPolicy,
    Speculator,
)
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.config_tables import SchedulerConfig
from hardpoint.typed import convert


class TestOptions:
    def test_options_of_an_unknown_plugin(self, installed):
        config_sources = ConfigSources({"plugin.min_q": "environment"})
        with pytest.raises(ConfigError) as error:
            installed.resolve(config_sources, plugin={"min_q": {}})
        assert str(error.value) == (
            "plugin.min_q: no plugin 'min_q' is enabled (did you mean 'min_p'?) (from environment)"
        )

    def test_options_of_a_plugin_that_is_installed_but_not_on(self, installed):
        installed.offer("logits_processors/dry", component(LogitsProcessor))
        with pytest.raises(ConfigError, match="add it to plugins.enable, or remove the table"):
            installed.resolve(plugin={"dry": {}})

    def test_options_of_one_that_is_not_the_chosen_one_are_kept_with_a_warning(self, installed):
        installed.offer("scheduling_policies/mine", component(SchedulingPolicy))
        sources = ConfigSources({"plugin.mine": "file c.toml"})
        for name in ("mine", "scheduling_policies/mine"):
            found = installed.resolve(sources, plugin={name: {"a": 1}})
            assert [w for w in found.warnings if "options" in w] == [
                f"plugin.{name}: these options are not used, because scheduler.policy is 'fcfs' "
                f"(from {sources.of(f'plugin.{name}')})"
            ]
        chosen = {"scheduler": SchedulerConfig(policy="mine")}
        assert not installed.resolve(plugin={"mine": {}}, **chosen).warnings

    def test_options_of_one_of_a_list_that_does_not_name_it_are_kept_too(self, installed):
        installed.offer("speculators/mine", component(Speculator))
        found = installed.resolve(plugin={"mine": {"a": 1}})
        (warning,) = [w for w in found.warnings if "options" in w]
        assert "plugin.mine: these options are not used, because speculation.use is []" in warning

    def test_a_name_of_several_kinds(self, installed):
        with pytest.raises(ConfigError) as error:
            installed.resolve(plugin={"default": {}})
        assert 'could be any of "samplers/default", "schedulers/default"' in str(error.value)
        assert installed.resolve(plugin={"samplers/default": {}}).one("samplers").options == {}

    def test_an_unknown_option_is_reported_with_its_origin(self, installed):
        config_sources = ConfigSources({"plugin.min_p": "file hardpoint.toml"})
        with pytest.raises(ConfigError) as error:
            installed.resolve(config_sources, plugin={"min_p": {"x": 1}})
        assert str(error.value).startswith("plugin.min_p.x: unknown field")
        assert str(error.value).endswith("(from file hardpoint.toml)")

    def test_the_same_options_twice(self, installed):
        with pytest.raises(ConfigError) as error:
            installed.resolve(plugin={"min_p": {}, "logits_processors/min_p": {}})
        assert str(error.value).startswith(
            "plugin.logits_processors/min_p: given twice, here and by plugin.min_p"
        )

    def test_an_option_that_must_be_given_is_missed_at_once(self, installed):
        class DryOptions(Options):
            key: str

        installed.offer("logits_processors/dry", component(LogitsProcessor, Options=DryOptions))
        with pytest.raises(ConfigError) as error:
            installed.resolve(plugins={"enable": ["dry"]})
        message = str(error.value)
        assert message.startswith(
            "plugin.dry.key: missing, and it has no default (for plugin 'dry'"
        )
        assert "asked for by plugins.enable[0]" in message

    def test_texts_stand_for_numbers_as_keys_as_in_toml(self, installed):
        class DryOptions(Options):
            weights: dict[int, float] = {}

        installed.offer("logits_processors/dry", component(LogitsProcessor, Options=DryOptions))
        hashes = set()
        for weights in ({"7": 0.5, "11": 1.0}, {11: 1.0, 7: 0.5}):
            enabled = {"plugins": {"enable": ["dry"]}, "plugin": {"dry": {"weights": weights}}}
            plugins = installed.resolve(**enabled)
            entry = plugins.get("logits_processors", "dry")
            assert plugins.options(entry).weights == {7: 0.5, 11: 1.0}
            hashes.add(plugins.manifest.hash)
            plain = convert(enabled, EngineConfig, path="")
            shown = Settings(plain, ConfigSources(), plugins).shown()
            assert shown.values["plugin.dry.weights"].value == weights
            assert shown.fingerprint
        assert len(hashes) == 1

    def test_defaults_are_filled_in(self, installed):
        class DryOptions(Options):
            base: float = 2.0
            words: list[str] = []

        installed.offer("logits_processors/dry", component(LogitsProcessor, Options=DryOptions))
        plugins = installed.resolve(plugins={"enable": ["dry"]}, plugin={"dry": {"words": ["x"]}})
        entry = plugins.get("logits_processors", "dry")
        assert entry.options == {"base": 2.0, "words": ["x"]}
        assert plugins.options(entry) == DryOptions(words=["x"])


class TestLookUp:
    def test_get_names_what_is_enabled_and_suggests(self, installed):
        with pytest.raises(PluginNotFoundError) as error:
            installed.resolve().get("logits_processors", "min_q")
        assert str(error.value) == (
            "logits_processors: no component 'min_q' is enabled (did you mean 'min_p'?); "
            "enabled: min_p, top_k"
        )

    def test_get_names_the_package_of_a_component_that_is_not_enabled(self, installed):
        installed.offer("logits_processors/dry", component(LogitsProcessor))
        with pytest.raises(PluginNotFoundError) as error:
            installed.resolve().get("logits_processors", "dry")
        assert 'acme-pack 2.0 offers it: add "dry" to plugins.enable' in str(error.value)

    def test_origins_travel_with_the_entries(self, installed):
        installed.offer("logits_processors/dry", component(LogitsProcessor))
        config_sources = ConfigSources(
            {"plugins.enable[0]": "file hardpoint.toml", "sampler.use": "argument"}
        )
        plugins = installed.resolve(config_sources, plugins={"enable": ["dry"]})
        assert plugins.get("logits_processors", "dry").origin == (
            "plugins.enable[0] (file hardpoint.toml)"
        )
        assert plugins.one("samplers").origin == "sampler.use (argument)"
        assert plugins.get("logits_processors", "min_p").origin == "default"


def test_a_plugin_that_is_enabled_again_is_no_longer_quarantined(installed):
    for name in ("dry", "wet"):
        installed.offer(f"logits_processors/{name}", component(LogitsProcessor))
    left = installed.resolve(plugins={"enable": ["dry", "wet"]})
    for entry in left.entries("logits_processors"):
        if entry.name in ("dry", "wet"):
            left = left.without(entry, "it died")
    hook = msgspec.structs.replace(left.entries("samplers")[0], kind="hooks", name="dry")
    left = left.without(hook, "it died, too")
    with_dry = installed.resolve(plugins={"enable": ["dry"]})
    now = left.successor(with_dry, {"logits_processors"})
    assert now.manifest.quarantined == {
        "logits_processors/wet": "it died",
        "hooks/dry": "it died, too",
    }
    assert now.manifest.quarantined_of("logits_processors") == {"wet": "it died"}
    assert now.find("logits_processors", "dry")
