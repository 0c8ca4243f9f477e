"""The attention interface of transformers; its calls go to the attention of a step."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hardpoint.plugins import KVSpec, ModelError

NAME = "hardpoint"
"""The attention of steps, by the name that transformers knows it under."""
OBSERVED = "hardpoint_observed"
"""The same for a step that is observed, with masks."""

_SLOT = "_hardpoint_layer"
_FAR = 1 << 20  # a position at which windows are looked for
_LAYERS = "num_hidden_layers"
_KNOWN = {"s_aux", "position_ids", "cache_position"}
"""Tensors that attention is given: sinks, and positions, which its step has."""


@dataclass(eq=False)
class SharedStep:
    """State of a step that the attention layers of a model share.

    Attributes:
        device: where the model runs.
        attend: attention of the step that runs.
        is_dry: whether the step has no weights: products and embeddings are zeros.
    """

    device: torch.device
    attend: Callable[..., torch.Tensor] | None = None
    is_dry: bool = False


@dataclass(eq=False)
class AttentionLayer:
    """One attention layer.

    Attributes:
        path: name of its module.
        index: in `Model.kv_specs`.
        spec: parameters of the attention backend.
        value_size: elements of a value head; the smaller ones of it and the heads of queries and
            keys are padded with zeros.
        sinks: parameter of the module that `spec.sinks` has the values of; None is without.
    """

    path: str
    index: int
    spec: KVSpec
    value_size: int
    step: SharedStep = field(repr=False)
    sinks: Callable[[], torch.Tensor] | None = field(default=None, repr=False)

    def load_sinks(self) -> None:
        """Write the loaded sinks of the module to the sinks of the spec."""
        if self.sinks is not None and self.spec.sinks is not None:
            self.spec.sinks.copy_(self.sinks())

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return the result [1, tokens, heads, value_size] for q [1, heads, tokens, head_size]."""
        assert self.step.attend is not None, "it is set while a step runs"
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        size = self.spec.head_size
        if q.shape[2] < size:
            q, k = (nn.functional.pad(x, (0, size - x.shape[2])) for x in (q, k))
        if self.value_size < size:
            v = nn.functional.pad(v, (0, size - self.value_size))
        # Backends take tokens with adjacent heads; rotated heads may not be adjacent.
        out = self.step.attend(self.index, q.contiguous(), k.contiguous(), v.contiguous())
        return out[..., : self.value_size].unsqueeze(0)


class Observer(Protocol):
    """Receiver of the masks and the attention of an observed step."""

    def mask(self, mask: torch.Tensor, function: Callable[..., Any], window: int | None) -> None:
        """Receive a mask, its function of (batch, head, query, key) and the window stated."""

    def attended(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Any,
        arguments: dict[str, Any],
    ) -> torch.Tensor:
        """Return the result of attention [1, tokens, heads, value_size]."""


class _Observers(threading.local):
    """Observers of the steps of a thread; the last one counts."""

    def __init__(self) -> None:
        self.stack: list[Observer] = []


_observers = _Observers()


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,  # noqa: ARG001 - the spec decides
    **_: Any,
) -> tuple[torch.Tensor, None]:
    layer: AttentionLayer = getattr(module, _SLOT)
    return layer.attend(query, key, value), None


