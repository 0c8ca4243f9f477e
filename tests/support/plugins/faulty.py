"""Plugins that fail in every way, on request."""

from __future__ import annotations

import math

import torch

from hardpoint import plugins
from hardpoint.plugins import (
    BatchLogitsProcessor,
    Edits,
    LogitsProcessor,
    Phase,
    Sampler,
    SparseLogitsProcessor,
    TensorSpec,
)
from support.samples import Sample

NAN, INF = math.nan, math.inf
VALUES = {"nan": NAN, "inf": INF, "nothing": -INF}
RESULTS = {
    "none": lambda logits: None,
    "rows": lambda logits: logits[:0],
    "columns": lambda logits: logits[:, :-1],
    "dtype": lambda logits: logits.double(),
    "device": lambda logits: logits.to("meta"),
    "sparse": lambda logits: logits.to_sparse(),
    # These change what was handed over, so that it agrees with itself.
    "smaller": lambda logits: logits.resize_(len(logits), 8),
    "transposed": lambda logits: logits.t_(),
    "set": lambda logits: logits.set_(torch.zeros(len(logits), 257)),
}


class Dense(LogitsProcessor):
    """Adds nothing, or fails as its argument asks; damages its inputs first."""

    contract = 1
    phase = Phase.PENALTY

    class Arguments(plugins.Arguments):
        how: str = ""

    @classmethod
    def prepare(cls, arguments, context):
        if arguments.how == "refuse":
            raise ValueError("not this one")
        if arguments.how == "prepare":
            raise KeyError("prepare")
        return arguments

    def start(self, request):
        if request.arguments["dense"].how == "start":
            raise RuntimeError("broken start")
        return 0

    def advance(self, state, token):
        if state is None:
            raise RuntimeError("broken advance")
        return state + 1

    def apply(self, logits, rows):
        for row, arguments in enumerate(rows.arguments()):
            how = arguments.how
            if how in ("raise", "spill"):
                logits.fill_(NAN)  # damages the rows of other requests, too
            if how == "raise":
                raise RuntimeError("broken apply")
            if how in VALUES:
                logits[row] = VALUES[how]
            if how == "one nan":
                logits[row, 5] = NAN
            if how in RESULTS:
                return RESULTS[how](logits)
        return logits


class Sparse(SparseLogitsProcessor):
    contract = 1
    phase = Phase.BIAS

    class Arguments(plugins.Arguments):
        how: str = ""

    def start(self, request):
        return request.arguments["sparse"].how

    def advance(self, state, token):
        if state == "advance":
            raise RuntimeError("broken advance")
        return state

    def edits(self, rows):
        how = "".join(arguments.how for arguments in rows.arguments())
        if "raise" in how:
            raise RuntimeError("broken edits")
        return {
            "type": [1, 2],
            "vocabulary": Edits([0], [10_000], [1.0]),
            "negative": Edits([0], [-1], [1.0]),
            "rows": Edits([len(rows)], [0], [1.0]),
            "lengths": Edits([0], [0, 1], [1.0]),
            "values": Edits([0], [0], []),
            "infinite": Edits([0], [0], [INF]),
            "op": Edits([0], [0], [1.0], "keep_only"),
        }.get(how)


class Whole(BatchLogitsProcessor):
    """Used by requests that ask for it; fails as its option asks."""

    contract = 1
    phase = Phase.BIAS

    class Arguments(plugins.Arguments):
        how: str = ""

    def __init__(self, context):
        super().__init__(context)
        self.books = plugins.RowMap(
            lambda added: (
                added.params.plugin_args["whole"].how
                if "whole" in added.params.plugin_args
                else None
            )
        )

    @classmethod
    def uses(cls, params):
        return False

    def update_state(self, update):
        self.books.apply(update)
        if any(self.books[row] == "update" for row in self.books):
            raise RuntimeError("broken books")

    def apply(self, logits):
        for row in self.books:
            if self.books[row] == "raise":
                raise RuntimeError("broken apply")
            if self.books[row] == "nan":
                logits[row] = NAN
            if self.books[row] == "bias":
                logits[row, 70] += 100
        return logits


class OnDevice(LogitsProcessor):
    """Counts tokens on the device; a token may come at most `most` times."""

    contract = 1
    phase = Phase.MASK
    reads = plugins.Reads.DEVICE_IDS

    class Arguments(plugins.Arguments):
        most: int
        fail: bool = False

    def device_state(self):
        return {"counts": TensorSpec((self.context.vocab_size,), "int32")}

    def start_row(self, request, tensors):
        for token in request.output_token_ids:
            tensors["counts"][token] += 1

    def advance_rows(self, rows, tokens, tensors):
        if any(arguments.fail for arguments in rows.arguments()):
            raise RuntimeError("broken rows")
        tensors["counts"][range(len(tokens)), tokens] += 1

    def apply(self, logits, rows):
        return logits.masked_fill(rows.state_tensor("counts") >= rows.tensor("most"), -INF)


class NanSampler(Sample, Sampler, contract=1):
    def sample(self, logits, rows):
        raise RuntimeError("broken sampler")


class Indifferent(BatchLogitsProcessor):
    """A batch-level processor that every request uses and that does nothing."""

    contract = 1
    phase = Phase.FORCE

    def update_state(self, update):
        pass

    def apply(self, logits):
        return logits


class NoneSampler(Sample, Sampler, contract=1):
    def sample(self, logits, rows):
        return None


class BadPolicy(Sample, plugins.SchedulingPolicy, contract=1):
    def key(self, request):
        return 1 / request.priority
