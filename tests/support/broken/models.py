"""Models with one mistake each, and a right one."""

from __future__ import annotations

import dataclasses

import torch

from hardpoint.plugins import KVSpec, Model, ModelConfig
from hardpoint.plugins.model import LinearMatrix
from support.samples import Sample

HIDDEN, HEADS, KV_HEADS, SIZE, LAYERS = 24, 4, 2, 6, 2

CONFIG = ModelConfig(
    architecture="TinyForCausalLM", hf={}, vocab_size=257, max_position_embeddings=64
)


class Tiny(Sample, Model, contract=1):
    """Right: learned positions, two layers of grouped-query attention, a head."""

    def weight_shapes(self):
        vocab = self.context.config.vocab_size
        shapes = {"embed.weight": (vocab, HIDDEN), "head.weight": (vocab, HIDDEN)}
        shapes["positions.weight"] = (self.context.max_model_len, HIDDEN)
        for layer in range(LAYERS):
            shapes[f"{layer}.qkv.weight"] = ((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN)
            shapes[f"{layer}.out.weight"] = (HIDDEN, HEADS * SIZE)
        return shapes

    def load_weights(self, weights):
        self.weights = {name: self.placed(tensor) for name, tensor in weights}

    def placed(self, tensor):
        return tensor.to(self.context.device, self.context.dtype)

    def kv_specs(self):
        return [KVSpec(HEADS, KV_HEADS, SIZE, SIZE**-0.5)] * LAYERS

    def forward(self, batch):
        x = self.embedded(batch)
        for layer in range(LAYERS):
            x = torch.tanh(x + self.attended(batch, layer, x))
        return x

    def embedded(self, batch):
        embed, positions = self.weights["embed.weight"], self.weights["positions.weight"]
        return embed[batch.token_ids] + positions[batch.positions]

    def attended(self, batch, layer, x):
        out = batch.attend(layer, *self.projected(layer, x))
        return out.flatten(1) @ self.weights[f"{layer}.out.weight"].T

    def projected(self, layer, x):
        qkv = (x @ self.weights[f"{layer}.qkv.weight"].T).view(len(x), -1, SIZE)
        return qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)

    def compute_logits(self, hidden):
        return hidden @ self.weights["head.weight"].T


class Kept(Tiny):
    """Right: its weights can be kept."""

    def packed_weights(self):
        return dict(self.weights)

    def load_packed(self, tensors):
        self.weights = {name: tensors[name] for name in self.weight_shapes()}


class KeepsTooFew(Kept):
    def packed_weights(self):
        return {n: t for n, t in self.weights.items() if n != "head.weight"}

    def load_packed(self, tensors):
        head = tensors["embed.weight"]
        self.weights = {n: tensors.get(n, head) for n in self.weight_shapes()}


class FillsUp(Kept):
    def load_packed(self, tensors):
        self.weights = {n: tensors.get(n, torch.zeros(s)) for n, s in self.weight_shapes().items()}


class KeepsAList(Kept):
    def packed_weights(self):
        return list(self.weights.values())


class Quantizable(Kept):
    """Right: its matrices may have few bits, and its weights can be kept."""

    def __init__(self, context):
        super().__init__(context)
        self.quantized = {}

    def quantizable(self):
        return [name for name in self.weight_shapes() if name != "positions.weight"]

    def load_quantized(self, name, matrix):
        self.quantized[name] = self.placed(matrix.dequantize())

    def load_weights(self, weights):
        super().load_weights(weights)
        self.weights |= self.quantized


class NamesUnknownMatrices(Quantizable):
    def quantizable(self):
        return ["absent.weight"]


class ForgetsToLoadQuantized(Quantizable):
    load_quantized = Model.load_quantized


class ReadsCodesAlone(Quantizable):
    def load_quantized(self, name, matrix):
        codes = matrix.codes.float()
        self.quantized[name] = self.placed(codes * matrix.scales[:, :1])


class LoadsHalvesUpsideDown(Quantizable):
    def load_quantized(self, name, matrix):
        self.quantized[name] = self.placed(matrix.dequantize().flip(0))


