"""The parts of an open engine, and of one with other plugins."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from hardpoint.core.client.base import EngineCoreClient
from hardpoint.host.boundary.activity import PluginCall
from hardpoint.host.boundary.parts.frontend_parts import FrontendParts
from hardpoint.host.boundary.plugin_health import PluginHealth
from hardpoint.host.live.settings import Settings, with_policy, without_plugin
from hardpoint.host.registry.hooks import HookSet
from hardpoint.host.registry.plugin_set import PluginSet, resolve_plugins
from hardpoint.plugins import (
    EngineConfig,
    ModelConfig,
    Tokenizer,
)
from hardpoint.plugins.component import Component
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.config_tables import KVCacheConfig, LoadConfig, SchedulerConfig

T = TypeVar("T")

_OPTIONAL_KINDS = frozenset({"logits_processors", "kv_event_publishers", "hooks"})
REMOVABLE_KINDS = _OPTIONAL_KINDS | {"scheduling_policies", "eviction_policies"}
"""Kinds of plugins that a running engine can lose."""


@dataclass(frozen=True)
class Opening:
    """An engine that is opened, before its weights are read.

    Attributes:
        new_tokenizer: opens one more tokenizer.
    """

    config: EngineConfig
    plugins: PluginSet
    model_config: ModelConfig
    max_model_len: int
    new_tokenizer: Callable[[], Tokenizer]


class Companion:
    """Plugins of calls of a program alone, which are opened and closed with its engine."""

    def report_to(self, health: PluginHealth) -> None:
        """Count the faults of the plugins."""

    def close(self) -> None:
        """Close all of them; called once."""


@dataclass(frozen=True)
class EngineParts:
    """The parts of an open engine.

    Attributes:
        config: with `max_model_len` and `kv_cache.num_blocks` filled in.
        supported_tasks: tasks of the model, such as "generate".
        components: closed with the engine, last one first.
        clock: seconds; gives requests their arrival times.
        step_parts: frontend halves of step parts; closed with the engine.
        companions: closed with the engine.
    """

    config: EngineConfig
    config_sources: ConfigSources
    plugins: PluginSet
    hooks: HookSet
    model_config: ModelConfig
    tokenizer: Tokenizer
    client: EngineCoreClient
    supported_tasks: tuple[str, ...]
    components: Sequence[Component]
    clock: Callable[[], float]
    step_parts: FrontendParts = field(default_factory=FrontendParts)
    companions: Sequence[Companion] = ()

    def companion(self, cls: type[T]) -> T:
        """Return the companion of a class, with which the engine was opened."""
        return next(companion for companion in self.companions if isinstance(companion, cls))

    @property
    def settings(self) -> Settings:
        """Configuration and plugins, as live changes replace them."""
        return Settings(self.config, self.config_sources, self.plugins)

    def with_settings(self, settings: Settings) -> EngineParts:
        """Return the parts with other settings."""
        return dataclasses.replace(
            self,
            config=settings.config,
            config_sources=settings.sources,
            plugins=settings.plugins,
        )

    def with_load(self, load: LoadConfig) -> EngineParts:
        """Return the parts of an engine with another load configuration."""
        return dataclasses.replace(self, config=msgspec.structs.replace(self.config, load=load))

    def without(self, call: PluginCall, why: str) -> EngineParts:
        """Return the parts of an engine without a plugin of one of `REMOVABLE_KINDS`.

        The built-in default takes the place of a policy.

        Args:
            why: for requests that still use it.
        """
        if call.kind in _OPTIONAL_KINDS:
            removed = self.plugins.get(call.kind, call.name)
            plugins = self.plugins.without(removed, why)
            config = without_plugin(self.config, removed, self.plugins.found)
            return dataclasses.replace(self, config=config, plugins=plugins)
        if call.kind == "scheduling_policies":
            policy = SchedulerConfig().policy
            return self.with_settings(with_policy(self.settings, policy, {}, "default"))
        kv_cache = msgspec.structs.replace(self.config.kv_cache, eviction=KVCacheConfig().eviction)
        config = msgspec.structs.replace(self.config, kv_cache=kv_cache)
        fresh = resolve_plugins(config, self.config_sources, self.plugins.found)
        plugins = self.plugins.successor(fresh, {call.kind})
        return dataclasses.replace(self, config=config, plugins=plugins)
