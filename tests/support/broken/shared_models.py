"""Models that ranks share, with one mistake each, and right ones."""

from __future__ import annotations

import dataclasses

import torch

from hardpoint.plugins import KVSpec, Model, ModelConfig, ModelError
from hardpoint.plugins.parallel import SingleRank
from hardpoint.toolkit.layers import (
    Embedding,
    Linear,
    LMHead,
    load_weights,
    weight_cuts,
    weight_shapes,
)
from support.samples import Sample

HIDDEN, HEADS, SIZE, LAYERS, EXPERTS = 24, 6, 4, 2, 6

CONFIG = ModelConfig(
    architecture="SharedForCausalLM",
    hf={"hidden_size": HIDDEN},
    vocab_size=257,
    max_position_embeddings=64,
)


class Shared(Sample, Model, contract=1):
    """Right: two layers of attention, divided by heads, and stages."""

    parallelism = ("tensor", "pipeline")

    def __init__(self, context):
        super().__init__(context)
        self.parallel = context.parallel
        self.heads = self.parallel.share(HEADS, "heads")
        self.numbers = self.my_layers()
        self.embed = Embedding("embed", context.config.vocab_size, HIDDEN, context)
        self.positions = Embedding("positions", context.max_model_len, HIDDEN, context)
        self.qkv = [self.rows(i) for i in self.numbers]
        self.out = [self.columns(i) for i in self.numbers]
        self.head = self.make_head()

    def my_layers(self):
        return self.parallel.stage_layers(LAYERS)

    def my_rows(self):
        return range(self.heads.start * SIZE, self.heads.stop * SIZE)

    def my_columns(self):
        return self.my_rows()

    def rows(self, i):
        parts = [(f"{i}.{part}", HIDDEN) for part in "qkv"]
        return Linear(parts, HIDDEN, self.context, row_ranges=[self.my_rows()] * 3)

    def columns(self, i):
        out = [(f"{i}.out", HIDDEN)]
        return Linear(out, HIDDEN, self.context, column_range=self.my_columns())

    def make_head(self):
        return LMHead("head", self.context.config.vocab_size, HIDDEN, self.context)

    def layers(self):
        first = [self.embed, self.positions] if self.parallel.is_first else []
        return [*first, *self.qkv, *self.out, *([self.head] if self.parallel.is_last else [])]

    def weight_shapes(self):
        return weight_shapes(self.layers())

    def weight_cuts(self):
        return weight_cuts(self.layers())

    def load_weights(self, weights):
        load_weights(self.layers(), weights)

    def kv_specs(self):
        return [KVSpec(len(self.heads), len(self.heads), SIZE, SIZE**-0.5) for _ in self.numbers]

    def forward(self, batch):
        x = self.begun(batch)
        for index in range(len(self.numbers)):
            qkv = self.qkv[index](x).view(len(x), 3, -1, SIZE)
            attended = batch.attend(self.index(index), *qkv.unbind(1)).flatten(1)
            x = self.mixed(index, torch.tanh(x + self.out[index](attended)))
        return x

    def begun(self, batch):
        if batch.hidden is not None:
            return batch.hidden
        return self.embed(batch.token_ids) + self.positions(batch.positions)

    def index(self, index):
        return index

    def mixed(self, index, x):
        return x

    def compute_logits(self, hidden):
        return self.head(hidden)


class InPairs(Shared):
    """Right, for sizes that divide 4."""

    def __init__(self, context):
        super().__init__(context)
        self.groups = self.parallel.share(4, "groups")


class Deaf(SingleRank):
    """Does nothing, with the rank and size of another one."""

    def __init__(self, tensor):
        self.rank, self.size = tensor.rank, tensor.size


class NoAllReduce(Shared):
    def columns(self, i):
        deaf = dataclasses.replace(self.parallel, tensor=Deaf(self.parallel.tensor))
        context = dataclasses.replace(self.context, parallel=deaf)
        return Linear([(f"{i}.out", HIDDEN)], HIDDEN, context, column_range=self.my_columns())


class FirstRowsOnly(Shared):
    def my_rows(self):
        return range(len(self.heads) * SIZE)


class OtherColumns(Shared):
    def my_columns(self):
        rows = self.my_rows()
        return range(HIDDEN - rows.stop, HIDDEN - rows.start)


class NeedsAll(Shared):
    def __init__(self, context):
        whole = dataclasses.replace(
            context, parallel=dataclasses.replace(context.parallel, tensor=SingleRank())
        )
        super().__init__(whole)
        self.context = context


class CopiesAttention(Shared):
    def __init__(self, context):
        super().__init__(context)
        self.heads = range(HEADS)
        self.qkv = [self.rows(i) for i in self.numbers]
        self.out = [Linear([(f"{i}.out", HIDDEN)], HIDDEN, context) for i in self.numbers]


