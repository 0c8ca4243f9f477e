"""The conformance suite for poolers; the built-in ones pass it too."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import strategies as st

from hardpoint.plugins import Pooler, PoolerContext, PromptPooler
from hardpoint.plugins.component import Component
from hardpoint.testing.component_suite import ComponentSuite
from hardpoint.testing.suite import Rule, short_repr
from hardpoint.typed.read_only import ReadOnlyList

SHAPE = Rule(
    "shape: start() gives a PromptPooler, and finish() a vector, or several with `per_token`",
    "return a floating-point tensor [hidden_size]; or [vectors, hidden_size] with per_token = True",
)
CHUNKS = Rule(
    "chunks: how a prompt is cut into chunks changes no bit of its result",
    "add rows in groups that begin at the same tokens whatever the chunks are, or keep them",
)
ALONE = Rule(
    "alone: a prompt has the same result next to others, and after them",
    "keep all that belongs to a prompt in what start() returns",
)
OVERWRITTEN = Rule(
    "overwritten: the memory of a chunk is used again once update() has returned",
    "keep a copy of rows, by .clone(), and no view of them",
)
LAST = Rule(
    "last: with `needs_all = False`, the first tokens may be left out",
    "use the last token's hidden state alone, or set needs_all = True",
)


@dataclass
class _Prompt:
    """A prompt of a test.

    Attributes:
        cuts: tokens of each chunk; the last one has the rest.
    """

    token_ids: list[int]
    cuts: list[int]
    arguments: Any = None

    def chunks(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Return the hidden states, cut."""
        ends = [0]
        for size in self.cuts:
            ends.append(min(ends[-1] + size, len(hidden)))
        ends.append(len(hidden))
        pairs = itertools.pairwise(ends)
        return [hidden[first:end] for first, end in pairs if end > first]


