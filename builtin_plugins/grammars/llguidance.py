"""llguidance: grammars whose masks are made as they are needed."""

from __future__ import annotations

import json
import re
import threading
from typing import Annotated, Any

import numpy as np

from hardpoint import plugins
from hardpoint.plugins import Meta
from hardpoint.plugins.grammars import GrammarBackend, GrammarContext, GrammarState, Vocabulary
from hardpoint.plugins.structured import StructuralTag, StructuredOutputs

from .limits import check_limits
from .validation import validation_error

_MAX_ITEMS = 10_000
"""Of one row of llguidance's parser: what an object with 2000 optional properties needs."""


class LLGuidance(GrammarBackend):
    """llguidance (https://github.com/guidance-ai/llguidance): strict, and quick to compile.

    A JSON schema is enforced, or the schema is refused with the keywords that are not
    supported. Grammars are Lark's, in llguidance's dialect, or GBNF.
    """

    contract = 1
    formats = ("json", "json_object", "regex", "grammar", "choice", "structural_tag")

    class Options(plugins.Options):
        """White space in JSON, and limits of one grammar.

        Attributes:
            max_whitespace: characters of white space between two parts of JSON; 0 allows none.
            max_lexer_states: maximum number of states of a grammar's lexer; a state has 1 to 2 KB.
        """

        max_whitespace: Annotated[int, Meta(ge=0, le=1000)] = 64
        max_lexer_states: Annotated[int, Meta(ge=100)] = 50_000

    options: Options

    def __init__(self, context: GrammarContext) -> None:
        """Read nothing yet: the library's trie of the vocabulary is made for the first grammar."""
        super().__init__(context)
        self._lock = threading.Lock()
        self._made: Any = None

    def compile(self, structured: StructuredOutputs) -> GrammarState:
        """Return the state before the first token.

        Raises:
            ValueError: the grammar is wrong, not supported or too large.
        """
        # Imported on use: most engines get no request with a grammar.
        import llguidance  # noqa: PLC0415

        check_limits(structured)
        limits = llguidance.LLParserLimits(
            max_lexer_states=self.options.max_lexer_states,
            max_items_in_row=_MAX_ITEMS,
            verbose_errors=False,
        )
        matcher = llguidance.LLMatcher(
            self._tokenizer(), self._grammar(structured), log_level=0, limits=limits
        )
        if matcher.is_error():
            message = _reason(matcher.get_error())
            if "Unimplemented keys" in message and not structured.lenient:
                message += "; with `lenient`, they are left out, and the answer is validated"
            raise ValueError(message)
        state = _State(matcher, len(self.context.vocabulary.tokens))
        if structured.format in ("json", "json_object") and state.can_end():
            raise ValueError("no JSON fits the schema")  # it refers to itself alone
        return state

    @classmethod
    def validate(cls, structured: StructuredOutputs, answer: str) -> str | None:
        """Return the first error of a finished answer of a `lenient` request."""
        assert structured.json is not None
        return validation_error(structured.json, answer)

    def _grammar(self, structured: StructuredOutputs) -> str:
        """Return a grammar as llguidance reads it."""
        from llguidance import regex_to_lark  # noqa: PLC0415

        from .lark import FREE, LarkWriter, quoted, read_grammar  # noqa: PLC0415

        options = self._schema_options(lenient=structured.lenient)
        match structured:
            case StructuredOutputs(json=dict() | True as schema):
                given = {} if schema is True else schema
                rest = f"start: %json {json.dumps({**given, 'x-guidance': options})}"
            case StructuredOutputs(json_object=True):
                schema = {"type": "object", "x-guidance": options}
                rest = f"start: %json {json.dumps(schema)}"
            case StructuredOutputs(regex=str(regex)):
                rest = f"start: /{regex_to_lark(regex, use_ascii='')}/"
            case StructuredOutputs(grammar=str(grammar)):
                rest = read_grammar(grammar)
            case StructuredOutputs(choice=list(choice)):
                rest = f"start: ANY\nANY: {' | '.join(map(quoted, choice))}"
            case StructuredOutputs(structural_tag=StructuralTag() as tag):
                return LarkWriter(self.context.vocabulary, options).grammar(tag)
            case _:
                raise ValueError(f"expected one of {', '.join(self.formats)}")
        return f"{rest}\n{FREE}\n"

    def _schema_options(self, *, lenient: bool) -> Any:
        longest = self.options.max_whitespace
        options: dict[str, Any] = {"lenient": lenient, "coerce_one_of": lenient}
        if longest:
            options["whitespace_pattern"] = rf"[\x20\x0A\x0D\x09]{{1,{longest}}}"
        else:
            options["whitespace_flexible"] = False
        return options

    def _tokenizer(self) -> Any:
        """Return llguidance's own form of the vocabulary."""
        from llguidance import LLTokenizer, TokenizerWrapper  # noqa: PLC0415

        with self._lock:
            if self._made is None:
                self._made = LLTokenizer(
                    TokenizerWrapper(_Tokens(self.context.vocabulary)), slices=None
                )
            return self._made


