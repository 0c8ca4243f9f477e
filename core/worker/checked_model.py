"""Models, attention backends and weight loaders whose results are checked.

A wrong one names its plugin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hardpoint.plugins import (
    AttentionBackend,
    ForwardBatch,
    HardpointError,
    KVSpec,
    Model,
    ModelError,
    WeightLoader,
    Wrapper,
    is_replayable,
)
from hardpoint.plugins.errors import ConfigError, PluginFaultError
from hardpoint.plugins.manifest import Source
from hardpoint.plugins.parallel import Cut
from hardpoint.plugins.quantization import QuantizedWeight
from hardpoint.registry.blame import describe, raise_unless_fault
from hardpoint.registry.tensor_checks import shown

from .memory import is_out_of_memory

_CACHE_EXTRA = 1 << 20  # bytes that a layer may have besides its blocks


class CheckedModel:
    """A model whose shapes, KV specs, hidden states and logits are checked.

    Attributes:
        shapes: of the weights, by Hugging Face name.
        needed: the shapes of the parts of them that this rank needs.
        cuts: these parts, of those that it does not need whole.
        specs: one per attention layer.
        is_replayable: whether the model's class says so.
        routed_experts: layers, and experts that a token has in each; None if it reports none.
        kv_variant: what the bytes of its KV blocks depend on besides weights and config.
    """

    def __init__(self, model: Model, source: Source) -> None:
        """Ask the model for its shapes and KV specs.

        Raises:
            PluginFaultError: they are none.
        """
        self._model = model
        self._source = source
        self._vocab_size = model.context.config.vocab_size
        shapes, specs = model.weight_shapes(), model.kv_specs()
        cuts = model.weight_cuts()
        if not isinstance(shapes, Mapping) or not all(map(_is_shape, shapes.values())):
            raise self._wrong("weight_shapes", shapes, "a shape per name")
        if not isinstance(cuts, Mapping) or not all(
            name in shapes and _is_cut(cut, shapes[name]) for name, cut in cuts.items()
        ):
            raise self._wrong("weight_cuts", cuts, "a Cut inside of the shape of each name")
        if not isinstance(specs, list) or not all(map(_is_spec, specs)):
            expected = (
                "a list of KVSpec of whole numbers >= 1, a finite scale and a softcap > 0, where "
            )
            expected += "num_kv_heads divides num_heads"
            raise self._wrong("kv_specs", specs, expected)
        self.shapes: dict[str, tuple[int, ...]] = dict(shapes)
        self.cuts: dict[str, Cut] = dict(cuts)
        self.needed = {
            name: cuts[name].shape(shape) if name in cuts else tuple(shape)
            for name, shape in shapes.items()
        }
        self.specs: list[KVSpec] = specs
        self.is_replayable = is_replayable(model)
        routed = self.routed_experts = model.routed_experts
        if routed is not None and not (_is_shape(routed) and len(routed) == 2):
            raise self._wrong("routed_experts", routed, "layers and experts per token, or None")
        self.kv_variant = model.kv_variant
        if not isinstance(self.kv_variant, str):
            raise self._wrong("kv_variant", self.kv_variant, "a string")
        self._is_last = model.context.parallel.is_last
        self._width: int | None = None  # of hidden states, once known

    def run_trial(self, num_tokens: int, num_rows: int) -> None:
        """Run a step of the first `num_tokens` positions without a cache; attention gives zeros.

        Args:
            num_tokens: of the step.
            num_rows: hidden states whose logits are computed, at most.

        Raises:
            PluginFaultError: a method raised, attention was called with something else than
                `kv_specs` says, or hidden states or logits are of a wrong shape.
        """
        context = self._model.context
        ids = torch.arange(num_tokens, device=context.device) % self._vocab_size
        positions = torch.arange(num_tokens, device=context.device)
        attention = _TrialAttention(self._source, self.specs, context.dtype, positions)
        parallel = context.parallel
        before = None
        if not parallel.is_first:
            before = self.empty_hidden(num_tokens).zero_()
        batch = ForwardBatch(ids, positions, attention.attend, before)
        hidden = self._try("forward", self.forward, batch)
        attention.check_complete()
        if parallel.is_last:
            self._try("compute_logits", self.compute_logits, hidden[:num_rows])
        self._width = hidden.shape[1]

    def _try(self, method: str, function: Callable[[Any], torch.Tensor], argument: Any) -> Any:
        """Return what a method gives in a trial step; name it if it raises."""
        try:
            return function(argument)
        except BaseException as cause:
            raise_unless_fault(cause)
            if isinstance(cause, HardpointError) or is_out_of_memory(cause):
                raise
            raise PluginFaultError(
                f"{self._source}: its {method}() failed in a trial step: {describe(cause)}"
            ) from cause

    def empty_hidden(self, num_tokens: int) -> torch.Tensor:
        """Return room for what the stage before passes on, [tokens, hidden_size]."""
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

    def _wrong(self, method: str, got: Any, expected: str) -> PluginFaultError:
        return _fault(self._source, method, got, expected)


class _TrialAttention:
    """The attention of a trial step: checks what it is called with, and gives zeros."""

    def __init__(
        self, source: Source, specs: Sequence[KVSpec], dtype: torch.dtype, positions: torch.Tensor
    ) -> None:
        """Expect one call per spec, each for `len(positions)` tokens on their device."""
        self._source = source
        self._specs = specs
        self._dtype = dtype
        self._positions = positions
        self._called: set[int] = set()

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return zeros of the shape of q.

        Raises:
            PluginFaultError: it is no call for a layer of the specs, or the second one.
        """
        if not isinstance(layer, int) or not 0 <= layer < len(self._specs):
            layers = f"0..{len(self._specs) - 1}" if self._specs else "none, as kv_specs() is empty"
            raise self._wrong(f"called attend for layer {shown(layer)}, expected {layers}")
        if layer in self._called:
            raise self._wrong(f"called attend for layer {layer} twice")
        self._called.add(layer)
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
                raise self._wrong(
                    f"called attend for layer {layer} with {name} = {shown(tensor)}, expected a "
                    f"{self._dtype} tensor {list(shape)} on {device}, as kv_specs() says"
                )
        return torch.zeros_like(q)

    def check_complete(self) -> None:
        """Check that every layer was called.

        Raises:
            PluginFaultError: one was not.
        """
        if missing := [layer for layer in range(len(self._specs)) if layer not in self._called]:
            raise self._wrong(
                f"called attend for no layer {', '.join(map(str, missing[:8]))}, though kv_specs() "
                f"has {len(self._specs)} layers"
            )

    def _wrong(self, what: str) -> PluginFaultError:
        return PluginFaultError(f"{self._source}: its forward() {what}")


