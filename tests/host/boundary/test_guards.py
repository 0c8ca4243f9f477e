"""Tokenizers and reasoning parsers that do what they must not are named, with method and cause."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
from support.samples import Sample

from hardpoint import RequestError, SamplingParams
from hardpoint.builtin_plugins.parsers.think_tags import ThinkTags
from hardpoint.builtin_plugins.tokenizer.transformers import TransformersTokenizer
from hardpoint.errors import PluginFaultError
from hardpoint.host.boundary.text_guards import guarded_parser, guarded_tokenizer, open_tokenizer
from hardpoint.plugins import (
    OutputParser,
    OutputParserContext,
    ParserRequest,
    ReasoningMarkers,
    Tokenizer,
    TokenizerContext,
)
from hardpoint.plugins.component import Source
from hardpoint.plugins.grammars import Vocabulary
from hardpoint.plugins.output_parser import (
    ContentText,
    MalformedText,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from hardpoint.testing import scripted_engine

HERE = __name__
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def failing(*_, **__):
    raise LookupError("lost")


def exiting(*_, **__):
    raise SystemExit(3)


def returning(value):
    return lambda *_, **__: value


class Mine(Source):
    def __str__(self):
        return "plugin 'mine'"


SOURCE = Mine("mine", "acme:Mine", "acme", "1.0", "default")


def component(interface, context, **members):
    own = {n: staticmethod(m) if callable(m) else m for n, m in members.items()}
    cls = type("Mine", (interface,), {"contract": 1, **own})
    cls.__abstractmethods__ = frozenset()
    return cls(context)


def tokenizer(**methods):
    context = TokenizerContext(name="mine", options=None, files=None)
    return guarded_tokenizer(component(Tokenizer, context, **methods), SOURCE, vocab_size=9)


def parser(markers, open=None):
    context = OutputParserContext(name="mine", options=None, tokenizer=None)
    mine = component(OutputParser, context, markers=markers, open=open)
    return guarded_parser(mine, "reasoning_parsers", SOURCE, vocab_size=9)


@pytest.mark.parametrize(
    ("encode", "words"),
    [
        (failing, "failed: LookupError: lost"),
        (exiting, "failed: SystemExit: 3"),
        (returning(None), "returned None, expected token ids: TypeError: "),
        (returning("ab"), "returned 'ab', expected token ids: TypeError: "),
        (returning([1.5]), "returned [1.5], expected token ids: TypeError: "),
        (returning([1, -1]), "returned -1, expected token ids from 0 to 8"),
        (returning([2**80]), f"returned {2**80}, expected token ids from 0 to 8"),
    ],
)
def test_encode(encode, words):
    with pytest.raises(PluginFaultError) as error:
        tokenizer(encode=encode).encode("x")
    assert str(error.value).startswith(f"plugin 'mine': its encode {words}")


def test_token_ids_are_the_frontends_own_and_whole_numbers():
    shared = [1, 2]
    assert tokenizer(encode=returning(shared)).encode("x") is not shared
    for value in ((1, 2), np.array([1, 2]), [np.int64(1), 2], iter([1, 2])):
        ids = tokenizer(encode=returning(value)).encode("x")
        assert ids == [1, 2]
        assert set(map(type, ids)) == {int}


@pytest.mark.parametrize(
    ("vocabulary", "words"),
    [
        (failing, "failed: LookupError: lost"),
        (returning([b"a"]), "returned [b'a'], expected a Vocabulary"),
        (returning(Vocabulary(tokens=[b"a"])), "returned tokens in a list, expected a tuple of b"),
        (returning(Vocabulary(tokens=(b"a", "b"))), "returned the token 'b', expected a tuple of"),
        (returning(Vocabulary(tokens=(b"a",), special=(1,))), "returned 1, expected token ids fr"),
        (returning(Vocabulary(tokens=(b"a",), special=1)), "returned 1, expected token ids: Type"),
    ],
)
def test_vocabulary(vocabulary, words):
    with pytest.raises(PluginFaultError) as error:
        tokenizer(vocabulary=vocabulary).vocabulary()
    assert str(error.value).startswith(f"plugin 'mine': its vocabulary {words}")


def test_a_vocabulary_has_the_models_tokens_alone():
    tokens = tuple(bytes([byte]) for byte in range(65, 80))
    for length in (3, 9, 10, 15):
        found = Vocabulary(tokens=tokens[:length], special=(2, 0, length - 1, 2))
        checked = tokenizer(vocabulary=returning(found)).vocabulary()
        special = {0, 2, length - 1} if length <= 9 else {0, 2}
        assert checked == Vocabulary(tokens=tokens[: min(length, 9)], special=(*sorted(special),))


@pytest.mark.parametrize("member", ["vocabulary", "vocab_size"])
def test_a_member_that_a_tokenizer_lacks_is_no_fault(member):
    mine = tokenizer(eos_token_ids=())
    plugins = SimpleNamespace(create=lambda *_, **__: mine.wrapped)
    guarded = open_tokenizer(plugins, SimpleNamespace(source=SOURCE), None, 9)
    with pytest.raises(NotImplementedError, match="^the tokenizer 'mine' "):
        getattr(guarded, member)()  # the property raises first
    with pytest.raises(PluginFaultError, match="its encode failed: NotImplementedError: never"):
        tokenizer(encode=raising(NotImplementedError("never"))).encode("x")


@pytest.mark.parametrize(
    ("markers", "words"),
    [
        (returning(([1], [2])), "returned ([1], [2]), expected ReasoningMarkers"),
        (
            returning(ReasoningMarkers(["<a>"], ["<b>"])),
            "returned '<a>', expected token ids: TypeErr",
        ),
        (returning(ReasoningMarkers([[9]], [[1]])), "returned 9, expected token ids from 0 to 8"),
        (failing, "failed: LookupError: lost"),
    ],
)
def test_markers(markers, words):
    with pytest.raises(
        RequestError, match=f"^output parser 'mine': its markers {re.escape(words)}"
    ):
        parser(markers).markers()


def test_markers_are_asked_for_once():
    found = iter([ReasoningMarkers([iter([1])], [iter([2])]), ReasoningMarkers([[2]], [[1]])])
    mine = parser(lambda: next(found))
    for _ in range(2):
        assert (mine.markers().start, mine.markers().end) == (((1,),), ((2,),))


class Picky(Sample, TransformersTokenizer, contract=1):
    """Fails for some texts, and for what comes after others."""

    def encode(self, text, **options):
        if "picky" in text:
            raise KeyError(text)
        return super().encode(text, **options)

    def decode(self, token_ids, **options):
        if len(token_ids) > 1:
            raise RequestError("not two")  # a fault: there is no caller to refuse
        return super().decode(token_ids, **options)

    def decode_stream(self, prompt_token_ids, **options):
        if list(prompt_token_ids[:2]) == [7, 7]:
            return SimpleNamespace(step=WRONG_STEPS[prompt_token_ids[2]])
        if list(prompt_token_ids) == [8] and next(ONCE, None) is None:
            raise LookupError("again")
        return super().decode_stream(prompt_token_ids, **options)


def raising(error):
    def step(*_, **__):
        raise error

    return step


WRONG_STEPS = [
    returning(b""),
    returning(0),
    returning(np.array([1, 2])),
    raising(LookupError("lost")),
    raising(SystemExit(3)),
    raising(RequestError("no such token")),
    returning(None),
]
STEP_WORDS = [
    "its step returned b'', expected text or None",
    "its step returned 0, expected text or None",
    "its step returned array([1, 2]), expected text or None",
    "its step failed: LookupError: lost",
    "its step failed: SystemExit: 3",
    "its step failed: RequestError: no such token",
    "its decode failed: RequestError: not two",  # of all tokens that gave no text
]
ONCE = iter([True])


class Lost(Sample, ThinkTags, contract=1):
    """Its markers are no token ids."""

    def markers(self):
        return ReasoningMarkers([[10**9]], [[1]])


def test_a_prompt_that_it_cannot_encode_disturbs_nobody(open_engine):
    engine = open_engine({"tokenizer": {"use": f"{HERE}:Picky"}})
    engine.add_request("fine", "say abc", GREEDY)
    words = "^plugin 'picky'.*: its encode failed: KeyError: 'so picky'$"
    with pytest.raises(PluginFaultError, match=words):
        engine.add_request("bad", "so picky", GREEDY)
    with pytest.raises(PluginFaultError, match=words):
        engine.add_request("bad", "x", SamplingParams(bad_words=["so picky"]))
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert outputs[0].outputs[0].text == " abc a"


def test_a_token_that_it_cannot_decode_ends_that_request_alone(open_engine):
    engine = open_engine({"tokenizer": {"use": f"{HERE}:Picky"}})
    engine.add_request("fine", "say abc", GREEDY)
    for number in range(len(WRONG_STEPS)):
        engine.add_request(str(number), [7, 7, number], GREEDY)
    with pytest.raises(PluginFaultError, match="its decode_stream failed: LookupError: again$"):
        engine.add_request("twice", [8], SamplingParams(n=2))
    texts, errors = {}, {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            (completion,) = output.outputs
            texts[output.request_id] = completion.text
            if completion.finish_reason == "error":
                errors[output.request_id] = completion.error
    assert texts["fine"] == " abc a"
    assert [errors.pop(str(number)) for number in range(len(WRONG_STEPS))] == [
        f"plugin 'picky' ({HERE}:Picky), asked for by tokenizer.use: {words}"
        for words in STEP_WORDS
    ]
    assert not errors
    health = engine.health()
    assert (health.faults, health.ok) == ({"picky": len(WRONG_STEPS)}, True)


class OddSpecials(Sample, TransformersTokenizer, contract=1):
    """Its properties break the interface."""

    class Options(TransformersTokenizer.Options):
        wrong: str

    @property
    def eos_token_ids(self):
        return "eos" if self.options.wrong == "eos" else []

    @property
    def vocab_size(self):
        return None if self.options.wrong == "size" else 1 / 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("eos", "eos_token_ids returned 'eos', expected token ids: TypeError: "),
        ("size", "vocab_size returned None, expected a number of tokens$"),
        ("zero", "vocab_size failed: ZeroDivisionError: division by zero$"),
    ],
)
def test_properties_are_checked_at_start(scripted, wrong, words):
    extra = {"tokenizer": {"use": f"{HERE}:OddSpecials"}}
    extra |= {"plugin": {"odd_specials": {"wrong": wrong}}}
    with pytest.raises(PluginFaultError, match=f"^plugin 'odd_specials'.*: its {words}"):
        scripted_engine(scripted, extra)


class Odd:
    """A state that gives what a test names."""

    in_reasoning = False

    def __init__(self, give):
        self.give = give

    def feed(self, text):
        return self.give(text)

    feed_token = finish = None


def state(give):
    return parser(None, lambda request: Odd(give)).open(ParserRequest())


@pytest.mark.parametrize(
    ("give", "words"),
    [
        (failing, "failed: LookupError: lost"),
        (returning(None), "returned None, expected a list of events"),
        (returning(["x"]), "gave 'x' outside of a call, expected other events"),
        (returning([ContentText(None)]), "gave ContentText(text=None) outside of a call"),
        (
            returning([ToolCallArguments("{}")]),
            "gave ToolCallArguments(text='{}') outside of a call",
        ),
        (returning([ToolCallEnd()]), "gave ToolCallEnd() outside of a call"),
        (returning([ToolCallBegin("")]), "gave ToolCallBegin(name='', id=None) outside of a call"),
        (returning([ToolCallBegin("f")] * 2), "id=None) inside a call, expected other events"),
    ],
)
def test_events(give, words):
    with pytest.raises(PluginFaultError) as error:
        state(give).feed("x")
    assert str(error.value).startswith("plugin 'mine': its feed ")
    assert words in str(error.value)


def test_a_state_that_is_none_is_named():
    words = "plugin 'mine': its open failed: AttributeError: 'str' object has no attribute 'feed'"
    with pytest.raises(PluginFaultError, match=words):
        parser(None, lambda request: "x").open(ParserRequest())


def test_events_of_a_call_pass():
    events = [ToolCallBegin("f"), ToolCallArguments("{}"), ToolCallEnd(), ContentText("x")]
    assert state(returning(events)).feed("x") == events
    malformed = [ToolCallBegin("f"), MalformedText("x", "why"), ContentText("x")]
    assert state(returning(malformed)).feed("x") == malformed


def test_a_reasoning_parser_without_markers_is_named(open_engine):
    extra = {
        "plugins": {"enable": [{"use": f"{HERE}:Lost", "name": "lost"}]},
        "reasoning": {"parser": "lost"},
    }
    engine = open_engine(extra)
    words = r"^output parser 'lost': its markers returned 1000000000, expected token ids from 0"
    for fields in ({}, {"thinking_token_budget": 3}):
        with pytest.raises(RequestError, match=words):
            engine.add_request("r", "x", SamplingParams(**fields))
    assert not engine.has_unfinished_requests()
