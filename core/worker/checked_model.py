"""Models and weight loaders whose results are checked, so that a wrong one names its plugin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from hardpoint.plugins import ForwardBatch, KVSpec, Model, WeightLoader
from hardpoint.plugins.errors import PluginFaultError
from hardpoint.plugins.manifest import Source

_SHOWN = 120


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


def _fault(source: Source, method: str, got: Any, expected: str) -> PluginFaultError:
    if isinstance(got, torch.Tensor):
        text = f"a {got.dtype} tensor {list(got.shape)} ({got.layout}, on {got.device})"
    else:
        text = repr(got)[:_SHOWN]
    return PluginFaultError(f"{source}: its {method}() gave {text}, expected {expected}")
