"""Graceful ends of requests: effects of a `Finish` on the result and outputs of a step.

The engine core calls it, so that schedulers need not know of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from hardpoint.plugins import (
    EngineCoreOutput,
    EngineCoreOutputs,
    Finish,
    FinishReason,
    ModelRunnerOutput,
    RequestFault,
    Scheduler,
)

_REPLACED = (FinishReason.LENGTH, FinishReason.ERROR)


def take_finishes(
    ends: Mapping[str, Any], plugin: str, users: Collection[str], result: ModelRunnerOutput
) -> dict[str, RequestFault]:
    """Move the graceful ends by a plugin into a result, and return its faults.

    Args:
        ends: faults and ends by request id.
        plugin: name of the plugin.
        users: requests that use it; their ends count.

    Returns:
        The faults.
    """
    faults: dict[str, RequestFault] = {}
    for request_id, end in ends.items():
        if request_id not in users:
            continue
        if isinstance(end, Finish):
            result.finishes.setdefault(request_id, end.of(plugin))
        else:
            faults[request_id] = end
    return faults


def limit_tokens(result: ModelRunnerOutput, scheduler: Scheduler) -> None:
    """Apply `Finish.num_tokens` before the scheduler gets the result of a step."""
    if result.finishes:
        result.drop_tokens(_num_output_tokens(result, scheduler))


def _num_output_tokens(result: ModelRunnerOutput, scheduler: Scheduler) -> dict[str, int]:
    """Return the number of output tokens of live requests with a limit, by id.

    If the scheduler shows no live requests, a request fails if its end depends on the number.
    """
    num_tokens: dict[str, int] = {}
    for request_id, finish in list(result.finishes.items()):
        if finish.num_tokens is None:
            continue
        try:
            live = scheduler.live_request(request_id)
        except NotImplementedError:  # optional for schedulers
            message = f"{finish.plugin}: Finish.num_tokens: the scheduler shows no live requests"
            result.sampled_token_ids.pop(request_id, None)
            result.end({request_id: RequestFault(message, finish.plugin)})
            continue
        if live is not None:
            num_tokens[request_id] = len(live.output_token_ids)
    return num_tokens


def end_requests(
    result: ModelRunnerOutput, outputs: dict[int, EngineCoreOutputs], scheduler: Scheduler
) -> None:
    """End the requests of `result.finishes`, and complete their outputs."""
    if not result.finishes:
        return
    messages = list(outputs.values())
    by_id = {output.request_id: output for message in messages for output in message.outputs}
    for request_id, finish in result.finishes.items():
        output = by_id.get(request_id)
        if output is None and request_id in result.sampled_token_ids:
            continue  # it was preempted or aborted while the model ran: the tokens are void
        if output is None or output.finish_reason is None:
            ended = scheduler.finish_requests([request_id], FinishReason.STOP)
            _merge(outputs, ended, output, finish)
        elif output.finish_reason in _REPLACED:
            _finish(output, finish)


def _finish(output: EngineCoreOutput, finish: Finish) -> None:
    output.finish_reason, output.stop_reason = FinishReason.STOP, finish.shown
    output.error = output.error_kind = output.faulty_plugin = None


def _merge(
    outputs: dict[int, EngineCoreOutputs],
    ended: Mapping[int, EngineCoreOutputs],
    output: EngineCoreOutput | None,
    finish: Finish,
) -> None:
    """Add the last output of a request to the output of the step, if there is one."""
    for client, message in ended.items():
        for last in message.outputs:
            if output is None:
                _finish(last, finish)
                continue
            output.events = [*output.events, *last.events]
            output.kv_transfer_params = last.kv_transfer_params
            output.trace_headers = last.trace_headers
            _finish(output, finish)
        if client not in outputs:
            outputs[client] = message
            continue
        held = outputs[client]
        if output is None:
            held.outputs = [*held.outputs, *message.outputs]
        if message.finished_requests:
            held.finished_requests = (held.finished_requests or set()) | message.finished_requests
