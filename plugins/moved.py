"""Modules and names that moved out of the contract; old import paths work until version 0.3.

`hardpoint.plugins` registers them, since authors import them directly:
`from hardpoint.plugins.errors import PluginError` warns, and names the new module.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

_CONTRACT = "hardpoint.plugins"
_EARLIER = "hardpoint.registry.adapters.contract_1"
_REPLAYABLE = "hardpoint.boundary.checked_model"
_SERVER = "hardpoint.builtin_plugins.server.config"
_ERRORS = (
    "EngineClosedError",
    "EngineDeadError",
    "EngineFaultError",
    "EnginePausedError",
    "EngineTimeoutError",
    "PluginConflictError",
    "PluginContractError",
    "PluginError",
    "PluginFaultError",
    "PluginLoadError",
    "PluginNotFoundError",
)

MOVED = {
    "describing": ("hardpoint.typed.describing",),
    "batch_update": (f"{_CONTRACT}.logits",),
    "collaborators": (f"{_CONTRACT}.kv_connector", f"{_CONTRACT}.scheduler"),
    "errors": ("hardpoint.errors",),
    "execution": (f"{_CONTRACT}.plan", f"{_CONTRACT}.stats", f"{_CONTRACT}.executor"),
    "hf_config": ("hardpoint.toolkit.hf_config",),
    "kinds": ("hardpoint.registry.kinds",),
    "live_request": (f"{_CONTRACT}.request",),
    "mlp": ("hardpoint.toolkit.layers",),
    "modeling": (f"{_CONTRACT}.loader", f"{_CONTRACT}.attention", f"{_CONTRACT}.model"),
    "models": ("hardpoint.toolkit.layers", "hardpoint.toolkit.hf_config"),
    "msgspec_errors": ("hardpoint.typed.msgspec_errors",),
    "output_format": ("hardpoint.toolkit.parsing.format_parser",),
    "output_json": ("hardpoint.toolkit.parsing.json_text",),
    "read_only": ("hardpoint.typed.read_only",),
    "reasoning": (f"{_CONTRACT}.markers", _EARLIER),
    "rotary": ("hardpoint.toolkit.layers",),
    "sampling": (f"{_CONTRACT}.sampler",),
    "scheduling": (f"{_CONTRACT}.plan", f"{_CONTRACT}.stats", f"{_CONTRACT}.scheduler"),
    "server_config": (_SERVER,),
    "stat_sink": (f"{_CONTRACT}.stats",),
    "tokenizing": (f"{_CONTRACT}.tokenizer",),
    "typed": ("hardpoint.typed",),
    "worker_calls": ("hardpoint.toolkit.workers.calls",),
}
"""By old name in `hardpoint.plugins`: the modules that have its names now."""

MOVED_NAMES = {
    "config": {
        **dict.fromkeys(("ServerConfig", "ServerLimits"), _SERVER),
        "PluginUse": "hardpoint.plugins.config_tables",
        "Origins": "hardpoint.plugins.config:ConfigSources",
    },
    "component": {"is_replayable": _REPLAYABLE},
    "grammars": {"allow_tokens": "hardpoint.toolkit.bitmasks"},
    "request": {"RequestView": "hardpoint.live.policy"},
    "structured": {"check_schema": "hardpoint.typed.schema_check"},
    "server": {
        **dict.fromkeys(("ServerConfig", "ServerLimits"), _SERVER),
        **dict.fromkeys(("Receive", "Scope", "Send"), "starlette.types"),
        "App": "starlette.types:ASGIApp",
        "Controls": f"{_CONTRACT}.server:AsyncGenerator",
    },
    "plan": {"NO_DRAFT": f"{_CONTRACT}.plan:SchedulerOutput.NO_DRAFT"},
    "quantization": {"OUTER_COLUMNS": f"{_CONTRACT}.quantization:AffineCodes.OUTER_COLUMNS"},
    "model": {
        "AttentionBackend": "hardpoint.plugins.attention",
        "AttentionContext": "hardpoint.plugins.attention",
        "LoaderContext": "hardpoint.plugins.loader",
        "ModelFiles": "hardpoint.plugins.loader",
        "WeightFormat": "hardpoint.plugins.loader",
        "WeightLoader": "hardpoint.plugins.loader",
    },
    "": {
        "ServerConfig": _SERVER,
        **dict.fromkeys(_ERRORS, "hardpoint.errors"),
        **dict.fromkeys(("Component", "Context", "Progress"), "hardpoint.plugins.component"),
        "is_replayable": _REPLAYABLE,
        **dict.fromkeys(("KVCacheGroup", "KVCacheManager", "KVEvent"), f"{_CONTRACT}.kv_cache"),
        "KVConnectorScheduler": "hardpoint.plugins.kv_connector",
        **dict.fromkeys(("Grammars", "SchedulerLimits"), "hardpoint.plugins.scheduler"),
        "NO_DRAFT": f"{_CONTRACT}.plan:SchedulerOutput.NO_DRAFT",
        "Worker": "hardpoint.plugins.executor",
        **dict.fromkeys(
            ("PluginMeter", "RequestMetrics", "StepFault"),
            "hardpoint.plugins.stats",
        ),
        **dict.fromkeys(
            ("MultiModalFeature", "PoolingRequestOutput", "TokenLogprobs"),
            "hardpoint.plugins.requests",
        ),
        "PoolingParams": "hardpoint.plugins.params",
        **dict.fromkeys(("Manifest", "PluginEntry"), "hardpoint.plugins.manifest"),
        "Origins": "hardpoint.plugins.config:ConfigSources",
        "KINDS": "hardpoint.registry.kinds",
        "Kind": "hardpoint.registry.kinds:PluginKind",
        "Found": "hardpoint.registry.discovery:InstalledPlugin",
        "discover": "hardpoint.registry.discovery",
        **dict.fromkeys(("PluginSet", "resolve_plugins"), "hardpoint.registry.plugin_set"),
    },
    "logits": {"PrepareContext": "hardpoint.plugins.arguments"},
    "executor": {
        "MAX_CONCURRENT_BATCHES": f"{_CONTRACT}.executor:Executor.MAX_CONCURRENT_BATCHES",
        "are_out_of_step": "hardpoint.toolkit.workers.joining",
        "failed_rank": "hardpoint.toolkit.workers.joining",
        "first_error_or": "hardpoint.toolkit.workers.joining",
        "is_joint": "hardpoint.toolkit.workers.joining",
        "join_outputs": "hardpoint.toolkit.workers.joining",
        "results_of": "hardpoint.toolkit.workers.joining",
        "worker_method": "hardpoint.toolkit.workers.joining",
    },
}
"""By module of `hardpoint.plugins`, "" for itself: names that left it, and their modules now.

