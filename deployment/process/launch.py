"""The launch message of an engine process."""

from __future__ import annotations

from typing import Any

from hardpoint.plugins.component.manifest import Manifest
from hardpoint.plugins.grammars import Vocabulary
from hardpoint.plugins.parallel import Placement
from hardpoint.process.child_processes.launch import ChildLaunch


class Launch(ChildLaunch, frozen=True, kw_only=True):
    """Everything that an engine process needs.

    Attributes:
        address: the EngineAddresses to connect to, as JSON.
        manifest: the plugins, the same in every process.
        config: an EngineConfig as plain data.
        config_sources: by dotted path, where configuration values came from.
        log_level: level of the logger "hardpoint".
        engine_index: the number of the engine, from 0.
        local_rank: its number among the engines of its host, which divide cores and devices.
        num_sharing: engines of this host that are started at the same time, this one included.
        engines: see EnginePlace.
        vocabulary: vocabulary of the tokenizer, for grammars; None is an engine without them.
        reports_load: whether the engine sends its clients its load (`EngineCoreOutputs.load`).
        reports_cache: whether it sends them the changes of its KV cache
            (`EngineCoreOutputs.cache_changes`).
        inputs: `package.module:Class` of the record/replay hook; empty is the core's own.
    """

    address: str
    manifest: Manifest
    config: dict[str, Any]
    config_sources: dict[str, str] = {}
    log_level: str = "INFO"
    engine_index: int = 0
    local_rank: int = 0
    num_sharing: int = 1
    engines: Placement | None = None
    vocabulary: Vocabulary | None = None
    reports_load: bool = False
    reports_cache: bool = False
    inputs: str = ""
