"""The conformance suite for tokenizers; the built-in one passes it too."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st

from hardpoint.plugins import ModelFiles, RequestError, Tokenizer, TokenizerContext
from hardpoint.plugins.component import Component
from hardpoint.plugins.component.behaviour import UnusableError
from hardpoint.plugins.grammars import Vocabulary
from hardpoint.plugins.text.tokenizer import PAIR
from hardpoint.testing.component_suite import GeneralComponentSuite
from hardpoint.testing.pace import cpu_cost
from hardpoint.testing.snapshots import snapshot, without_growth
from hardpoint.testing.suite import (
    Violation,
    checks,
    short_repr,
)

from . import tokenizer_rules as rules

_INCOMPLETE = "\ufffd"
_THREADS_SECONDS, _THREADS_ROUNDS = 0.3, 3
_TOKENS = 1000  # of the stream whose speed is measured
_COMPARED_TOKENS = 3000

_WORDS = (
    *("Hello, world!", " and", " é", "日本語", "🙂", "👩‍👩‍👧", "naïve", "\n\n", "  ", "\t"),
    *("1234", "'s", "<b>", "def f(x):\n    return", "ﬁ", "Ω≈ç", "العربية"),
)
_TEXTS = st.lists(st.sampled_from(_WORDS), max_size=5).map("".join) | st.text(max_size=12)

_CONVERSATION = (
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "So."},
    {"role": "user", "content": "Oh."},
)
_WRONG_CONVERSATIONS: tuple[Any, ...] = (
    [],
    [{}],
    [{"role": "user"}],
    [{"content": "Why?"}],
    [{"role": "user", "content": None}],
    [{"role": 1, "content": "Why?"}],
    [{"role": "user", "content": {"a": 1}}],
    ["Why?"],
    [None],
    "Why?",
    {"role": "user", "content": "Why?"},
    None,
)


class TokenizerSuite(GeneralComponentSuite):
    """Base class of a test class, which sets `tokenizer`, and `files` if it reads some.

    Attributes:
        tokenizer: the class under test.
        files: the folder or file that it reads; None is an empty folder.
        texts: a strategy for texts that it can encode; None draws any text.
        lossless: whether decoding gives exactly the text that was encoded. If it is false,
            encoding and decoding once more has to change nothing.
        budget_us_per_token: maximum microseconds per token of a stream of 1000; None does not
            measure.
    """

    kind = "tokenizers"
    tokenizer: ClassVar[type[Tokenizer]]
    files: ClassVar[Path | str | None] = None
    texts: ClassVar[st.SearchStrategy[str] | None] = None
    lossless: ClassVar[bool] = True
    budget_us_per_token: ClassVar[float | None] = 100.0

    def _component(self) -> type[Component]:
        return self.tokenizer

    def test_vocabulary(self) -> None:
        """Token ids are whole numbers from 0 to `vocab_size` - 1, which is the largest id. A class
        may leave `vocab_size` out.
        """
        self._run_checks(rules.VOCABULARY.text, self._check_size)

        def check(text: str, special: bool) -> None:
            ids = self._encoded(text, add_special_tokens=special)
            for token in ids:
                self._check_token(token, f"encode({text!r})")

        self._search(rules.VOCABULARY.text, 100, check, text=self._texts, special=st.booleans())

    def test_token_bytes(self) -> None:
        """The bytes that `vocabulary()` has for the tokens of a text are the text's in UTF-8, but
        for a space at an end; its special tokens are those that `decode` skips. A class may leave
        `vocabulary` out: then there are no grammars with it.
        """
        vocabulary = self._vocabulary
        if vocabulary is None:
            pytest.skip("vocabulary is left out: there are no grammars with this tokenizer")
        self._run_checks(
            rules.TOKEN_BYTES.text,
            partial(self._check_tokens, vocabulary),
            partial(self._check_special_bytes, vocabulary),
            partial(self._check_texts_of_tokens, vocabulary),
        )

        def check(text: str) -> None:
            ids = self._encoded(text)
            if not self.lossless:
                text = self._decoded(ids, False)
            joined = _bytes_of(vocabulary, ids)
            if not _is_same_but_for_a_space(joined.decode(errors="surrogateescape"), text):
                raise rules.TOKEN_BYTES.violation(
                    f"{text!r} has the tokens {short_repr(ids)}; their bytes in vocabulary() are "
                    f"{joined!r}"
                )

        texts = self._texts.filter(lambda text: _INCOMPLETE not in text)
        self._search(rules.TOKEN_BYTES.text, 100, check, text=texts)

    def test_round_trip(self) -> None:
        """Decoding the result of `encode` gives the text again."""

        def check(text: str) -> None:
            for special in (False, True):
                again = self._round_trip(text, special)
                if not self.lossless:
                    text, again = again, self._round_trip(again, special)
                if again != text:
                    raise rules.ROUND_TRIP.violation(
                        f"{text!r} came back as {again!r} from its tokens "
                        f"{short_repr(self._encoded(text, add_special_tokens=special))}"
                    )

        self._search(rules.ROUND_TRIP.text, 150, check, text=self._texts)

    def test_stream(self) -> None:
        """The pieces of `decode_stream` add up to the result of `decode`: after a prompt that ends
        at any token, inside characters too, with special tokens skipped or shown.
        """

        def check(text: str, more: str, skip: bool) -> None:
            eos = [*self._subject.eos_token_ids][:1]
            ids = self._encoded(text) + eos + self._encoded(more)
            whole = self._decoded(ids, skip)
            for split in range(len(ids) + 1):
                before = self._decoded(ids[:split], skip).rstrip(_INCOMPLETE)
                streamed = _streamed(self._subject, ids[:split], ids[split:], skip)
                if before + streamed != whole:
                    raise rules.STREAM.violation(
                        f"after the prompt {ids[:split]}, which is {before!r}, the tokens "
                        f"{ids[split:]} gave {streamed!r}; all of them are {whole!r} "
                        f"(skip_special_tokens={skip})"
                    )

        texts = self._texts.filter(lambda text: _INCOMPLETE not in text)
        self._search(rules.STREAM.text, 60, check, text=texts, more=texts, skip=st.booleans())

    def test_streams_apart(self) -> None:
        """Interleaved streams give the same as each stream alone."""

        def check(texts: list[str], skip: bool) -> None:
            ids = [self._encoded(text) for text in texts]
            alone = [self._pieces(tokens, skip) for tokens in ids]
            streams = [self._subject.decode_stream([], skip_special_tokens=skip) for _ in ids]
            streamed: list[list[str | None]] = [[] for _ in ids]
            for turn in range(max(map(len, ids))):
                for pieces, stream, tokens in zip(streamed, streams, ids, strict=True):
                    if turn < len(tokens):
                        pieces.append(stream.step(tokens[turn]))
            for number, text in enumerate(texts):
                if streamed[number] != alone[number]:
                    raise rules.STREAMS_APART.violation(
                        f"of {len(ids)} streams that take turns, the one of {text!r} gave "
                        f"{streamed[number]}, alone it gives {alone[number]}"
                    )

        texts = st.lists(self._texts.filter(bool), min_size=2, max_size=3)
        self._search(rules.STREAMS_APART.text, 20, check, texts=texts, skip=st.booleans())

    def test_unknown_tokens(self) -> None:
        """Ids from `vocab_size` on are decoded as no text, because a model may have more rows than
        the tokenizer has tokens.
        """
        size = self._size
        if size is None:
            pytest.skip("vocab_size is left out: which ids are unknown is not known")

        def check(ids: list[int], skip: bool) -> None:
            calls: dict[str, Callable[[], str]] = {
                "decode": lambda: self._decoded(ids, skip),
                "a stream": lambda: _streamed(self._subject, [], ids, skip),
            }
            for call, decode in calls.items():
                try:
                    text = decode()
                except Violation:
                    raise
                except Exception as cause:
                    raise rules.UNKNOWN.violation(
                        f"{call} raised {type(cause).__name__}: {cause}, for {ids}; "
                        f"vocab_size is {size}"
                    ) from cause
                if text:
                    raise rules.UNKNOWN.violation(
                        f"{call} made {text!r} of {ids}; vocab_size is {size}"
                    )

        ids = st.lists(st.integers(size, size + 300), min_size=1, max_size=4)
        self._search(rules.UNKNOWN.text, 20, check, ids=ids, skip=st.booleans())

    def test_deterministic(self) -> None:
        """The same call returns the same, in a new instance too."""
        other = self._make()

        def check(texts: list[str], skip: bool) -> None:
            first = [self._results(self._subject, text, skip) for text in texts]
            for text, expected in zip(texts[::-1], first[::-1], strict=True):
                for label, instance in (("again", self._subject), ("a new instance", other)):
                    if (two := self._results(instance, text, skip)) != expected:
                        raise rules.DETERMINISTIC.violation(
                            f"for {text!r} it gave {short_repr(expected)}, {label} "
                            f"{short_repr(two)}"
                        )

        texts = st.lists(self._texts, min_size=1, max_size=3)
        self._search(rules.DETERMINISTIC.text, 20, check, texts=texts, skip=st.booleans())

    @checks(rules.THREADS)
    def test_threads(self) -> None:
        """Calls in several threads do not disturb each other."""
        subject = self._subject
        texts = [word * 20 + str(number) for number, word in enumerate(_WORDS[:4])]
        expected = [self._results(subject, text, True) for text in texts]
        wrong: list[str] = []
        end = time.monotonic() + _THREADS_SECONDS

        def work(number: int) -> None:
            rounds = 0
            _trace(_sleep_at_lines)
            while not wrong and (rounds < _THREADS_ROUNDS or time.monotonic() < end):
                rounds += 1
                if rounds == _THREADS_ROUNDS:
                    _trace(None)
                try:
                    result = self._results(subject, texts[number], True)
                except Exception as cause:
                    wrong.append(f"one raised {type(cause).__name__}: {cause}")
                    return
                if result != expected[number]:
                    wrong.append(
                        f"one got {short_repr(result)} for {texts[number][:20]!r}..., alone it "
                        f"gets {short_repr(expected[number])}"
                    )

        _run_in_threads([partial(work, number) for number in range(len(texts))])
        if wrong:
            raise rules.THREADS.violation(
                f"of {len(texts)} threads that use one tokenizer, {wrong[0]}"
            )

    def test_chat(self) -> None:
        """A conversation, right or wrong, becomes text or a RequestError."""
        self._run_checks(
            rules.CHAT.text,
            lambda: self._check_chat(_CONVERSATION),
            lambda: self._check_chat(_CONVERSATION, template="{{ nothing.at.all }}"),
            *(partial(self._check_chat, wrong) for wrong in _WRONG_CONVERSATIONS),
        )

    def test_eos(self) -> None:
        """The end-of-sequence tokens are special: no text is encoded with one, none is decoded to
        text where special tokens are skipped.
        """
        self._run_checks(rules.EOS.text, self._check_eos)

        def check(text: str) -> None:
            eos = set(self._subject.eos_token_ids)
            if matches := eos.intersection(self._encoded(text)):
                raise rules.EOS.violation(
                    f"{text!r} is encoded with token {min(matches)}, which is one of "
                    f"eos_token_ids: a completion would end where this text occurs"
                )

        if self._subject.eos_token_ids:
            self._search(rules.EOS.text, 100, check, text=self._texts)

    @checks(rules.SPECIAL)
    def test_special_tokens(self) -> None:
        """Each of `special_tokens` is encoded as its id alone, and decoded to its text."""
        subject = self._subject
        for text, token in subject.special_tokens.items():
            self._check_token(token, "special_tokens")
            ids = subject.encode(text, add_special_tokens=False)
            shown = subject.decode([token], skip_special_tokens=False)
            if list(ids) != [token] or shown.strip() != text.strip():
                raise rules.SPECIAL.violation(
                    f"special_tokens has {text!r} as token {token}; it is encoded as "
                    f"{short_repr(ids)}, and the token is decoded to {shown!r}"
                )

    def test_pairs(self) -> None:
        """`encode_pair` gives each of two texts the tokens that it has alone, and their places. A
        class may leave it out: then there are no pairs.
        """
        try:
            self._subject.encode_pair("a", "b")
        except NotImplementedError:
            pytest.skip("encode_pair is left out: the tokenizer takes no pairs of texts")

        def check(first: str, second: str) -> None:
            pair, of = self._subject.encode_pair(first, second), f"({first!r}, {second!r})"
            try:
                ids = PAIR.check(pair, (first, second), (first, second)).token_ids
            except UnusableError as cause:
                raise rules.PAIRS.violation(f"encode_pair{of} {cause}") from cause
            for text, span in ((first, pair.first), (second, pair.second)):
                alone, tokens = self._encoded(text), ids[span.start : span.stop]
                if tokens != alone:
                    raise rules.PAIRS.violation(
                        f"encode_pair{of} has the tokens {short_repr(tokens)} for {text!r}, which "
                        f"are {short_repr(alone)} alone"
                    )
            for token in ids:
                self._check_token(token, f"encode_pair{of}")

        texts = self._texts.filter(bool)
        self._search(rules.PAIRS.text, 60, check, first=texts, second=texts)

    def test_reads_only(self) -> None:
        """Token ids and messages that a method gets stay as they are."""

        def check(text: str) -> None:
            ids = self._encoded(text)
            messages = [dict(message) for message in _CONVERSATION]
            calls: dict[str, Callable[[], Any]] = {
                "decode": lambda: self._subject.decode(ids),
                "decode_stream": lambda: self._subject.decode_stream(ids).step(ids[-1]),
                "apply_chat_template": lambda: self._subject.apply_chat_template(messages),
            }
            for name, call in calls.items():
                before = snapshot([ids, messages])
                with suppress(RequestError):
                    call()
                if snapshot([ids, messages]) != before:
                    raise rules.READS_ONLY.violation(
                        f"{name} mutated its input, for {text!r}: now it is "
                        f"{short_repr(messages if name == 'apply_chat_template' else ids)}"
                    )

        texts = self._texts.filter(lambda text: bool(text and self._encoded(text)))
        self._search(rules.READS_ONLY.text, 10, check, text=texts)

    @checks("memory: nothing grows with the number of texts")
    def test_memory(self) -> None:
        """Nothing grows with the number of texts and streams."""
        subject = self._subject
        description = "the tokenizer: while 100 texts were encoded and decoded"
        fix = "bound every cache, by functools.lru_cache(maxsize=...) for example, and drop streams"
        for wave in without_growth(subject, 100, description, fix):
            ids = subject.encode(f"{wave} of 200")
            subject.decode(ids)
            subject.decode_stream(ids).step(ids[0])

    def test_speed(self) -> None:
        """The cost of a token stays within the budget, and does not grow with the text."""
        if self.budget_us_per_token is None:
            pytest.skip("budget_us_per_token is None")
        self._run_checks(
            "speed: a token of a stream costs no more than its budget", self._check_speed
        )

    @cached_property
    def _subject(self) -> Tokenizer:
        return self._make()

    @cached_property
    def _empty(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory()

    @property
    def _texts(self) -> st.SearchStrategy[str]:
        return _TEXTS if self.texts is None else self.texts

    @property
    def _size(self) -> int | None:
        try:
            return self._subject.vocab_size
        except NotImplementedError:
            return None

    @cached_property
    def _vocabulary(self) -> Vocabulary | None:
        try:
            return self._subject.vocabulary()
        except NotImplementedError:
            return None

    def _use_once(self, component: Any, number: int) -> object:
        ids = component.encode(f"{number} of many")
        return component.decode(ids), component.decode_stream(ids).step(ids[0])

    def _make(self) -> Tokenizer:
        path = Path(self._empty.name if self.files is None else self.files)
        files = ModelFiles(name=path.name, path=path)
        tokenizer: Tokenizer = self._build(TokenizerContext, files=files)
        return tokenizer

    def _encoded(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        ids = self._subject.encode(text, add_special_tokens=add_special_tokens)
        if not isinstance(ids, list) or any(type(token) is not int for token in ids):
            raise rules.VOCABULARY.violation(
                f"encode({text!r}) returned {short_repr(ids)}, no list of whole numbers"
            )
        return ids

    def _decoded(self, ids: list[int], skip: bool) -> str:
        text = self._subject.decode(ids, skip_special_tokens=skip)
        if not isinstance(text, str):
            raise rules.ROUND_TRIP.violation(
                f"decode({ids}) returned {short_repr(text)}, no text", "return str"
            )
        return text

    def _round_trip(self, text: str, special: bool) -> str:
        """Return the text of a text's tokens; the ones that encode adds are skipped."""
        return self._decoded(self._encoded(text, add_special_tokens=special), skip=special)

    def _results(self, tokenizer: Tokenizer, text: str, skip: bool) -> Any:
        ids = tokenizer.encode(text)
        text = tokenizer.decode(ids, skip_special_tokens=skip)
        return ids, text, _streamed(tokenizer, [], ids, skip)

    def _pieces(self, ids: list[int], skip: bool) -> list[str | None]:
        stream = self._subject.decode_stream([], skip_special_tokens=skip)
        return [stream.step(token) for token in ids]

    def _check_size(self) -> None:
        size, subject = self._size, self._subject
        if size is None:
            return
        if type(size) is not int or size < 1:
            raise rules.VOCABULARY.violation(
                f"vocab_size is {short_repr(size)}, no number of tokens"
            )
        for token in subject.eos_token_ids:
            self._check_token(token, "eos_token_ids")
        is_special = size - 1 in subject.eos_token_ids  # which may have no text
        if not is_special and not subject.decode([size - 1], skip_special_tokens=False):
            raise rules.VOCABULARY.violation(
                f"vocab_size is {size}, but token {size - 1} has no text: it is too large"
            )
        text, again = "", []
        with suppress(Exception):  # what an unknown id may not do is another rule
            text = subject.decode([size], skip_special_tokens=False)
            again = subject.encode(text, add_special_tokens=False)
        if text and again == [size]:
            raise rules.VOCABULARY.violation(
                f"vocab_size is {size}, but token {size} is the text {text!r}: it is too small"
            )

    def _check_tokens(self, vocabulary: Vocabulary) -> None:
        size = self._size
        if not isinstance(vocabulary, Vocabulary):
            raise rules.TOKEN_BYTES.violation(
                f"vocabulary() returned {short_repr(vocabulary)}", "return a Vocabulary"
            )
        tokens, special = vocabulary.tokens, vocabulary.special
        if not isinstance(tokens, tuple) or {*map(type, tokens)} != {bytes}:
            raise rules.TOKEN_BYTES.violation(
                f"the tokens of vocabulary() are {short_repr(tokens)}", "return a tuple of bytes"
            )
        if size is not None and len(tokens) > size:
            raise rules.TOKEN_BYTES.violation(
                f"vocabulary() has {len(tokens)} tokens, vocab_size is {size}",
                "let vocab_size be one more than the largest id",
            )
        if list(special) != sorted(set(special)) or not set(special) <= set(range(len(tokens))):
            raise rules.TOKEN_BYTES.violation(
                f"the special tokens of vocabulary() are {short_repr(special)}",
                "name ids that tokens has, in order and once",
            )

    def _check_special_bytes(self, vocabulary: Vocabulary) -> None:
        names = {token: text for text, token in self._subject.special_tokens.items()}
        for token in sorted({*names, *vocabulary.special}):
            is_special = token in vocabulary.special
            shown, is_shown = self._decoded([token], False), self._decoded([token], True)
            if is_special == bool(is_shown) and (is_shown or shown):
                raise rules.TOKEN_BYTES.violation(
                    f"token {token}, {shown!r}, {'is' if is_special else 'is not'} "
                    f"among the special tokens of vocabulary(), and decode "
                    f"{'shows' if is_shown else 'skips'} it with skip_special_tokens",
                    "name the tokens that decode skips with skip_special_tokens, no others",
                )
            name, bytes_of_token = names.get(token), _bytes_of(vocabulary, [token])
            if is_special and name is not None and bytes_of_token != name.encode():
                raise rules.TOKEN_BYTES.violation(
                    f"token {token} is {name!r} in special_tokens and {bytes_of_token!r} "
                    f"in vocabulary()",
                    "return the text of a special token as its bytes",
                )

    def _check_texts_of_tokens(self, vocabulary: Vocabulary) -> None:
        ordinary = sorted({*range(len(vocabulary.tokens))}.difference(vocabulary.special))
        first = self._encoded("a")
        before = self._decoded(first, False)
        for token in ordinary[:: 1 + len(ordinary) // _COMPARED_TOKENS]:
            with suppress(UnicodeDecodeError):
                text = vocabulary.tokens[token].decode()
                alone = self._decoded([token], False)
                after = self._decoded([*first, token], False)
                if not _is_same_but_for_a_space(text, alone) and before + text != after:
                    raise rules.TOKEN_BYTES.violation(
                        f"token {token} is {text!r} in vocabulary(), and decode makes {alone!r} "
                        f"of it"
                    )

    def _check_token(self, token: int, where: str) -> None:
        size = self._size
        if type(token) is not int or token < 0 or (size is not None and token >= size):
            raise rules.VOCABULARY.violation(
                f"{where} has the token id {short_repr(token)}, vocab_size is {size}"
            )

    def _check_chat(self, messages: Any, template: str | None = None) -> None:
        chat = short_repr(messages)
        conversation = list(messages) if isinstance(messages, tuple) else messages
        extra: Mapping[str, Any] = {} if template is None else {"template": template}
        for add in (True, False):
            try:
                text = self._subject.apply_chat_template(
                    conversation, add_generation_prompt=add, **extra
                )
            except RequestError:
                continue
            except Exception as cause:
                raise rules.CHAT.violation(
                    f"for {chat} it raised {type(cause).__name__}: {cause}"
                ) from cause
            if not isinstance(text, str):
                raise rules.CHAT.violation(f"for {chat} it returned {short_repr(text)}")

    def _check_eos(self) -> None:
        subject, ids = self._subject, self._subject.eos_token_ids
        try:
            listed = list(ids)
        except TypeError as cause:
            raise rules.EOS.violation(
                f"eos_token_ids is {short_repr(ids)}: {cause}", "return a list of token ids"
            ) from cause
        for token in listed:
            self._check_token(token, "eos_token_ids")
            if text := subject.decode([token]):
                raise rules.EOS.violation(
                    f"eos_token_ids has token {token}, which is the text {text!r} even where "
                    f"special tokens are skipped"
                )

    def _check_speed(self) -> None:
        ids = self._encoded(" and so on, as ever" * 200)[:_TOKENS]
        budget = self.budget_us_per_token or 0.0

        def work() -> None:
            stream = self._subject.decode_stream([])
            for token in ids:
                stream.step(token)

        cost = cpu_cost(work, budget * len(ids) / 1e6, rounds=3) * 1e6 / len(ids)
        if cost > budget:
            raise Violation(
                f"a token of a stream of {len(ids)} cost {cost:.0f} microseconds, the budget is "
                f"{budget:.0f}",
                "decode the newest tokens only, not the whole text in every step; or set "
                "budget_us_per_token",
            )


def _bytes_of(vocabulary: Vocabulary, ids: list[int]) -> bytes:
    """Return the bytes of tokens; ids outside of the vocabulary have no bytes."""
    return b"".join(b"".join(vocabulary.tokens[token : token + 1]) for token in ids)


def _is_same_but_for_a_space(joined: str, text: str) -> bool:
    return joined in (text, f" {text}", f"{text} ")


def _streamed(tokenizer: Tokenizer, prompt: list[int], ids: Sequence[int], skip: bool) -> str:
    """Return a stream's text, including the text of pending last tokens, like the engine."""
    stream = tokenizer.decode_stream(prompt, skip_special_tokens=skip)
    pieces: list[str] = []
    pending: list[int] = []
    for token in ids:
        piece = stream.step(token)
        if piece is not None and not isinstance(piece, str):
            raise rules.STREAM.violation(
                f"step({token}) returned {short_repr(piece)}", "return text that is final, or None"
            )
        if piece:
            pieces.append(piece)
            pending.clear()
        else:
            pending.append(token)
    if pending:
        pieces.append(tokenizer.decode(pending, skip_special_tokens=skip))
    return "".join(pieces)


def _sleep_at_lines(*_: object) -> Callable[..., Any]:
    """Let other threads run before each line: a trace function of Python code."""
    # The interval between switches alone finds few races, and fewer on a busy machine.
    time.sleep(1e-6)
    return _sleep_at_lines


_tracing = threading.Lock()


def _trace(function: Callable[..., Any] | None) -> None:
    """Set the trace function of this thread, but of one thread at a time."""
    with _tracing:
        sys.settrace(function)


def _run_in_threads(calls: Sequence[Callable[[], None]]) -> None:
    """Run calls at once, with frequent switches between the threads."""
    threads = [threading.Thread(target=call) for call in calls]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
