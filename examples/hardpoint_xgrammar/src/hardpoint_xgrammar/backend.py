"""The grammar backend."""

from __future__ import annotations

import importlib
import json
import re
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from msgspec import Meta

from hardpoint import plugins
from hardpoint.plugins.grammars import GrammarBackend, GrammarContext
from hardpoint.plugins.structured import (
    StructuredOutputs,
)

from .compile_program import CompilerAnswer, Job, Start, tokenizer_info
from .compiler import GrammarCompiler
from .schemas import spelled_out, unenforced_keywords
from .tags import TagConverter

if TYPE_CHECKING:
    from hardpoint.plugins.requests.structured import StructuredFormat

_REQUIREMENT = "xgrammar>=0.2.8,<0.3"
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*+"?|\[(?:[^\]\\\n]|\\.)*+\]?|#[^\n]*')
_MACRO = re.compile(r"\b(\w*(?:Token|Tokens|TagDispatch))\s*\(")


class XGrammarState:
    """A position in a text, and the tokens that the grammar could ever take."""

    def __init__(self, matcher: Any, allowed: np.ndarray) -> None:
        """Wrap a matcher.

        Args:
            matcher: an xgrammar.GrammarMatcher.
            allowed: int32 [ceil(vocab_size / 32)], a bit per token, as in a mask.
        """
        self._matcher = matcher
        self._allowed = allowed

    def fill_bitmask(self, row: np.ndarray) -> bool:
        """Set the bits of the tokens that may come next; return whether the text may end."""
        if not self._matcher.fill_next_token_bitmask(row):
            row.fill(-1)
        np.bitwise_and(row, self._allowed, out=row)
        return bool(self._matcher.is_completed())

    def advance(self, token_id: int) -> bool:
        """Process a token; return False, and stay, if the grammar does not allow it."""
        word = token_id >> 5
        if not 0 <= word < len(self._allowed) or not (self._allowed[word] >> (token_id & 31)) & 1:
            return False  # xgrammar would write a line about it
        return bool(self._matcher.accept_token(token_id))

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens."""
        self._matcher.rollback(count)

    def fork(self) -> XGrammarState:
        """Return a copy that goes on by itself."""
        return XGrammarState(self._matcher.fork(), self._allowed)


class XGrammar(GrammarBackend):
    """Grammars in GBNF, schemas, regular expressions and structural tags, by xgrammar.

    It enforces less of JSON schemas than llguidance, and compiles more of them. A schema with
    parts that it does not enforce is refused, unless the request is `lenient`:

    - `not`, `if`, `contains`, `uniqueItems`, `patternProperties`, `propertyNames`,
      `unevaluatedProperties`, dependencies, `allOf` of several schemas, required properties
      that `properties` lack, and `minProperties` without `additionalProperties: false`;
    - what stands next to `$ref`, `const`, `enum`, `anyOf`, `oneOf` or `allOf`, and what needs a
      `type` and has none;
    - what xgrammar itself warns of, such as a `oneOf` whose schemas may overlap, `multipleOf` of
      numbers, or a length together with a `pattern`.

    A `pattern` matches the whole string, and properties come in the order of the schema. Unless
    `additionalProperties` is false, another property whose name is written with an escape
    (`"\\u0061"`) may have the name of one in the schema. A schema in a structural tag is in strict
    mode. Grammars have no macros, such as `TagDispatch`.

    It compiles in processes of its own, which start with the first grammar, are limited in memory,
    and are ended after `grammar.compile_seconds`.
    """

    contract = 1
    formats: ClassVar[Sequence[StructuredFormat]] = (
        "json",
        "json_object",
        "regex",
        "grammar",
        "choice",
        "structural_tag",
    )

    class Options(plugins.Options):
        """Options.

        Attributes:
            any_whitespace: whether JSON may have any white space between its parts, or is written
                as Python's json.dumps does.
            strict_mode: whether objects have only properties, and arrays only items, that the
                schema describes, unless it allows others itself.
            processes: maximum number of processes that compile.
            threads: number of threads of each process.
            max_bytes: memory that each process may use for grammars.
        """

        any_whitespace: bool = True
        strict_mode: bool = False
        processes: Annotated[int, Meta(ge=1, le=64)] = 2
        threads: Annotated[int, Meta(ge=1, le=256)] = 1
        max_bytes: Annotated[int, Meta(ge=1 << 20)] = 2 << 30

    options: Options

    def __init__(self, context: GrammarContext) -> None:
        """Import xgrammar.

        Raises:
            ImportError: it is not installed, or its import fails.
        """
        super().__init__(context)
        self._library = _import_library()
        vocabulary, vocab_size = context.vocabulary, context.vocab_size
        tokens = list(vocabulary.tokens[:vocab_size])
        self._special = [token for token in vocabulary.special if token < len(tokens)]
        self._text_tokens = _bits(set(_non_empty(tokens)).difference(self._special), vocab_size)
        self._start = Start(
            tokens=tokens,
            special=self._special,
            vocab_size=vocab_size,
            threads=self.options.threads,
            max_bytes=self.options.max_bytes,
        )
        # The rest is for reading the result, and for the first mask.
        seconds = 0.9 * context.compile_seconds
        self._compiler = GrammarCompiler(self._start, seconds, self.options.processes)
        self._lock = threading.Lock()
        self._tokenizer_info: Any = None

    def compile(self, structured: StructuredOutputs) -> XGrammarState:
        """Return the state before the first token.

        Raises:
            ValueError: the grammar is wrong, not enforced, or needs too much time or memory.
        """
        job, tokens = self._job(structured)
        answer = self._compiler.compile(job)
        if answer.error:
            raise ValueError(answer.error)
        if answer.warnings and not structured.lenient:
            warnings = "; ".join(answer.warnings)
            raise ValueError(f"xgrammar does not enforce all of it: {warnings}")
        return self._state(answer, tokens)

    @property
    def pids(self) -> Sequence[int]:
        """Of the processes that compile; none before the first grammar."""
        return self._compiler.pids

    def close(self) -> None:
        """End the processes."""
        self._compiler.close()

    def _job(self, structured: StructuredOutputs) -> tuple[Job, set[int]]:
        """Return the source to compile, and the special tokens that it has."""
        match structured.format:
            case "json":
                if not structured.lenient:
                    _check_schema(structured.json)
                return self._json_job(structured.json), set()
            case "json_object":
                return self._json_job({"type": "object", "additionalProperties": True}), set()
            case "regex":
                return Job("regex", structured.regex or ""), set()
            case "grammar":
                check_grammar(structured.grammar or "")
                return Job("ebnf", structured.grammar or ""), set()
            case "choice":
                choices = [
                    {"type": "const_string", "value": choice} for choice in structured.choice or ()
                ]
                return _tag_job({"type": "or", "elements": choices}), set()
            case "structural_tag":
                assert structured.structural_tag is not None
                check = _allow if structured.lenient else _check_schema
                converter = TagConverter(self.context.vocabulary, check, check_grammar)
                format = converter.convert(structured.structural_tag.format)
                return _tag_job(format), converter.tokens

    def _json_job(self, schema: Any) -> Job:
        return Job(
            "json",
            json.dumps(spelled_out(schema)),
            any_whitespace=self.options.any_whitespace,
            strict_mode=self.options.strict_mode,
        )

    def _state(self, answer: CompilerAnswer, tokens: set[int]) -> XGrammarState:
        with self._lock:
            if self._tokenizer_info is None:
                start = self._start
                self._tokenizer_info = tokenizer_info(start.tokens, start.special, start.vocab_size)
        compiled = self._library.CompiledGrammar.deserialize_json(
            answer.grammar, self._tokenizer_info
        )
        allowed = self._text_tokens
        if tokens:
            allowed = allowed | _bits(tokens, self.context.vocab_size)
        return XGrammarState(self._library.GrammarMatcher(compiled), allowed)


def _import_library() -> Any:
    """Return the module xgrammar.

    Raises:
        ImportError: it is not installed, or its import fails.
    """
    try:
        return importlib.import_module("xgrammar")
    except ImportError as cause:
        raise ImportError(
            f"it needs the library xgrammar: pip install '{_REQUIREMENT}' ({cause})"
        ) from cause


def _non_empty(tokens: list[bytes]) -> list[int]:
    return [token for token, content in enumerate(tokens) if content]


def _bits(tokens: set[int], vocab_size: int) -> np.ndarray:
    """Return a mask of tokens, int32 [ceil(vocab_size / 32)]."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def _tag_job(format: dict[str, Any]) -> Job:
    return Job("structural_tag", json.dumps({"type": "structural_tag", "format": format}))


def _allow(schema: Any) -> None:
    """Allow any schema."""


def _check_schema(schema: Any) -> None:
    """Refuse a schema that xgrammar would not enforce.

    Raises:
        ValueError: naming the keywords.
    """
    if keywords := unenforced_keywords(schema):
        raise ValueError(f"xgrammar does not enforce {', '.join(keywords)}")


def check_grammar(grammar: str) -> None:
    """Refuse a grammar in another syntax than GBNF.

    Raises:
        ValueError: it is in the syntax of Lark, or has macros.
    """
    bare = _QUOTED.sub('""', grammar)
    if "::=" not in bare:
        raise ValueError(
            "the backend xgrammar has grammars in GBNF (root ::= ...), not in the syntax "
            "of Lark; the backend llguidance has them"
        )
    if macro := _MACRO.search(bare):
        raise ValueError(f"the backend xgrammar has no macros, got {macro[1]}")
