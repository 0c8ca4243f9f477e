"""Unread engine outputs as one batch: one entry per request, however many steps it came from."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np

from hardpoint.plugins import EngineCoreOutput, EngineCoreOutputs
from hardpoint.plugins.requests.engine_state import KVCacheChanges

T = TypeVar("T")

MOST_UNREAD = 65_536
"""Blocks in unread changes of a cache; if there are more, they are dropped."""


class OutputCoalescer:
    """Buffer of at most one batch, into which later batches are merged. Not thread-safe.

    The buffer of every queue of engine outputs: `ClientSendQueues` in the engine process,
    `OutputQueue` and `EventLoopBridge` in the client, each with its own lock.
    """

    # A batch that is read before the next one comes is returned as it came; copies are made, and
    # `_indexes` filled, from the second batch on. So a reader that keeps up pays nothing.

    def __init__(self) -> None:
        self._batch: EngineCoreOutputs | None = None
        self._indexes: dict[str, int] | None = None  # request id -> place in the merged batch

    def __len__(self) -> int:
        """Return the number of entries; a batch without any counts as one. In any thread."""
        batch = self._batch  # another thread may pop it at any time
        return 0 if batch is None else max(len(batch.outputs), 1)

    def put(self, batch: EngineCoreOutputs) -> None:
        """Add a batch that is later than all before it."""
        self._batch = batch if self._batch is None else self._merged(self._batch, batch)

    def pop(self) -> EngineCoreOutputs | None:
        """Remove and return the batch, None if there is none."""
        batch = self._batch
        self._batch = self._indexes = None
        return batch

    def _merged(self, held: EngineCoreOutputs, later: EngineCoreOutputs) -> EngineCoreOutputs:
        if self._indexes is None:
            held = msgspec.structs.replace(
                held,
                outputs=[_copy(output) for output in held.outputs],
                cache_changes=_merged_changes(None, held.cache_changes),
            )
            self._indexes = {output.request_id: i for i, output in enumerate(held.outputs)}
        for output in later.outputs:
            index = self._indexes.get(output.request_id)
            if index is not None and not held.outputs[index].finished:
                merge_into(held.outputs[index], output)
            else:  # a new request, or another one with the id of a request that has finished
                self._indexes[output.request_id] = len(held.outputs)
                held.outputs.append(_copy(output))
        return msgspec.structs.replace(
            later,
            outputs=held.outputs,
            finished_requests=_union(held.finished_requests, later.finished_requests),
            scheduler_stats=_latest(held.scheduler_stats, later.scheduler_stats),
            load=_latest(held.load, later.load),
            cache_changes=_merged_changes(held.cache_changes, later.cache_changes),
            start_wave=_latest(held.start_wave, later.start_wave),
            wave_complete=_latest(held.wave_complete, later.wave_complete),
        )


def _copy(output: EngineCoreOutput) -> EngineCoreOutput:
    return msgspec.structs.replace(
        output,
        new_token_ids=list(output.new_token_ids),
        logprobs=_extended(None, output.logprobs),
        prompt_logprobs=_extended(None, output.prompt_logprobs),
        observed_logprobs=_extended(None, output.observed_logprobs),
    )


def merge_into(held: EngineCoreOutput, later: EngineCoreOutput) -> None:
    """Add a later output of the same request to `held`; changes its lists in place."""
    held.new_token_ids += later.new_token_ids
    held.logprobs = _extended(held.logprobs, later.logprobs)
    held.prompt_logprobs = _extended(held.prompt_logprobs, later.prompt_logprobs)
    held.observed_logprobs = _extended(held.observed_logprobs, later.observed_logprobs)
    if later.events:
        held.events = [*held.events, *later.events]
    if later.finish_reason is not None:
        held.finish_reason, held.stop_reason = later.finish_reason, later.stop_reason
        held.error, held.error_kind = later.error, later.error_kind
        held.faulty_plugin = later.faulty_plugin
    if later.part_figures is not None:
        held.part_figures = later.part_figures
    if later.part_arrays is not None:
        held.part_arrays = held.part_arrays or {}
        for part, arrays in later.part_arrays.items():
            merged = held.part_arrays.setdefault(part, {})
            merged.update({key: [*merged.get(key, ()), *new] for key, new in arrays.items()})
    held.num_nans_in_logits += later.num_nans_in_logits
    held.num_resumes = later.num_resumes
    if held.routed_experts is None:
        held.routed_experts = later.routed_experts
    elif later.routed_experts is not None:
        held.routed_experts = np.concatenate((held.routed_experts, later.routed_experts))
    for name in _SET_ONCE:
        if (value := getattr(later, name)) is not None:
            setattr(held, name, value)


_SET_ONCE = (
    "num_cached_tokens",
    "prefill_stats",
    "kv_transfer_params",
    "pooling_output",
    "trace_headers",
    "weight_runs",
)


def _extended(held: list[T] | None, later: list[T] | None) -> list[T] | None:
    if held is None:
        return None if later is None else list(later)
    held += later or ()
    return held


def _union(first: set[str] | None, later: set[str] | None) -> set[str] | None:
    return None if first is None and later is None else (first or set()) | (later or set())


def _latest(first: Any, later: Any) -> Any:
    return first if later is None else later


def _merged_changes(
    held: KVCacheChanges | None, later: KVCacheChanges | None
) -> KVCacheChanges | None:
    """Return two changes as one, None if there are none.

    Args:
        held: changes that only the caller has; they may be changed in place.
        later: those that come after them; they stay as they are.
    """
    if held is None or later is None:
        return held if later is None else _own_changes(later)
    if later.first != held.last + 1:  # what is missing makes the earlier ones void
        return _own_changes(later)
    held.last = later.last
    if later.cleared:
        held.cleared, held.stored, held.removed = True, set(later.stored), set()
    else:
        held.stored -= later.removed
        held.stored |= later.stored
        if not held.cleared:
            held.removed -= later.stored
            held.removed |= later.removed
    if len(held.stored) + len(held.removed) > MOST_UNREAD:
        return KVCacheChanges(first=held.last + 1, last=held.last)
    return held


def _own_changes(changes: KVCacheChanges) -> KVCacheChanges:
    return KVCacheChanges(
        first=changes.first,
        last=changes.last,
        cleared=changes.cleared,
        stored=set(changes.stored),
        removed=set(changes.removed),
    )
