"""Building blocks of models: the MLPs of decoder layers, dense ones and mixtures of experts.

Importing this module loads torch, as `models` does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hardpoint.errors import ModelError
from hardpoint.plugins.model import ModelContext
from hardpoint.plugins.model.ops import ClampedSwiGLU, Ops
from hardpoint.plugins.parallel import Cut
from hardpoint.plugins.quantization import AffineCodes, QuantizedMatrix

from .engines import over_engines
from .layer import (
    PackedLayer,
    Vector,
    packed_weights,
    quantizable,
    weight_cuts,
    weight_shapes,
)
from .linear import Linear, Run
from .routing import SigmoidRouting, SoftmaxRouting, sigmoid

__all__ = ["MLP", "Experts", "ExpertsConfig", "GatedMLP", "MixtureOfExperts"]


class MLP(Protocol):
    """The part of a decoder layer that computes each token alone."""

    def layers(self) -> list[PackedLayer]:
        """Return the layers that have weights."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, hidden] for x [rows, hidden]."""


class GatedMLP:
    """y = down (gate_up x, gated); the ranks of a stage divide its columns."""

    def __init__(
        self,
        name: str,
        hidden: int,
        width: int,
        context: ModelContext,
        *,
        gate: Callable[[torch.Tensor], torch.Tensor],
        bias: bool = False,
        reduce: bool = True,
        is_fused: bool = False,
    ) -> None:
        """Describe the layers.

        Args:
            name: the Hugging Face name, before `.gate_proj.weight`.
            hidden: size of x and y.
            width: rows of the gate, and of its other factor.
            gate: `Ops.silu_and_mul` or `Ops.gelu_and_mul`.
            bias: whether the matrices have biases.
            reduce: whether y is the sum over all ranks; otherwise the caller adds up the parts.
            is_fused: whether the checkpoint has one matrix `gate_up_proj`, the gate first.
        """
        columns = context.parallel.share(width, "columns of the MLP")
        self._gate = gate
        self._gate_up = Linear(
            [(f"{name}.{part}_proj", width) for part in ("gate", "up")],
            hidden,
            context,
            bias=bias,
            row_ranges=[columns, columns],
            stored_as=f"{name}.gate_up_proj" if is_fused else None,
        )
        self._down = Linear(
            [(f"{name}.down_proj", hidden)],
            width,
            context,
            bias=bias,
            column_range=columns,
            reduce=reduce,
        )

    def layers(self) -> list[PackedLayer]:
        """Return both."""
        return [self._gate_up, self._down]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, hidden] for x [rows, hidden]."""
        return self._down(self._gate(self._gate_up(x)))


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The experts of a layer.

    Attributes:
        count: number of experts.
        per_token: how many of them a token is computed by.
        width: rows of an expert's gate.
        normalize: whether the weights of a token's experts are scaled to a sum of 1.
        shared_width: rows of the gate of an expert that computes every token; None is without one.
        gate, up, down: names of an expert's matrices.
        shared: name of the expert that computes every token.
        weighs_shared: whether its result has a weight, the sigmoid of a product of its own.
        sigmoid: how experts are chosen by sigmoids of the router's logits; None is by softmax.
        softmax: how they are chosen otherwise.
        router: name of the matrix that chooses experts.
        has_biases: whether the router and the matrices of the experts have biases.
        clamped: activation of the experts; None is `Ops.silu_and_mul`.
    """

    count: int
    per_token: int
    width: int
    normalize: bool
    shared_width: int | None = None
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"
    weighs_shared: bool = True
    sigmoid: SigmoidRouting | None = None
    softmax: SoftmaxRouting = field(default_factory=SoftmaxRouting)
    router: str = "gate"
    has_biases: bool = False
    clamped: ClampedSwiGLU | None = None


