"""Where reasoning begins and ends in a sequence of token ids."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

__all__ = ["ReasoningMarkers", "ReasoningTracker"]


class ReasoningMarkers(msgspec.Struct, frozen=True):
    """The token ids that begin and end a model's reasoning.

    The output parser gives them once per request, and the thinking budget and the grammar go by
    them. Where two markers end at the same token, the longer one counts.

    Attributes:
        start: sequences that begin reasoning.
        end: sequences that end it; a thinking budget forces the first one.
        begins_open: whether every output begins inside reasoning, whatever its prompt ends with.
        message_prefix: the tokens from the end of reasoning to the next message, in formats with
            outputs of several messages.
        content_prefix: the tokens from there to the text of an answer, such as the header of a
            message. A grammar begins after both; tokens of them at the end of the prompt are not
            repeated.
        calls: special tokens that begin a call, and so the answer, inside reasoning too, where the
            request has tools. They are the answer's first; a request with a grammar gets none of
            them inside reasoning.
        boundaries: special tokens of chat templates, between messages: a start marker before one is
            of an earlier message, as in the text of a user, and leaves nothing open.
        blanks: tokens that may come before the reasoning, such as white space, in formats that have
            it before the answer alone: behind another token, and behind the end of the reasoning, a
            start marker is text. None where reasoning may begin anywhere.
    """

    start: tuple[tuple[int, ...], ...] = ()
    end: tuple[tuple[int, ...], ...] = ()
    begins_open: bool = False
    message_prefix: tuple[int, ...] = ()
    content_prefix: tuple[int, ...] = ()
    calls: tuple[int, ...] = ()
    boundaries: tuple[int, ...] = ()
    blanks: tuple[int, ...] | None = None

    def is_open(self, prompt: Sequence[int]) -> bool:
        """Return whether an output after this prompt begins inside reasoning."""
        return self.begins_open or self.thinking_since(prompt) is not None

    def ended(self, prompt: Sequence[int]) -> bool:
        """Return whether the last marker in a prompt ends the reasoning."""
        return not self.is_open(prompt) and _last(self.end, prompt)[0] > 0

    @property
    def _ends(self) -> tuple[tuple[int, ...], ...]:
        return (*self.end, *((token,) for token in self.calls))

    def thinking_since(self, prompt: Sequence[int]) -> int | None:
        """Return the index after the start marker that a prompt leaves open; None without one.

        A prompt may contain several markers; the last one decides.
        """
        opened, closed = _last(self.start, prompt), _last(self._ends, prompt)
        is_last = opened > closed and frozenset(self.boundaries).isdisjoint(prompt[opened[0] :])
        return opened[0] if is_last else None


def _last(markers: Sequence[Sequence[int]], token_ids: Sequence[int]) -> tuple[int, int]:
    """Return the index after the marker that ends last, and its length; (0, 0) without any."""
    text = _as_bytes(token_ids) if markers else b""
    ends = [(end, len(marker)) for marker in markers if (end := _end_of_last(marker, text))]
    return max(ends, default=(0, 0))


def _as_bytes(token_ids: Sequence[int | None]) -> bytes:
    """Return tokens as 64-bit integers; None, an embedding, becomes a value outside all markers."""
    known: Any = token_ids
    try:
        return array("q", known).tobytes()
    except TypeError:
        return array("q", [-1 if token is None else token for token in token_ids]).tobytes()


def _end_of_last(marker: Sequence[int], text: bytes) -> int:
    """Return the index after a marker's last occurrence in 64-bit integers; 0 without any."""
    if not marker:
        return 0
    needle, width = array("q", marker).tobytes(), array("q").itemsize
    start = text.rfind(needle)
    while start > 0 and start % width:  # a match that begins inside a token
        start = text.rfind(needle, 0, start + len(needle) - 1)
    return start // width + len(marker) if start >= 0 else 0


