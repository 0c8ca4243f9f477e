"""Outputs that nobody has taken yet, as one batch: one entry per request, however many steps."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from hardpoint.plugins import EngineCoreOutput, EngineCoreOutputs

T = TypeVar("T")


class MergedOutputs:
    """Holds batches until they are taken. One thread at a time.

    A batch that is alone is given as it came; merging begins with the second one.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._batch: EngineCoreOutputs | None = None
        self._places: dict[str, int] | None = None  # of requests in the batch, once it is merged

    def __len__(self) -> int:
        """Return the number of entries; a batch without any counts as one."""
        batch = self._batch  # another thread may take it meanwhile
        return 0 if batch is None else max(len(batch.outputs), 1)

    def put(self, batch: EngineCoreOutputs) -> None:
        """Add what came later than all that is held."""
        self._batch = batch if self._batch is None else self._merged(self._batch, batch)

    def take(self) -> EngineCoreOutputs | None:
        """Return what is held, None if nothing is."""
        batch = self._batch
        self._batch = self._places = None
        return batch

    def _merged(self, held: EngineCoreOutputs, later: EngineCoreOutputs) -> EngineCoreOutputs:
        if self._places is None:
            held = msgspec.structs.replace(held, outputs=[_own(each) for each in held.outputs])
            self._places = {output.request_id: i for i, output in enumerate(held.outputs)}
        for output in later.outputs:
            place = self._places.get(output.request_id)
            if place is not None and not held.outputs[place].finished:
                absorb(held.outputs[place], output)
            else:  # new to the client, or another request that got the id of an ended one
                self._places[output.request_id] = len(held.outputs)
                held.outputs.append(_own(output))
        return msgspec.structs.replace(
            later,
            outputs=held.outputs,
            finished_requests=_either(held.finished_requests, later.finished_requests),
            scheduler_stats=_latest(held.scheduler_stats, later.scheduler_stats),
            wave_complete=_latest(held.wave_complete, later.wave_complete),
            start_wave=_latest(held.start_wave, later.start_wave),
        )


def _own(output: EngineCoreOutput) -> EngineCoreOutput:
    """Return a copy that can be added to."""
    return msgspec.structs.replace(
        output,
        new_token_ids=list(output.new_token_ids),
        logprobs=_extended(None, output.logprobs),
        prompt_logprobs=_extended(None, output.prompt_logprobs),
    )


def absorb(held: EngineCoreOutput, later: EngineCoreOutput) -> None:
    """Have one output, whose lists are its own, say what a later one of its request says too."""
    held.new_token_ids += later.new_token_ids
    held.logprobs = _extended(held.logprobs, later.logprobs)
    held.prompt_logprobs = _extended(held.prompt_logprobs, later.prompt_logprobs)
    if later.events:
        held.events = [*held.events, *later.events]
    if later.finish_reason is not None:
        held.finish_reason, held.stop_reason = later.finish_reason, later.stop_reason
        held.error, held.error_kind = later.error, later.error_kind
        held.faulty_plugin = later.faulty_plugin
    held.num_nans_in_logits += later.num_nans_in_logits
    for name in _TOLD_ONCE:
        if (value := getattr(later, name)) is not None:
            setattr(held, name, value)


_TOLD_ONCE = (
    "num_cached_tokens",
    "prefill_stats",
    "kv_transfer_params",
    "pooling_output",
    "routed_experts",
    "trace_headers",
)


def _extended(held: list[T] | None, later: list[T] | None) -> list[T] | None:
    if held is None:
        return None if later is None else list(later)
    held += later or ()
    return held


def _either(first: set[str] | None, later: set[str] | None) -> set[str] | None:
    return None if first is None and later is None else (first or set()) | (later or set())


def _latest(first: Any, later: Any) -> Any:
    return first if later is None else later
