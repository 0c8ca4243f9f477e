"""Components that do nothing, and the entry points that offer them, without any installing."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any

import pytest

from hardpoint.host.registry.discovery import InstalledPlugin
from hardpoint.host.registry.kinds import KINDS
from hardpoint.host.registry.plugin_set import PluginSet, resolve_plugins
from hardpoint.plugins import (
    AttentionBackend,
    EngineConfig,
    EvictionPolicy,
    Executor,
    LogitsProcessor,
    Model,
    Ops,
    Phase,
    Sampler,
    Scheduler,
    SchedulingPolicy,
    Tokenizer,
    WeightLoader,
)
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.parallel import Communicator
from hardpoint.typed import convert


def component(interface: type, class_name: str = "Fake", **attributes: Any) -> Any:
    """Return a class that has all that its contract asks for, and `attributes`.

    An attribute that is given as None is left out.
    """
    body: dict[str, Any] = {
        name: _like(inspect.getattr_static(interface, name))
        for name in interface.__abstractmethods__
    }
    contracts = (
        k.contract for k in KINDS.values() if k.interface and issubclass(interface, k.interface)
    )
    body |= {"contract": next(contracts)}
    if issubclass(interface, LogitsProcessor):
        body["phase"] = Phase.TRUNCATE
    if issubclass(interface, AttentionBackend | Communicator | Ops):
        body["devices"] = ("cpu",)
    body |= attributes
    return type(class_name, (interface,), {k: v for k, v in body.items() if v is not None})


def _like(member: Any) -> Any:
    """Return a member of the same form that does nothing."""
    if isinstance(member, property | classmethod):
        return type(member)(_nothing)
    return _nothing


def _nothing(_self: Any, *_given: Any, **_more: Any) -> None:
    pass


BUILTINS = {
    "samplers/default": component(Sampler),
    "schedulers/default": component(Scheduler),
    "scheduling_policies/fcfs": component(SchedulingPolicy),
    "scheduling_policies/priority": component(SchedulingPolicy),
    "eviction_policies/lru": component(EvictionPolicy),
    "executors/uniproc": component(Executor),
    "models/LlamaForCausalLM": component(Model),
    "loaders/gguf": component(WeightLoader),
    "attention_backends/torch": component(AttentionBackend),
    "ops/torch": component(Ops),
    "communicators/auto": component(Communicator),
    "tokenizers/transformers": component(Tokenizer),
    "logits_processors/min_p": component(LogitsProcessor, after=("top_k",)),
    "logits_processors/top_k": component(LogitsProcessor),
}


class Installed:
    """The installed components of a test: the fake built-ins and the test's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.found: list[InstalledPlugin] = []
        for path, target in BUILTINS.items():
            self.offer(path, target, distribution="hardpoint", version="0.1.0")

    def module(self, name: str, **attributes: Any) -> ModuleType:
        """Make a module importable."""
        module = ModuleType(name)
        vars(module).update(attributes)
        self._monkeypatch.setitem(sys.modules, name, module)
        return module

    def offer(
        self,
        path: str,
        target: Any,
        distribution: str = "acme-pack",
        version: str = "2.0",
        module: str | None = None,
    ) -> str:
        """Add an entry point `kind/name`; return the FQCN that it stands for."""
        kind, name = path.split("/")
        place = module or f"{distribution.replace('-', '_')}.{kind}_{name}"
        if isinstance(target, ModuleType):
            value = target.__name__
        else:
            self.module(place, Thing=target)
            value = f"{place}:Thing"
        self.found.append(InstalledPlugin(kind, name, value, distribution, version))
        return value

    def resolve(self, config_sources: ConfigSources | None = None, **config: Any) -> PluginSet:
        """Resolve a configuration against these installed components."""
        return resolve_plugins(convert(config, EngineConfig, path=""), config_sources, self.found)


def on(plugins: PluginSet) -> dict[str, str]:
    """Return the enabled components: `kind/name` to its FQCN or module."""
    return {f"{entry.kind}/{entry.name}": entry.value for entry in plugins.manifest.entries}