class Adaptable(Tiny):
    """Right: step parts may change the products of its layers."""

    def load_weights(self, weights):
        super().load_weights(weights)
        for name, shape in self.weight_shapes().items():
            if name[0].isdigit():
                rows, columns = map(range, shape)
                stored = name.removesuffix(".weight")
                self.context.hooks.matrices[stored] = LinearMatrix(stored, shape, rows, columns)

    def product(self, name, x):
        y = x @ self.weights[f"{name}.weight"].T
        return self.changed(name, x, y)

    def changed(self, name, x, y):
        change = self.context.hooks.linear
        return y if change is None else change([(name, y.shape[1])], x, y)

    def attended(self, batch, layer, x):
        return self.product(
            f"{layer}.out", batch.attend(layer, *self.projected(layer, x)).flatten(1)
        )

    def projected(self, layer, x):
        qkv = self.product(f"{layer}.qkv", x).view(len(x), -1, SIZE)
        return qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)


class ForgetsToCall(Adaptable):
    def changed(self, name, x, y):
        return y if name == "1.out" else super().changed(name, x, y)


class DropsTheChange(Adaptable):
    def changed(self, name, x, y):
        super().changed(name, x, y)
        return y


class CallsWithOtherNames(Adaptable):
    def changed(self, name, x, y):
        other = name.replace("0", "1") if name[0] == "0" else name.replace("1", "0")
        return super().changed(other, x, y)


class NamesWithoutLayers(Adaptable):
    def changed(self, name, x, y):
        return super().changed(name.removeprefix("0."), x, y)


class NamesOtherShapes(Adaptable):
    def load_weights(self, weights):
        super().load_weights(weights)
        matrix = self.context.hooks.matrices["1.out"]
        self.context.hooks.matrices["1.out"] = dataclasses.replace(matrix, stored_as="1.qkv")


class Skipping(Tiny):
    """Right: tokens may skip its layers, which have an MLP, and its last layers may be left out."""

    def forward(self, batch):
        x, hooks = self.embedded(batch), self.context.hooks
        for layer in range(LAYERS)[: batch.num_layers]:
            skipped = None if hooks.skips is None else hooks.skips(layer)
            for branch in ("attention", "mlp"):
                delta = self.delta(branch, batch, layer, x, skipped)
                if hooks.added is not None:
                    hooks.added(layer, branch, x, delta)
                x = x + delta
        return self.last_norm(x, batch)

    def last_norm(self, x, batch):
        return torch.tanh(x)

    def delta(self, branch, batch, layer, x, skipped):
        if branch == "attention":
            return self.attended(batch, layer, x)
        result, rows = torch.zeros_like(x), self.runs(x, skipped)
        result[rows] = torch.tanh(x[rows] @ self.weights[f"{layer}.out.weight"])
        return result

    def runs(self, x, skipped):
        return torch.ones(len(x), dtype=torch.bool) if skipped is None else ~skipped


class SkipsTheOthers(Skipping):
    def runs(self, x, skipped):
        return super().runs(x, None if skipped is None else ~skipped)


class SkipsKeys(Skipping):
    """Writes zeros as keys and values of tokens that skip a layer."""

    def delta(self, branch, batch, layer, x, skipped):
        if branch == "attention" and skipped is not None:
            x = x.masked_fill(skipped[:, None], 0)
        return super().delta(branch, batch, layer, x, skipped)


class SkipsTheNorm(Skipping):
    def last_norm(self, x, batch):
        return x if batch.num_layers else super().last_norm(x, batch)


class NoContract(Tiny, contract=None):
    pass


class NarrowLogits(Tiny):
    def compute_logits(self, hidden):
        return super().compute_logits(hidden)[:, :100]


class WholeLogits(Tiny):
    def compute_logits(self, hidden):
        return super().compute_logits(hidden).long()


class NanLogits(Tiny):
    def compute_logits(self, hidden):
        return super().compute_logits(hidden) / 0.0 * 0.0


class NormalisesLogits(Tiny):
    def compute_logits(self, hidden):
        logits = super().compute_logits(hidden)
        return logits - logits.mean(0)