class _Tokens:
    """The vocabulary as llguidance wants it, with a token more: the end of the text."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        end = len(vocabulary.tokens)
        self.eos_token_id = end
        # The library marks special tokens with the byte 0xFF, which no text has.
        texts = (b"" if b"\xff" in token else token for token in vocabulary.tokens)
        self.tokens = [*texts, b"<the text ends>"]
        self.special_token_ids = [*vocabulary.special, end]
        self._ids = {token: index for index, token in enumerate(vocabulary.tokens) if token}
        self._longest = max(map(len, vocabulary.tokens), default=1)

    def __call__(self, text: bytes) -> list[int]:
        """Return tokens of a text, the longest first; masks do not depend on which."""
        ids, at = [], 0
        while at < len(text):
            longest = min(self._longest, len(text) - at)
            length = next(
                n for n in range(longest, -1, -1) if text[at : at + n] in self._ids or not n
            )
            if length:
                ids.append(self._ids[text[at : at + length]])
            at += length or 1
        return ids


class _State:
    """A matcher of llguidance."""

    def __init__(self, matcher: Any, end: int) -> None:
        self._matcher = matcher
        self._end = end  # the id of the token that ends the text
        self._bit = 1 << end % 32 if end % 32 < 31 else -(1 << 31)
        self._columns = np.zeros(end // 32 + 1, dtype=np.int32)
        # Looked up once: that takes as long as a mask of few tokens.
        self._memory = self._columns.ctypes.data, self._columns.nbytes

    def fill_bitmask(self, row: np.ndarray) -> bool:
        columns = self._columns
        self._matcher.unsafe_compute_mask_ptr(*self._memory)
        last = columns.item(-1)
        can_end = bool(last & self._bit)
        if can_end:
            columns[-1] = last - self._bit
            if self._matcher.is_error():
                if _STUCK not in self._matcher.get_error():
                    self._check()
                return False
        row[: len(columns)] = columns[: len(row)]
        return can_end

    def can_end(self) -> bool:
        return self.fill_bitmask(self._columns.copy())

    def advance(self, token_id: int) -> bool:
        if token_id >= self._end:
            return False
        if self._matcher.try_consume_tokens([token_id]):
            return True
        self._check()
        return False

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)
        self._check()

    def fork(self) -> GrammarState:
        return _State(self._matcher.deep_copy(), self._end)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(_reason(self._matcher.get_error()))


_STUCK = "NoExtensionBias"
"""What the library calls it that no token fits."""

_LONGEST = 500
"""Characters of an error of the library."""

_PLACE = re.compile(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?")


def _reason(message: str) -> str:
    """Return the error, in one line, without the library's picture of the grammar or stack."""
    message = message.partition("<backtrace>")[0]
    reason = " ".join(message.partition("\n   1 | ")[0].split())
    found = _PLACE.match(reason)
    reason = reason[found.end() :] if found and found[2] else reason
    # What is wrong stands at the end, after a copy of the text.
    return reason if len(reason) <= _LONGEST else f"{reason[:100]} ... {reason[100 - _LONGEST :]}"
