"""Old import paths of the contract, which work until version 0.3.

`hardpoint` registers them when it is imported, because authors import them directly:
`from hardpoint.plugins.errors import PluginError` warns, and names the new module.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from types import ModuleType
from typing import Any

_CONTRACT = "hardpoint.plugins"
_EARLIER = "hardpoint.host.registry.adapters.contract_1"
_REPLAYABLE = "hardpoint.host.boundary.checked_model"
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

_LOGITS = (
    f"{_CONTRACT}.sampling.logits",
    f"{_CONTRACT}.sampling.rows",
    f"{_CONTRACT}.sampling.phases",
    f"{_CONTRACT}.model.forward",
    f"{_CONTRACT}.model.logits_ops",
)
_STATS = (f"{_CONTRACT}.requests.stats", f"{_CONTRACT}.server.stat_sink")
_PLANS_AND_STATS = (
    "EngineCoreEvent",
    "EngineCoreEventType",
    "GrammarBitmask",
    "ModelRunnerOutput",
    "NewRequest",
    "CachedRequests",
    "PartData",
    "PrefillStats",
    "PrefixCacheStats",
    "RequestFault",
    "RequestMetrics",
    "SampledTokens",
    "SchedulerOutput",
    "SchedulerStats",
)

MOVED = {
    "activation_tap": (f"{_CONTRACT}.sampling.activation_tap",),
    "adapter_resolver": (f"{_CONTRACT}.server.adapter_resolver",),
    "arguments": (f"{_CONTRACT}.text.arguments",),
    "attention": (f"{_CONTRACT}.model.attention", f"{_CONTRACT}.model.attention_step"),
    "balancer": (f"{_CONTRACT}.process.balancer",),
    "batch_update": _LOGITS,
    "behaviour": (f"{_CONTRACT}.component.behaviour",),
    "block_hash": (f"{_CONTRACT}.kv_cache.block_hash",),
    "collaborators": (f"{_CONTRACT}.kv_cache.connector", f"{_CONTRACT}.scheduling.scheduler"),
    "describing": ("hardpoint.typed.describing",),
    "engine_set": (f"{_CONTRACT}.server.engine_set",),
    "engine_state": (f"{_CONTRACT}.requests.engine_state",),
    "errors": ("hardpoint.errors",),
    "execution": (f"{_CONTRACT}.requests.plan", *_STATS, f"{_CONTRACT}.process.executor"),
    "forward_step": (f"{_CONTRACT}.model.forward",),
    "frontend_half": (f"{_CONTRACT}.step_part.part",),
    "hf_config": ("hardpoint.toolkit.hf_config",),
    "hooks": (f"{_CONTRACT}.server.hooks", f"{_CONTRACT}.server.hook_specs"),
    "image_input": (f"{_CONTRACT}.requests.media", f"{_CONTRACT}.config.engine"),
    "io_processor": (f"{_CONTRACT}.text.io_processor",),
    "journals": (f"{_CONTRACT}.server.journals",),
    "kinds": ("hardpoint.host.registry.kinds",),
    "live_request": (f"{_CONTRACT}.requests.request",),
    "loader": (f"{_CONTRACT}.model.loader", f"{_CONTRACT}.config.model_files"),
    "logits": _LOGITS,
    "logits_ops": (f"{_CONTRACT}.model.logits_ops",),
    "manifest": (f"{_CONTRACT}.component.manifest", f"{_CONTRACT}.component.base"),
    "markers": (f"{_CONTRACT}.requests.markers",),
    "matrices": (f"{_CONTRACT}.model.matrices",),
    "media": (f"{_CONTRACT}.requests.media",),
    "media_format": (f"{_CONTRACT}.requests.media_format",),
    "mlp": ("hardpoint.toolkit.layers",),
    "modeling": (
        f"{_CONTRACT}.model.loader",
        f"{_CONTRACT}.config.model_files",
        f"{_CONTRACT}.model.attention",
        f"{_CONTRACT}.model.attention_step",
        f"{_CONTRACT}.model.model",
        f"{_CONTRACT}.model.forward",
    ),
    "models": ("hardpoint.toolkit.layers", "hardpoint.toolkit.hf_config"),
    "msgspec_errors": ("hardpoint.typed.msgspec_errors",),
    "ops": (f"{_CONTRACT}.model.ops",),
    "output_format": ("hardpoint.toolkit.parsing.format_parser",),
    "output_json": ("hardpoint.toolkit.parsing.json_text",),
    "parallel_config": (f"{_CONTRACT}.config.engine",),
    "part_components": (f"{_CONTRACT}.step_part.components",),
    "phases": (f"{_CONTRACT}.sampling.phases",),
    "plan": (f"{_CONTRACT}.requests.plan",),
    "pooler": (f"{_CONTRACT}.sampling.pooler",),
    "read_only": ("hardpoint.typed",),
    "reasoning": (f"{_CONTRACT}.requests.markers", _EARLIER),
    "request": (f"{_CONTRACT}.requests.request",),
    "resumed": (f"{_CONTRACT}.requests.resumed",),
    "rotary": ("hardpoint.toolkit.layers",),
    "sampler": (f"{_CONTRACT}.sampling.sampler",),
    "scheduler": (f"{_CONTRACT}.scheduling.scheduler",),
    "scheduling_policy": (f"{_CONTRACT}.scheduling.policy",),
    "server_config": (_SERVER,),
    "server_extension": (f"{_CONTRACT}.server.extension",),
    "settings": (f"{_CONTRACT}.server.settings",),
    "speculator": (f"{_CONTRACT}.step_part.speculator",),
    "stat_sink": _STATS,
    "stats": _STATS,
    "step_cost": (f"{_CONTRACT}.scheduling.step_cost",),
    "step_record": (f"{_CONTRACT}.scheduling.step_record",),
    "tokenizer": (f"{_CONTRACT}.text.tokenizer",),
    "tokenizing": (f"{_CONTRACT}.text.tokenizer",),
    "type_variables": (f"{_CONTRACT}.component.type_variables",),
    "typed": ("hardpoint.typed",),
    "worker_calls": ("hardpoint.toolkit.workers.calls",),
    "workers": (f"{_CONTRACT}.server.generator",),
    "wrapper": (f"{_CONTRACT}.component.wrapper",),
}
"""By old name in `hardpoint.plugins`: the modules that have its names now."""

MOVED_NAMES = {
    "config": {
        **dict.fromkeys(("ServerConfig", "ServerLimits"), _SERVER),
        "PluginUse": "hardpoint.plugins.config_tables",
        "Origins": "hardpoint.plugins.config:ConfigSources",
    },
    "component": {"is_replayable": _REPLAYABLE},
    "scheduling": dict.fromkeys(_PLANS_AND_STATS, f"{_CONTRACT}.requests"),
    "grammars": {"allow_tokens": "hardpoint.toolkit.bitmasks"},
    "request": {"RequestView": "hardpoint.host.boundary.policy"},
    "structured": {"check_schema": "hardpoint.typed.schema_check"},
    "server": {
        **dict.fromkeys(("ServerConfig", "ServerLimits"), _SERVER),
        **dict.fromkeys(("Receive", "Scope", "Send"), "starlette.types"),
        "App": "starlette.types:ASGIApp",
        "Controls": f"{_CONTRACT}.server:AsyncGenerator",
    },
    "plan": {"NO_DRAFT": f"{_CONTRACT}.requests:SchedulerOutput.NO_DRAFT"},
    "quantization": {"OUTER_COLUMNS": f"{_CONTRACT}.quantization:AffineCodes.OUTER_COLUMNS"},
    "": {
        "ServerConfig": _SERVER,
        **dict.fromkeys(_ERRORS, "hardpoint.errors"),
        **dict.fromkeys(("Component", "Context", "Progress"), "hardpoint.plugins.component"),
        "is_replayable": _REPLAYABLE,
        **dict.fromkeys(("KVCacheGroup", "KVCacheManager", "KVEvent"), f"{_CONTRACT}.kv_cache"),
        "KVConnectorScheduler": "hardpoint.plugins.kv_connector",
        **dict.fromkeys(("Added", "Moved"), f"{_CONTRACT}.sampling.rows"),
        **dict.fromkeys(("BlockHistory", "CachedBlocks"), f"{_CONTRACT}.kv_cache.eviction"),
        **dict.fromkeys(("EncoderCache", "SchedulerLimits"), f"{_CONTRACT}.scheduling"),
        "ReasoningPosition": f"{_CONTRACT}.requests",
        "NO_DRAFT": f"{_CONTRACT}.requests:SchedulerOutput.NO_DRAFT",
        "Worker": "hardpoint.plugins.executor",
        **dict.fromkeys(
            ("PluginMeter", "RequestMetrics", "StepFault"),
            f"{_CONTRACT}.requests",
        ),
        **dict.fromkeys(
            ("MultiModalFeature", "PoolingRequestOutput", "TokenLogprobs"),
            "hardpoint.plugins.requests",
        ),
        "PoolingParams": "hardpoint.plugins.params",
        **dict.fromkeys(("Manifest", "PluginEntry"), f"{_CONTRACT}.component.manifest"),
        "Origins": "hardpoint.plugins.config:ConfigSources",
        "KINDS": "hardpoint.host.registry.kinds",
        "Kind": "hardpoint.host.registry.kinds:PluginKind",
        "Found": "hardpoint.host.registry.discovery:InstalledPlugin",
        "discover": "hardpoint.host.registry.discovery",
        **dict.fromkeys(("PluginSet", "resolve_plugins"), "hardpoint.host.registry.plugin_set"),
    },
    "logits": {"PrepareContext": f"{_CONTRACT}.text"},
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
    "": ("CachedBlock", "DraftTokenIds", "Grammars", "ReasoningContext", "ReasoningParser"),
    "kv_cache": ("CachedBlock",),
    "plan": ("DraftTokenIds",),
    "scheduling": ("Grammars",),
}
"""By module as above: names of contracts that are still accepted, which give no warning here.

