"""Plugins with typical faults, which docs/token-traces.md finds by `trace` and `replay`."""

# ruff: noqa: ARG002 - parameters of the interfaces

import math

from hardpoint import plugins
from hardpoint.plugins import (
    Edits,
    KVConnector,
    LogitsProcessor,
    Op,
    Phase,
    Sampler,
    SchedulingPolicy,
    SparseLogitsProcessor,
    Speculator,
)
from hardpoint.plugins.kv_connector import (
    FinishedTransfers,
    KVConnectorScheduler,
    KVConnectorWorker,
)
from hardpoint.toolkit.parsing.format_parser import Content, FormatParser, Reasoning, State

TOKEN_A, TOKEN_Z = 64, 89  # "a" and "z" of the scripted model


class Enabled(plugins.Arguments):
    """Enables a plugin for the requests with `plugin_args`."""

    on: bool = True


class Forbids(SparseLogitsProcessor):
    """Mask that should forbid "b", and forbids "a", the right token."""

    contract = 1
    phase = Phase.MASK
    Arguments = Enabled

    def edits(self, rows):
        return Edits(range(len(rows)), [TOKEN_A] * len(rows), [-math.inf] * len(rows), Op.SET)


class Twice(LogitsProcessor):
    """Penalty for each output token, which counts the last token twice."""

    contract = 1
    phase = Phase.PENALTY
    Arguments = Enabled

    def apply(self, logits, rows):
        for row, request in enumerate(rows.requests):
            for token in [*request.output_token_ids, *request.output_token_ids[-1:]]:
                logits[row, token] -= 1.0
        return logits


class Leaks(LogitsProcessor):
    """Penalty for the last token of each row, which reads the first row only."""

    contract = 1
    phase = Phase.PENALTY
    Arguments = Enabled

    def apply(self, logits, rows):
        for token in rows.requests[0].output_token_ids[-1:]:
            logits[:, token] -= 3.0
        return logits


class Once(SparseLogitsProcessor):
    """Bias for "a", which applies at the first position only."""

    contract = 1
    phase = Phase.BIAS
    Arguments = Enabled

    def edits(self, rows):
        places = [row for row, request in enumerate(rows.requests) if not request.output_token_ids]
        return Edits(places, [TOKEN_A] * len(places), [2.0] * len(places), Op.ADD)


class Unseeded(Sampler):
    """Ignores the seeds of requests."""

    contract = 1

    def sample(self, logits, rows):
        best = self.context.ops.argmax(logits)
        drawn = logits.softmax(-1).multinomial(1).squeeze(1)
        return best.where(rows.greedy, drawn)


class Wrong(Speculator):
    """Drafts "z", which the model never generates."""

    contract = 1

    def propose(self, requests, budget):
        return [[TOKEN_Z] * min(2, request.limit) for request in requests]


class Short(SchedulingPolicy):
    """Should run short prompts first, and has a wrong sign."""

    contract = 1

    def key(self, request):
        return -request.num_prompt_tokens


class Swallows(FormatParser):
    """Reasoning between "<" and ">"; takes each "b" for a marker too."""

    contract = 2
    roles = ("reasoning",)
    reasoning = "thought"

    def states(self):
        return {
            "content": State(Content, {"<": "thought", "b": "content"}),
            "thought": State(Reasoning, {">": "content"}),
        }


class Stale(KVConnector):
    """Reports that it has all blocks, and loads nothing into them."""

    contract = 1

    def scheduler_half(self, context):
        return StalePlans(context.block_size)

    def worker_half(self, context):
        return StaleLoads()


class StalePlans(KVConnectorScheduler):
    def __init__(self, block_size):
        self.block_size = block_size

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        end = (request.num_tokens - 1) // self.block_size * self.block_size
        return max(end - num_computed_tokens, 0), False

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        pass

    def build_connector_meta(self, plan):
        return None

    def request_finished(self, request, block_ids):
        return False, None


class StaleLoads(KVConnectorWorker):
    def register_kv_caches(self, caches):
        pass

    def start_load_kv(self, metadata):
        pass

    def get_finished(self, ended):
        return FinishedTransfers()