class ReasoningPosition(NamedTuple):
    """Where a sequence of tokens is.

    Attributes:
        inside: whether it is inside reasoning.
        node: node of the tracker, for the marker that its last tokens may begin.
        in_answer: whether the answer has begun, in which no marker begins reasoning.
    """

    inside: bool
    node: int
    in_answer: bool = False


class ReasoningTracker:
    """Follows tokens by `ReasoningMarkers`, one dictionary lookup per token.

    It finds all markers at once (Aho and Corasick, 1975). Positions are immutable, so that drafts
    can be followed and given up.
    """

    def __init__(self, markers: ReasoningMarkers) -> None:
        """Build the automaton: a node for every beginning of a marker."""
        self.markers = markers
        kinds = dict.fromkeys(filter(None, markers._ends), False)
        kinds |= dict.fromkeys(filter(None, markers.start), True)
        self._longest = max(map(len, kinds), default=0)
        self._paths: list[tuple[int, ...]] = [()]  # by node: the beginning that it stands for
        nodes: dict[tuple[int, ...], int] = {(): 0}
        for marker in kinds:
            for length in range(1, len(marker) + 1):
                if nodes.setdefault(marker[:length], len(nodes)) == len(self._paths):
                    self._paths.append(marker[:length])
        tokens = {token for marker in kinds for token in marker}
        self._steps = [
            {token: node for token in tokens if (node := _suffix_node(nodes, (*path, token)))}
            for path in self._paths
        ]
        self._begins = [_kind(kinds, path) for path in self._paths]
        self._blanks = None if markers.blanks is None else frozenset(markers.blanks)

    def __eq__(self, other: object) -> bool:
        """Return whether the markers are the same."""
        return isinstance(other, ReasoningTracker) and self.markers == other.markers

    def __hash__(self) -> int:
        return hash(self.markers)

    def after(self, prompt: Sequence[int]) -> ReasoningPosition:
        """Return the position after a prompt."""
        node = 0
        for token in prompt[max(len(prompt) - self._longest, 0) :]:
            node = self._steps[node].get(token, 0)
        return ReasoningPosition(self.markers.is_open(prompt), node)

    def advance(self, position: ReasoningPosition, token: int) -> ReasoningPosition:
        """Return the position after one more token."""
        inside, before, in_answer = position
        node = self._steps[before].get(token, 0)
        is_first = self._blanks is not None and not (inside or in_answer)
        if node == before == 0 and not is_first:
            return position
        begins = self._begins[node]
        if self._blanks is not None and not in_answer:
            in_answer = begins is False or (is_first and self._has_text(before, token, node))
        if begins and in_answer:
            begins = None
        return ReasoningPosition(inside if begins is None else begins, node, in_answer)

    def _has_text(self, before: int, token: int, node: int) -> bool:
        """Return whether a token shows that one of the tokens so far belongs to the answer."""
        assert self._blanks is not None
        path = (*self._paths[before], token)
        return not self._blanks.issuperset(path[: len(path) - len(self._paths[node])])

    def next_of_end(self, position: ReasoningPosition) -> int:
        """Return the token that continues the first end marker, or begins it.

        Raises:
            IndexError: there is no end marker.
        """
        marker, path = self.markers.end[0], self._paths[position.node]
        for length in range(min(len(path), len(marker) - 1), 0, -1):
            if path[-length:] == marker[:length]:
                return marker[length]
        return marker[0]


def _suffix_node(nodes: dict[tuple[int, ...], int], path: tuple[int, ...]) -> int:
    """Return the node of the longest end of a path that begins a marker."""
    return next(nodes[path[at:]] for at in range(len(path) + 1) if path[at:] in nodes)


def _kind(kinds: dict[tuple[int, ...], bool], path: tuple[int, ...]) -> bool | None:
    """Return whether the longest marker at the end of a path begins reasoning; None without any."""
    return next((kinds[path[at:]] for at in range(len(path)) if path[at:] in kinds), None)
