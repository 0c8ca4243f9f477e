"""The windows of a document: token ids that overlap, framed as the model reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hardpoint.plugins import Tokenizer


@dataclass(frozen=True)
class Frame:
    """The special tokens around a text, such as [CLS] and [SEP].

    Attributes:
        before: token ids in front of the text's own.
        after: token ids behind them.
    """

    before: Sequence[int]
    after: Sequence[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Frame:
        """Return the special tokens that a tokenizer puts around each text."""
        inner = tokenizer.encode("a", add_special_tokens=False)
        whole = tokenizer.encode("a")
        for begin in range(len(whole) - len(inner) + 1):
            if whole[begin : begin + len(inner)] == inner:
                return cls(whole[:begin], whole[begin + len(inner) :])
        return cls((), ())

    def __len__(self) -> int:
        return len(self.before) + len(self.after)

    def around(self, ids: Sequence[int]) -> list[int]:
        """Return token ids with the frame."""
        return [*self.before, *ids, *self.after]


def windows(count: int, size: int, overlap: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of windows over `count` tokens; the last one ends with the last token.

    Args:
        size: most tokens of a window.
        overlap: tokens that a window has in common with the one before.
    """
    begin = 0
    while True:
        end = min(begin + size, count)
        yield begin, end
        if end == count:
            return
        begin = end - overlap
