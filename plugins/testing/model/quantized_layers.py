"""A model of one matrix in each kind of layer, loaded as a worker loads quantized weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from hardpoint.plugins import (
    ForwardBatch,
    KVSpec,
    Model,
    ModelConfig,
    ModelContext,
    Ops,
    Quantization,
)
from hardpoint.plugins.parallel import Communicator, Cut, Parallel, SingleRank
from hardpoint.plugins.quantization import QuantizedMatrix, QuantizedWeight
from hardpoint.testing.engine_access import load_quantized
from hardpoint.toolkit.layers import (
    Embedding,
    Linear,
    LMHead,
    PackedLayer,
    load_packed,
    load_weights,
    packed_weights,
    quantizable,
    weight_cuts,
    weight_shapes,
)

Weight = torch.Tensor | QuantizedWeight

PRODUCT = "a product of two matrices"


@dataclass(frozen=True)
class Way:
    """How a matrix is loaded.

    Attributes:
        use: `quantization.use`.
        ops: the operations.
        tensor: the ranks.
    """

    use: str
    ops: Ops
    tensor: Communicator = field(default_factory=SingleRank)


class QuantizedLayers(Model):
    """The same matrix as a tied embedding, as both parts of a fused product, and cut by columns."""

    def __init__(self, context: ModelContext) -> None:
        """Create the layers; the config has the matrix's `rows` and `columns`."""
        super().__init__(context)
        rows, columns = context.config.hf["rows"], context.config.hf["columns"]
        tensor = context.parallel.tensor
        mine = _half(rows, tensor)
        self.columns = _half(columns, tensor)
        self._embedding = Embedding("embed", rows, columns, context)
        self._head = LMHead("embed", rows, columns, context)
        self._fused = Linear(
            [("first", rows), ("second", rows)],
            columns,
            context,
            bias=True,
            row_ranges=[mine, mine],
        )
        self._down = Linear(
            [("down", rows)], columns, context, column_range=self.columns, reduce=True
        )
        self._layers: list[PackedLayer] = [self._embedding, self._fused, self._down]

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the weight shapes of all layers."""
        return weight_shapes(self._layers)

    def weight_cuts(self) -> dict[str, Cut]:
        """Return the weight cuts of all layers."""
        return weight_cuts(self._layers)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load all layers, and tie the head."""
        load_weights(self._layers, weights)
        self._head.tie(self._embedding)

    def quantizable(self) -> Iterable[str]:
        """Return the names of all matrices."""
        return quantizable(self._layers)

    def load_quantized(self, name: str, matrix: QuantizedMatrix) -> None:
        """Load one."""
        quantizable(self._layers)[name].load_quantized(name, matrix)

    def packed_weights(self) -> Mapping[str, torch.Tensor] | None:
        """Return the packed weights of all layers."""
        return packed_weights(self._layers)

    def load_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load all layers."""
        load_packed(self._layers, tensors)
        self._head.tie(self._embedding)

    def kv_specs(self) -> list[KVSpec]:
        """Return none: there is no attention."""
        return []

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the embeddings."""
        return self._embedding(batch.token_ids)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the products with the tied head."""
        return self._head(hidden)

    def results(self) -> dict[str, torch.Tensor]:
        """Return the result of each layer for the first tokens, by a name of it, in float64.

        Of a product of two matrices, [tokens, 2, rows]: this rank's rows.
        """
        ids = torch.arange(min(self.context.config.vocab_size, 9))
        x = self._embedding(ids)
        by_name = {
            "the rows of an embedding": x,
            PRODUCT: self._fused(x).view(len(x), 2, -1),
            "a product cut by columns": self._down(x[:, self.columns.start : self.columns.stop]),
            "the logits of tied embeddings": self._head(x),
        }
        return {name: result.double() for name, result in by_name.items()}


def load_layers(
    shape: tuple[int, int], weight: Weight, scheme: Quantization, way: Way
) -> tuple[QuantizedLayers, dict[str, torch.Tensor]]:
    """Return a model that has loaded one matrix as all of its matrices, and its results.

    Args:
        shape: shape of the matrix.
        weight: the matrix, whole.
        scheme: reads or makes it.
        way: in which it is loaded.

    Raises:
        HardpointError: it cannot be loaded.
    """
    model = build_layers(shape, way.ops, way.tensor)
    cuts, biases = model.weight_cuts(), torch.Generator().manual_seed(1)

    def weights() -> Iterator[tuple[str, Weight]]:
        for name, whole in model.weight_shapes().items():
            tensor = weight if len(whole) == 2 else torch.randn(whole, generator=biases)
            if name in cuts and isinstance(tensor, torch.Tensor):
                tensor = cuts[name].of(tensor)
            yield name, tensor

    with torch.inference_mode():
        load_quantized(model, weights(), scheme, way.use)
        return model, model.results()


def build_layers(shape: tuple[int, int], ops: Ops, tensor: Communicator) -> QuantizedLayers:
    """Return a model that has loaded nothing."""
    rows, columns = shape
    config = ModelConfig(
        architecture="QuantizedLayers",
        hf={"rows": rows, "columns": columns},
        vocab_size=rows,
        max_position_embeddings=16,
    )
    return QuantizedLayers(
        ModelContext(
            name="quantized_layers",
            options=None,
            config=config,
            dtype=ops.context.dtype,
            device=ops.context.device,
            max_model_len=16,
            ops=ops,
            parallel=Parallel(tensor=tensor),
        )
    )


def _half(count: int, tensor: Communicator) -> range:
    return range(count * tensor.rank // tensor.size, count * (tensor.rank + 1) // tensor.size)
