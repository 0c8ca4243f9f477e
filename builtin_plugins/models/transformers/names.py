"""Names of tensors in checkpoints, and how transformers converts these to its own."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    apply_converters,
    apply_renamings,
    rename_source_key,
    revert_weight_conversion,
)

from hardpoint.plugins import ModelError

Shape = tuple[int, ...]


@dataclass
class Conversion:
    """Tensors of a checkpoint of which one tensor of the model is made.

    Attributes:
        sources: their shapes, by name.
        arrived: those that were read.
    """

    sources: dict[str, Shape]
    arrived: dict[str, torch.Tensor] = field(default_factory=dict)


class StoredNames:
    """The tensors that checkpoints of a model have, as transformers writes them.

    Attributes:
        plain: names in checkpoints of tensors that are stored as they are, by the model's names.
        converted: what the others are made of, by the model's names.
    """

    def __init__(self, model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> None:
        """Ask transformers for the names of tensors, which are on the device "meta".

        Raises:
            ModelError: it does not convert back what it has written.
        """
        self._model = model
        transforms = get_model_conversion_mapping(model, add_legacy=False)
        self._transforms = [t for t in transforms if not isinstance(t, PrefixChange)]
        self._tensors = tensors
        self.plain: dict[str, str] = {}
        self.converted: dict[str, Conversion] = {}
        backwards = [transform.reverse_transform() for transform in reversed(self._transforms)]
        renamings = [one for one in backwards if isinstance(one, WeightRenaming)]
        converters = [one for one in backwards if isinstance(one, WeightConverter)]
        for name, tensor in tensors.items():
            if apply_converters(name, converters)[1] is None:
                self.plain[name] = apply_renamings(name, renamings)
            else:
                self.converted[name] = self._conversion(name, tensor)

    def _conversion(self, name: str, tensor: torch.Tensor) -> Conversion:
        stored = revert_weight_conversion(self._model, {name: tensor})
        found = Conversion({source: tuple(part.shape) for source, part in stored.items()})
        if any(self._target(source)[0] != name for source in found.sources):
            raise ModelError(
                f"model: {type(self._model).__name__}: transformers makes {name} of several "
                f"tensors, {', '.join(list(found.sources)[:3])}, in a way that cannot be reversed"
            )
        return found

    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of the tensors of converted ones, by their names in checkpoints."""
        return {n: s for found in self.converted.values() for n, s in found.sources.items()}

    def convert(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Take a tensor of a checkpoint; yield one of the model, by its name, once it is whole."""
        target, _ = self._target(name)
        found = self.converted[target]
        found.arrived[name] = tensor
        if len(found.arrived) < len(found.sources):
            return
        arrived, found.arrived = found.arrived, {}
        _, pattern = self._target(name)
        assert pattern is not None, "a renaming is no conversion"
        converter = deepcopy(self._by_pattern[pattern])
        for source in found.sources:
            _, pattern = self._target(source)
            converter.add_tensor(target, source, pattern or source, arrived[source])
        made = converter.convert(target, model=self._model, config=self._model.config)
        for result in made.values():
            yield target, result[0] if isinstance(result, list) else result

    def _target(self, name: str) -> tuple[str, str | None]:
        renamings = [one for one in self._transforms if isinstance(one, WeightRenaming)]
        found: tuple[str, str | None] = rename_source_key(
            name, renamings, self._converters, self._model.base_model_prefix, dict(self._tensors)
        )
        return found

    @functools.cached_property
    def _converters(self) -> list[WeightConverter]:
        return [one for one in self._transforms if isinstance(one, WeightConverter)]

    @functools.cached_property
    def _by_pattern(self) -> dict[str, WeightTransform]:
        return {pattern: one for one in self._converters for pattern in one.source_patterns}
