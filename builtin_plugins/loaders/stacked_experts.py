"""Experts of safetensors checkpoints with stacked matrices, one tensor per layer.

gpt-oss has `X.experts.gate_up_proj` [experts, hidden, 2 * width], the columns of gate and up in
turn, and `X.experts.down_proj` [experts, width, hidden]; with `_bias`, [experts, rows]. In MXFP4
they are `_blocks` [experts, rows, columns / 32, 16] and `_scales` [experts, rows, columns / 32].
Qwen3.5 has `X.experts.gate_up_proj` [experts, 2 * width, hidden], the rows of gate before rows of
up, and `X.experts.down_proj` [experts, hidden, width]. Qwen3-VL has these with the last two
dimensions swapped, unless transformers 5 has written it.
Models ask for `X.experts.0.gate_proj.weight` and so on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hardpoint.plugins import ModelError, WeightFormat
from hardpoint.plugins.parallel import Cut, needed_part
from hardpoint.plugins.quantization import QuantizedWeight

from .files import refusing_damage
from .index_file import former_name


class StackedLayout(NamedTuple):
    """Layout of stacked tensors.

    Attributes:
        alternates: whether the rows of gate and up come in turn.
        is_transposed: whether rows are the last dimension; None if their sizes show it.
    """

    alternates: bool = False
    is_transposed: bool | None = False


ARCHITECTURES = {
    "GptOssForCausalLM": StackedLayout(alternates=True, is_transposed=True),
    "Qwen3VLMoeForConditionalGeneration": StackedLayout(is_transposed=None),
    "Qwen3_5MoeForCausalLM": StackedLayout(),
    "Qwen3_5MoeForConditionalGeneration": StackedLayout(),
}
"""Architectures with stacked experts in checkpoints, and their forms."""
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_STACKED = {"gate": ("gate_up_proj", 0), "up": ("gate_up_proj", 1), "down": ("down_proj", None)}
"""The stacked tensor of a matrix, and which of the two it is there."""
_CODES = ("blocks", "scales")

Open = Callable[[Path], Any]


@dataclass(frozen=True)
class ExpertLocation:
    """Where an expert's tensor is.

    Attributes:
        tensors: names of the stacked tensors that have it: one, or blocks and scales.
        expert: index in their first dimension.
        half: which of two matrices it is; None if there is one.
        alternates: whether the rows of the two come in turn; else one after the other.
        is_transposed: whether its rows are the last dimension there; None if their sizes show it.
    """

    tensors: tuple[str, ...]
    expert: int
    half: int | None
    alternates: bool
    is_transposed: bool | None

    @property
    def has_codes(self) -> bool:
        """Whether it is quantized."""
        return len(self.tensors) > 1

    def of(self, stacked: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return the matrix from the expert's part of a stacked tensor.

        Args:
            stacked: the part of the expert.
            shape: shape of the weight.

        Raises:
            ModelError: its sizes do not show whether it is transposed.
        """
        is_transposed = self.is_transposed
        if is_transposed is None:
            if stacked.shape[0] == stacked.shape[1]:
                raise ModelError(
                    f"{self.tensors[0]}: expected experts with other sizes than {shape[1]} rows "
                    f"and columns, which do not show whether they are transposed"
                )
            is_transposed = stacked.shape[1] != shape[1]
        rows = stacked.T if is_transposed else stacked
        if self.half is None:
            return rows
        return rows[self.half :: 2] if self.alternates else rows.chunk(2)[self.half]


def stacked_places(
    names: Iterable[str], present: Container[str], form: StackedLayout
) -> dict[str, ExpertLocation]:
    """Return the places of the stacked weights.

    Args:
        names: names of weights.
        present: names of the tensors in the files.
        form: form of the stacked tensors.
    """
    places = {name: _place(name, present, form) for name in names if name not in present}
    return {name: place for name, place in places.items() if place is not None}


def _place(name: str, present: Container[str], form: StackedLayout) -> ExpertLocation | None:
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    module, expert, part, kind = match.groups()
    stacked, half = _STACKED[part]
    stem = f"{module}.{stacked}"
    if stem not in present:
        stem = former_name(stem, present) or stem
    for tensors, is_transposed in (
        ((f"{stem}_bias",), False),
        (tuple(f"{stem}_{codes}" for codes in _CODES), False),
        ((stem,), form.is_transposed),
    ):
        is_bias = tensors[0].endswith("_bias")
        if is_bias == (kind == "bias") and all(tensor in present for tensor in tensors):
            return ExpertLocation(tensors, int(expert), half, form.alternates, is_transposed)
    return None


