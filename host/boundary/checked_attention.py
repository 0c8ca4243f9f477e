"""An attention backend with checked results; a wrong one names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hardpoint.errors import ConfigError, ModelError, PluginFaultError
from hardpoint.host.registry.request_arguments import (
    argument_key,
    convert_arguments,
    takes_arguments,
)
from hardpoint.plugins import (
    AttentionBackend,
    AttentionStep,
    EngineCoreRequest,
    KVSpec,
    RequestError,
    RequestFault,
    Wrapper,
)
from hardpoint.plugins.component import Source
from hardpoint.plugins.executor import WorkerInfo
from hardpoint.plugins.model import Attend, Recur
from hardpoint.plugins.model.forward import no_states
from hardpoint.typed import prepared_type

from .checked_model import is_replayable, wrong_result
from .guard import checked
from .layers.groups import LayerGroups
from .layers.states import LayerStates

_CACHE_EXTRA = 1 << 20  # bytes that a cache may have besides its blocks


class CheckedAttention:
    """An attention backend with checked sizes, caches and outputs.

    Attributes:
        backend: the backend of all layers.
        source: source of it.
        specs: one per attention layer, as the backend gets it.
        groups: groups of the layers.
        group_of: index of the group, by layer.
        states: states of other layers, in the last group; None if the model has none.
        bytes_per_block: bytes of a block in all caches, without states.
        bytes_per_state: bytes of a state, all layers together.
        num_states: how many of the blocks are states, the last ones.
        kv_layout: name and version of the layout.
        is_replayable: whether the backend's class declares it.
        pads: whether it runs steps with padding, which are recorded.
        default_arguments: arguments of requests that give none; None if it takes none.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        source: Source,
        specs: Sequence[KVSpec],
        groups: LayerGroups,
        rotate: Callable[[torch.Tensor, torch.Tensor], None],
        states: LayerStates | None = None,
        *,
        sees_ahead: bool = False,
    ) -> None:
        """Ask the backend for the sizes of blocks.

        Args:
            rotate: rotates heads for a backend that does not, as `Ops.rotate`.
            sees_ahead: whether tokens of the model see later ones of a step.

        Raises:
            ModelError: the backend cannot compute such layers.
            PluginFaultError: the sizes are wrong, or differ in layers that are to share a cache.
        """
        self.backend, self.source, self._sees_ahead = backend, source, sees_ahead
        self._rotate = None if _rotates(backend) else rotate
        self.states, self.kv_layout = states, (backend.kv_layout, backend.kv_layout_version)
        self._use_layers(specs, groups)
        self.bytes_per_state = 0 if states is None else states.bytes_per_state
        self.num_states = 0
        self.is_replayable = is_replayable(backend)
        self._arguments_key = argument_key("attention_backends", backend.name)
        self._arguments_type = prepared_type(type(backend))
        takes_any = takes_arguments(type(backend))
        self.default_arguments = self._arguments_type() if takes_any else None
        self.pads = backend.pads and states is None and not takes_any

    def arguments_of(self, request: EngineCoreRequest) -> tuple[Any, RequestFault | None]:
        """Return the arguments of a request for the backend, None if it has none; or a fault."""
        if (plain := request.plugin_args.get(self._arguments_key)) is None:
            return None, None
        path = f"plugin_args.{self._arguments_key}"
        try:
            return convert_arguments(self.source, self._arguments_type, plain, path), None
        except RequestError as error:  # the frontend has checked them, but in another process
            return None, RequestFault(str(error))

    def _use_layers(self, specs: Sequence[KVSpec], groups: LayerGroups) -> None:
        _refuse_lacking(self.backend, self.source, specs, self._sees_ahead)
        self._layers = specs
        # A backend that does not know of values in keys stores these twice, whole.
        keeps_both = not self.backend.shares_values
        self.specs = [replace(s, value_size=None) for s in specs] if keeps_both else specs
        self._value_sizes = [spec.value_size for spec in specs]
        self.groups, self._cache_of = groups.groups, groups.cache_of
        self.group_of = groups.group_of
        self._sizes: list[int] = [self.backend.bytes_per_block(spec) for spec in self.specs]
        for size in self._sizes:
            checked(size, AttentionBackend, "bytes_per_block()", self.source)
        self._layer_of = {cache: layer for layer, cache in enumerate(self._cache_of)}  # one of it
        for layer, cache in enumerate(self._cache_of):
            other = self._layer_of[cache]
            if self._sizes[layer] != self._sizes[other]:
                raise PluginFaultError(
                    f"{self.source}: its bytes_per_block() gave {self._sizes[layer]} for "
                    f"{specs[layer]} and {self._sizes[other]} for {specs[other]}, expected the "
                    f"same, since they differ in the window alone"
                )
        self.bytes_per_block = sum(self._sizes[layer] for layer in self._layer_of.values())

    def add_layers(self, specs: Sequence[KVSpec]) -> int:
        """Add layers of drafting heads; return the index of the first.

        Raises:
            ModelError: other layers have sliding windows, or the backend cannot compute such ones.
        """
        windows = [group.window for group in self.groups]
        if windows != [None]:
            raise ModelError(
                f"kv_cache.window_groups: expected false with drafting heads, because layers have "
                f"KV cache groups with the windows {', '.join(map(str, windows))}"
            )
        layers = [*self._layers, *specs]
        self._use_layers(layers, LayerGroups.single(len(layers)))
        return len(layers) - len(specs)

    def plans(self, steps: Sequence[AttentionStep]) -> list[Any]:
        """Return the plan of each layer.

        Args:
            steps: one per group.
        """
        if self.states is not None:
            steps = steps[:-1]
        plans = [self.backend.plan(step) for step in steps]
        return [plans[group] for group in self.group_of]

    def allocate(self, num_blocks: int) -> list[Any]:
        """Return the cache of each layer, which layers of several groups share, then the states.

        Raises:
            PluginFaultError: a cache takes more memory than its blocks should.
        """
        caches, num_keys = {}, num_blocks - self.num_states
        for index, layer in self._layer_of.items():
            spec, size = self.specs[layer], self._sizes[layer]
            cache = self.backend.allocate(spec, num_keys)
            if (taken := _num_bytes(cache)) > size * num_keys + _CACHE_EXTRA:
                raise PluginFaultError(
                    f"{self.source}: its allocate() took {taken} bytes for {num_keys} blocks, "
                    f"expected {size * num_keys}, since bytes_per_block() gave {size}"
                )
            caches[index] = cache
        states = [] if self.states is None else self.states.allocate(self.num_states, num_keys)
        return [*(caches[index] for index in self._cache_of), *states]

    @property
    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes of a block of each layer."""
        return tuple(self._sizes)

    def worker_info(self) -> WorkerInfo:
        """Return the blocks of the caches; without memory for them."""
        windows = tuple(group.window for group in self.groups)
        return WorkerInfo(
            self.bytes_per_block,
            0,
            windows=windows,
            has_states=self.states is not None,
            bytes_per_state=self.bytes_per_state,
        )

    def num_bytes(self, num_blocks: int) -> int:
        """Return the bytes of so many blocks, `num_states` among them."""
        num_keys = num_blocks - self.num_states
        return num_keys * self.bytes_per_block + self.num_states * self.bytes_per_state

    def recurrence(self, caches: Sequence[Any], steps: Sequence[AttentionStep]) -> Recur:
        """Return the recurrence of a step in layers with states.

        Args:
            caches: the result of `allocate`.
            steps: one per group.
        """
        return no_states if self.states is None else self.states.of_step(caches, steps)

    def block_views(self, caches: Sequence[Any], user: str) -> list[list[torch.Tensor]]:
        """Return the views of each layer's cache, as bytes by block.

        Args:
            user: the setting that needs them, for messages.

        Raises:
            ConfigError: the backend has none.
            PluginFaultError: they have a wrong form.
        """
        result = []
        for cache, size in zip(caches, self._sizes, strict=True):
            try:
                views = list(self.backend.block_views(cache))
            except NotImplementedError:
                raise ConfigError(
                    f"{user} moves blocks of the KV cache, and {self.source} has no block_views()"
                ) from None
            if not _are_block_views(views, size):
                expected = f"uint8 tensors [num_blocks, bytes] with {size} bytes per block in all"
                raise wrong_result(self.source, "block_views", views, expected)
            result.append(views)
        return result

    def of_step(self, caches: Sequence[Any], steps: Sequence[AttentionStep]) -> Attend:
        """Return the attention of a step, which is planned.

        Args:
            steps: one per group.
        """
        plans = self.plans(steps)

        def attend(
            layer: int,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            angles: torch.Tensor | None = None,
        ) -> torch.Tensor:
            return self.attend(layer, caches[layer], plans[layer], (q, k, v), angles)

        return attend

    def attend(
        self,
        layer: int,
        cache: Any,
        plan: Any,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        angles: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention of a layer, [tokens, num_heads, head_size] or [..., value_size].

        Args:
            qkv: as in `AttentionBackend.attend`.
            angles: by which q and k are rotated first; None leaves them as they are.

        Raises:
            PluginFaultError: the backend returned something else.
        """
        q, spec, method = qkv[0], self.specs[layer], "attend"
        if angles is None:
            out = self.backend.attend(spec, cache, plan, *qkv)
        elif self._rotate is None:
            method = "rotate_and_attend"
            out = self.backend.rotate_and_attend(spec, cache, plan, *qkv, angles)
        else:
            size = angles.shape[1]
            for x in qkv[:2]:
                self._rotate(x if size == spec.head_size else x[..., :size], angles)
            out = self.backend.attend(spec, cache, plan, *qkv)
        shape = (*q.shape[:2], spec.value_size or q.shape[2])
        form = isinstance(out, torch.Tensor) and (out.shape, out.dtype, out.device)
        if form != (shape, q.dtype, q.device):
            expected = f"a {q.dtype} tensor {list(shape)} on {q.device}"
            raise wrong_result(self.source, method, out, expected)
        value_size = self._value_sizes[layer]
        return out if value_size is None else out[..., -value_size:]