class MixtureOfExperts:
    """A mixture of experts: a router selects a few MLPs per token (arXiv:1701.06538).

    They are chosen by the router's logits in float32, as `SoftmaxRouting` or `SigmoidRouting` has
    it. The ranks of a stage divide each expert's columns, or the experts
    (`Parallel.expert`); all compute the router.
    """

    def __init__(
        self, name: str, hidden: int, experts: ExpertsConfig, context: ModelContext
    ) -> None:
        """Describe the layers.

        Args:
            name: the Hugging Face name, before the router's and `.experts.0`.
            hidden: size of x and y.
            experts: their number and sizes.
        """
        self._config = experts
        self._communicator = context.parallel.tensor
        self._engines = context.parallel.engines
        self._router = Linear(
            [(f"{name}.{experts.router}", experts.count)],
            hidden,
            context,
            bias=experts.has_biases,
            out_dtype=torch.float32,
            quantize=False,
        )
        self._experts = Experts(f"{name}.experts", hidden, experts, context)
        self._bias: Vector | None = None
        if experts.sigmoid is not None:
            bias = f"{name}.gate.e_score_correction_bias"
            self._bias = Vector(bias, experts.count, context, dtype=torch.float32)
        self._shared: GatedMLP | None = None
        self._share: Linear | None = None
        if experts.shared_width is not None:
            self._shared = GatedMLP(
                f"{name}.{experts.shared}",
                hidden,
                experts.shared_width,
                context,
                gate=context.ops.silu_and_mul,
                reduce=False,
            )
        if self._shared is not None and experts.weighs_shared:
            share = f"{name}.{experts.shared}_gate"
            self._share = Linear(
                [(share, 1)], hidden, context, out_dtype=torch.float32, quantize=False
            )

    def layers(self) -> list[PackedLayer]:
        """Return the router, the experts, and the shared one."""
        parts = [self._router, self._bias, self._experts, self._share]
        layers: list[PackedLayer] = [part for part in parts if part is not None]
        return layers if self._shared is None else [*layers, *self._shared.layers()]

    def __call__(self, x: torch.Tensor, routed: torch.Tensor | None = None) -> torch.Tensor:
        """Return [rows, hidden] for x [rows, hidden].

        Args:
            x: hidden state of each token.
            routed: gets the experts of each token, int32 [rows, experts per token].
        """
        weights, chosen = self._route(self._router(x))
        if routed is not None:
            routed.copy_(chosen)
        y = over_engines(self._engines, self._experts, x, chosen, weights)
        if self._shared is not None:
            shared = self._shared(x)
            y += shared if self._share is None else shared * sigmoid(self._share(x)).to(y.dtype)
        return self._communicator.all_reduce(y) if self._communicator.size > 1 else y

    def _route(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights of the chosen experts, and the experts, each [rows, per token]."""
        config = self._config
        if config.sigmoid is not None and self._bias is not None:
            return config.sigmoid.route(
                logits, self._bias.tensor, config.per_token, normalize=config.normalize
            )
        return config.softmax.route(logits, config.per_token, normalize=config.normalize)


class Experts:
    """The matrices of the experts: of some of them all, or of all of them some columns."""

    def __init__(
        self, name: str, hidden: int, experts: ExpertsConfig, context: ModelContext
    ) -> None:
        """`name` is the Hugging Face name before the number of an expert."""
        parallel, width = context.parallel, experts.width
        self._context, self._config = context, experts
        _check_ops(context.ops, experts)
        if parallel.expert:
            self._mine, columns = parallel.share_experts(experts.count), range(width)
        else:
            self._mine = range(experts.count)
            columns = parallel.share(width, "columns of an expert")
        self._sizes = hidden, len(columns)
        names = [f"{name}.{expert}" for expert in self._mine]
        self._gate_up = [
            _ExpertMatrix(
                [(f"{expert}.{part}", width) for part in (experts.gate, experts.up)],
                hidden,
                context,
                bias=experts.has_biases,
                row_ranges=[columns, columns],
            )
            for expert in names
        ]
        self._down = [
            _ExpertMatrix(
                [(f"{expert}.{experts.down}", hidden)],
                width,
                context,
                bias=experts.has_biases,
                column_range=columns if len(columns) < width else None,
            )
            for expert in names
        ]
        self._matrices = [*self._gate_up, *self._down]
        self._owners = {name: part for part in self._matrices for name in part.shapes()}
        for owned in self._owners:  # all experts are multiplied at once, without a hook
            if owned.endswith(".weight"):
                del context.hooks.matrices[owned.removesuffix(".weight")]
        self._missing = set(self._owners)
        self._apply: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None
        self._apply = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the matrices of the experts that this rank has."""
        return weight_shapes(self._matrices)

    def cuts(self) -> dict[str, Cut]:
        """Return the cut of each matrix that this rank has."""
        return weight_cuts(self._matrices)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Load one matrix; the last one makes the layer ready."""
        self._owners[name].load(name, tensor)
        self._loaded(name)

    def quantizable(self) -> list[str]:
        """Return the names of the matrices."""
        return list(quantizable(self._matrices))

    def load_quantized(self, name: str, matrix: QuantizedMatrix) -> None:
        """Load one matrix; the last one makes the layer ready."""
        self._owners[name].load_quantized(name, matrix)
        self._loaded(name)

    def packed(self) -> dict[str, torch.Tensor] | None:
        """Return the packed matrices."""
        return packed_weights(self._matrices)

    def load_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the packed matrices."""
        for matrix in self._matrices:
            matrix.load_packed(tensors)
        self._prepare()

    def __call__(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the part of y [rows, hidden] that the experts of this rank contribute.

        Args:
            x: [rows, hidden].
            chosen: int64 [rows, experts per token], among all experts.
            weights: the weight of each of these, float32.

        Raises:
            RuntimeError: a matrix was not loaded.
        """
        if self._apply is None:
            raise RuntimeError(f"weights were not loaded: {', '.join(sorted(self._missing)[:3])}")
        if self._mine.start:
            chosen = chosen - self._mine.start
        return self._apply(x, chosen, weights)

    def _loaded(self, name: str) -> None:
        self._missing.discard(name)
        if not self._missing:
            self._prepare()
            self._missing = set(self._owners)  # they may be loaded again

    def _prepare(self) -> None:
        ops, sides = self._context.ops, (self._gate_up, self._down)
        gate_up, down = ([m.matrix for m in side] for side in sides)
        further: dict[str, Any] = {}
        if self._config.has_biases:
            further["biases"] = tuple([m.added_bias for m in side] for side in sides)
        if self._config.clamped is not None:
            further["clamped"] = self._config.clamped
        self._apply = ops.experts(gate_up, down, self._sizes, **further)


def _check_ops(ops: Ops, experts: ExpertsConfig) -> None:
    """Check that the operations support the features of the experts.

    Raises:
        ModelError: their class has an `experts` of an earlier form.
    """
    needed = {"biases": experts.has_biases, "clamped": experts.clamped is not None}
    known = inspect.signature(ops.experts).parameters
    missing = [name for name, is_needed in needed.items() if is_needed and name not in known]
    if missing and not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        raise ModelError(
            f"ops.use: the experts() of {ops.name!r} takes no {' and no '.join(missing)}, which "
            f"the experts of this model have; choose other operations for it"
        )


class _ExpertMatrix(Linear):
    """An expert's matrix, which is multiplied together with the other experts' matrices."""

    @property
    def matrix(self) -> torch.Tensor:
        assert self._packed is not None
        return next(iter(self._packed.values()))

    @property
    def added_bias(self) -> torch.Tensor:
        """The bias as this rank adds it, [rows]; zeros if another one does."""
        assert self._packed is not None
        bias = self._packed[self._bias_name]
        return bias if self._adds_bias else torch.zeros_like(bias)

    def load_quantized(self, name: str, matrix: QuantizedMatrix) -> None:
        """Load one part; only codes stay as small as they are."""
        if isinstance(matrix, AffineCodes):
            super().load_quantized(name, matrix)
        else:
            self.load(name, matrix.dequantize())

    def _prepare_runs(self, runs: dict[str, Run]) -> None:
        """Prepare parts; if one has numbers, all become numbers, as they are packed together."""
        if len(runs) > 1:
            weight, start = self._empty(self._rows, self._columns), 0
            for run in runs.values():
                for part in run if isinstance(run, list) else [run]:
                    numbers = part if isinstance(part, torch.Tensor) else part.dequantize()
                    weight[start : start + len(numbers)].copy_(numbers)
                    start += len(numbers)
            runs = {next(iter(runs)): weight}
        super()._prepare_runs(runs)

    def _prepare(self, packed: dict[str, torch.Tensor], bias: torch.Tensor | None) -> None:
        self._ranges(packed)  # none is missing
        self._packed = packed if bias is None else {**packed, self._bias_name: bias}
