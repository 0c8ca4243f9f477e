"""Token ids of texts with special tokens, such as conversations, cached by segment.

A tokenizer finds its special tokens in the text first, and tokenizes the parts between. So
the tokens of a text are the tokens of its segments, each but the first beginning with
a special token. In a conversation, all but the last ones belong to the turn before.
"""

from __future__ import annotations

import re
import sys
import threading
from array import array
from collections import OrderedDict

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer


class SegmentCache:
    """Tokenizes texts by segments, and caches the ids of recently used ones.

    Safe in any thread.

    Attributes:
        num_bytes: memory of the cache.
    """

    def __init__(self, tokenizer: FastTokenizer, max_bytes: int) -> None:
        """Keep nothing yet.

        Args:
            tokenizer: must not be changed any more.
            max_bytes: limit of the memory; 0 keeps nothing.
        """
        self._tokenizer, self._max_bytes = tokenizer, max_bytes
        starts = sorted(segment_starts(tokenizer)) if max_bytes else []
        self._start = re.compile("|".join(map(re.escape, starts))) if starts else None
        self._kept: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without the tokens that the tokenizer adds around texts."""
        places = (
            [] if self._start is None else [match.start() for match in self._start.finditer(text)]
        )
        if not places:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        ids: list[int] = []
        for start, end in zip((0, *places), (*places, len(text)), strict=True):
            if start < end:
                ids += self._ids(text[start:end])
        return ids

    def _ids(self, segment: str) -> list[int]:
        with self._lock:
            if (cached := self._kept.get(segment)) is not None:
                self._kept.move_to_end(segment)
                return cached.tolist()
        ids = self._tokenizer.encode(segment, add_special_tokens=False).ids
        cached = array("I", ids)
        size = _size(segment, cached)
        with self._lock:
            if size <= self._max_bytes and segment not in self._kept:
                self._kept[segment] = cached
                self.num_bytes += size
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= _size(*self._kept.popitem(last=False))
        return ids


_ENTRY_BYTES = 200
"""Memory of an entry besides its text and its ids."""


def _size(segment: str, ids: array[int]) -> int:
    return _ENTRY_BYTES + sys.getsizeof(segment) + sys.getsizeof(ids)


def segment_starts(tokenizer: FastTokenizer) -> set[str]:
    """Return the tokens before which any text may be cut without changing its token ids.

    Tokens that are not normalized are found in the text first, before anything else reads it, from
    left to right. One of them is always found where its text is, if no other can begin before that
    place and reach beyond it. It takes nothing from the text before it, if it does not strip blanks
    there (`lstrip`), and begins with no blank that another one could strip (`rstrip`).
    """
    added = list(tokenizer.get_added_tokens_decoder().values())
    if (
        tokenizer.encode_special_tokens  # they are not looked for in texts
        or any(token.single_word for token in added)  # which look at their neighbors
        or getattr(tokenizer.model, "dropout", None) is not None
        or not _is_of_library(tokenizer)
    ):
        return set()
    first = [token.content for token in added if not token.normalized and token.content]
    return {
        token.content
        for token in added
        if token.special
        and _stands_alone(token)
        and not any(_reaches_into(other, token.content) for other in first)
    }


def _stands_alone(token: AddedToken) -> bool:
    content: str = token.content
    return bool(content) and not (token.normalized or token.lstrip or content[0].isspace())


def _reaches_into(token: str, later: str) -> bool:
    """Return whether a token can begin before another one and reach beyond the place of that."""
    ends = (token[place:] for place in range(1, len(token)))
    return any(later.startswith(end) or end.startswith(later) for end in ends)


def _is_of_library(tokenizer: FastTokenizer) -> bool:
    try:
        for part in (tokenizer.normalizer, tokenizer.pre_tokenizer):
            if part is not None:
                part.__getstate__()
    except Exception:  # the library's own for a part that is a Python object
        return False
    return True
