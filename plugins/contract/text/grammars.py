"""Grammar backends: which tokens may come next in structured output."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from hardpoint.plugins.component.base import Component, Context
from hardpoint.plugins.component.behaviour import PIECE, returns
from hardpoint.plugins.requests.structured import StructuredFormat, StructuredOutputs

from .vocabulary import Vocabulary

if TYPE_CHECKING:
    import numpy as np

__all__ = ["GrammarBackend", "GrammarContext"]


@dataclass(frozen=True, kw_only=True)
class GrammarContext(Context["GrammarBackend"]):
    """Context of a grammar backend.

    Attributes:
        vocabulary: the tokenizer's.
        vocab_size: vocabulary size of the model, at least as large.
        compile_seconds: after which the engine gives up a compilation. A backend that runs it
            in another process ends it by then.
    """

    vocabulary: Vocabulary
    vocab_size: int
    compile_seconds: float = 10.0


class GrammarState(Protocol):
    """A position in the text of one grammar.

    It is used by one thread at a time, possibly another one than the compiling thread.
    """

    def fill_bitmask(self, row: np.ndarray) -> bool:
        """Set the bits of the tokens that may come next; return whether the text may end here.

        A token may come if its bytes may, however the text is cut into tokens. No special token
        may, unless the description names it: where the text may end, the engine allows tokens that
        end the request.

        Args:
            row: int32 [ceil(vocab_size / 32)], all zero; token t is bit t % 32 of row[t // 32].
                `hardpoint.toolkit.bitmasks.allow_tokens` sets bits.

        Raises:
            ValueError: the grammar cannot go on, for a reason that the request's error gives.
        """

    def advance(self, token_id: int) -> bool:
        """Take a token; return False, and stay, if the grammar does not allow it.

        Args:
            token_id: any id below `vocab_size`.

        Raises:
            ValueError: the grammar cannot go on, for a reason that the request's error gives.
        """

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens taken, at most as many as a step has drafts.

        None that were taken before the state was forked.
        """

    def fork(self) -> GrammarState:
        """Return a copy that goes on by itself, also in another thread at the same time."""


class GrammarBackend(Component):
    """Compiles grammars, in the engine.

    Faults end the request that the grammar is for.

    Attributes:
        formats: the fields of `StructuredOutputs` that it compiles.
    """

    context: GrammarContext
    formats: ClassVar[Sequence[StructuredFormat]]

    @abstractmethod
    def compile(self, structured: StructuredOutputs) -> GrammarState:
        """Return the state before the first token, which the engine forks for each request.

        Runs while the engine makes steps, in several threads at once; grammars are cached by their
        content. After `compile_seconds`, first mask included, the engine gives up.

        Raises:
            ValueError: it cannot be compiled; the message becomes the request's error. It names
                the mistake, such as the keywords of a schema that are not supported.
        """

    @classmethod
    @returns(PIECE, raises=(NotImplementedError,))
    def validate(cls, structured: StructuredOutputs, answer: str) -> str | None:
        """Return the flaw of a finished answer of a `lenient` request; None if there is no flaw.

        It becomes `CompletionOutput.validation_error`. The frontend calls it, once per answer,
        while the outputs of other requests wait: limit its time, since a schema may be hostile.
        Its exceptions are reported there too, and end nothing. Without it, the answer
        is validated by the default backend.

        Args:
            structured: constraint of the request; `json` is given, as a schema.
            answer: without reasoning.
        """
        raise NotImplementedError
