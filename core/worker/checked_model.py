"""Models, attention backends and weight loaders whose results are checked.

A wrong one names its plugin.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hardpoint.plugins import AttentionBackend, ForwardBatch, KVSpec, Model, WeightLoader
from hardpoint.plugins.errors import PluginFaultError
from hardpoint.plugins.manifest import Source
from hardpoint.registry.tensor_checks import shown

_CACHE_EXTRA = 1 << 20  # bytes that a layer may have besides its blocks


class CheckedModel:
    """A model whose shapes, KV specs, hidden states and logits are checked.

    Attributes:
        shapes: of the weights, by Hugging Face name.
        specs: one per attention layer.
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
        if not isinstance(shapes, Mapping) or not all(map(_is_shape, shapes.values())):
            raise self._wrong("weight_shapes", shapes, "a shape per name")
        if not isinstance(specs, list) or not all(map(_is_spec, specs)):
            raise self._wrong("kv_specs", specs, "a list of KVSpec with numbers >= 1")
        self.shapes: dict[str, tuple[int, ...]] = dict(shapes)
        self.specs: list[KVSpec] = specs

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return hidden states [tokens, hidden].

        Raises:
            PluginFaultError: the model returned something else.
        """
        tokens = len(batch.token_ids)
        hidden = self._model.forward(batch)
        if not isinstance(hidden, torch.Tensor) or hidden.shape[:1] != (tokens,):
            raise self._wrong("forward", hidden, f"hidden states [{tokens}, hidden]")
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
        ):
            raise self._wrong("compute_logits", logits, f"floating logits {list(expected)}")
        return logits

    def _wrong(self, method: str, got: Any, expected: str) -> PluginFaultError:
        return _fault(self._source, method, got, expected)


class CheckedAttention:
    """An attention backend whose sizes, caches and outputs are checked.

    Attributes:
        bytes_per_block: of all layers.
    """

    def __init__(self, backend: AttentionBackend, source: Source, specs: Sequence[KVSpec]) -> None:
        """Ask the backend for the sizes of blocks.

        Raises:
            PluginFaultError: they are none.
        """
        self._backend = backend
        self._source = source
        self._specs = specs
        self._sizes = [backend.bytes_per_block(spec) for spec in specs]
        for size in self._sizes:
            if type(size) is not int or size < 1:
                raise _fault(source, "bytes_per_block", size, "an int >= 1")
        self.bytes_per_block = sum(self._sizes)
        self.plan = backend.plan

    def allocate(self, num_blocks: int) -> list[Any]:
        """Return the cache of each layer.

        Raises:
            PluginFaultError: a cache takes more memory than its blocks should.
        """
        caches = []
        for spec, size in zip(self._specs, self._sizes, strict=True):
            cache = self._backend.allocate(spec, num_blocks)
            if (taken := _num_bytes(cache)) > size * num_blocks + _CACHE_EXTRA:
                raise PluginFaultError(
                    f"{self._source}: its allocate() took {taken} bytes for {num_blocks} blocks, "
                    f"expected {size * num_blocks}, since bytes_per_block() gave {size}"
                )
            caches.append(cache)
        return caches

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
        out = self._backend.attend(self._specs[layer], cache, plan, *qkv)
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
    loader: WeightLoader, source: Source, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a loader's weights.

    Raises:
        PluginFaultError: it yielded something else, or a weight twice.
    """
    weights = loader.weights(dict(shapes))
    if not isinstance(weights, Iterable):
        raise _fault(source, "weights", weights, "weights one after the other")
    seen: set[str] = set()
    for item in weights:
        if not _is_weight(item):
            raise _fault(source, "weights", item, "a name and a dense CPU tensor")
        name, tensor = item
        if name in seen:
            raise PluginFaultError(f"{source}: its weights() gave {name!r} twice")
        seen.add(name)
        yield name, tensor


def _is_weight(item: Any) -> bool:
    if not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[0], str):
        return False
    tensor = item[1]
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
    )


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, tuple | list) and all(isinstance(n, int) and n >= 0 for n in shape)


def _is_spec(spec: Any) -> bool:
    numbers = ("num_heads", "num_kv_heads", "head_size")
    return isinstance(spec, KVSpec) and all(getattr(spec, name) >= 1 for name in numbers)


def _num_bytes(cache: Any) -> int:
    """Return the bytes of the tensors of a cache: a tensor, or a list, tuple or dict of such."""
    if isinstance(cache, torch.Tensor):
        return cache.numel() * cache.element_size()
    if isinstance(cache, Mapping):
        cache = list(cache.values())
    return sum(map(_num_bytes, cache)) if isinstance(cache, list | tuple) else 0


def _fault(source: Source, method: str, got: Any, expected: str) -> PluginFaultError:
    return PluginFaultError(f"{source}: its {method}() gave {shown(got)}, expected {expected}")