The loader warns of the components.
"""


class _MovedModule(ModuleType):
    """A module with names that moved elsewhere; reading one warns."""

    def __getattr__(self, name: str) -> Any:
        """Return a name of the new module.

        Raises:
            AttributeError: it has no such name.
        """
        return _moved_name(self.__name__, name)


class _NamesMoved:
    """The `__getattr__` of a module that stays; reading a name that left it warns."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __call__(self, name: str) -> Any:
        """Return a name of another module.

        Raises:
            AttributeError: it is not a name that moved.
        """
        return _moved_name(self._module, name)


def _moved_name(module: str, name: str) -> Any:
    """Return a name that a module of the contract had, and warn the caller's caller.

    Raises:
        AttributeError: it had no such name.
    """
    old = module.removeprefix(_CONTRACT).removeprefix(".")
    if name in EARLIER.get(old, ()):
        return getattr(importlib.import_module(_EARLIER), name)
    # Names with two underscores are of the import system and of inspection.
    moved = () if name.startswith("__") else MOVED.get(old, ())
    # A module that only imports the name comes after the one that defines it.
    modules = sorted(moved, key=lambda path: not _defines(path, name))
    target = MOVED_NAMES.get(old, {}).get(name)
    for location in modules if target is None else (target,):
        path, _, renamed = location.partition(":")
        owner, _, new = (renamed or name).rpartition(".")
        source = importlib.import_module(path)
        holder = getattr(source, owner) if owner else source
        if hasattr(holder, new):
            public = _public_module(path, owner or new)
            warnings.warn(
                f"{module}.{name} moved to {public}.{renamed or name}; the old path works until "
                f"hardpoint 0.3",
                DeprecationWarning,
                stacklevel=3,
            )
            return getattr(holder, new)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def _public_module(module: str, name: str) -> str:
    package = module.rpartition(".")[0]
    return package if package.startswith(f"{_CONTRACT}.") and _exports(package, name) else module


def _defines(module: str, name: str) -> bool:
    value = getattr(importlib.import_module(module), name, None)
    return _exports(module, name) or getattr(value, "__module__", None) == module


def _exports(module: str, name: str) -> bool:
    return name in getattr(importlib.import_module(module), "__all__", ())


def register() -> None:
    """Register the old modules of `hardpoint.plugins`, and the names that moved out of a module."""
    for name in MOVED:
        old = _MovedModule(f"{_CONTRACT}.{name}", "Moved; see hardpoint.old_names.modules.")
        sys.modules.setdefault(old.__name__, old)
        setattr(sys.modules[_CONTRACT], name, sys.modules[old.__name__])
    for name in MOVED_NAMES.keys() | EARLIER.keys():
        if name in MOVED:
            continue
        module = importlib.import_module(f"{_CONTRACT}.{name}" if name else _CONTRACT)
        # Not in its source: type checkers would take the module to have every name.
        vars(module)["__getattr__"] = _NamesMoved(module.__name__)
