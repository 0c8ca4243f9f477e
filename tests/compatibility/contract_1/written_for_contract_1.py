"""One plugin of each stable kind and form, which uses every member of its interface.

The wheel beside this file was built from it once and is not built again: a later version of the
engine that accepts contract 1 has to run it as it is.
"""

import json
import math

import torch

from hardpoint import plugins
from hardpoint.plugins import (
    Annotated,
    BatchLogitsProcessor,
    Edits,
    EvictionPolicy,
    LogitsProcessor,
    Meta,
    Move,
    Op,
    Phase,
    Reads,
    RequestStatus,
    RowMap,
    SchedulingPolicy,
    SparseLogitsProcessor,
    StatSink,
    TensorSpec,
)


class CompatDense(LogitsProcessor):
    """Raises the token after the newest one, by an argument that `prepare` limits."""

    contract = 1
    phase = Phase.BIAS
    before = ("logit_bias",)
    after = ()
    argmax_invariant = False
    reads = Reads.HOST_IDS

    class Options(plugins.Options):
        limit: float = 50.0

    class Arguments(plugins.Arguments):
        by: Annotated[float, Meta(ge=0)] = 5.0

    @classmethod
    def prepare(cls, arguments, context):
        if arguments.by > context.options.limit:
            raise ValueError(f"by: expected at most {context.options.limit}, got {arguments.by}")
        assert context.vocab_size > 0
        assert context.tokenizer is not None
        assert list(context.prompt_token_ids)
        return cls.Arguments(by=arguments.by)

    def start(self, request):
        return [*request.prompt_token_ids, *request.output_token_ids][-1:]

    def advance(self, state, token):
        return [token]

    def fork(self, state):
        return list(state)

    def apply(self, logits, rows):
        assert len(rows) == len(logits) == len(rows.requests) == len(rows.arguments())
        newest = torch.tensor([[state[0]] for state in rows.states()], device=logits.device)
        following = (newest + 1) % self.context.vocab_size
        return logits.scatter_add(1, following, rows.tensor("by").to(logits.dtype))


class CompatSparse(SparseLogitsProcessor):
    contract = 1
    phase = Phase.MASK

    class Arguments(plugins.Arguments):
        ban: list[int]

    def __init__(self, context):
        super().__init__(context)
        self.edits_of_version = (None, None)

    def edits(self, rows):
        version, edits = self.edits_of_version
        if version != rows.version:
            pairs = [(row, t) for row, own in enumerate(rows.arguments()) for t in own.ban]
            row, token = zip(*pairs, strict=True)
            edits = Edits(row, token, [-math.inf] * len(row), Op.SET)
            self.edits_of_version = (rows.version, edits)
        return edits


class CompatBatch(BatchLogitsProcessor):
    contract = 1
    phase = Phase.PENALTY
    supports_drafts = False

    class Arguments(plugins.Arguments):
        by: float = 1.0

    @classmethod
    def uses(cls, params):
        return False

    def __init__(self, context):
        super().__init__(context)
        self.rows = RowMap(self.begin)

    def begin(self, added):
        own = added.params.plugin_args.get(self.name)
        return None if own is None else (own.by, added.output_token_ids)

    def update_state(self, update):
        self.rows.apply(update)
        for move in () if update is None else update.moved:
            assert move.direction in (Move.SWAP, Move.UNIDIRECTIONAL)

    def apply(self, logits):
        for row in self.rows:
            by, outputs = self.rows[row]
            for token in set(outputs):
                logits[row, token] -= by
        return logits


class CompatDevice(LogitsProcessor):
    contract = 1
    phase = Phase.PENALTY
    reads = Reads.DEVICE_IDS

    class Arguments(plugins.Arguments):
        by: float = 1.0

    def device_state(self):
        return {"counts": TensorSpec((self.context.vocab_size,), "int32", fill=0)}

    def start_row(self, request, tensors):
        for token in request.output_token_ids:
            tensors["counts"][token] += 1

    def advance_rows(self, rows, tokens, tensors):
        one = torch.ones_like(tokens, dtype=torch.int32).unsqueeze(1)
        tensors["counts"].scatter_add_(1, tokens.unsqueeze(1), one)

    def apply(self, logits, rows):
        return logits - rows.tensor("by") * rows.state_tensor("counts")


