"""How a rank holds its weights: in which scheme or dtype, and in how many bytes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch

from hardpoint.errors import PluginFaultError, shown
from hardpoint.host.boundary.checked_model import CheckedModel, is_quantized_weight
from hardpoint.host.boundary.guard import checked
from hardpoint.host.registry.blame import faults_as
from hardpoint.host.system.memory import HeldWeight
from hardpoint.plugins import HardpointError, Model, WeightLoader
from hardpoint.plugins.component import Source
from hardpoint.plugins.model.loader import WeightFormat

from .quantized_weights import QuantizedWeights

_READ = 4  # bytes of a number as it is read, before it is packed: float32
_DEQUANTIZED = 9  # the same, with its code, and factors of its groups for each column
_MADE = 9  # of one that is quantised while it is loaded: its numbers, and its codes
_EXPERTS = ".experts."  # in Hugging Face names
_HEAD = "lm_head."
_CODES = 3  # of a matrix that stays in codes: those of the whole product, a byte each, and a copy


def hold_weights(
    model: Model,
    checked: CheckedModel,
    loader: WeightLoader,
    source: Source,
    quantized: QuantizedWeights,
) -> dict[str, HeldWeight]:
    """Return how each weight that a rank needs will be held, by Hugging Face name.

    Args:
        model: the rank's share.
        checked: the same, checked.
        loader: loader of the weights.
        source: source of the loader.
        quantized: what is to give the model its matrices of few bits.

    Raises:
        ModelError: the files store a weight in a way that cannot be read.
        ConfigError: they lack the scheme that the configuration requires.
        PluginFaultError: the loader's `formats` raised something else, or gave something else.
    """
    formats = _formats(loader, source, quantized.whole_shapes)
    quantized.check_stored(formats)
    vocab, size = model.context.config.vocab_size, model.context.dtype.itemsize
    held = {}
    for name, shape in checked.needed.items():
        stored, count = formats.get(name), math.prod(shape)
        of = stored.name if stored is not None and stored.is_quantized else None
        scheme = wanted = quantized.scheme_of(name, of)
        is_vocabulary = checked.shapes[name][:1] == (vocab,)
        num_bytes = None
        if scheme is not None and _is_multiplied(model, quantized, scheme, name, is_vocabulary):
            num_bytes = quantized.stored_bytes(scheme, shape)
        if num_bytes is None:
            scheme, loading = None, _READ if of is wanted is None else _DEQUANTIZED
        else:
            loading = _CODES if scheme == of else _MADE
        held[name] = HeldWeight(
            stored,
            scheme,
            tuple(shape),
            count * size if num_bytes is None else num_bytes,
            count * loading,
            is_vocabulary,
        )
    return held | _copy_of_table(model, held)


def _is_multiplied(
    model: Model, quantized: QuantizedWeights, scheme: str, name: str, is_vocabulary: bool
) -> bool:
    if not quantized.has_own_linear(scheme):
        return bool(model.context.ops.code_bits)
    is_table = is_vocabulary and not name.startswith(_HEAD)
    return not is_table and _EXPERTS not in name


def _copy_of_table(model: Model, held: Mapping[str, HeldWeight]) -> dict[str, HeldWeight]:
    context, parallel = model.context, model.context.parallel
    tables = [(name, weight) for name, weight in held.items() if weight.is_vocabulary]
    if len(tables) != 1 or not (parallel.is_first and parallel.is_last):
        return {}
    ((name, table),) = tables
    if table.scheme is not None:
        return {}
    row = torch.zeros(1, table.shape[1], device=context.device, dtype=context.dtype)
    if context.ops.pack(row) is row:
        return {}
    return {name: dataclasses.replace(table, num_bytes=2 * table.num_bytes)}


def _formats(
    loader: WeightLoader, source: Source, shapes: Mapping[str, tuple[int, ...]]
) -> Mapping[str, WeightFormat]:
    """Return how the files store weights, as the loader reports it.

    Raises:
        ModelError: a weight is stored in a way that cannot be read.
        PluginFaultError: the loader raised something else, or gave something else.
    """
    with faults_as(PluginFaultError, f"{source}: its formats()", passing=(HardpointError,)):
        formats = loader.formats(dict(shapes))
    checked(formats, WeightLoader, "formats()", source)
    for name, found in formats.items():
        if not _is_format(found):
            raise PluginFaultError(
                f"{source}: its formats() gave {shown(found)} for {shown(name)}, expected a "
                f"WeightFormat with a name, a number of bytes, and what is stored, if at all, as a "
                f"QuantizedWeight"
            )
    return formats


def _is_format(found: object) -> bool:
    return (
        isinstance(found, WeightFormat)
        and isinstance(found.name, str)
        and isinstance(found.num_bytes, int)
        and (found.stored is None or is_quantized_weight(found.stored))
    )
