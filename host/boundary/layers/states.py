"""States of a model's layers: one in each block of their group, checked as the model changes them.

A block of the group has the state after the last token that was computed of the block's tokens. A
step continues from the block of the token before it, and writes the state at its end and where the
block of its last token begins: the tokens of a sequence are one part of the step, or two. Parts
that continue from a state that another part writes come after it. So a request may find the block
of another one in the very step that fills it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hardpoint.errors import ConfigError, PluginFaultError, shown
from hardpoint.plugins import AttentionStep, EngineConfig, TensorSpec
from hardpoint.plugins.component import Source
from hardpoint.plugins.model import Advance, Recur

_IntArray = np.ndarray[Any, np.dtype[np.int64]]
_NO_BLOCK = -1


@dataclass(frozen=True)
class _Part:
    """Tokens of one sequence that are computed at once.

    Attributes:
        begin, end: its tokens, among the tokens of the step.
        source: block of the state before it; -1 at the beginning of a sequence.
        target: block of the state after it.
    """

    begin: int
    end: int
    source: int
    target: int


@dataclass(frozen=True, eq=False)
class _Wave:
    """Parts that are computed together.

    Attributes:
        starts: int [parts + 1]; first token of each part, and the number of all their tokens.
        tokens: int64 [tokens]; indices in the tokens of the step. None: it is all, in order.
        sources: int64 [parts]; indices of the states before.
        begins: int64; indices of the parts that begin a sequence.
        targets: int64 [parts]; indices of the states after.
    """

    starts: _IntArray
    tokens: torch.Tensor | None
    sources: torch.Tensor
    begins: torch.Tensor
    targets: torch.Tensor


class LayerStates:
    """The states of the layers of a rank, which share the blocks of the last group.

    Attributes:
        bytes_per_state: bytes of a state, all layers together.
    """

    def __init__(
        self, specs: Sequence[tuple[TensorSpec, ...]], source: Source, device: torch.device
    ) -> None:
        """`specs`: tensors of each layer; there may be no layer of this rank."""
        self._specs, self._source, self._device = specs, source, device
        self._first_block = 0
        self.bytes_per_state = sum(_num_bytes(spec) for layer in specs for spec in layer)

    def allocate(self, num_states: int, first_block: int = 0) -> list[list[torch.Tensor]]:
        """Return the states of each layer, tensors [num_states, ...], of blocks with adjacent ids.

        Args:
            first_block: id of the first one.
        """
        self._first_block = first_block
        return [
            [spec_tensor(spec, num_states, self._device) for spec in layer] for layer in self._specs
        ]

    def of_step(self, caches: Sequence[Any], steps: Sequence[AttentionStep]) -> Recur:
        """Return the recurrence of a step.

        Args:
            caches: caches of the attention layers, then the result of `allocate`.
            steps: one per group; the last one is of states.
        """
        states = caches[len(caches) - len(self._specs) :]
        parts, first = _parts(steps[-1]), self._first_block
        waves = [_wave(wave_parts, steps[-1], first, self._device) for wave_parts in _waves(parts)]

        def recur(layer: int, advance: Advance, *inputs: torch.Tensor) -> torch.Tensor:
            run = functools.partial(self._run, layer, states[layer], advance)
            if len(waves) == 1 and waves[0].tokens is None:
                return run(waves[0], inputs)
            output: torch.Tensor | None = None
            for wave in waves:
                outputs = run(wave, [x[wave.tokens] for x in inputs])
                if output is None:
                    output = outputs.new_empty((len(inputs[0]), *outputs.shape[1:]))
                output[wave.tokens] = outputs
            assert output is not None, "a step has tokens"
            return output

        return recur

    def _run(
        self,
        layer: int,
        caches: Sequence[torch.Tensor],
        advance: Advance,
        wave: _Wave,
        inputs: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        before = [cache[wave.sources] for cache in caches]
        for spec, state in zip(self._specs[layer], before, strict=True):
            state[wave.begins] = spec.fill
        output, after = checked_advance(
            self._source, layer, self._specs[layer], advance, before, wave.starts, inputs
        )
        for cache, state in zip(caches, after, strict=True):
            cache[wave.targets] = state
        return output


def check_states_fit(config: EngineConfig, num_draft_tokens: int, model: Source) -> None:
    """Check that nothing is configured that needs more states than are kept.

    Args:
        model: source of a model that has layers with states.

    Raises:
        ConfigError: there are drafts, or a KV connector.
    """
    keeps = f"{model} keeps states in some layers"
    if num_draft_tokens:
        raise ConfigError(
            f"speculation: {keeps}, which cannot go back when drafts are rejected; expected no "
            f"speculation for this model"
        )
    if config.kv_connector.use is not None:
        raise ConfigError(
            f"kv_connector.use: {config.kv_connector.use!r} moves blocks, and {keeps}, "
            f"which most blocks lack; expected no connector for this model"
        )


class TrialCalls:
    """The calls of a function for the layers of a model in a trial step: one of each.

    Attributes:
        called: the layers that were called.
    """

    def __init__(self, source: Source, function: str, declared: str, num_layers: int) -> None:
        """`declared` names the model's method that states the layers of `function`."""
        self._source, self._function = source, function
        self._declared, self._num_layers = declared, num_layers
        self.called: set[int] = set()

    def add(self, layer: int) -> None:
        """Record a call.

        Raises:
            PluginFaultError: there is no such layer, or it is the layer's second call.
        """
        count, function = self._num_layers, self._function
        if not isinstance(layer, int) or not 0 <= layer < count:
            layers = f"0..{count - 1}" if count else f"none, as {self._declared} is empty"
            raise self.wrong(f"called {function} for layer {shown(layer)}, expected {layers}")
        if layer in self.called:
            raise self.wrong(f"called {function} for layer {layer} twice")
        self.called.add(layer)

    def check_complete(self) -> None:
        """Check that every layer was called.

        Raises:
            PluginFaultError: one was not.
        """
        if missing := [layer for layer in range(self._num_layers) if layer not in self.called]:
            raise self.wrong(
                f"called {self._function} for no layer {', '.join(map(str, missing[:8]))}, though "
                f"{self._declared} has {self._num_layers} layers"
            )

    def wrong(self, problem: str) -> PluginFaultError:
        """Return the fault of the model."""
        return PluginFaultError(f"{self._source}: its forward() {problem}")