class WidthOfTheBatch(Tiny):
    def forward(self, batch):
        x = super().forward(batch)
        return torch.cat((x, x[:, : len(x)]), 1)

    def compute_logits(self, hidden):
        return super().compute_logits(hidden[:, :HIDDEN])


class NormalisesTheBatch(Tiny):
    def embedded(self, batch):
        x = super().embedded(batch)
        return x - x.mean(0)


class IgnoresPositions(Tiny):
    def embedded(self, batch):
        return self.weights["embed.weight"][batch.token_ids] + self.weights["positions.weight"][0]


class OwnPositions(Tiny):
    """Counts positions in the batch."""

    def embedded(self, batch):
        positions = self.weights["positions.weight"][: len(batch.token_ids)]
        return self.weights["embed.weight"][batch.token_ids] + positions


class ShortTable(Tiny):
    def weight_shapes(self):
        return super().weight_shapes() | {"positions.weight": (48, HIDDEN)}


class ListsTooFew(Tiny):
    def weight_shapes(self):
        return {n: s for n, s in super().weight_shapes().items() if n != "head.weight"}

    def load_weights(self, weights):
        super().load_weights(weights)
        self.weights["head.weight"] = self.weights["head.weight"].contiguous()


class ListsTooMany(Tiny):
    def weight_shapes(self):
        return super().weight_shapes() | {"pooler.weight": (HIDDEN, HIDDEN)}


class WrongShape(Tiny):
    def weight_shapes(self):
        return super().weight_shapes() | {"0.out.weight": (HIDDEN, HIDDEN + 1)}

    def load_weights(self, weights):
        super().load_weights(weights)
        for layer in range(LAYERS):
            self.weights[f"{layer}.out.weight"].view(HIDDEN, HEADS * SIZE)


class ShapesAsList(Tiny):
    def weight_shapes(self):
        return list(super().weight_shapes())


class ForgetsAWeight(Tiny):
    """Never loads the head, and uses its initial values."""

    def load_weights(self, weights):
        super().load_weights(weights)
        self.weights["1.out.weight"] = torch.ones(HIDDEN, HEADS * SIZE)


class TakesTheFirst(Tiny):
    def load_weights(self, weights):
        super().load_weights(next(weights) for _ in self.weight_shapes().keys() - {"0.out.weight"})


class ByOrder(Tiny):
    """Takes matrices of one shape by their place instead of by their name."""

    def load_weights(self, weights):
        names = iter(("0.out.weight", "1.out.weight"))
        super().load_weights(
            (next(names) if ".out." in name else name, tensor) for name, tensor in weights
        )


class OtherSpecs(Tiny):
    def kv_specs(self):
        return [KVSpec(HEADS, HEADS, SIZE, SIZE**-0.5)] * LAYERS


class SpecsAfterLoading(Tiny):
    def kv_specs(self):
        return super().kv_specs() if hasattr(self, "weights") else []


class SkipsALayer(Tiny):
    def attended(self, batch, layer, x):
        return super().attended(batch, layer, x) if layer != 1 else x


class AttendsTwice(Tiny):
    def attended(self, batch, layer, x):
        return super().attended(batch, 0, x)


class BeyondTheLayers(Tiny):
    def attended(self, batch, layer, x):
        out = batch.attend(layer + 1, *self.projected(layer, x))
        return out.flatten(1) @ self.weights[f"{layer}.out.weight"].T


class AlwaysFloat32(Tiny):
    def placed(self, tensor):
        return tensor.to(self.context.device, torch.float32)


class CountsSteps(Tiny):
    steps = 0

    def embedded(self, batch):
        self.steps += 1
        return super().embedded(batch) + self.steps * 1e-6


class KeepsHidden(Tiny):
    def __init__(self, context):
        super().__init__(context)
        self.kept = []

    def forward(self, batch):
        self.kept.append(super().forward(batch))
        return self.kept[-1]


class ShiftsPositions(Tiny):
    def embedded(self, batch):
        x = super().embedded(batch)
        batch.positions.add_(1)
        return x


class ScalesHidden(Tiny):
    def compute_logits(self, hidden):
        return super().compute_logits(hidden.mul_(2.0))
