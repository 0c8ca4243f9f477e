"""Grammar backend llguidance: masks are computed on demand."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from hardpoint import plugins
from hardpoint.plugins import Meta
from hardpoint.plugins.grammars import GrammarBackend, GrammarContext, Vocabulary
from hardpoint.plugins.structured import StructuralTag, StructuredOutputs

from .limits import check_limits
from .schemas.errors import located
from .schemas.writer import SchemaWriter
from .validation import validation_error

if TYPE_CHECKING:
    from hardpoint.plugins.text.grammars import GrammarState

_MAX_ITEMS = 10_000
"""Items of one row of llguidance's parser: an object with 2000 optional properties needs them."""


class LLGuidance(GrammarBackend):
    """llguidance (https://github.com/guidance-ai/llguidance): strict, and quick to compile.

    A JSON schema is enforced exactly, or rejected with its unsupported keywords. Grammars are Lark
    in llguidance's dialect, or GBNF.

    It rejects texts and expressions of more than 32,768 characters, more than 5,000 repetitions
    in the expressions of a grammar, a `multipleOf` above 100,000 without its decimal point, and
    GBNF of more than 65,536 characters or 1,000 rules. A structural tag has at most 10,000
    parts, 1,000 triggers and 1,000 tags.
    """

    contract = 1
    formats = ("json", "json_object", "regex", "grammar", "choice", "structural_tag")

    class Options(plugins.Options):
        """White space in JSON, and limits of one grammar.

        Attributes:
            max_whitespace: blanks and tabs between two parts of JSON in one line; the indentation
                of a line may have twice as many. 0 allows no white space.
            max_newlines: newlines between two parts of JSON, before the indentation.
            max_lexer_states: maximum number of states of a grammar's lexer; a state has 1 to 2 KB.
        """

        max_whitespace: Annotated[int, Meta(ge=0, le=1000)] = 20
        max_newlines: Annotated[int, Meta(ge=0, le=100)] = 2
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
        check_limits(structured)
        matcher = self._matcher(structured, lenient=structured.lenient)
        if _is_in_schema(matcher):
            # Slower, and needed by few schemas.
            matcher = self._matcher(
                structured, lenient=structured.lenient, error_of=self._error_of, is_inline=True
            )
        if matcher.is_error():
            message = _reason(matcher.get_error())
            if isinstance(schema := structured.json, dict) and _is_in_schema(matcher):
                message = located(message, schema, self._error_of)
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

    def _matcher(self, structured: StructuredOutputs, **settings: Any) -> Any:
        """Return a matcher of a grammar.

        Args:
            settings: arguments of the `SchemaWriter` for each of its schemas.
        """

        def write(schema: Any) -> dict[str, Any]:
            return {**SchemaWriter(schema, **settings).document(), "x-guidance": options}

        options = self._schema_options(lenient=structured.lenient)
        return self._compiled(self._grammar(structured, write))

    def _error_of(self, schema: dict[str, Any]) -> str:
        from .lark import FREE  # noqa: PLC0415

        options = {"x-guidance": self._schema_options(lenient=False)}
        matcher = self._compiled(f"start: %json {json.dumps({**schema, **options})}\n{FREE}\n")
        return _reason(matcher.get_error()) if matcher.is_error() else ""

    def _compiled(self, grammar: str) -> Any:
        import llguidance  # noqa: PLC0415

        limits = llguidance.LLParserLimits(
            max_lexer_states=self.options.max_lexer_states,
            max_items_in_row=_MAX_ITEMS,
            verbose_errors=False,
        )
        return llguidance.LLMatcher(self._tokenizer(), grammar, log_level=0, limits=limits)

    def _grammar(
        self, structured: StructuredOutputs, write: Callable[[Any], dict[str, Any]]
    ) -> str:
        # Imported on use: most engines get no request with a grammar.
        from llguidance import regex_to_lark  # noqa: PLC0415

        from .lark import FREE, LarkWriter, quoted, read_grammar  # noqa: PLC0415

        match structured:
            case StructuredOutputs(json=dict() | True as schema):
                rest = f"start: %json {json.dumps(write(schema))}"
            case StructuredOutputs(json_object=True):
                rest = f"start: %json {json.dumps(write({'type': 'object'}))}"
            case StructuredOutputs(regex=str(regex)):
                rest = f"start: /{regex_to_lark(regex, use_ascii='')}/"
            case StructuredOutputs(grammar=str(grammar)):
                rest = read_grammar(grammar)
            case StructuredOutputs(choice=list(choice)):
                rest = f"start: ANY\nANY: {' | '.join(map(quoted, choice))}"
            case StructuredOutputs(structural_tag=StructuralTag() as tag):
                return LarkWriter(self.context.vocabulary, write).grammar(tag)
            case _:
                raise ValueError(f"expected one of {', '.join(self.formats)}")
        return f"{rest}\n{FREE}\n"

    def _schema_options(self, *, lenient: bool) -> Any:
        blanks, newlines = self.options.max_whitespace, self.options.max_newlines
        options: dict[str, Any] = {"lenient": lenient, "coerce_one_of": lenient}
        run = rf"[\x20\x09]{{1,{blanks}}}"
        if newlines and blanks:
            # A blank may stand at the end of a line; indentation follows the last newline.
            run += rf"|\x20?(?:\x0D?\x0A){{1,{newlines}}}[\x20\x09]{{0,{2 * blanks}}}"
        if blanks:
            options["whitespace_pattern"] = run
        else:
            options["whitespace_flexible"] = False
        return options

    def _tokenizer(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper  # noqa: PLC0415

        with self._lock:
            if self._made is None:
                self._made = LLTokenizer(
                    TokenizerWrapper(_Vocabulary(self.context.vocabulary)), slices=None
                )
            return self._made


def _is_in_schema(matcher: Any) -> bool:
    error = matcher.get_error() if matcher.is_error() else ""
    return _OF_SCHEMA in error and not any(limit in error for limit in _LIMITS)


class _Vocabulary:
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
"""The library's phrase for a grammar that no token fits."""

_LONGEST = 500
"""Characters of an error of the library."""

_OF_SCHEMA = "failed to compile JSON schema"
_LIMITS = ("too large", "recursion limit", "too many", "Unsatisfiable")
"""Signs of errors that are not in one place."""

_PLACE = re.compile(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?")


def _reason(message: str) -> str:
    message = message.partition("<backtrace>")[0]
    reason = " ".join(message.partition("\n   1 | ")[0].split())
    match = _PLACE.match(reason)
    reason = reason[match.end() :] if match and match[2] else reason
    # The cause comes last, after a copy of the text.
    return reason if len(reason) <= _LONGEST else f"{reason[:100]} ... {reason[100 - _LONGEST :]}"