class TrialStates:
    """The states of a trial step of one sequence: checks the model's calls and results."""

    def __init__(
        self,
        source: Source,
        specs: Sequence[tuple[TensorSpec, ...]],
        device: torch.device,
        num_tokens: int,
    ) -> None:
        self._source, self._specs, self._device = source, specs, device
        self._num_tokens = num_tokens
        self._calls = TrialCalls(source, "recur", "state_specs()", len(specs))
        self.check_complete = self._calls.check_complete

    def recur(self, layer: int, advance: Advance, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs of a new sequence.

        Raises:
            PluginFaultError: it is no call for a layer of the specs, or the second one; the inputs
                are not of all tokens, or `advance` gave something else than it should.
        """
        self._calls.add(layer)
        for x in inputs:
            if not isinstance(x, torch.Tensor) or x.shape[:1] != (self._num_tokens,):
                raise self._calls.wrong(
                    f"called recur for layer {layer} with {shown(x)}, expected tensors "
                    f"[{self._num_tokens}, ...]"
                )
        states = [spec_tensor(spec, 1, self._device) for spec in self._specs[layer]]
        starts = np.array([0, self._num_tokens])
        specs = self._specs[layer]
        return checked_advance(self._source, layer, specs, advance, states, starts, inputs)[0]


def checked_advance(
    source: Source,
    layer: int,
    specs: Sequence[TensorSpec],
    advance: Advance,
    states: Sequence[torch.Tensor],
    starts: _IntArray,
    inputs: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """Return the outputs and the states of an `advance` of a layer.

    Raises:
        PluginFaultError: they have a wrong form.
    """
    result = advance(states, starts, *inputs)
    tokens, seqs = int(starts[-1]), len(starts) - 1
    if (
        isinstance(result, tuple)
        and len(result) == 2
        and isinstance(result[0], torch.Tensor)
        and result[0].shape[:1] == (tokens,)
        and isinstance(result[1], Sequence)
        and len(result[1]) == len(specs)
        and all(map(functools.partial(_fits, seqs), specs, result[1]))
    ):
        return result
    tensors = ", ".join(f"{spec.dtype} {[seqs, *spec.shape]}" for spec in specs)
    raise PluginFaultError(
        f"{source}: its advance() of layer {layer} gave {shown(result)}, expected outputs "
        f"[{tokens}, ...] and states {tensors}, by state_specs()"
    )


def spec_tensor(spec: TensorSpec, count: int, device: torch.device) -> torch.Tensor:
    """Return new states [count, ...]."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return torch.full((count, *spec.shape), spec.fill, dtype=dtype, device=device)


def _fits(seqs: int, spec: TensorSpec, state: Any) -> bool:
    return (
        isinstance(state, torch.Tensor)
        and state.shape == (seqs, *spec.shape)
        and state.dtype == getattr(torch, spec.dtype)
    )


def _num_bytes(spec: TensorSpec) -> int:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return int(np.prod(spec.shape, dtype=np.int64)) * dtype.itemsize


def _parts(step: AttentionStep) -> Iterator[_Part]:
    size, table = step.block_size, step.block_table.cpu().numpy()
    for row, blocks in enumerate(table):
        first, last = int(step.query_starts[row]), int(step.query_starts[row + 1])
        end = int(step.seq_lens[row])
        begin = end - (last - first)
        source = int(blocks[(begin - 1) // size]) if begin else _NO_BLOCK
        border = (end - 1) // size * size
        if begin < border:
            target = int(blocks[border // size - 1])
            yield _Part(first, last - (end - border), source, target)
            first, source = last - (end - border), target
        yield _Part(first, last, source, int(blocks[(end - 1) // size]))


def _waves(parts: Iterator[_Part]) -> list[list[_Part]]:
    """Return the parts of a step, in waves: a part that continues another one comes after it."""
    left, waves = list(parts), []
    while left:
        writers = {part.target: part for part in left}
        waiting = [part for part in left if writers.get(part.source, part) is not part]
        late = set(map(id, waiting))
        waves.append([part for part in left if id(part) not in late])
        left = waiting
    return waves


def _wave(
    parts: Sequence[_Part], step: AttentionStep, first_block: int, device: torch.device
) -> _Wave:
    lengths = np.array([part.end - part.begin for part in parts])
    starts = np.zeros(len(parts) + 1, dtype=np.int64)
    lengths.cumsum(out=starts[1:])
    tokens = None
    if starts[-1] < step.query_starts[-1]:
        ranges = [np.arange(part.begin, part.end) for part in parts]
        tokens = torch.from_numpy(np.concatenate(ranges)).to(device)
    begins = [index for index, part in enumerate(parts) if part.source == _NO_BLOCK]
    assert min(part.target for part in parts) >= first_block, "a step ends where there is a state"
    return _Wave(
        starts,
        tokens,
        torch.tensor([max(part.source - first_block, 0) for part in parts], device=device),
        torch.tensor(begins, dtype=torch.int64, device=device),
        torch.tensor([part.target - first_block for part in parts], device=device),
    )
