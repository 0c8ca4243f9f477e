"""The tokens of a step on their way to the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from hardpoint.core.worker.sampling.pipeline import LogitsPipeline
from hardpoint.core.worker.sampling.sampling_stage import Sampled
from hardpoint.host.system.transfers import select_rows
from hardpoint.plugins import LogitsRequest, ModelRunnerOutput
from hardpoint.toolkit.batches.groups import copy_to_members

from .input_batch import InputBatch


@dataclass(eq=False)
class LateTokens:
    """The tokens of a step that may be on the device only.

    Attributes:
        output: result of the step, without tokens.
        ids: int64 [requests], on the device.
        finish: waits for the tokens, and checks them.
        ended: requests that have ended since.
    """

    requests: list[LogitsRequest]
    output: ModelRunnerOutput
    ids: torch.Tensor
    finish: Callable[[], Sampled]
    ended: frozenset[str] = frozenset()

    def distribute(
        self, batch: InputBatch, pipeline: LogitsPipeline
    ) -> tuple[dict[LogitsRequest, int | None], bool]:
        """Wait for the tokens; pass them to the output, the batch and the processors' states.

        Returns:
            The token of each request, None after a fault, and whether one differs from its `ids`.
        """
        requests, output, sampled = self.requests, self.output, self.finish()
        output.faults |= sampled.faults
        rows = [i for i, request in enumerate(requests) if request.request_id not in output.faults]
        tokens: dict[LogitsRequest, int | None] = dict.fromkeys(requests)
        for row in rows:
            request = requests[row]
            tokens[request] = token = sampled.tokens[row]
            output.sampled_token_ids[request.request_id] = [token]
            if row in sampled.logprobs:
                output.logprobs[request.request_id] = [sampled.logprobs[row]]
        if batch.groups.by_leader:
            members = copy_to_members(requests, output)
            tokens |= {member: ids[0] if ids else None for member, ids in members.items()}
        advancing = rows
        if not batch.settle_late(tokens):
            advancing = [row for row in rows if batch.has(requests[row])]
        ids = sampled.device_ids
        ends = pipeline.advance(
            [requests[row] for row in advancing],
            [sampled.tokens[row] for row in advancing],
            ids if len(advancing) == len(requests) else select_rows(ids, advancing),
        )
        if ends:
            output.end(ends)
        if sampled.observed:
            seen = [r for r in rows if r in sampled.observed]
            seen = [row for row in seen if requests[row].request_id not in self.ended]
            users, observed = [requests[row] for row in seen], [sampled.observed[r] for r in seen]
            for request, distribution in zip(users, observed, strict=True):
                output.observed_logprobs[request.request_id] = [distribution.logprob]
            output.end(pipeline.observe(users, [sampled.tokens[row] for row in seen], observed))
        if ids is self.ids:
            return tokens, False
        read = self.ids.tolist()
        return tokens, any(read[row] != sampled.tokens[row] for row in rows)

    def over(self, tokens: Mapping[LogitsRequest, int | None]) -> set[LogitsRequest]:
        """Return the requests that end with their token: no plugin runs for their next one."""
        ended = self.output.faults.keys() | self.output.finishes.keys()
        return {
            request
            for request, token in tokens.items()
            if token is None
            or request.request_id in ended
            or (
                token in request.stop_token_ids
                and len(request.output_token_ids) > request.params.min_tokens
            )
        }
