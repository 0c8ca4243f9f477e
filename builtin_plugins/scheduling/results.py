"""What a step's results do to its requests."""

from __future__ import annotations

from typing import Any

from hardpoint.plugins import (
    EngineCoreOutput,
    FinishReason,
    ModelRunnerOutput,
    PrefillStats,
    RequestFault,
    RequestStatus,
)

from .encoder import free_features
from .live import LiveRequest
from .step import PlannedStep
from .tracker import Books


class DraftCounts:
    """Totals of speculation.

    Attributes:
        verified: drafts that steps looked at.
        accepted: drafts that turned out right.
    """

    def __init__(self) -> None:
        """Start at zero."""
        self.verified = 0
        self.accepted = 0


def take_results(
    books: Books, planned: PlannedStep, result: ModelRunnerOutput, drafts: DraftCounts
) -> list[tuple[int, EngineCoreOutput]]:
    """Append what was sampled, end the requests that are done; return (client, output) pairs."""
    plan = planned.plan
    asynchronous = books.limits.asynchronous
    sampled = result.sampled_token_ids
    rare = _is_rare(result)
    computed = planned.computed_before() if result.prompt_logprobs else {}
    outputs: list[tuple[int, EngineCoreOutput]] = []
    for place, request in enumerate(planned.requests):
        if request.status is not RequestStatus.RUNNING:
            continue  # ended or preempted while the model ran
        if asynchronous and request.num_preemptions != planned.preemptions[place]:
            continue  # preempted and back again: what was sampled for it is sampled anew
        request_id = request.request_id
        if rare and (fault := result.faults.get(request_id)):
            outputs.append((request.client_index, _failed(books, request, fault)))
            continue
        if request.features:
            free_features(books, request)
        tokens = sampled.get(request_id)
        output: EngineCoreOutput | None = None
        if tokens:
            if plan.draft_token_ids and request_id in plan.draft_token_ids:
                _settle_drafts(request, len(plan.draft_token_ids[request_id]), tokens, drafts)
            if asynchronous:
                request.num_output_placeholders -= len(tokens)
            output = _take_tokens(books, request, tokens)
        elif rare and request_id in result.pooler_output:
            output = _take_pooled(books, request, result.pooler_output[request_id])
        if rare:
            output = _with_logprobs(request, computed.get(request_id, 0), result, output)
            if output is not None:
                output.num_nans_in_logits = result.num_nans_in_logits.get(request_id, 0)
                output.routed_experts = result.routed_experts.get(request_id)
        if output is not None:
            outputs.append((request.client_index, output))
    return outputs


def _is_rare(result: ModelRunnerOutput) -> bool:
    """Whether there is more to look at than sampled tokens."""
    return bool(
        result.faults
        or result.logprobs
        or result.prompt_logprobs
        or result.num_nans_in_logits
        or result.pooler_output
        or result.routed_experts
    )


def _take_tokens(books: Books, request: LiveRequest, tokens: list[int]) -> EngineCoreOutput:
    """Append sampled tokens up to the one that ends the request, if one does."""
    output = EngineCoreOutput(request_id=request.request_id, new_token_ids=tokens)
    if request.events or not request.told_prefill:
        _tell_news(request, output)
    for count, token in enumerate(tokens, 1):
        request.append(token)
        reason = request.ends_with(token)
        if reason is not None:
            output.finish_reason = reason
            if reason is FinishReason.STOP:
                output.stop_reason = request.stop_reason(token)
            if count < len(tokens):
                output.new_token_ids = tokens[:count]
            books.finish(request, output)
            break
    return output


def _take_pooled(books: Books, request: LiveRequest, pooled: Any) -> EngineCoreOutput:
    """End a request that pools: its prompt is computed, and it gives no tokens."""
    output = EngineCoreOutput(
        request_id=request.request_id,
        finish_reason=FinishReason.STOP,
        pooling_output=pooled,
    )
    _tell_news(request, output)
    books.finish(request, output)
    return output


def _tell_news(request: LiveRequest, output: EngineCoreOutput) -> None:
    """Add what happened, and how the prompt was computed with the first output after that."""
    if not request.told_prefill:
        request.told_prefill = True
        cached = max(request.num_cached_tokens, 0)
        output.num_cached_tokens = cached
        output.prefill_stats = PrefillStats(
            request.num_prompt_tokens, cached, request.num_external_tokens
        )
    if request.events:
        output.events, request.events = request.events, []


def _settle_drafts(
    request: LiveRequest, verified: int, tokens: list[int], drafts: DraftCounts
) -> None:
    """Take back the positions of rejected drafts: they were counted as computed."""
    accepted = len(tokens) - 1
    request.num_computed_tokens -= verified - accepted
    drafts.verified += verified
    drafts.accepted += accepted


def _with_logprobs(
    request: LiveRequest,
    computed_before: int,
    result: ModelRunnerOutput,
    output: EngineCoreOutput | None,
) -> EngineCoreOutput | None:
    """Add log-probabilities to a request's output; make one if only those of its prompt came."""
    if output is not None and (logprobs := result.logprobs.get(request.request_id)):
        output.logprobs = logprobs[: len(output.new_token_ids)]
    if prompt_logprobs := result.prompt_logprobs.get(request.request_id):
        first = computed_before + 1 if computed_before else 0
        fresh = prompt_logprobs[max(request.num_prompt_logprobs - first, 0) :]
        request.num_prompt_logprobs += len(fresh)
        if fresh:
            output = output or EngineCoreOutput(request_id=request.request_id)
            output.prompt_logprobs = fresh
    return output


def _failed(books: Books, request: LiveRequest, fault: RequestFault) -> EngineCoreOutput:
    output = books.last_output(request, FinishReason.ERROR, fault.message)
    output.faulty_plugin = fault.plugin
    return output