def _refuse_lacking(
    backend: AttentionBackend, source: Source, specs: Sequence[KVSpec], sees_ahead: bool
) -> None:
    for flag, feature, needed in (
        ("softcaps", "soft cap of attention scores", [s.softcap is not None for s in specs]),
        ("has_sinks", "sinks of attention", [s.sinks is not None for s in specs]),
        ("sees_ahead", "tokens that see later ones of an image", [sees_ahead for _ in specs]),
    ):
        if True in needed and not getattr(backend, flag):
            raise ModelError(
                f"attention.use: {source} has no {feature} ({flag} = False in its class), which "
                f"layer {needed.index(True)} needs; choose another attention backend for this model"
            )


def _rotates(backend: AttentionBackend) -> bool:
    """Return whether `rotate_and_attend` is to be called.

    A class that overrides `attend` alone, of a backend or wrapper that rotates, changes attention
    in a way that the inherited `rotate_and_attend` does not: its `attend` is called.
    """
    classes = type(backend).__mro__
    rotating, attending = (
        next(index for index, cls in enumerate(classes) if name in vars(cls))
        for name in ("rotate_and_attend", "attend")
    )
    if isinstance(backend, Wrapper) and Wrapper in classes[rotating].__bases__:  # it forwards
        return rotating <= attending and _rotates(backend.wrapped)
    return backend.rotates and rotating <= attending


def _are_block_views(views: Sequence[Any], size: int) -> bool:
    return (
        all(is_block_view(view, views[0]) for view in views)
        and sum(view.shape[1] for view in views) == size
    )


def is_block_view(view: Any, other: Any) -> bool:
    """Return whether a value is a uint8 tensor [num_blocks, bytes] with as many blocks as another.

    The bytes of each block have to be adjacent.
    """
    return (
        isinstance(view, torch.Tensor)
        and view.dtype == torch.uint8
        and view.dim() == 2
        and view.stride(1) == 1
        and len(view) == len(other)
    )


def _num_bytes(cache: Any) -> int:
    if isinstance(cache, torch.Tensor):
        return cache.numel() * cache.element_size()
    if isinstance(cache, Mapping):
        cache = list(cache.values())
    return sum(map(_num_bytes, cache)) if isinstance(cache, list | tuple) else 0