def _attend_observed(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    return _observers.stack[-1].attended(module, query, key, value, attention_mask, arguments), None


def _mask_observed(*args: Any, mask_function: Callable[..., Any], **others: Any) -> torch.Tensor:
    others.pop("allow_is_bidirectional_skip", None)
    mask: torch.Tensor = eager_mask(*args, mask_function=mask_function, **others)
    _observers.stack[-1].mask(mask, mask_function, others.get("local_size"))
    return mask


ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
ALL_ATTENTION_FUNCTIONS.register(OBSERVED, _attend_observed)
ALL_MASK_ATTENTION_FUNCTIONS.register(OBSERVED, _mask_observed)


def use(model: PreTrainedModel, implementation: str) -> None:
    """Let all modules of a model use an attention implementation."""
    for config in _configs(model, "_attn_implementation"):
        config._attn_implementation = implementation


def _configs(model: PreTrainedModel, name: str) -> list[Any]:
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    return [config for config in configs if hasattr(config, name)]


@contextlib.contextmanager
def experts_one_by_one(model: PreTrainedModel) -> Iterator[None]:
    """Let experts compute without kernels in the body, which look at the strides of weights."""
    configs = _configs(model, "_experts_implementation")
    earlier = [config._experts_implementation for config in configs]
    for config in configs:
        config._experts_implementation = "eager"
    try:
        yield
    finally:
        for config, implementation in zip(configs, earlier, strict=True):
            config._experts_implementation = implementation


@contextlib.contextmanager
def observing(model: PreTrainedModel, observer: Observer) -> Iterator[None]:
    """Let an observer receive the attention of the steps of the body."""
    use(model, OBSERVED)
    _observers.stack.append(observer)
    try:
        yield
    finally:
        _observers.stack.pop()
        use(model, NAME)


class Specs:
    """Observes the attention of each layer, and rejects features without a field in `KVSpec`."""

    def __init__(self, model: PreTrainedModel, step: SharedStep, max_model_len: int) -> None:
        """`step`: the step that the layers will share."""
        self.layers: list[AttentionLayer] = []
        self.num_calls = 0
        self._step, self._longest = step, max_model_len
        self._config = model.config.get_text_config(decoder=True)
        self._paths = {module: path for path, module in model.named_modules()}
        self._name = type(model).__name__
        self._masks: dict[int, tuple[str, int | None, torch.Tensor]] = {}

    def mask(self, mask: torch.Tensor, function: Callable[..., Any], window: int | None) -> None:
        """Record the kind of a mask: causal, with a window, or another one."""
        kind = self.kind_of(function, window)
        self._masks[mask.untyped_storage().data_ptr()] = (kind, window, mask)

    def kind_of(self, function: Callable[..., Any], window: int | None) -> str:
        """Return the kind of a mask, by its function and the window stated."""
        return "causal" if _is_causal(function, window) else "neither causal nor a sliding window"

    def attended(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Any,
        arguments: dict[str, Any],
    ) -> torch.Tensor:
        """Add a layer.

        Raises:
            ModelError: it needs something that cannot be kept.
        """
        path = self._paths[module]
        self.num_calls += 1
        if hasattr(module, _SLOT):
            self.called_again(path)
        window = self.window_of(path, module, mask)
        if window is None:
            self.check_unbounded(path, module)
        scale = arguments.get("scaling")
        (_, heads, tokens, size), kv_heads, value_size = q.shape, k.shape[1], v.shape[3]
        sinks = self._sinks_of(path, module, arguments.get("s_aux"), heads)
        for name in sorted(arguments.keys() - _KNOWN):
            if isinstance(arguments[name], torch.Tensor):
                problem = "a tensor besides keys and values"
                raise self.refused(path, problem, f"{name} {list(arguments[name].shape)}")
        if k.shape != (1, kv_heads, tokens, size) or v.shape[:3] != (1, kv_heads, tokens):
            shapes = f"queries {list(q.shape)}, keys {list(k.shape)}, values {list(v.shape)}"
            raise self.refused(path, "other tokens than in the step", shapes)
        if heads % kv_heads:
            raise self.refused(path, f"{heads} heads", f"{kv_heads} key and value heads")
        softcap = arguments.get("softcap")
        spec = KVSpec(
            heads,
            kv_heads,
            max(size, value_size),
            float(size**-0.5 if scale is None else scale),
            window,
            None if softcap is None else float(softcap),
            None if sinks is None else torch.zeros(heads, device=self._step.device),
        )
        layer = AttentionLayer(path, len(self.layers), spec, value_size, self._step, sinks)
        self.layers.append(layer)
        setattr(module, _SLOT, layer)
        return q.new_zeros(1, tokens, heads, value_size)

    def called_again(self, path: str) -> None:
        """Refuse a layer that was called before in the step: its keys have one place.

        Raises:
            ModelError: always.
        """
        raise self.refused(path, "attention", "called more than once in a step")

    @functools.cached_property
    def _cached(self) -> list[Any]:
        has_layers = hasattr(self._config, _LAYERS)
        return list(DynamicCache(config=self._config).layers) if has_layers else []

    def check_unbounded(self, path: str, module: nn.Module) -> None:
        """Reject a layer without a window if the cache of transformers drops earlier tokens."""
        index = getattr(module, "layer_idx", len(self._cached))
        cached = self._cached[index : index + 1]
        cache_window = getattr(cached[0], "sliding_window", None) if cached else None
        if cache_window is not None and cache_window < self._longest:
            problem = "a cache of fewer tokens than its masks show"
            raise self.refused(path, problem, f"sliding_window {cache_window}")

    def _sinks_of(
        self, path: str, module: nn.Module, sinks: torch.Tensor | None, heads: int
    ) -> Callable[[], torch.Tensor] | None:
        """Return how the sinks of a layer are read; None if it has none.

        Raises:
            ModelError: they are no parameter of the module, or not one number for each head.
        """
        if sinks is None:
            return None
        names = [
            name for name, parameter in module.named_parameters(recurse=False) if parameter is sinks
        ]
        if not names or sinks.shape != (heads,):
            numbers = f"{list(sinks.shape)} numbers for {heads} heads"
            raise self.refused(path, "sinks (s_aux) that are no parameter of the layer", numbers)
        return lambda: getattr(module, names[0])

    def window_of(self, path: str, module: nn.Module, mask: Any) -> int | None:
        """Return the window of a layer by its mask; None if it has none.

        Raises:
            ModelError: the mask is another one.
        """
        if mask is None and getattr(module, "is_causal", True):
            return None
        if mask is None:
            raise self.refused(path, "tokens that see later ones", "is_causal = False")
        return self.window_of_mask(path, mask, "causal")

    def window_of_mask(self, path: str, mask: Any, expected: str) -> int | None:
        """Return the window of a mask; None if it has none.

        Raises:
            ModelError: it is of another kind than the expected one.
        """
        place = mask.untyped_storage().data_ptr() if isinstance(mask, torch.Tensor) else 0
        default: tuple[str, int | None, Any] = ("made by the model itself", None, mask)
        kind, window, _ = self._masks.get(place, default)
        if kind != expected:
            raise self.refused(path, "attention_mask", kind)
        return None if window is None else int(window)

    def refused(self, path: str, problem: str, value: Any) -> ModelError:
        """Return the error of a layer that needs something else."""
        return ModelError(
            f"model: {self._name}, layer {path}: {problem}: {value}: cannot be kept by attention "
            "over blocks, so that it cannot run through transformers"
        )


def layer_of(module: nn.Module) -> AttentionLayer:
    """Return the layer that was observed of an attention module."""
    layer: AttentionLayer = getattr(module, _SLOT)
    return layer


def _is_causal(function: Callable[..., Any], window: int | None) -> bool:
    width = window or _FAR
    last = 4 * width + 3
    pairs = [(last, last, True), (last, last + 1, False), (0, 0, True), (0, 1, False)]
    pairs += [(last, last - width + 1, True), (last, last - width, window is None)]
    pairs += [(last, 0, window is None)]
    return shows(function, pairs)


def shows(function: Callable[..., Any], pairs: Sequence[tuple[int, int, bool]]) -> bool:
    """Return whether a mask shows or hides each pair (query, key) as stated."""
    zero = torch.tensor(0)
    try:
        visible = [
            bool(function(zero, zero, torch.tensor(q), torch.tensor(k))) for q, k, _ in pairs
        ]
    except (IndexError, RuntimeError):
        return False
    return visible == [expected for *_, expected in pairs]
