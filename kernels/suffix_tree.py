"""Trees of the suffixes of token sequences, compiled.

`hardpoint.builtin_plugins.speculators.suffix_tree` explains them, and is the same in Python.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from . import cpu

__all__ = ["CompiledSuffixTree", "Extent"]


@dataclass(frozen=True, slots=True)
class Extent:
    """How far drafts go.

    Attributes:
        limit: tokens, at most.
        factor: tokens for each token that is the same, at most; rounded down.
        offset: tokens more than those.
        probability: probability of a token, at least.
    """

    limit: int
    factor: float = 1.0
    offset: int = 0
    probability: float = 0.1


class CompiledSuffixTree:
    """As the one in Python; calls raise MemoryError if there is no memory."""

    def __init__(self, depth: int, path: str = "") -> None:
        """Make an empty tree.

        Args:
            depth: tokens of a suffix, at most.
            path: path of the kernels, see `cpu.load`.

        Raises:
            KernelsUnavailableError: they cannot run here.
        """
        library = cpu.load(path)
        self._tree: int = library.function("suffix_tree_create", None)(depth) or _no_memory()
        weakref.finalize(self, library.function("suffix_tree_free", None), self._tree)
        self._nodes = library.function("suffix_tree_nodes", None)
        self._bytes = library.function("suffix_tree_bytes", None)
        self._begin = library.function("suffix_tree_begin", None)
        self._remove_oldest = library.function("suffix_tree_remove_oldest", None)
        self._append = library.function("suffix_tree_append", None)
        self._draft = library.function("suffix_tree_draft", None)
        self._num_sequences = 0

    def __len__(self) -> int:
        """Return the number of sequences."""
        return self._num_sequences

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return int(self._nodes(self._tree))

    @property
    def num_bytes(self) -> int:
        """Bytes that it occupies, at most."""
        return int(self._bytes(self._tree))

    def begin(self) -> int:
        """Begin a sequence, and return its number."""
        number = int(self._begin(self._tree))
        if number < 0:
            _no_memory()
        self._num_sequences += 1
        return number

    def append(self, sequence: int, tokens: Sequence[int]) -> None:
        """Append tokens to a sequence."""
        values = array("i", tokens)
        if self._append(self._tree, sequence, values.buffer_info()[0], len(values)) < 0:
            _no_memory()

    def remove_oldest(self) -> None:
        """Remove the sequence that began first."""
        self._remove_oldest(self._tree)
        self._num_sequences -= 1

    def draft(self, pattern: Sequence[int], extent: Extent) -> tuple[list[int], float]:
        """Return the tokens that followed the last ones of a pattern most often, and a score."""
        values, drafts = array("i", pattern), (ctypes.c_int32 * extent.limit)()
        score = ctypes.c_double()
        count = self._draft(
            *(self._tree, values.buffer_info()[0], len(values)),
            *(extent.limit, extent.factor, extent.offset, extent.probability),
            *(ctypes.addressof(drafts), ctypes.addressof(score)),
        )
        return (drafts[:count], score.value) if count >= 0 else _no_memory()


def _no_memory() -> NoReturn:
    raise MemoryError("there is no memory for a tree of suffixes")
