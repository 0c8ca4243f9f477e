"""A suffix tree of token sequences, with counts of continuations."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hardpoint.kernels import cpu
from hardpoint.kernels import suffix_tree as compiled
from hardpoint.kernels.suffix_tree import Extent

_NODE_BYTES, _SEQUENCE_BYTES = 320, 1024


@dataclass(slots=True, eq=False)
class _Node:
    """Some tokens that follow the parent's tokens, the same at each of its places.

    Attributes:
        count: places where the tokens from the root to here stand.
        sequence: the last sequence of these places.
        start: the last of them in it: where the tokens of this node begin.
        length: number of its tokens.
        children: by their first tokens.
    """

    count: int
    sequence: int
    start: int
    length: int
    parent: _Node | None
    children: dict[int, _Node]


_NOWHERE = _Node(0, -1, 0, 0, None, {})


class SuffixTree:
    """The first `depth` tokens of each suffix of some sequences, path-compressed.

    Sequences are numbered in the order in which they begin, and removed in the same
    order: so no node refers to a removed sequence while another with its tokens is left.
    Each suffix ends at a node, hence there are at most twice as many nodes as tokens.

    `hardpoint.kernels.suffix_tree.CompiledSuffixTree` is the same in C++, with the same drafts.
    """

    def __init__(self, depth: int) -> None:
        """`depth`: tokens of a suffix, at most."""
        self.num_nodes = 0
        self.num_tokens = 0
        self._depth = depth
        self._root = _Node(0, -1, 0, 0, None, {})
        self._first = 0  # number of the oldest sequence
        self._texts: deque[array[int]] = deque()
        # Where the suffixes of each sequence end that may grow, the longest first.
        self._ends: deque[deque[_Node]] = deque()

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def num_bytes(self) -> int:
        """Bytes that it occupies, at most."""
        sequences = (len(self) + 1) * (_SEQUENCE_BYTES + 16 * self._depth)
        return self.num_nodes * _NODE_BYTES + 8 * self.num_tokens + sequences

    def begin(self) -> int:
        """Begin a sequence, and return its number."""
        self._texts.append(array("i"))
        self._ends.append(deque(maxlen=self._depth))
        return self._first + len(self._texts) - 1

    def append(self, sequence: int, tokens: Sequence[int]) -> None:
        """Append tokens to a sequence."""
        text, ends = self._texts[sequence - self._first], self._ends[sequence - self._first]
        for token in tokens:
            text.append(token)
            ends.append(self._root)
            for index, node in enumerate(ends):
                ends[index] = self._advance(node, token, sequence, len(text) - 1)
        self.num_tokens += len(tokens)

    def _advance(self, node: _Node, token: int, sequence: int, place: int) -> _Node:
        child = node.children.get(token)
        if child is None:
            if node.count == 1:  # only this one ends here; the root's count is 0
                node.length += 1
                return node
            child = node.children[token] = _Node(1, sequence, place, 1, node, {})
            self.num_nodes += 1
            return child
        if child.length > 1:
            if node.count == child.count + 1:  # nothing else ends here or goes another way
                node.length += 1
                self._shorten(child, node)
                return node
            child = self._split(child, node, token)
        child.count += 1
        if sequence >= child.sequence:
            child.sequence, child.start = sequence, place
        if node.count == child.count:
            self._merge(node, child)
        return child

    def _shorten(self, node: _Node, parent: _Node) -> None:
        node.start += 1
        node.length -= 1
        node.parent = parent
        parent.children = {self._token(node): node}

    def _split(self, child: _Node, parent: _Node, token: int) -> _Node:
        """Put a node of the first token of a child before it."""
        middle = _Node(child.count, child.sequence, child.start, 1, parent, {})
        self._shorten(child, middle)
        parent.children[token] = middle
        self.num_nodes += 1
        return middle

    def _merge(self, node: _Node, child: _Node) -> None:
        """Join a node to its child: they stand at the same places."""
        assert node.parent is not None
        node.parent.children[self._token(node)] = child
        child.parent = node.parent
        child.start -= node.length
        child.length += node.length
        self.num_nodes -= 1

    def _token(self, node: _Node) -> int:
        return self._texts[node.sequence - self._first][node.start]

    def remove_oldest(self) -> None:
        """Remove the sequence that began first."""
        text = self._texts[0]
        for start in range(len(text)):
            self._remove(text, start)
        self.num_tokens -= len(text)
        self._texts.popleft()
        self._ends.popleft()
        self._first += 1

    def _remove(self, text: Sequence[int], place: int) -> None:
        node, end = self._root, min(place + self._depth, len(text))
        while place < end:
            child = node.children[text[place]]
            child.count -= 1
            if not child.count:
                del node.children[text[place]]
                self.num_nodes -= 1
                break
            place += child.length
            node = child
        if node.count and len(node.children) == 1:
            (child,) = node.children.values()
            if child.count == node.count:
                self._merge(node, child)

    def draft(self, pattern: Sequence[int], extent: Extent) -> tuple[list[int], float]:
        """Return the tokens that followed the last ones of a pattern most often.

        The last 1, 2, ... tokens are looked up. Their most frequent continuation is taken again and
        again, of equals the latest in the newest sequence. The probability of a token is the
        product of the fractions that took it; a score is the sum of them.

        Args:
            pattern: the newest tokens.
            extent: how far drafts go.

        Returns:
            The drafts with the highest score, of equals the longest pattern's; the score.
        """
        drafts: list[int] = []
        best = 0.0
        for length in range(1, min(len(pattern), self._depth) + 1):
            node, matched = self._find(pattern[len(pattern) - length :])
            if matched == node.length and not node.children:  # nothing followed
                break
            tokens, score = self._follow(node, matched, _limit(extent, length), extent.probability)
            if tokens and score >= best:
                drafts, best = tokens, score
        return drafts, best

    def _find(self, pattern: Sequence[int]) -> tuple[_Node, int]:
        node, matched = self._root, 0
        for token in pattern:
            if matched == node.length:
                child, matched = node.children.get(token), 0
                if child is None:
                    return _NOWHERE, 0
                node = child
            elif self._texts[node.sequence - self._first][node.start + matched] != token:
                return _NOWHERE, 0
            matched += 1
        return node, matched

    def _follow(
        self, node: _Node, matched: int, limit: int, least: float
    ) -> tuple[list[int], float]:
        tokens: list[int] = []
        probability, score = 1.0, 0.0
        while len(tokens) < limit:
            if matched == node.length:
                places = node.count
                node, matched = max(node.children.values(), key=_rank, default=_NOWHERE), 0
                probability = probability * node.count / places
                if probability < least or node is _NOWHERE:
                    break
            tokens.append(self._texts[node.sequence - self._first][node.start + matched])
            score += probability
            matched += 1
        return tokens, score


def _limit(extent: Extent, length: int) -> int:
    return min(extent.limit, int(length * extent.factor) + extent.offset)


def _rank(node: _Node) -> tuple[int, int, int]:
    return node.count, node.sequence, node.start


Tree = SuffixTree | compiled.CompiledSuffixTree


def make_tree(depth: int) -> Tree:
    """Return an empty tree: the compiled one where there are kernels."""
    try:
        return compiled.CompiledSuffixTree(depth)
    except cpu.KernelsUnavailableError:
        return SuffixTree(depth)