class CompatObserve(LogitsProcessor):
    contract = 1
    phase = Phase.TEMPERATURE
    max_state_bytes = 32

    class Arguments(plugins.Arguments):
        target: float = 2.0

    class State(plugins.State):
        scale: float
        target: float

    def start(self, request):
        return self.State(scale=1.0, target=request.arguments[self.name].target)

    def apply(self, logits, rows):
        return logits * logits.new_tensor([[state.scale] for state in rows.states()])

    def observe(self, state, token, logprob):
        scale = state.scale + 0.1 * (-logprob - state.target)
        return self.State(scale=min(max(scale, 0.5), 2.0), target=state.target)


class CompatPolicy(SchedulingPolicy):
    """Tenants in turn, the shortest prompt first; at most `most` requests of a tenant run."""

    contract = 1
    state_format = "compat-1"

    class Options(plugins.Options):
        most: int = 2

    def __init__(self, context):
        super().__init__(context)
        self.tokens = {}
        self.running = {}

    def key(self, request):
        return (request.num_prompt_tokens, request.priority, request.arrival_time)

    def group(self, request):
        return request.tags.get("tenant", "")

    def group_key(self, group, now):
        assert now >= 0
        return self.tokens.get(group, 0)

    def admit(self, request, load):
        assert load.num_running <= load.max_num_seqs
        assert load.num_free_blocks <= load.num_blocks
        if len(self.running.get(self.group(request), ())) >= self.options.most:
            return f"{self.options.most} requests of this tenant run"
        return None

    def victim(self, running, load):
        return max(running, key=lambda request: request.num_tokens)

    def added(self, request):
        if request.status is RequestStatus.RUNNING:
            self.scheduled(request, 0)

    def scheduled(self, request, tokens):
        tenant = self.group(request)
        self.tokens[tenant] = self.tokens.get(tenant, 0) + tokens
        self.running.setdefault(tenant, set()).add(request.request_id)

    def preempted(self, request):
        self.running.get(self.group(request), set()).discard(request.request_id)

    finished = preempted

    def export_state(self):
        return self.tokens

    def import_state(self, state):
        self.tokens = dict(state)


class CompatEviction(EvictionPolicy):
    """Evicts the block with the fewest hits, of several the deepest, of several the oldest."""

    contract = 1

    def __init__(self, context):
        super().__init__(context)
        self.history = context.history()
        self.candidates = {}
        self.ghosts = {}

    def released(self, block_ids):
        for block_id in block_ids:
            assert self.context.blocks.hash(block_id) is not None
            self.candidates[block_id] = self.context.clock()

    def taken(self, block_ids):
        for block_id in block_ids:
            del self.candidates[block_id]

    dropped = taken

    def evict(self, count):
        chosen = sorted(self.candidates, key=self.rank)[:count]
        for block_id in chosen:
            self.ghosts[self.context.blocks.hash(block_id)] = self.history.last_use(block_id)
            del self.candidates[block_id]
        while len(self.ghosts) > self.context.blocks.num_blocks:
            del self.ghosts[next(iter(self.ghosts))]
        return chosen

    def rank(self, block_id):
        parent = self.history.parent_hash(block_id)
        assert (parent is None) == (self.context.blocks.depth(block_id) == 0)
        waits = self.history.num_children(block_id) > 0
        depth = self.context.blocks.depth(block_id)
        return (waits, self.history.hits(block_id), -depth, self.candidates[block_id])


class CompatSink(StatSink):
    """Writes lines of JSON."""

    contract = 1

    class Options(plugins.Options):
        path: str

    def __init__(self, context):
        super().__init__(context)
        assert context.clock() >= 0
        assert context.model
        self.file = open(self.options.path, "a")  # noqa: SIM115 - closed in close
        self.tokens = 0

    def record(self, stats):
        self.tokens += stats.num_generation_tokens
        for finished in stats.finished:
            assert finished.finish_reason
        if stats.scheduler is not None:
            assert 0 <= stats.scheduler.kv_cache_usage <= 1
            assert stats.scheduler.prefix_cache.requests >= 0

    def report(self):
        self.file.write(json.dumps({"tokens": self.tokens}) + "\n")

    def close(self):
        self.file.close()
