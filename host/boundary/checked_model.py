"""Models and weight loaders with checked results.

A wrong one names its plugin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hardpoint.errors import PluginFaultError, shown
from hardpoint.host.system import torch_state
from hardpoint.host.system.memory import is_out_of_memory
from hardpoint.plugins import (
    ForwardBatch,
    KVSpec,
    Model,
    TensorSpec,
    WeightLoader,
)
from hardpoint.plugins.component import Component, Source
from hardpoint.plugins.model.model import CUTS, is_shape
from hardpoint.plugins.parallel import Cut
from hardpoint.plugins.quantization import QuantizedWeight
from hardpoint.toolkit.cut_weights import cut_weights

from .guard import PASSING, Boundary, checked
from .layers.states import TrialCalls, TrialStates


def is_replayable(component: Component) -> bool:
    """Return whether a component's own class declares that its operations can be repeated."""
    return "replayable" in vars(type(component)) and bool(getattr(component, "replayable", False))


class CheckedModel:
    """A model with checked shapes, KV specs, hidden states and logits.

    Attributes:
        source: source of the model.
        shapes: shapes of the weights, by Hugging Face name.
        needed: the shapes of the parts of them that this rank needs.
        cuts: these parts, for weights that it needs in part only.
        specs: one per attention layer.
        states: tensors of each layer that keeps a state.
        is_replayable: whether the model's class declares it.
        routed_experts: layers, and experts that a token has in each; None if it reports none.
        kv_variant: dependence of the bytes of its KV blocks besides weights and config.
        hooks: hooks for step parts in its layers.
        called_hooks: names of the hooks that it called in the last trial step.
        version: number of times that its weights were replaced.
    """

    def __init__(self, model: Model, source: Source) -> None:
        """Ask the model for its shapes and KV specs.

        Raises:
            PluginFaultError: they are wrong.
        """
        self._model = model
        self.source = source
        self._vocab_size = model.context.config.vocab_size
        self.hooks = model.context.hooks
        self.called_hooks = frozenset[str]()
        self.version = 0
        shapes = self._stated("weight_shapes()", model.weight_shapes())
        specs, cuts = model.kv_specs(), self._stated("weight_cuts()", model.weight_cuts())
        if not all(name in shapes and cut.fits(shapes[name]) for name, cut in cuts.items()):
            raise self._wrong("weight_cuts", cuts, CUTS.text)
        for name in self._stated("quantizable()", model.quantizable()):
            if not isinstance(name, str) or len(shapes.get(name, ())) != 2:
                raise self._wrong("quantizable", name, "names of matrices in weight_shapes()")
        self.shapes: dict[str, tuple[int, ...]] = dict(shapes)
        self.cuts: dict[str, Cut] = dict(cuts)
        self.needed = {
            name: cuts[name].shape(shape) if name in cuts else tuple(shape)
            for name, shape in shapes.items()
        }
        self.specs: list[KVSpec] = self._stated("kv_specs()", specs)
        self.states: list[tuple[TensorSpec, ...]] = self._stated(
            "state_specs()", model.state_specs()
        )
        self.is_replayable = is_replayable(model) and not self.states
        self.routed_experts = self._stated("routed_experts()", model.routed_experts)
        self.kv_variant: str = self._stated("kv_variant()", model.kv_variant)
        self._is_last = model.context.parallel.is_last
        self._width: int | None = None  # of hidden states, once known

    def run_trial(self, num_tokens: int, num_rows: int) -> None:
        """Run a step of `num_tokens` tokens without a cache; attention gives zeros.

        Args:
            num_tokens: number of tokens of the step, in sequences of the maximum length.
            num_rows: most hidden states to compute logits of.

        Raises:
            PluginFaultError: a method raised, attention was called with something else than
                `kv_specs` declares, or hidden states or logits are of a wrong shape.
        """
        context = self._model.context
        places = torch.arange(num_tokens, device=context.device)
        ids, positions = places % self._vocab_size, places % context.max_model_len
        attention = _TrialAttention(self.source, self.specs, context.dtype, positions)
        parallel = context.parallel
        before = None
        if not parallel.is_first:
            before = self.empty_hidden(num_tokens).zero_()
        states = TrialStates(self.source, self.states, context.device, num_tokens)
        batch = ForwardBatch(ids, positions, attention.attend, before, recur=states.recur)
        with self._noting_hooks():
            hidden = self._try("forward", self.forward, batch)
        attention.check_complete()
        states.check_complete()
        if parallel.is_last and self._model.generates:
            self._try("compute_logits", self.compute_logits, hidden[:num_rows])
        self._width = hidden.shape[1]

    @contextmanager
    def _noting_hooks(self) -> Iterator[None]:
        called = set()

        def embedded(values: torch.Tensor) -> torch.Tensor:
            called.add("embedded")
            return values

        def linear(
            parts: Sequence[tuple[str, int]],  # noqa: ARG001
            x: torch.Tensor,  # noqa: ARG001
            y: torch.Tensor,
        ) -> torch.Tensor:
            called.add("linear")
            return y

        def added(*_: Any) -> None:
            called.add("added")

        self.hooks.embedded, self.hooks.linear, self.hooks.added = embedded, linear, added
        try:
            yield
        finally:
            self.hooks.embedded = self.hooks.linear = self.hooks.added = None
        self.called_hooks = frozenset(called)

    def _try(self, method: str, function: Callable[[Any], torch.Tensor], argument: Any) -> Any:
        try:
            return function(argument)
        except BaseException as cause:
            if is_out_of_memory(cause):
                raise
            boundary = Boundary.naming("models", self.source)
            boundary.end(f"{method}()", cause, PASSING, "in a trial step")

    def empty_hidden(self, num_tokens: int) -> torch.Tensor:
        """Return memory for the hidden states of the stage before, [tokens, hidden_size]."""
        context = self._model.context
        shape = num_tokens, self._model.hidden_size
        return torch.empty(shape, dtype=context.dtype, device=context.device)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return hidden states [tokens, hidden].

        Raises:
            PluginFaultError: the model returned something else.
        """
        tokens = len(batch.token_ids)
        hidden = self._model.forward(batch)
        if (
            not isinstance(hidden, torch.Tensor)
            or hidden.dim() != 2
            or hidden.shape[0] != tokens
            or self._width not in (None, hidden.shape[1])
            or not (self._is_last or hidden.shape[1] == self._model.hidden_size)
            or hidden.device != batch.token_ids.device
        ):
            width = self._width or ("hidden" if self._is_last else self._model.hidden_size)
            where = f"[{tokens}, {width}] on {batch.token_ids.device}"
            raise self._wrong("forward", hidden, f"hidden states {where}")
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocab] of hidden states [rows, hidden].

        Raises:
            PluginFaultError: the model returned something else.
        """
        expected = (len(hidden), self._vocab_size)
        logits = self._model.compute_logits(hidden)
        if (
            not isinstance(logits, torch.Tensor)
            or logits.shape != expected
            or not logits.is_floating_point()
            or logits.device != hidden.device
        ):
            where = f"{list(expected)} on {hidden.device}"
            raise self._wrong("compute_logits", logits, f"floating logits {where}")
        return logits

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return embedded tokens, as `Model.embed`."""
        return self._model.embed(token_ids)

    def unembed(self, residual: torch.Tensor) -> torch.Tensor:
        """Return logits of the residual stream, as `Model.unembed`."""
        return self._model.unembed(residual)

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """Return logits of classes [rows, classes] of vectors of prompts [rows, hidden]."""
        return self._model.classify(pooled)

    def encode_media(self, modality: str, items: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the embeddings of media, [length, a multiple of hidden_size] of each.

        Raises:
            PluginFaultError: the model returned something else.
        """
        embeddings = self._model.encode_media(modality, items)
        size = self._model.hidden_size
        device = items[0].device if items else self._model.context.device
        if (
            not isinstance(embeddings, Sequence)
            or len(embeddings) != len(items)
            or not all(isinstance(x, torch.Tensor) and x.dim() == 2 for x in embeddings)
            or not all(x.shape[1] % size == 0 and x.device == device for x in embeddings)
        ):
            expected = f"{len(items)} tensors [length, {size}] on {device}"
            raise self._wrong("encode_media", embeddings, expected)
        return list(embeddings)

    def become(self, other: CheckedModel) -> Model:
        """Be another model of the same class, configuration and share; return the earlier one."""
        earlier, self._model, self.hooks = self._model, other._model, other.hooks
        self.version += 1
        for spec, new in zip(self.specs, other.specs, strict=True):  # which attention has
            if spec.sinks is not None and new.sinks is not None:
                spec.sinks.copy_(new.sinks)
        return earlier

    def _stated(self, method: str, value: Any) -> Any:
        return checked(value, Model, method, self.source)

    def _wrong(self, method: str, got: Any, expected: str) -> PluginFaultError:
        return wrong_result(self.source, method, got, expected)


