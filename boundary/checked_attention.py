"""An attention backend whose results are checked; a wrong one names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hardpoint.errors import ConfigError, ModelError, PluginFaultError
from hardpoint.plugins import AttentionBackend, AttentionStep, KVSpec, Wrapper
from hardpoint.plugins.manifest import Source
from hardpoint.plugins.model import Attend

from .checked_model import is_replayable, wrong_result
from .guard import checked
from .layer_groups import LayerGroups

_CACHE_EXTRA = 1 << 20  # bytes that a cache may have besides its blocks


class CheckedAttention:
    """An attention backend whose sizes, caches and outputs are checked.

    Attributes:
        backend: the backend of all layers.
        source: source of it.
        specs: one per attention layer.
        groups: groups of the layers.
        group_of: index of the group, by layer.
        bytes_per_block: bytes of a block in all caches.
        kv_layout: name and version of the layout.
        is_replayable: whether the backend's class declares it.
        pads: whether it runs steps with padding, which are recorded.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        source: Source,
        specs: Sequence[KVSpec],
        groups: LayerGroups,
        rotate: Callable[[torch.Tensor, torch.Tensor], None],
        *,
        sees_ahead: bool = False,
    ) -> None:
        """Ask the backend for the sizes of blocks.

        Args:
            backend: the backend of all layers.
            source: source of the backend.
            specs: one per attention layer.
            groups: groups of the layers.
            rotate: rotates heads for a backend that does not, as `Ops.rotate`.
            sees_ahead: whether tokens of the model see later ones of a step.

        Raises:
            ModelError: the backend cannot compute such layers.
            PluginFaultError: the sizes are wrong, or differ in layers that are to share a cache.
        """
        capped = [index for index, spec in enumerate(specs) if spec.softcap is not None]
        if capped and not backend.softcaps:
            raise ModelError(
                f"attention.use: {source} has no soft cap of attention scores (its class says "
                f"softcaps = False), and layer {capped[0]} has the soft cap "
                f"{specs[capped[0]].softcap:g}; choose another attention backend for this model"
            )
        if sees_ahead and not backend.sees_ahead:
            raise ModelError(
                f"attention.use: {source} lets no token see later ones (its class says sees_ahead "
                f"= False), as those of an image do in this model; choose another attention "
                f"backend for this model"
            )
        self.backend = backend
        self.source = source
        self._rotate = None if _rotates(backend) else rotate
        self.specs = specs
        self.groups = groups.groups
        self.group_of, self._cache_of = groups.group_of, groups.cache_of
        self.kv_layout = (backend.kv_layout, backend.kv_layout_version)
        sizes = [backend.bytes_per_block(spec) for spec in specs]
        for size in sizes:
            checked(size, AttentionBackend, "bytes_per_block()", source)
        self._sizes: list[int] = sizes
        self._layer_of = {cache: layer for layer, cache in enumerate(self._cache_of)}  # one of it
        for layer, cache in enumerate(self._cache_of):
            other = self._layer_of[cache]
            if self._sizes[layer] != self._sizes[other]:
                raise PluginFaultError(
                    f"{source}: its bytes_per_block() gave {self._sizes[layer]} for {specs[layer]} "
                    f"and {self._sizes[other]} for {specs[other]}, expected the same, since they "
                    f"differ in the window alone"
                )
        self.bytes_per_block = sum(self._sizes[layer] for layer in self._layer_of.values())
        self.is_replayable = is_replayable(backend)
        self.pads = backend.pads

    def plans(self, steps: Sequence[AttentionStep]) -> list[Any]:
        """Return the plan of each layer.

        Args:
            steps: one per group.
        """
        plans = [self.backend.plan(step) for step in steps]
        return [plans[group] for group in self.group_of]

    def allocate(self, num_blocks: int) -> list[Any]:
        """Return the cache of each layer, which layers of several groups share.

        Raises:
            PluginFaultError: a cache takes more memory than its blocks should.
        """
        caches = {}
        for index, layer in self._layer_of.items():
            spec, size = self.specs[layer], self._sizes[layer]
            cache = self.backend.allocate(spec, num_blocks)
            if (taken := _num_bytes(cache)) > size * num_blocks + _CACHE_EXTRA:
                raise PluginFaultError(
                    f"{self.source}: its allocate() took {taken} bytes for {num_blocks} blocks, "
                    f"expected {size * num_blocks}, since bytes_per_block() gave {size}"
                )
            caches[index] = cache
        return [caches[index] for index in self._cache_of]

    @property
    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes of a block of each layer."""
        return tuple(self._sizes)

    def block_views(self, caches: Sequence[Any], user: str) -> list[list[torch.Tensor]]:
        """Return the views of each layer's cache, as bytes by block.

        Args:
            caches: caches of all layers.
            user: the setting that needs them, for messages.

        Raises:
            ConfigError: the backend has none.
            PluginFaultError: they are not what they should be.
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
            caches: caches of the layers.
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
        """Return the attention of a layer, [tokens, num_heads, head_size].

        Args:
            layer: index.
            cache: cache of the layer.
            plan: plan of the step.
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
        if not (
            isinstance(out, torch.Tensor)
            and out.shape == q.shape
            and out.dtype == q.dtype
            and out.device == q.device
        ):
            expected = f"a {q.dtype} tensor {list(q.shape)} on {q.device}"
            raise wrong_result(self.source, method, out, expected)
        return out


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
    """Return the bytes of the tensors of a cache: a tensor, or a list, tuple or dict of such."""
    if isinstance(cache, torch.Tensor):
        return cache.numel() * cache.element_size()
    if isinstance(cache, Mapping):
        cache = list(cache.values())
    return sum(map(_num_bytes, cache)) if isinstance(cache, list | tuple) else 0
