"""Grammar backends: which tokens may come next in structured output."""

from .text.grammars import (
    GrammarBackend,
    GrammarContext,
)
from .text.grammars import GrammarState as GrammarState
from .text.vocabulary import Vocabulary

__all__ = ["GrammarBackend", "GrammarContext", "Vocabulary"]
