"""The spec that a worker is built from; core/engine/prepare.py makes it of the configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins import EngineConfig, ModelConfig, WeightLoader
from hardpoint.plugins.component import Progress
from hardpoint.plugins.component.manifest import Manifest
from hardpoint.plugins.executor import WorkerLaunch, WorkerProcess
from hardpoint.plugins.parallel import Placement


class EnginePlace(msgspec.Struct, frozen=True):
    """The place of an engine among several (`parallel.data`).

    Attributes:
        rank: number of the engine.
        num_sharing: engines of this host that are loading, which share the memory that is free.
        local_rank: its number among the engines of its host.
        engines: placement of all engines, if they share experts; else None.
    """

    rank: int = 0
    num_sharing: int = 1
    local_rank: int = 0
    engines: Placement | None = None


ONLY_ENGINE = EnginePlace()
"""The place of an engine without others."""


StartWorker = Callable[[WorkerLaunch, str, Sequence[int], Manifest, str], WorkerProcess]
"""Starts a process as `ExecutorContext.start_process`, given the plugins, too, and a folder, which
the process removes if this one ends without doing so.
"""


@dataclass(frozen=True)
class WorkerSpec:
    """The configuration and plugins of a worker.

    Attributes:
        dtype: resolved; never "auto".
        device: resolved; never "auto".
        max_model_len: resolved.
        rank: rank in the engine.
        placement: placement of all ranks; None if there is one.
        num_draft_tokens: most drafts of a request that a step verifies.
        prepare: returns the spec of a further model; None if the spec was made by hand.
        place: place of its engine among several.
        start_worker: starts the process of a worker; None if the program starts none.
        without_overlap: what prevents `scheduler.asynchronous = "auto"` from overlapping steps.
    """

    config: EngineConfig
    plugins: PluginSet
    loader: WeightLoader
    model_config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    progress: Progress
    rank: int = 0
    placement: Placement | None = None
    num_draft_tokens: int = 0
    prepare: Callable[[EngineConfig], WorkerSpec] | None = None
    place: EnginePlace = ONLY_ENGINE
    start_worker: StartWorker | None = None
    without_overlap: Sequence[str] = ()

    @property
    def for_parts(self) -> dict[str, Any]:
        """The fields of the context of step parts."""
        files = self.loader.context.files
        return {"config": self.config, "model_config": self.model_config, "files": files}