class PoolerSuite(ComponentSuite):
    """Base class of a test class, which sets `pooler`, and `options` if it has some.

    Attributes:
        pooler: the class under test.
        vocab_size: vocabulary size of the prompts.
        hidden_size: hidden size of the model.
        device: device of the model.
        dtype: dtype of the hidden states.
    """

    kind = "poolers"
    pooler: ClassVar[type[Pooler]]
    vocab_size: ClassVar[int] = 131
    hidden_size: ClassVar[int] = 16
    device: ClassVar[str] = "cpu"
    dtype: ClassVar[torch.dtype] = torch.float32

    def _component(self) -> type[Component]:
        return self.pooler

    def _make(self) -> Pooler:
        pooler: Pooler = self._build(
            PoolerContext, device=torch.device(self.device), hidden_size=self.hidden_size
        )
        return pooler

    def test_shape(self) -> None:
        """It gives a floating-point tensor of the declared form for each prompt."""

        def check(prompt: _Prompt) -> None:
            found = self._result(self._make(), prompt, [self._hidden(prompt)])
            if not isinstance(found, torch.Tensor) or not found.is_floating_point():
                raise SHAPE.violation(f"finish() gave {short_repr(found)}")
            shape = list(found.shape)
            if len(shape) != 1 + self.pooler.per_token or shape[-1] != self.hidden_size:
                expected = f"[{'vectors, ' if self.pooler.per_token else ''}{self.hidden_size}]"
                raise SHAPE.violation(f"finish() gave a tensor {shape}, expected {expected}")

        self._search(SHAPE.text, 40, check, prompt=self._prompts())

    def test_chunks(self) -> None:
        """A prompt in chunks has the result that it has whole, bit for bit."""

        def check(prompt: _Prompt) -> None:
            hidden = self._hidden(prompt)
            whole = self._result(self._make(), prompt, [hidden])
            chunks = prompt.chunks(hidden)
            cut = self._result(self._make(), prompt, chunks)
            if not torch.equal(whole, cut):
                raise CHUNKS.violation(
                    f"a prompt of {len(hidden)} tokens has another result in chunks of "
                    f"{', '.join(str(len(chunk)) for chunk in chunks)} tokens"
                )

        self._search(CHUNKS.text, 60, check, prompt=self._prompts())

    def test_alone(self) -> None:
        """Prompts whose chunks come in turn have the results that each has alone."""

        def check(prompts: list[_Prompt]) -> None:
            pooler = self._make()
            states = [self._start(pooler, prompt) for prompt in prompts]
            waiting = [prompt.chunks(self._hidden(prompt)) for prompt in prompts]
            while any(waiting):
                for state, chunks in zip(states, waiting, strict=True):
                    if chunks:
                        state.update(chunks.pop(0))
            for number, (prompt, state) in enumerate(zip(prompts, states, strict=True)):
                alone = self._result(self._make(), prompt, prompt.chunks(self._hidden(prompt)))
                if not torch.equal(state.finish(), alone):
                    raise ALONE.violation(
                        f"prompt {number} of {len(prompts)} has another result than alone"
                    )
            (first, *_) = prompts
            again = self._result(pooler, first, [self._hidden(first)])
            if not torch.equal(again, self._result(self._make(), first, [self._hidden(first)])):
                raise ALONE.violation(
                    f"after {len(prompts)} others, a prompt has another result than alone"
                )

        prompts = st.lists(self._prompts(), min_size=1, max_size=4)
        self._search(ALONE.text, 40, check, prompts=prompts)

    def test_overwritten(self) -> None:
        """It keeps no view of the hidden states of a chunk."""

        def check(prompt: _Prompt) -> None:
            hidden = self._hidden(prompt)
            expected = self._result(self._make(), prompt, [hidden])
            state = self._start(self._make(), prompt)
            buffer = torch.empty_like(hidden)
            for chunk in prompt.chunks(hidden):
                shown = buffer[: len(chunk)].copy_(chunk)
                state.update(shown)
                shown.fill_(-99.0)
            if not torch.equal(state.finish(), expected):
                raise OVERWRITTEN.violation("the result changed with memory that was shown before")

        self._search(OVERWRITTEN.text, 40, check, prompt=self._prompts())

    def test_last(self) -> None:
        """With `needs_all = False`, it gives the same without the hidden states of a prefix."""
        if self.pooler.needs_all:
            pytest.skip("needs_all is True")

        def check(prompt: _Prompt) -> None:
            hidden = self._hidden(prompt)
            whole = self._result(self._make(), prompt, [hidden])
            left = prompt.chunks(hidden)[-1]
            if not torch.equal(self._result(self._make(), prompt, [left]), whole):
                raise LAST.violation(
                    f"without the first {len(hidden) - len(left)} of {len(hidden)} tokens, the "
                    f"result is another one"
                )

        self._search(LAST.text, 40, check, prompt=self._prompts())

    def _prompts(self) -> st.SearchStrategy[_Prompt]:
        """Return a strategy for prompts, some of them of many tokens."""
        token = st.integers(0, 3) | st.integers(0, self.vocab_size - 1)
        return st.builds(
            _Prompt,
            token_ids=st.integers(1, 9).flatmap(
                lambda size: st.lists(token, min_size=1, max_size=size * size * 4)
            ),
            cuts=st.lists(st.integers(1, 90), max_size=5),
            arguments=self._drawn_arguments(self.vocab_size),
        )

    def _hidden(self, prompt: _Prompt) -> torch.Tensor:
        """Return hidden states of a prompt, which depend on tokens and places."""
        table = torch.randn(997, self.hidden_size, generator=torch.Generator().manual_seed(0))
        rows = [(31 * place + token) % 997 for place, token in enumerate(prompt.token_ids)]
        return table[rows].to(self.device, self.dtype)

    def _start(self, pooler: Pooler, prompt: _Prompt) -> PromptPooler:
        state = pooler.start(ReadOnlyList(prompt.token_ids), prompt.arguments)
        if not isinstance(state, PromptPooler):
            raise SHAPE.violation(f"start() gave {short_repr(state)}, expected a PromptPooler")
        return state

    def _result(self, pooler: Pooler, prompt: _Prompt, chunks: Sequence[torch.Tensor]) -> Any:
        """Return the result of a prompt, given its chunks."""
        state = self._start(pooler, prompt)
        for chunk in chunks:
            state.update(chunk)
        return state.finish()