After a colon, the name that it has there; that of a class's attribute has a dot.
"""

EARLIER = {
    "": ("CachedBlock", "DraftTokenIds", "ReasoningContext", "ReasoningParser"),
    "kv_cache": ("CachedBlock",),
    "plan": ("DraftTokenIds",),
}
"""By module as above: names of contracts that are still accepted, which give no warning here.

The loader warns of the components.
"""


class _MovedModule(ModuleType):
    """A module whose names are elsewhere; reading one warns."""

    def __getattr__(self, name: str) -> Any:
        """Return a name of the new module.

        Raises:
            AttributeError: it has no such name.
        """
        targets = MOVED[self.__name__.rpartition(".")[2]]
        # Names with two underscores are of the import system and of inspection.
        return _forwarded(self.__name__, name, () if name.startswith("__") else targets)


class _NamesMoved:
    """The `__getattr__` of a module that stays; reading a name that left it warns."""

    def __init__(self, module: str, targets: Mapping[str, str], earlier: Sequence[str]) -> None:
        """Forward the names of a module, by its full name, to their modules.

        Args:
            module: full name of the module.
            targets: modules by name.
            earlier: names of contracts that are still accepted.
        """
        self._module = module
        self._targets = targets
        self._earlier = earlier

    def __call__(self, name: str) -> Any:
        """Return a name of another module.

        Raises:
            AttributeError: it is not a name that moved.
        """
        if name in self._earlier:
            return getattr(importlib.import_module(_EARLIER), name)
        targets = (self._targets[name],) if name in self._targets else ()
        return _forwarded(self._module, name, targets)


def _forwarded(old: str, name: str, targets: tuple[str, ...]) -> Any:
    """Return a name of the first module that has it, and warn the caller's caller.

    Args:
        old: full name of the module that was asked.
        name: name in it.
        targets: full names of the modules that may have it now.

    Raises:
        AttributeError: none has it.
    """
    for target in targets:
        path, _, renamed = target.partition(":")
        owner, _, new = (renamed or name).rpartition(".")
        module = importlib.import_module(path)
        holder = getattr(module, owner) if owner else module
        if hasattr(holder, new):
            warnings.warn(
                f"{old}.{name} moved to {path}.{renamed or name}; the old path works until "
                f"hardpoint 0.3",
                DeprecationWarning,
                stacklevel=3,
            )
            return getattr(holder, new)
    raise AttributeError(f"module {old!r} has no attribute {name!r}")


def register(package: str) -> None:
    """Register the old modules of a package, where nothing has yet, and the names that moved."""
    for name in MOVED:
        old = _MovedModule(f"{package}.{name}", "Moved; see hardpoint.plugins.moved.")
        sys.modules.setdefault(old.__name__, old)
        setattr(sys.modules[package], name, sys.modules[old.__name__])
    for name in MOVED_NAMES.keys() | EARLIER.keys():
        module = importlib.import_module(f"{package}.{name}" if name else package)
        moved = _NamesMoved(module.__name__, MOVED_NAMES.get(name, {}), EARLIER.get(name, ()))
        # Not in its source: type checkers would take the module to have every name.
        vars(module)["__getattr__"] = moved
