"""How a model is divided among ranks: whether it can be, and in which sizes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch

from hardpoint.host.registry.blame import raise_unless_fault
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins import Model, ModelConfig, ModelContext, ModelError, Ops, OpsContext
from hardpoint.plugins.component import Source
from hardpoint.plugins.config.engine import ParallelConfig
from hardpoint.plugins.process.parallel import IndivisibleError, Parallel, SingleRank

_MAX_SIZE = 64  # ranks of a stage that are tried
_SEARCH_S = 1.0


def check_parallelism(model: type[Model], source: Source, parallel: ParallelConfig) -> None:
    """Refuse a kind of parallelism that a model does not honor.

    Raises:
        ModelError: naming the setting and the model.
    """
    settings = {
        "tensor": parallel.tensor > 1,
        "pipeline": parallel.pipeline > 1,
        "expert": parallel.expert,
    }
    for name, is_on in settings.items():
        if is_on and name not in model.parallelism:
            does = ", ".join(f"parallel.{other}" for other in model.parallelism) or "none"
            raise ModelError(
                f"parallel.{name}: {source} cannot be divided in this way; `parallelism` of its "
                f"class has: {does}"
            )


def check_shares(
    plugins: PluginSet, config: ModelConfig, dtype: torch.dtype, parallel: ParallelConfig
) -> None:
    """Reject an impossible sharding of the model, before workers are started.

    The model is built as the first rank's share, without operations. One that needs these is left
    to the workers.

    Raises:
        ModelError: naming the setting, and the sizes that would do.
    """
    entry = plugins.get("models", config.model_plugin)
    check_parallelism(plugins.target(entry), entry.source, parallel)
    cpu = torch.device("cpu")
    unused: Any = _UNUSED_OPS(OpsContext(name="unused", options=None, device=cpu, dtype=dtype))

    def create(share: Parallel) -> Model:
        return plugins.create(
            entry,
            ModelContext,
            config=config,
            dtype=dtype,
            device=cpu,
            max_model_len=1,
            ops=unused,
            parallel=share,
        )

    first = FirstRank(parallel.tensor)
    engines = FirstRank(parallel.data if parallel.spreads_experts else 1)
    try:
        share = Parallel(first, 0, parallel.pipeline, parallel.expert, engines)
        build_share(create, share).close()
    except ModelError:
        raise
    except BaseException as cause:
        raise_unless_fault(cause)


def _is_not_called(*_arguments: object) -> None:
    raise NotImplementedError("the model is built for its sharding plan only, and computes nothing")


_UNUSED_OPS = type("_UnusedOps", (Ops,), dict.fromkeys(Ops.__abstractmethods__, _is_not_called))


class FirstRank(SingleRank):
    """Rank 0 of so many, for which a model is built and never run."""

    def __init__(self, size: int) -> None:
        self.size = size


def build_share(create: Callable[[Parallel], Model], parallel: Parallel) -> Model:
    """Build a rank's share of a model.

    Args:
        create: builds the model without weights.

    Raises:
        ModelError: the model cannot be divided in this way; names the sizes that all of it can be
            divided by.
    """
    try:
        return create(parallel)
    except IndivisibleError as cause:
        fitting = _fitting_sizes(create, parallel, cause.count)
        raise ModelError(f"{cause.problem}; {fitting}") from cause


def _fitting_sizes(create: Callable[[Parallel], Model], parallel: Parallel, count: int) -> str:
    """Return the part of the message that names the sizes a model can be divided by.

    Args:
        create: builds the model, which takes long for one of many layers.
        count: number of the parts that are to be divided, or copied to several ranks.
    """
    deadline, fitting, largest = time.monotonic() + _SEARCH_S, list[str](), _MAX_SIZE
    for size in range(2, _MAX_SIZE + 1):
        if count % size and size % count:
            continue
        if time.monotonic() > deadline:
            largest = size - 1
            break
        if _fits(create, parallel, size):
            fitting.append(str(size))
    if not fitting:
        return f"no size up to {largest} would do"
    rest = "" if largest == _MAX_SIZE else f" (sizes above {largest} were not tried)"
    return f"{', '.join(fitting)} would do{rest}"


def _fits(create: Callable[[Parallel], Model], parallel: Parallel, size: int) -> bool:
    try:
        create(dataclasses.replace(parallel, tensor=FirstRank(size))).close()
    except ModelError:
        return False
    return True