class _TrialAttention:
    """The attention of a trial step: checks its arguments, and returns zeros."""

    def __init__(
        self, source: Source, specs: Sequence[KVSpec], dtype: torch.dtype, positions: torch.Tensor
    ) -> None:
        self._specs, self._dtype, self._positions = specs, dtype, positions
        self._calls = TrialCalls(source, "attend", "kv_specs()", len(specs))
        self.check_complete = self._calls.check_complete

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        angles: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return zeros of the shape of q.

        Raises:
            PluginFaultError: it is no call for a layer of the specs, or the second one.
        """
        self._calls.add(layer)
        spec, device = self._specs[layer], self._positions.device
        for name, tensor, heads in (
            ("q", q, spec.num_heads),
            ("k", k, spec.num_kv_heads),
            ("v", v, spec.num_kv_heads),
        ):
            shape = (len(self._positions), heads, spec.head_size)
            if not (
                isinstance(tensor, torch.Tensor)
                and tensor.shape == shape
                and tensor.dtype == self._dtype
                and tensor.device == device
            ):
                raise self._calls.wrong(
                    f"called attend for layer {layer} with {name} = {shown(tensor)}, expected a "
                    f"{self._dtype} tensor {list(shape)} on {device}, by kv_specs()"
                )
        if spec.value_size is not None and v is not k:
            raise self._calls.wrong(
                f"called attend for layer {layer} with v that is not k, expected one tensor, as "
                f"kv_specs() has value_size {spec.value_size}"
            )
        if angles is not None and not self._are_angles(angles, spec):
            raise self._calls.wrong(
                f"called attend for layer {layer} with angles = {shown(angles)}, expected a "
                f"torch.float32 tensor [{len(self._positions)}, an even size of at most "
                f"{spec.head_size}] on {device}"
            )
        return torch.zeros_like(q if spec.value_size is None else q[..., -spec.value_size :])

    def _are_angles(self, angles: Any, spec: KVSpec) -> bool:
        return (
            isinstance(angles, torch.Tensor)
            and angles.dim() == 2
            and len(angles) == len(self._positions)
            and 0 < angles.shape[1] <= spec.head_size
            and angles.shape[1] % 2 == 0
            and angles.dtype == torch.float32
            and angles.device == self._positions.device
        )


def checked_weights(
    loader: WeightLoader,
    source: Source,
    shapes: Mapping[str, tuple[int, ...]],
    cuts: Mapping[str, Cut],
) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
    """Yield a loader's weights, cut.

    Raises:
        PluginFaultError: it yielded something else, or a weight twice.
    """
    with torch_state.kept(source, "weights"):
        weights = cut_weights(loader, shapes, cuts) if cuts else loader.weights(dict(shapes))
    if not isinstance(weights, Iterable):
        raise wrong_result(source, "weights", weights, "weights one after the other")
    seen: set[str] = set()
    for item in torch_state.kept_within(weights, source, "weights"):
        if not _is_weight(item):
            expected = "a name and a dense CPU tensor, or a QuantizedWeight of such"
            if isinstance(item, tuple) and len(item) == 2:  # of tensors without their numbers
                name, weight = map(shown, item)
                raise PluginFaultError(
                    f"{source}: its weights() gave {weight} for {name}, expected {expected}"
                )
            raise wrong_result(source, "weights", item, expected)
        name, tensor = item
        if name in seen:
            raise PluginFaultError(f"{source}: its weights() gave {name!r} twice")
        seen.add(name)
        yield name, tensor


def _is_weight(item: Any) -> bool:
    if not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[0], str):
        return False
    weight = item[1]
    if isinstance(weight, QuantizedWeight):
        return is_quantized_weight(weight) and all(map(_is_dense, weight.tensors.values()))
    return _is_dense(weight)


def is_quantized_weight(weight: Any) -> bool:
    """Return whether a stored matrix has the name of a scheme, two sizes, and named tensors."""
    return (
        isinstance(weight, QuantizedWeight)
        and isinstance(weight.scheme, str)
        and is_shape(weight.shape)
        and len(weight.shape) == 2
        and isinstance(weight.tensors, Mapping)
        and all(
            isinstance(name, str) and isinstance(tensor, torch.Tensor)
            for name, tensor in weight.tensors.items()
        )
    )


def _is_dense(tensor: Any) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
    )


def wrong_result(source: Source, method: str, got: Any, expected: str) -> PluginFaultError:
    """Return the fault of a plugin for a wrong result of a method."""
    return PluginFaultError(f"{source}: its {method}() gave {shown(got)}, expected {expected}")
