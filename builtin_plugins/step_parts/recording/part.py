"""Step part that decides which steps of a model are recorded, and logs why none are."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hardpoint.errors import PluginFaultError, shown
from hardpoint.plugins import StepPart
from hardpoint.plugins.worker_half import WorkerHalfContext

from .decode_graphs import DecodeGraphs
from .repeated_steps import RepeatedSteps

if TYPE_CHECKING:
    from hardpoint.plugins.step_part.worker import LoadedModel


_log = logging.getLogger("hardpoint")


class RecordedSteps(StepPart):
    """Repeats steps of the model without running Python, as far as its classes allow it."""

    contract = 1
    fault_scope = "engine"

    def worker_half(self, context: WorkerHalfContext) -> DecodeGraphs | RepeatedSteps | None:
        """Return the worker half that repeats steps; None, with the reason logged, if none may be.

        Raises:
            PluginFaultError: `Ops.record_sizes` returned something else than ascending sizes.
        """
        if (loaded := context.loaded) is None:
            return None
        config, max_num_seqs = self.context.config, self.context.config.scheduler.max_num_seqs
        sizes = loaded.ops.record_sizes(max_num_seqs)
        if not _are_sizes(sizes, max_num_seqs):
            raise PluginFaultError(
                f"{loaded.ops_source}: its record_sizes() gave {shown(sizes)}, expected numbers of "
                f"sequences in 1..{max_num_seqs}, ascending"
            )
        reason = None
        if config.executor.enforce_eager:
            reason = "executor.enforce_eager is set"
        elif context.world_size > 1 or config.parallel.spreads_experts:
            reason = "ranks share the model"
        else:
            reason = _lack(loaded, has_sizes=bool(sizes))
        if sizes and context.rank == 0:
            text = f"up to {sizes[-1]} sequences, recorded when idle or needed"
            _log.info("decode graphs: %s", text if reason is None else f"off, since {reason}")
        if reason is not None:
            return None
        if sizes:
            return DecodeGraphs(context, loaded, sizes, config.kv_cache.block_size)
        return None if loaded.pads else RepeatedSteps(loaded.model, loaded.ops)


def _lack(loaded: LoadedModel, *, has_sizes: bool) -> str | None:
    if loaded.unreplayable:
        return f"{loaded.unreplayable[0]} does not state replayable = True"
    if has_sizes and not loaded.pads:
        return f"{loaded.attention_source} does not state pads = True"
    return None


def _are_sizes(sizes: Any, limit: int) -> bool:
    return (
        isinstance(sizes, Sequence)
        and all(type(size) is int and 1 <= size <= limit for size in sizes)
        and all(size < following for size, following in pairwise(sizes))
    )