class StackedExperts:
    """The experts that shards have stacked."""

    def __init__(
        self, shards: Sequence[Path], open_shard: Open, scheme: str | None, form: StackedLayout
    ) -> None:
        """Read the names of the tensors.

        Args:
            shards: paths of the files.
            scheme: scheme of the checkpoint's matrices; None if they are not quantized.
            form: form of the stacked tensors.
        """
        self._open, self._scheme, self._form = open_shard, scheme, form
        self._shard_of: dict[str, Path] = {}
        for shard in shards:
            with open_shard(shard) as file:
                self._shard_of |= dict.fromkeys(file.keys(), shard)

    def places(self, names: Iterable[str]) -> dict[str, ExpertLocation]:
        """Return the places of the stacked weights."""
        return stacked_places(names, self._shard_of, self._form)

    def read(
        self,
        places: Mapping[str, ExpertLocation],
        shapes: Mapping[str, Sequence[int]],
        cuts: Mapping[str, Cut],
    ) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
        """Yield weights, cut; quantized weights are whole.

        The tensors of an expert are read once, for all its weights.

        Raises:
            ModelError: a tensor is damaged, or another one than the model's.
        """
        together: dict[tuple[tuple[str, ...], int], dict[str, ExpertLocation]] = {}
        for name, place in places.items():
            together.setdefault((place.tensors, place.expert), {})[name] = place
        for (tensors, expert), owners in together.items():
            parts = [self._of_expert(tensor, expert) for tensor in tensors]
            for name, place in owners.items():
                expert_parts = [place.of(part, shapes[name]) for part in parts]
                if len(expert_parts) > 1:
                    yield name, self._stored(name, shapes[name], expert_parts)
                    continue
                cut = needed_part(name, expert_parts[0].shape, shapes, cuts)
                yield (
                    name,
                    (expert_parts[0] if cut is None else cut.of(expert_parts[0])).contiguous(),
                )

    def formats(
        self,
        places: Mapping[str, ExpertLocation],
        shapes: Mapping[str, Sequence[int]],
        outline: Callable[[Any, str, Path], torch.Tensor],
    ) -> dict[str, WeightFormat]:
        """Return how weights are stored.

        Args:
            places: places of the weights.
            shapes: shapes of them.
            outline: returns a tensor of an open shard without content.
        """
        outlines: dict[str, torch.Tensor] = {}
        formats: dict[str, WeightFormat] = {}
        for name, place in places.items():
            for tensor in place.tensors:
                if tensor not in outlines:
                    with self._open(self._shard_of[tensor]) as file:
                        outlines[tensor] = outline(file, tensor, self._shard_of[tensor])
            for tensor in place.tensors:
                self._check(tensor, outlines[tensor].shape, place.expert)
            parts = [outlines[tensor][place.expert] for tensor in place.tensors]
            expert_parts = [place.of(part, shapes[name]) for part in parts]
            size = sum(part.nbytes for part in expert_parts)
            if len(expert_parts) > 1:
                stored = self._stored(name, shapes[name], expert_parts)
                formats[name] = WeightFormat(stored.scheme, size, True, stored)
            else:
                formats[name] = WeightFormat(
                    str(expert_parts[0].dtype).removeprefix("torch."), size
                )
        return formats

    def _of_expert(self, tensor: str, expert: int) -> torch.Tensor:
        shard = self._shard_of[tensor]
        with self._open(shard) as file, refusing_damage(f"{shard.parent.name}/{shard.name}"):
            stacked = file.get_slice(tensor)
            self._check(tensor, stacked.get_shape(), expert)
            part: torch.Tensor = stacked[expert]
        return part

    def _check(self, tensor: str, shape: Sequence[int], expert: int) -> None:
        """Check the shape of a stacked tensor.

        Raises:
            ModelError: it has another number of dimensions, or too few experts.
        """
        dimensions = {"bias": 2, "blocks": 4}.get(tensor.rpartition("_")[2], 3)
        if len(shape) != dimensions or shape[0] <= expert:
            shard = self._shard_of[tensor]
            raise ModelError(
                f"{shard.parent.name}/{shard.name}: {tensor}: expected {dimensions} dimensions, "
                f"the first of them at least {expert + 1} experts, got {list(shape)}"
            )

    def _stored(
        self, name: str, shape: Sequence[int], parts: Sequence[torch.Tensor]
    ) -> QuantizedWeight:
        if self._scheme is None:
            raise ModelError(
                f"config.json: quantization_config: {name} has codes of few bits; expected the "
                f"scheme that they are of, such as mxfp4, got none"
            )
        rows, columns = shape
        return QuantizedWeight(
            self._scheme, (rows, columns), dict(zip(_CODES, parts, strict=True)), name
        )
