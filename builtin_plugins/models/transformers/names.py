"""Names of tensors in checkpoints, and how transformers converts these to its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
    rename_source_key,
    revert_weight_conversion,
)

from hardpoint.plugins import ModelError
from hardpoint.plugins.parallel import Cut

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorLocation:
    """Location of a checkpoint's tensor in the combined tensor.

    Attributes:
        index: in the first dimension, where they are stacked; None where they are not.
        dim: dimension of the made one in which they follow each other.
        start, stop: its part of that.
    """

    index: int | None
    dim: int
    start: int
    stop: int

    def within(self, part: Cut) -> tuple[TensorLocation, Cut]:
        """Return the place in a part of the made one, and which part of the tensor is there."""
        dim = part.dim - (self.index is not None)
        if part.dim != self.dim:
            return self, Cut(dim, part.start, part.stop, part.more)
        bounds = [(span.start, span.stop) for span in part.parts]
        inside = [(max(a - self.start, 0), min(b, self.stop) - self.start) for a, b in bounds]
        spans = [(a, b) for a, b in inside if a < b] or [(0, 0)]
        start = sum(max(min(b, self.start) - a, 0) for a, b in bounds)
        stop = start + sum(b - a for a, b in spans)
        return TensorLocation(self.index, self.dim, start, stop), Cut(
            dim, *spans[0], tuple(spans[1:])
        )

    def put(self, tensor: torch.Tensor, made: torch.Tensor) -> None:
        """Write the tensor to its place."""
        dim = self.dim if self.index is None else self.dim - 1
        into = made if self.index is None else made[self.index]
        into.narrow(dim, self.start, self.stop - self.start).copy_(tensor)


@dataclass
class Conversion:
    """Tensors of a checkpoint that are converted to one tensor of the model.

    Attributes:
        sources: their shapes, by name.
        places: where they are in it, by name; empty if it is made by other operations.
        cuts: the parts of them that this rank has.
        arrived: tensors read; with places, nothing is kept of them.
        made: the tensor that the others are written to.
    """

    sources: dict[str, Shape]
    places: dict[str, TensorLocation] = field(default_factory=dict)
    cuts: dict[str, Cut] = field(default_factory=dict)
    arrived: dict[str, torch.Tensor | None] = field(default_factory=dict)
    made: torch.Tensor | None = None


class StoredNames:
    """The tensors that checkpoints of a model have, as transformers writes them.

    Attributes:
        plain: names in checkpoints of tensors that are stored as they are, by the model's names.
        converted: sources of the other tensors, by the model's names.
    """

    def __init__(self, model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> None:
        """Ask transformers for the names of tensors, which are on the device "meta".

        Raises:
            ModelError: it makes several tensors of one of a checkpoint.
        """
        self._model = model
        transforms = get_model_conversion_mapping(model, add_legacy=False)
        self._transforms = [t for t in transforms if not isinstance(t, PrefixChange)]
        self._tensors = tensors
        self.plain: dict[str, str] = {}
        self.converted: dict[str, Conversion] = {}
        backwards = [transform.reverse_transform() for transform in reversed(self._transforms)]
        renamings = [transform for transform in backwards if isinstance(transform, WeightRenaming)]
        converters = [
            transform for transform in backwards if isinstance(transform, WeightConverter)
        ]
        for name, tensor in tensors.items():
            if apply_converters(name, converters)[1] is None:
                self.plain[name] = apply_renamings(name, renamings)
            else:
                self.converted[name] = self._conversion(name, tensor)

    def _conversion(self, name: str, tensor: torch.Tensor) -> Conversion:
        stored = revert_weight_conversion(self._model, {name: tensor})
        conversion = Conversion({source: tuple(part.shape) for source, part in stored.items()})
        if any(self._target(source)[0] != name for source in conversion.sources):
            raise ModelError(
                f"model: {type(self._model).__name__}: transformers cuts a tensor of checkpoints, "
                f"{next(iter(conversion.sources))}, into several, {name} among them, which models "
                "through transformers cannot"
            )
        conversion.places = self._places(conversion.sources)
        return conversion

    def _places(self, sources: Mapping[str, Shape]) -> dict[str, TensorLocation]:
        patterns = {name: self._target(name)[1] for name in sources}
        converter = self._by_pattern.get(next(iter(patterns.values())) or "")
        if converter is None or not all(sources.values()):
            return {}
        kinds = [
            (type(operation), int(getattr(operation, "dim", -1)))
            for operation in converter.operations
        ]
        is_stacked = kinds[0] == (MergeModulelist, 0)
        joined = kinds[is_stacked:]
        if len(joined) > 1 or any(
            kind is not Concatenate or dim < is_stacked for kind, dim in joined
        ):
            return {}
        dim = joined[0][1] if joined else int(is_stacked)
        places, start = dict[str, TensorLocation](), 0
        for pattern in converter.source_patterns:
            of_pattern = [name for name in sources if patterns[name] == pattern]
            for index, name in enumerate(of_pattern):
                stop = start + sources[name][dim - is_stacked]
                places[name] = TensorLocation(index if is_stacked else None, dim, start, stop)
                start = start if is_stacked and index < len(of_pattern) - 1 else stop
        return places

    def divide(self, name: str, part: Cut) -> None:
        """Take only the part that this rank has of a converted tensor, by the model's name."""
        conversion = self.converted[name]
        for source, place in conversion.places.items():
            conversion.places[source], conversion.cuts[source] = place.within(part)

    def cuts(self) -> dict[str, Cut]:
        """Return the parts of the tensors of converted ones, by their names in checkpoints."""
        return {n: c for conversion in self.converted.values() for n, c in conversion.cuts.items()}

    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of the tensors of converted ones, by their names in checkpoints."""
        return {
            n: s for conversion in self.converted.values() for n, s in conversion.sources.items()
        }

    def convert(
        self, name: str, tensor: torch.Tensor, empty: Callable[[str], torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Take a tensor of a checkpoint; yield one of the model, by its name, once it is whole.

        Stacked or joined tensors are copied to their place at once, so that none waits for
        the others. The result is this rank's part then, from `empty`.

        Args:
            name: name of the tensor.
            tensor: the tensor.
            empty: returns one of the model without content, by its name.
        """
        target, _ = self._target(name)
        conversion = self.converted[target]
        if (place := conversion.places.get(name)) is not None:
            if conversion.made is None:
                conversion.made = empty(target)
            place.put(tensor, conversion.made)
        conversion.arrived[name] = tensor if place is None else None
        if len(conversion.arrived) < len(conversion.sources):
            return
        arrived, conversion.arrived = conversion.arrived, {}
        made, conversion.made = conversion.made, None
        yield target, self._converted(target, arrived) if made is None else made

    def _converted(self, target: str, arrived: Mapping[str, Any]) -> torch.Tensor:
        names = self.converted[target].sources
        patterns = {name: self._target(name)[1] for name in names}
        converter = deepcopy(self._by_pattern[str(next(iter(patterns.values())))])
        for name, pattern in patterns.items():
            converter.add_tensor(target, name, pattern or name, arrived[name])
        made = converter.convert(target, model=self._model, config=self._model.config)
        (result,) = made.values()
        whole: torch.Tensor = result[0] if isinstance(result, list) else result
        return whole

    def _target(self, name: str) -> tuple[str, str | None]:
        renamings = [
            transform for transform in self._transforms if isinstance(transform, WeightRenaming)
        ]
        renamed: tuple[str, str | None] = rename_source_key(
            name, renamings, self._converters, self._model.base_model_prefix, dict(self._tensors)
        )
        return renamed

    @functools.cached_property
    def _converters(self) -> list[WeightConverter]:
        return [
            transform for transform in self._transforms if isinstance(transform, WeightConverter)
        ]

    @functools.cached_property
    def _by_pattern(self) -> dict[str, WeightConverter]:
        return {
            pattern: converter
            for converter in self._converters
            for pattern in converter.source_patterns
        }