class CheckedAttention:
    """An attention backend whose sizes, caches and outputs are checked.

    Attributes:
        specs: one per attention layer.
        bytes_per_block: of all layers.
        kv_layout: name and version of the layout.
        is_replayable: whether the backend's class says so.
    """

    def __init__(self, backend: AttentionBackend, source: Source, specs: Sequence[KVSpec]) -> None:
        """Ask the backend for the sizes of blocks.

        Raises:
            ModelError: the backend cannot compute such layers.
            PluginFaultError: the sizes are none.
        """
        capped = [index for index, spec in enumerate(specs) if spec.softcap is not None]
        if capped and not backend.softcaps:
            raise ModelError(
                f"attention.use: {source} has no soft cap of attention scores (its class says "
                f"softcaps = False), and layer {capped[0]} has the soft cap "
                f"{specs[capped[0]].softcap:g}; choose another attention backend for this model"
            )
        self._backend = backend
        self._source = source
        self.specs = specs
        self.kv_layout = (backend.kv_layout, backend.kv_layout_version)
        self._sizes = [backend.bytes_per_block(spec) for spec in specs]
        for size in self._sizes:
            if type(size) is not int or size < 1:
                raise _fault(source, "bytes_per_block", size, "an int >= 1")
        self.bytes_per_block = sum(self._sizes)
        self.is_replayable = is_replayable(backend)
        self.plan = backend.plan

    def allocate(self, num_blocks: int) -> list[Any]:
        """Return the cache of each layer.

        Raises:
            PluginFaultError: a cache takes more memory than its blocks should.
        """
        caches = []
        for spec, size in zip(self.specs, self._sizes, strict=True):
            cache = self._backend.allocate(spec, num_blocks)
            if (taken := _num_bytes(cache)) > size * num_blocks + _CACHE_EXTRA:
                raise PluginFaultError(
                    f"{self._source}: its allocate() took {taken} bytes for {num_blocks} blocks, "
                    f"expected {size * num_blocks}, since bytes_per_block() gave {size}"
                )
            caches.append(cache)
        return caches

    @property
    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes of a block of each layer."""
        return tuple(self._sizes)

    def block_views(self, caches: Sequence[Any], connector: str) -> list[list[torch.Tensor]]:
        """Return the views of each layer's cache, as bytes by block.

        Args:
            caches: of all layers.
            connector: the KV connector that needs them, for messages.

        Raises:
            ConfigError: the backend has none.
            PluginFaultError: they are not what they should be.
        """
        result = []
        for cache, size in zip(caches, self._sizes, strict=True):
            try:
                views = list(self._backend.block_views(cache))
            except NotImplementedError:
                raise ConfigError(
                    f"kv_connector.use: {connector!r} moves blocks of the KV cache, and "
                    f"{self._source} has no block_views()"
                ) from None
            if not _are_block_views(views, size):
                expected = f"uint8 tensors [num_blocks, bytes] with {size} bytes per block in all"
                raise _fault(self._source, "block_views", views, expected)
            result.append(views)
        return result

    def attend(
        self,
        layer: int,
        cache: Any,
        plan: Any,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Return the attention of a layer, [tokens, num_heads, head_size].

        Args:
            layer: index.
            cache: of the layer.
            plan: of the step.
            qkv: as in `AttentionBackend.attend`.

        Raises:
            PluginFaultError: the backend returned something else.
        """
        out = self._backend.attend(self.specs[layer], cache, plan, *qkv)
        q = qkv[0]
        if not (
            isinstance(out, torch.Tensor)
            and out.shape == q.shape
            and out.dtype == q.dtype
            and out.device == q.device
        ):
            expected = f"a {q.dtype} tensor {list(q.shape)} on {q.device}"
            raise _fault(self._source, "attend", out, expected)
        return out


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
    weights = cut_weights(loader, shapes, cuts) if cuts else loader.weights(dict(shapes))
    if not isinstance(weights, Iterable):
        raise _fault(source, "weights", weights, "weights one after the other")
    seen: set[str] = set()
    for item in weights:
        if not _is_weight(item):
            expected = "a name and a dense CPU tensor, or a QuantizedWeight of such"
            raise _fault(source, "weights", item, expected)
        name, tensor = item
        if name in seen:
            raise PluginFaultError(f"{source}: its weights() gave {name!r} twice")
        seen.add(name)
        yield name, tensor


