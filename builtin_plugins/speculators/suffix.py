"""Suffix speculator: drafts the most frequent continuation in the request and earlier outputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

from hardpoint import plugins
from hardpoint.kernels.suffix_tree import Extent
from hardpoint.plugins import DraftRequest, Meta, Speculator, SpeculatorContext

from .suffix_tree import Tree, make_tree

_T = TypeVar("_T")


class Suffix(Speculator):
    """Drafts from suffix trees of the request's own text and of outputs of other requests.

    It looks up the last 1, 2, ... tokens in both trees, and drafts the most frequent continuation
    while its share of the occurrences is large enough. Of these drafts, it takes the one with the
    most tokens that are expected to be accepted; of equal ones, that of the longest match, and of
    the request's own text (G. Oliaro et al., "SuffixDecoding", NeurIPS 2025). A longer match gives
    a longer draft.

    Outputs, also those of running requests, are shared by requests with the same cache salt and
    adapter only. The oldest outputs are removed when a limit is reached. In addition, the trees of
    running requests take 50 to 110 bytes per token of prompt and output. In a prompt with
    embeddings, the text begins after the last one.
    """

    contract = 1
    is_quick = True
    conformance_suite = "hardpoint.testing.checking.builtin_suites:SuffixSuite"

    class Options(plugins.Options):
        """Options.

        Attributes:
            max_tree_depth: maximum number of compared and drafted tokens together.
            max_cached_requests: maximum number of requests with kept outputs; 0 keeps none.
            max_bytes: maximum size of the kept outputs.
            max_spec_factor: maximum number of drafted tokens per matched token.
            max_spec_offset: drafted tokens beyond that.
            min_token_prob: a draft ends before a token with a lower probability.
        """

        max_tree_depth: Annotated[int, Meta(ge=2, le=256)] = 24
        max_cached_requests: Annotated[int, Meta(ge=0, le=1_000_000)] = 10_000
        max_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 40)] = 1 << 28
        max_spec_factor: Annotated[float, Meta(ge=0, le=256)] = 1.0
        max_spec_offset: Annotated[int, Meta(ge=0, le=256)] = 0
        min_token_prob: Annotated[float, Meta(ge=0, le=1)] = 0.1

    class Arguments(plugins.Arguments):
        """Options of a request; None is the operator's option.

        Attributes:
            max_spec_factor: see the option.
            max_spec_offset: see the option.
            min_token_prob: see the option.
        """

        max_spec_factor: Annotated[float, Meta(ge=0, le=256)] | None = None
        max_spec_offset: Annotated[int, Meta(ge=0, le=256)] | None = None
        min_token_prob: Annotated[float, Meta(ge=0, le=1)] | None = None

    options: Options

    def __init__(self, context: SpeculatorContext) -> None:
        super().__init__(context)
        options = self.options
        self._depth = options.max_tree_depth
        self._outputs = Outputs(self._depth, options.max_cached_requests, options.max_bytes)

    def start(self, request: DraftRequest) -> _RequestText:
        """Return an empty tree of the request, and where its output is going to be."""
        prompt = request.last_prompt_ids
        return _RequestText(make_tree(self._depth), Output(request.scope), prompt)

    def propose(self, requests: Sequence[DraftRequest], budget: int) -> list[list[int]]:
        """Return the drafts with the highest scores."""
        for request in requests:
            self._read(request)
        results = [self._draft(request) for request in requests]
        order = sorted(range(len(results)), key=lambda index: -results[index][1])  # stable
        for index in order:
            del results[index][0][budget:]
            budget -= len(results[index][0])
        return [drafts for drafts, _ in results]

    def ended(self, request: DraftRequest) -> None:
        """Keep the end of the output, and drop the tree."""
        self._keep(request)
        request.state = None

    def memory(self) -> int:
        """Return the bytes of earlier outputs, which are in the memory of the processor."""
        return self.options.max_bytes if self.context.device.type == "cpu" else 0

    def _read(self, request: DraftRequest) -> None:
        text: _RequestText = request.state
        if not text.num_tokens:
            text.append(text.prompt)
        text.append(request.output_token_ids[text.num_tokens - len(text.prompt) :])
        self._keep(request)

    def _keep(self, request: DraftRequest) -> None:
        text: _RequestText = request.state
        self._outputs.append(text.output, request.output_token_ids[text.num_kept :])
        text.num_kept = len(request.output_token_ids)

    def _draft(self, request: DraftRequest) -> tuple[list[int], float]:
        text: _RequestText = request.state
        longest = self._depth - 1
        pattern = request.output_token_ids[-longest:]
        if missing := longest - len(pattern):
            pattern = [*text.prompt[-missing:], *pattern]
        extent = self._extent(request)
        local_draft = text.tree.draft(pattern, extent)
        other = self._outputs.draft(request.scope, pattern, extent)
        return max(local_draft, other, key=lambda drafted: drafted[1])  # of equals the first

    def _extent(self, request: DraftRequest) -> Extent:
        arguments, options = request.arguments, self.options
        return Extent(
            request.limit,
            _chosen(arguments.max_spec_factor, options.max_spec_factor),
            _chosen(arguments.max_spec_offset, options.max_spec_offset),
            _chosen(arguments.min_token_prob, options.min_token_prob),
        )


def _chosen(argument: _T | None, option: _T) -> _T:
    return option if argument is None else argument


@dataclass(slots=True, eq=False)
class Output:
    """The output of a request.

    Attributes:
        scope: requests that see it.
        sequence: its number in the tree of its scope; None if nothing of it is kept.
    """

    scope: str
    sequence: int | None = None


@dataclass(slots=True, eq=False)
class _RequestText:
    """The text of a request.

    Attributes:
        tree: tree of its prompt and output.
        output: its output among all.
        prompt: its prompt.
        num_tokens: number of tokens in the tree.
        num_kept: tokens of the output that were handed on.
    """

    tree: Tree
    output: Output
    prompt: Sequence[int]
    num_tokens: int = 0
    num_kept: int = 0
    sequence: int = field(init=False)

    def __post_init__(self) -> None:
        self.sequence = self.tree.begin()

    def append(self, tokens: Sequence[int]) -> None:
        self.tree.append(self.sequence, tokens)
        self.num_tokens += len(tokens)


class Outputs:
    """Outputs of requests, by scope; the oldest go when they are too many or too large.

    Attributes:
        num_bytes: bytes that they occupy.
    """

    def __init__(self, depth: int, max_requests: int, max_bytes: int) -> None:
        """Keep nothing yet.

        Args:
            depth: depth of the trees.
            max_requests: outputs, at most.
            max_bytes: bytes of all of them, at most.
        """
        self.num_bytes = 0
        self._depth, self._max_requests, self._max_bytes = depth, max_requests, max_bytes
        self._trees: dict[str, Tree] = {}
        self._outputs: deque[Output] = deque()  # in the order in which they began

    def __len__(self) -> int:
        return len(self._outputs)

    def append(self, output: Output, tokens: Sequence[int]) -> None:
        """Append tokens to an output; a removed output begins again with them."""
        if not tokens or not self._max_requests:
            return
        with self._changing(output.scope) as tree:
            if output.sequence is None:
                output.sequence = tree.begin()
                self._outputs.append(output)
            tree.append(output.sequence, tokens)
        while len(self._outputs) > self._max_requests or self.num_bytes > self._max_bytes:
            self.remove_oldest()

    def remove_oldest(self) -> None:
        """Remove the output that began first."""
        oldest = self._outputs.popleft()
        with self._changing(oldest.scope) as tree:
            tree.remove_oldest()
        oldest.sequence = None

    @contextmanager
    def _changing(self, scope: str) -> Iterator[Tree]:
        """Yield the tree of a scope, and count its bytes; it is kept while it has an output."""
        tree = self._trees.pop(scope, None)
        before = tree.num_bytes if tree else 0
        tree = tree or make_tree(self._depth)
        try:
            yield tree
        finally:
            if len(tree):
                self._trees[scope] = tree
                self.num_bytes += tree.num_bytes
            self.num_bytes -= before

    def draft(self, scope: str, pattern: Sequence[int], extent: Extent) -> tuple[list[int], float]:
        """Return the tokens that followed a pattern most often in a scope, and their score."""
        tree = self._trees.get(scope)
        return tree.draft(pattern, extent) if tree else ([], 0.0)