class ShapesOfTheCut(Shared):
    def weight_shapes(self):
        cuts = self.weight_cuts()
        shapes = super().weight_shapes()
        return {n: cuts[n].shape(s) if n in cuts else s for n, s in shapes.items()}

    def load_weights(self, weights):
        load_weights(self.layers(), weights)


class CutsUnknown(Shared):
    def weight_cuts(self):
        return {f"model.{name}": cut for name, cut in super().weight_cuts().items()}


class RefusesWithoutWords(Shared):
    def __init__(self, context):
        super().__init__(context)
        if context.parallel.tensor.size > 1:
            raise ModelError("it cannot be done")


class OneRankWaits(Shared):
    def begun(self, batch):
        x = super().begun(batch)
        return self.parallel.tensor.all_reduce(x) if self.parallel.tensor.rank else x


class PartOfTheLogits(Shared):
    def make_head(self):
        vocab = self.context.config.vocab_size
        rows = self.parallel.padded_share(vocab)
        return Linear([("head", vocab)], HIDDEN, self.context, row_ranges=[rows])


class ForgetsTheStage(Shared):
    def my_layers(self):
        return range(LAYERS)

    def layers(self):
        return [self.embed, self.positions, *self.qkv, *self.out, self.head]


class EmbedsAgain(Shared):
    def begun(self, batch):
        return self.embed(batch.token_ids) + self.positions(batch.positions)

    def layers(self):
        layers = super().layers()
        return layers if self.parallel.is_first else [self.embed, self.positions, *layers]


class NoEmbedding(Shared):
    def layers(self):
        return [layer for layer in super().layers() if layer is not self.positions]

    def begun(self, batch):
        return self.embed(batch.token_ids) if batch.hidden is None else batch.hidden


class NumbersOfTheWhole(Shared):
    def index(self, index):
        return self.numbers[index]


class WrongHiddenSize(Shared):
    hidden_size = HEADS


class ForgetsTheHead(Shared):
    """No stage of several has the head's weights."""

    def layers(self):
        return [layer for layer in super().layers() if layer is not self.head]

    def weight_shapes(self):
        shapes = super().weight_shapes()
        return shapes if self.parallel.num_stages > 1 else shapes | self.head.shapes()

    def load_weights(self, weights):
        load_weights([*self.layers(), self.head], weights)

    def compute_logits(self, hidden):
        return (
            self.head(hidden)
            if self.parallel.num_stages == 1
            else hidden.new_zeros(len(hidden), 257)
        )


class SumsStages(Shared):
    """Adds up the results of the previous stage's ranks, which are whole already."""

    def begun(self, batch):
        if batch.hidden is None:
            return super().begun(batch)
        return self.parallel.tensor.all_reduce(batch.hidden)


class PassesZerosOn(Shared):
    """The second rank of a stage gives its successor nothing."""

    def forward(self, batch):
        hidden = super().forward(batch)
        is_lost = self.parallel.tensor.rank == 1 and not self.parallel.is_last
        return hidden * 0 if is_lost else hidden


class SharedExperts(Shared):
    """Right: each layer ends with experts that all compute; a rank has some of them, whole."""

    parallelism = ("tensor", "pipeline", "expert")

    def __init__(self, context):
        super().__init__(context)
        self.mine = self.my_experts()
        self.router = [Linear([(f"{i}.router", EXPERTS)], HIDDEN, context) for i in self.numbers]
        self.experts = [[self.expert(i, j) for j in self.mine] for i in self.numbers]

    def my_experts(self):
        return self.parallel.share(EXPERTS, "experts")

    def expert(self, layer, number):
        return Linear([(f"{layer}.experts.{number}", HIDDEN)], HIDDEN, self.context)

    def layers(self):
        return [*super().layers(), *self.router, *(e for layer in self.experts for e in layer)]

    def mixed(self, index, x):
        weights = self.router[index](x).softmax(-1)[:, list(self.mine)]
        parts = [
            weights[:, j, None] * expert(x).tanh() for j, expert in enumerate(self.experts[index])
        ]
        return self.parallel.tensor.all_reduce(torch.stack(parts).sum(0))


class ExpertsWithoutSum(SharedExperts):
    def mixed(self, index, x):
        self.parallel, parallel = (
            dataclasses.replace(self.parallel, tensor=SingleRank()),
            self.parallel,
        )
        try:
            return super().mixed(index, x)
        finally:
            self.parallel = parallel


class FirstExpertsOnly(SharedExperts):
    def my_experts(self):
        return range(len(super().my_experts()))