def cut_weights(
    loader: WeightLoader, shapes: Mapping[str, tuple[int, ...]], cuts: Mapping[str, Cut]
) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
    """Return a loader's weights, cut.

    A class that overrides `weights` alone, of a loader or wrapper that cuts by itself, changes
    weights in a way that the inherited `cut_weights` does not: those of `weights` are cut then.

    Args:
        loader: of the weights.
        shapes: as in `WeightLoader.cut_weights`.
        cuts: the same.
    """
    classes = type(loader).__mro__
    whole, part = (
        next(index for index, cls in enumerate(classes) if name in vars(cls))
        for name in ("weights", "cut_weights")
    )
    if whole < part:
        return WeightLoader.cut_weights(loader, dict(shapes), dict(cuts))
    if isinstance(loader, Wrapper) and Wrapper in classes[part].__bases__:  # it overrides neither
        return cut_weights(loader.wrapped, shapes, cuts)
    return loader.cut_weights(dict(shapes), dict(cuts))


def _is_weight(item: Any) -> bool:
    if not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[0], str):
        return False
    weight = item[1]
    if isinstance(weight, QuantizedWeight):
        return all(map(_is_dense, weight.tensors.values()))
    return _is_dense(weight)


def _is_dense(tensor: Any) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
    )


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, tuple | list) and all(isinstance(n, int) and n >= 0 for n in shape)


def _is_cut(cut: Any, shape: Sequence[int]) -> bool:
    return isinstance(cut, Cut) and cut.fits(shape)


def _is_spec(spec: Any) -> bool:
    if not isinstance(spec, KVSpec):
        return False
    numbers = (spec.num_heads, spec.num_kv_heads, spec.head_size, spec.window)
    return (
        all(type(number) is int and number >= 1 for number in numbers if number is not None)
        and None not in numbers[:3]
        and spec.num_heads % spec.num_kv_heads == 0
        and isinstance(spec.scale, int | float)
        and math.isfinite(spec.scale)
        and (spec.softcap is None or _is_positive(spec.softcap))
    )


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def _are_block_views(views: Sequence[Any], size: int) -> bool:
    return (
        all(
            isinstance(view, torch.Tensor)
            and view.dtype == torch.uint8
            and view.dim() == 2
            and view.stride(1) == 1
            and len(view) == len(views[0])
            for view in views
        )
        and sum(view.shape[1] for view in views) == size
    )


def _num_bytes(cache: Any) -> int:
    """Return the bytes of the tensors of a cache: a tensor, or a list, tuple or dict of such."""
    if isinstance(cache, torch.Tensor):
        return cache.numel() * cache.element_size()
    if isinstance(cache, Mapping):
        cache = list(cache.values())
    return sum(map(_num_bytes, cache)) if isinstance(cache, list | tuple) else 0


def _fault(source: Source, method: str, got: Any, expected: str) -> PluginFaultError:
    return PluginFaultError(f"{source}: its {method}() gave {shown(got)}, expected {expected}")
