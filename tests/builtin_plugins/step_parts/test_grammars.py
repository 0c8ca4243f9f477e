"""The answer in an output: its start, its next tokens, and drafts; compiled grammars."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.searching import examples
from support.waiting import wait_until

from hardpoint.builtin_plugins.grammars.llguidance import LLGuidance
from hardpoint.builtin_plugins.step_parts.structured.answers import ConstrainedAnswer
from hardpoint.builtin_plugins.step_parts.structured.grammars import GrammarManager
from hardpoint.host.boundary.parts.components import describe_fault
from hardpoint.plugins import (
    EngineConfig,
    EngineCoreRequest,
    GrammarBackend,
    ModelRunnerOutput,
    ReasoningMarkers,
    ReasoningTracker,
    RequestError,
    RequestStatus,
    SamplingParams,
    SchedulerOutput,
)
from hardpoint.plugins.config_tables import GrammarConfig
from hardpoint.plugins.grammars import Vocabulary
from hardpoint.plugins.structured import StructuredOutputs
from hardpoint.testing import ScriptedClock

VOCAB_SIZE = 70
END = 69
NO_DRAFT = SchedulerOutput.NO_DRAFT
EVERYTHING = frozenset(range(96))


class Counting:
    """Allows the tokens 1 to 9, none of them lower than the one before; may end after three."""

    forked = 0

    def __init__(self, tokens=()):
        self.tokens = list(tokens)

    def fill_bitmask(self, row):
        for token in range(self.tokens[-1] if self.tokens else 1, 10):
            row[0] |= np.int32(1 << token)
        return len(self.tokens) >= 3

    def advance(self, token_id):
        allowed = (self.tokens[-1] if self.tokens else 1) <= token_id <= 9
        if allowed:
            self.tokens.append(token_id)
        return allowed

    def rollback(self, count):
        assert 0 < count <= len(self.tokens)
        del self.tokens[-count:]

    def fork(self):
        return Counting(self.tokens)


class LiveRequest:
    def __init__(self, prompt=(50,), markers=None, request_id="r", structured=None):
        self.request_id = request_id
        self.status = RequestStatus.RUNNING
        self.output_token_ids = []
        self.source = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            params=SamplingParams(structured=structured or StructuredOutputs(regex="a")),
            eos_token_ids=[END],
            reasoning_markers=markers,
        )


def answer_of(request, compiled=None):
    return ConstrainedAnswer(request, compiled or Counting(), VOCAB_SIZE, describe_fault)


def rows_of(answer, drafts=()):
    """The tokens that may come next, and after each draft."""
    rows = np.zeros((1 + len(drafts), 3), dtype=np.int32)
    answer.fill(rows, drafts)
    bits = np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little")
    return [frozenset(np.flatnonzero(row).tolist()) for row in bits]


def allowed(answer):
    (row,) = rows_of(answer)
    return row


def after(outputs, prompt=(50,), markers=None):
    """The tokens that may follow outputs that came one by one."""
    request = LiveRequest(prompt, markers)
    answer = answer_of(request)
    for token in outputs:
        row = allowed(answer)
        assert token in row, (token, request.output_token_ids)
        request.output_token_ids.append(token)
    return allowed(answer)


DIGITS = frozenset(range(1, 10))
REASONING = EVERYTHING - {END}
THINK = ReasoningMarkers(start=((20,),), end=((21,),))
LONG = ReasoningMarkers(start=((20, 22, 20),), end=((21, 22, 21),))
MESSAGES = ReasoningMarkers(
    start=((30, 31),), end=((33,),), message_prefix=(34, 35), content_prefix=(36, 37)
)


class TestWithoutReasoning:
    def test_the_grammar_limits_what_comes_next(self):
        assert after([]) == DIGITS
        assert after([3, 5]) == {5, 6, 7, 8, 9}

    def test_the_output_may_end_where_the_grammar_allows_it(self):
        assert after([3, 5, 9]) == {9, END}

    @pytest.mark.parametrize("outside", [VOCAB_SIZE, 95, 96, 9_999])
    @pytest.mark.parametrize("eos", [[], [END]])
    def test_an_end_outside_the_vocabulary_is_none(self, outside, eos):
        request = LiveRequest()
        request.source.eos_token_ids = [*eos, outside]
        stops = [] if eos else [outside, END]
        request.source.params = SamplingParams(
            structured=StructuredOutputs(regex="a"), stop_token_ids=stops
        )
        assert allowed(answer_of(request)) == DIGITS
        request.output_token_ids += [3, 5, 9]
        assert allowed(answer_of(request)) == {9, END}

    def test_a_token_that_the_grammar_forbids_is_an_error_that_names_it(self):
        request = LiveRequest()
        answer = answer_of(request)
        request.output_token_ids += [3, 2]
        with pytest.raises(ValueError, match="does not allow the token 2, the output's number 2"):
            allowed(answer)

    def test_a_grammar_that_allows_nothing_is_an_error(self):
        class Silent(Counting):
            def fill_bitmask(self, row):
                return False

            def fork(self):
                return Silent(self.tokens)

        with pytest.raises(ValueError, match="it allows no token after the output so far"):
            allowed(answer_of(LiveRequest(), Silent()))

    def test_tokens_beyond_the_vocabulary_are_none(self):
        class Wide(Counting):
            def fill_bitmask(self, row):
                row[:] = -1
                return False

            def fork(self):
                return Wide(self.tokens)

        assert allowed(answer_of(LiveRequest(), Wide())) == frozenset(range(VOCAB_SIZE)) - {END}

    def test_the_compiled_state_is_never_advanced(self):
        compiled = Counting()
        request = LiveRequest()
        answer = answer_of(request, compiled)
        request.output_token_ids += [3, 5]
        assert allowed(answer) == {5, 6, 7, 8, 9}
        assert compiled.tokens == []


class TestReasoning:
    @pytest.mark.parametrize("prompt", [(50, 20), (50, 20, 44), (21, 20)])
    def test_that_the_prompt_opened_allows_all_but_the_end_tokens(self, prompt):
        assert after([], prompt, THINK) == REASONING
        assert after([5, 2, 20, 44], prompt, THINK) == REASONING
        assert after([5, 2, 21], prompt, THINK) == DIGITS

    def test_every_output_may_begin_inside_it(self):
        markers = ReasoningMarkers(end=((21,),), begins_open=True)
        assert after([], (50, 21), markers) == REASONING
        assert after([1, 21, 7], (50,), markers) == {7, 8, 9}

    def test_that_the_prompt_ended_leaves_the_answer_or_reasoning_anew(self):
        assert after([], (20, 44, 21), THINK) == DIGITS | {20}

    def test_may_begin_where_the_output_does(self):
        assert after([], (50,), THINK) == DIGITS | {20}
        assert after([20], (50,), THINK) == REASONING
        assert after([20, 3, 21], (50,), THINK) == DIGITS

    def test_does_not_begin_later(self):
        assert after([4], (50,), THINK) == {4, 5, 6, 7, 8, 9}
        assert after([20, 21, 4], (50,), THINK) == {4, 5, 6, 7, 8, 9}

    def test_a_marker_of_several_tokens_comes_whole(self):
        assert after([], (50,), LONG) == DIGITS | {20}
        assert after([20], (50,), LONG) == {22}
        assert after([20, 22], (50,), LONG) == {20}
        assert after([20, 22, 20], (50,), LONG) == REASONING
        assert after([20, 22, 20, 21, 22], (50,), LONG) == REASONING
        assert after([20, 22, 20, 21, 22, 21], (50,), LONG) == DIGITS

    def test_an_end_marker_that_begins_again(self):
        assert after([21, 22, 22, 21, 22, 21], (20, 22, 20), LONG) == DIGITS

    def test_one_of_several_markers(self):
        markers = ReasoningMarkers(start=((20, 22), (23,), (20, 24)), end=((21,), (25, 26)))
        assert after([], (50,), markers) == DIGITS | {20, 23}
        assert after([20], (50,), markers) == {22, 24}
        assert after([20, 24], (50,), markers) == REASONING
        assert after([23, 25, 26], (50,), markers) == DIGITS

    def test_a_marker_that_is_text_of_the_grammar_too(self):
        """Both are followed until one token decides; a whole marker begins reasoning."""
        markers = ReasoningMarkers(start=((3, 4),), end=((21,),))
        assert after([], (50,), markers) == DIGITS
        assert after([3], (50,), markers) == {3, 4, 5, 6, 7, 8, 9}
        assert after([3, 5], (50,), markers) == {5, 6, 7, 8, 9}
        assert after([3, 4], (50,), markers) == REASONING
        assert after([3, 4, 44, 21], (50,), markers) == DIGITS
        assert after([3, 4, 44, 21, 8], (50,), markers) == {8, 9}

    def test_no_call_begins_inside_it(self):
        markers = ReasoningMarkers(start=((20,),), end=((21,),), calls=(25,))
        assert after([20], (50,), markers) == REASONING - {25}
        assert after([20, 21], (50,), markers) == DIGITS
        answer = answer_of(LiveRequest((50,), markers))
        assert answer.num_allowed([20, 44, 25, 3]) == 2

    def test_it_reports_whether_the_output_is_inside(self):
        request = LiveRequest((50,), THINK)
        answer = answer_of(request)
        seen = []
        for token in (20, 44, 21, 5):
            allowed(answer)
            seen.append(answer.in_reasoning)
            request.output_token_ids.append(token)
        assert seen == [False, True, True, False]


class TestPrefixes:
    """Text between the reasoning and the text of the answer."""

    def test_all_of_it_after_reasoning(self):
        outputs = [30, 31, 44, 33]
        for token in (34, 35, 36, 37):
            assert after(outputs, (50,), MESSAGES) == {token}
            outputs.append(token)
        assert after(outputs, (50,), MESSAGES) == DIGITS

    @pytest.mark.parametrize(
        ("prompt", "first"),
        [
            ((50,), 34),
            ((50, 34), 35),
            ((34, 35), 36),
            ((34, 35, 36), 37),
            ((34, 35, 50), 34),
            ((36, 37), 34),
        ],
    )
    def test_not_what_the_prompt_ends_with(self, prompt, first):
        assert after([], prompt, MESSAGES) == {first, 30}
        rest = [token for token in (34, 35, 36, 37) if token >= first]
        assert after(rest, prompt, MESSAGES) == DIGITS

    def test_the_longest_overlap_counts(self):
        markers = ReasoningMarkers(end=((33,),), message_prefix=(34, 34, 35))
        assert after([], (34,), markers) == {34}
        assert after([34], (34,), markers) == {35}
        assert after([], (34, 34, 34), markers) == {35}
        assert after([], (34, 34, 35), markers) == DIGITS

    def test_a_prefix_that_reasoning_begins_like(self):
        markers = ReasoningMarkers(start=((36, 38),), end=((33,),), content_prefix=(36, 37))
        assert after([], (50,), markers) == {36}
        assert after([36], (50,), markers) == {37, 38}
        assert after([36, 37], (50,), markers) == DIGITS
        assert after([36, 38, 33], (50,), markers) == {36}

    def test_reasoning_that_the_prompt_opened(self):
        assert after([33], (34, 35, 30, 31), MESSAGES) == {34}


class TestDrafts:
    def rows(self, outputs, drafts, prompt=(50,), markers=None):
        request = LiveRequest(prompt, markers)
        answer = answer_of(request)
        request.output_token_ids += outputs
        return rows_of(answer, drafts)

    def test_each_has_the_row_after_it(self):
        assert self.rows([], [3, 5, 9]) == [DIGITS, after([3]), after([3, 5]), after([3, 5, 9])]

    @pytest.mark.parametrize("draft", [2, 40, NO_DRAFT, END])
    def test_after_one_that_is_forbidden_everything_is_allowed(self, draft):
        assert self.rows([3], [5, draft, 7]) == [after([3]), after([3, 5]), EVERYTHING, EVERYTHING]

    def test_after_one_that_ends_the_output_everything_is_allowed(self):
        assert self.rows([3, 3, 3], [END, 4]) == [after([3, 3, 3]), EVERYTHING, EVERYTHING]

    @pytest.mark.parametrize(
        ("outputs", "drafts"),
        [
            ([20, 44], [45, 21, 3, 5]),  # from reasoning into the answer
            ([], [20, 44, 21, 3]),  # into reasoning and out of it
            ([], [3, 5]),
        ],
    )
    def test_across_the_border(self, outputs, drafts):
        expected = [after(outputs + drafts[:n], (50,), THINK) for n in range(len(drafts) + 1)]
        assert self.rows(outputs, drafts, (50,), THINK) == expected

    @pytest.mark.parametrize(
        ("outputs", "drafts", "left"),
        [
            ([3], [5, 2, 7], 1),
            ([3], [2], 0),
            ([3], [4, 5, 9], 3),
            ([3, 3, 3], [END, 4], 0),
            ([3], [4, 40], 1),
            ([20, 44], [45, 21, 3, 2], 3),
            ([20], [END], 0),
        ],
    )
    def test_are_cut_at_the_first_one_that_is_refused(self, outputs, drafts, left):
        request = LiveRequest((50,), THINK)
        answer = answer_of(request)
        request.output_token_ids += outputs
        assert answer.num_allowed(drafts) == left
        assert rows_of(answer, drafts) == self.rows(outputs, drafts, (50,), THINK)

    def test_where_a_grammar_cannot_go_on_they_are_cut_and_the_request_goes_on(self):
        class Short(Counting):
            def advance(self, token_id):
                if len(self.tokens) == 2:
                    raise ValueError("too long")
                return super().advance(token_id)

            def fork(self):
                return Short(self.tokens)

        request = LiveRequest()
        answer = answer_of(request, Short())
        request.output_token_ids.append(3)
        assert answer.num_allowed([4, 5, 6]) == 1
        assert allowed(answer) == after([3])

    def test_that_were_text_until_they_began_reasoning_are_undone(self):
        markers = ReasoningMarkers(start=((3, 4),), end=((21,),))
        request = LiveRequest((50,), markers)
        answer = answer_of(request)
        for _ in range(2):
            rows = rows_of(answer, [3, 4, 44, 21, 8])
            assert rows == [
                after(outputs, (50,), markers)
                for outputs in ([], [3], [3, 4], [3, 4, 44], [3, 4, 44, 21], [3, 4, 44, 21, 8])
            ]
        request.output_token_ids += [2]
        assert allowed(answer) == after([2], (50,), markers)

    @pytest.mark.parametrize(
        ("fails_in", "cause"),
        [
            ("advance", None),
            ("advance", ValueError("too long")),
            ("advance", ZeroDivisionError()),
            ("fill_bitmask", None),
            ("fill_bitmask", ValueError("too long")),
            ("fill_bitmask", ZeroDivisionError()),
        ],
    )
    def test_one_with_which_the_grammar_cannot_go_on_has_no_token_after_it(self, fails_in, cause):
        class Stuck(Counting):
            def advance(self, token_id):
                return not self.fails("advance", token_id) and super().advance(token_id)

            def fill_bitmask(self, row):
                can_end = super().fill_bitmask(row)
                if self.tokens and self.fails("fill_bitmask", self.tokens[-1]):
                    row[:] = 0
                    return False
                return can_end

            def fails(self, method, token):
                if (method, token) == (fails_in, 7) and cause is not None:
                    raise cause
                return (method, token) == (fails_in, 7)

            def fork(self):
                return Stuck(self.tokens)

        request = LiveRequest()
        answer = answer_of(request, Stuck())
        rows = rows_of(answer, [3, 7, 8, 9])
        assert rows == [DIGITS, after([3]), frozenset(), EVERYTHING, EVERYTHING]
        assert answer.num_allowed([3, 7]) == (1 if fails_in == "advance" else 2)
        request.output_token_ids.append(3)
        assert allowed(answer) == after([3])
        request.output_token_ids.append(7)
        with pytest.raises(type(cause or ValueError())):
            allowed(answer)


MARKERS = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), max_size=2)


@st.composite
def sequences(draw):
    """Markers of tokens that the grammar allows too, a prompt, outputs and drafts."""
    markers = ReasoningMarkers(
        start=tuple(map(tuple, draw(MARKERS))),
        end=tuple(map(tuple, draw(MARKERS))),
        begins_open=draw(st.booleans()),
        message_prefix=tuple(draw(st.lists(st.integers(3, 6), max_size=2))),
        content_prefix=tuple(draw(st.lists(st.integers(3, 6), max_size=2))),
    )
    prompt = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    seed, count = draw(st.integers(0, 2**16)), draw(st.integers(0, 10))
    return markers, prompt, seed, count


def walk(answer, request, rng, count):
    """Let tokens come that are allowed, small ones rather than others; return their rows."""
    rows = []
    for _ in range(count):
        row = allowed(answer)
        rows.append(row)
        small = sorted(token for token in row if 1 <= token <= 6) or sorted(row)
        token = rng.choice(small)
        request.output_token_ids.append(token)
        if token == END:
            break
    return rows


@examples(150)
@given(sequences(), st.data())
def test_rows_after_drafts_are_those_without_drafts(given_, data):
    markers, prompt, seed, count = given_
    request = LiveRequest(prompt, markers)
    rows = walk(answer_of(request), request, random.Random(seed), count)
    tokens, request.output_token_ids = request.output_token_ids, []
    answer = answer_of(request)
    while len(request.output_token_ids) < len(rows):
        at = len(request.output_token_ids)
        right = tokens[at : at + data.draw(st.integers(0, 4))]
        wrong = data.draw(st.lists(st.integers(1, 9) | st.just(NO_DRAFT), max_size=2))
        draft_rows = rows_of(answer, right + wrong)
        following = rows[at : at + len(right) + 1]
        assert draft_rows[: len(following)] == following
        request.output_token_ids += tokens[at : at + data.draw(st.integers(1, 3))]


def test_a_start_marker_that_ends_an_end_marker_of_the_prompt_does_not_begin():
    markers = ReasoningMarkers(start=((2,), (3, 4)), end=((1, 3, 4),), content_prefix=(4,))
    answer = answer_of(LiveRequest([1], markers))
    assert allowed(answer) == {2, 4}


@examples(150)
@given(sequences())
def test_reasoning_is_where_the_tracker_finds_it(given_):
    """Until the answer begins; markers in its text mean nothing."""
    markers, prompt, seed, count = given_
    request = LiveRequest(prompt, markers)
    answer = answer_of(request)
    tracker = ReasoningTracker(markers)
    position = tracker.after(prompt)
    rng = random.Random(seed)
    for _ in range(count):
        allowed(answer)
        assert answer.in_reasoning is position.inside
        (row,) = walk(answer, request, rng, 1)
        assert not position.inside or row == REASONING
        outputs = tuple(request.output_token_ids)
        before, position = position, tracker.advance(position, outputs[-1])
        if not position.inside and (
            before.inside or not any(marker[: len(outputs)] == outputs for marker in markers.start)
        ):
            break  # the answer has begun


class Backend(GrammarBackend):
    """Compiles when it may, and counts."""

    contract = 1
    formats = ("regex",)
    compiled: list[str]
    may: threading.Event
    name = "backend"

    def compile(self, structured):
        Backend.compiled.append(structured.regex)
        if structured.regex.startswith("late"):
            assert Backend.may.wait(60)
        if structured.regex == "wrong":
            raise ValueError("not this one")
        return Counting()

    def close(self):
        Backend.compiled.append("closed")


class Components:
    """One backend."""

    def source(self, kind, name):
        assert (kind, name) == ("grammars", "backend")
        return "plugin 'backend'"

    def create(self, kind, name, context_type, **fields):
        return Backend.__new__(Backend)


@pytest.fixture
def clock():
    return ScriptedClock()


@pytest.fixture
def manager(clock):
    Backend.compiled, Backend.may = [], threading.Event()
    grammar = GrammarConfig(use="backend", cache_size=2, compile_seconds=5.0)
    config = EngineConfig(grammar=grammar)
    vocabulary = Vocabulary((b"a",))
    yield manager_of(Components(), config, vocabulary, clock)
    Backend.may.set()


def manager_of(components, config, vocabulary, clock=time.monotonic):
    return GrammarManager(
        components, config, vocabulary, VOCAB_SIZE, clock, describe_fault=describe_fault
    )


def live(request_id, structured):
    if isinstance(structured, str):
        structured = StructuredOutputs(regex=structured)
    return LiveRequest(request_id=request_id, structured=structured)


def ready(manager, request):
    wait_until(lambda: is_ready(manager, request), what="the compilation")


def is_ready(manager, request):
    reason = manager.gate(request)
    assert reason is None or reason.message == "its grammar is being compiled"
    return reason is None


def bitmask(manager, *names):
    return manager.mask(SchedulerOutput(step=1, num_scheduled_tokens=dict.fromkeys(names, 1)))


class TestCompiling:
    def test_the_same_content_is_compiled_once(self, manager):
        for name in "abc":
            ready(manager, live(name, "x"))
        assert Backend.compiled == ["x"]

    def test_requests_that_wait_for_the_same_content_get_one_compilation(self, manager):
        requests = [live(name, "late") for name in "abc"]
        assert [is_ready(manager, request) for request in requests] == [False] * 3
        Backend.may.set()
        for request in requests:
            ready(manager, request)
        assert Backend.compiled == ["late"]
        assert bitmask(manager, *"abc").bitmask.shape == (3, 3)

    def test_the_grammar_used_least_recently_is_compiled_again(self, manager):
        for index, regex in enumerate(["x", "y", "x", "z", "x", "y"]):
            ready(manager, live(f"r{index}", regex))
        assert Backend.compiled == ["x", "y", "z", "y"]

    def test_one_that_is_wrong_is_an_error_each_time(self, manager):
        for _ in range(2):
            with pytest.raises(RequestError, match=r"structured\.regex: backend: not this one"):
                ready(manager, live("a", "wrong"))

    def test_two_are_compiled_at_a_time_in_the_order_of_requests(self, manager):
        requests = [live(f"r{i}", f"late {i}") for i in range(4)]
        for request in requests:
            assert not is_ready(manager, request)
        wait_until(lambda: len(Backend.compiled) == 2)
        assert sorted(Backend.compiled) == ["late 0", "late 1"]
        Backend.may.set()
        for request in requests:
            ready(manager, request)
        assert sorted(Backend.compiled) == [f"late {i}" for i in range(4)]

    def test_what_no_request_waits_for_any_more_does_not_begin(self, manager):
        requests = [live(f"r{i}", f"late {i}") for i in range(4)]
        for request in requests:
            is_ready(manager, request)
        manager.begin(SchedulerOutput())  # a step goes by
        manager.ended("r2")
        Backend.may.set()
        ready(manager, requests[3])
        assert "late 2" not in Backend.compiled

    def test_one_that_takes_too_long_is_given_up(self, manager, clock):
        request = live("a", "late")
        assert not is_ready(manager, request)
        clock.now = 4.9
        manager.begin(SchedulerOutput())
        assert not is_ready(manager, request)
        clock.now = 5.0
        manager.begin(SchedulerOutput())
        with pytest.raises(RequestError, match=r"longer than 5 s \(grammar.compile_seconds\)"):
            is_ready(manager, request)

    def test_the_time_of_one_that_waits_for_others_does_not_count(self, manager, clock):
        requests = [live(f"r{i}", f"late {i}") for i in range(3)]
        for request in requests:
            is_ready(manager, request)
        clock.now = 5.0
        manager.begin(SchedulerOutput())
        for request in requests[:2]:
            with pytest.raises(RequestError, match="longer than 5 s"):
                is_ready(manager, request)
        clock.now = 9.0
        manager.begin(SchedulerOutput())
        assert not is_ready(manager, requests[2])
        Backend.may.set()
        ready(manager, requests[2])

    def test_drafts_end_at_the_first_token_that_a_grammar_refuses(self, manager):
        requests = [live(name, "x") for name in ("a", "b")]
        for request in requests:
            ready(manager, request)
        drafts = {"a": [4, 5, 3, 9], "b": [40, 4], "no grammar": [1]}
        assert manager.limit_drafts(drafts) == {"a": 2, "b": 0}
        assert manager.limit_drafts(drafts) == {"a": 2, "b": 0}
        requests[0].output_token_ids.append(6)
        assert manager.limit_drafts(drafts) == {"a": 0, "b": 0}

    def test_a_backend_that_fails_ends_its_request_with_the_token_not_with_the_draft(
        self, manager, monkeypatch
    ):
        request = live("a", "x")
        ready(manager, request)
        monkeypatch.setattr(Counting, "advance", lambda *_: 1 // 0)
        plan = SchedulerOutput(step=1, num_scheduled_tokens={"a": 1})
        assert manager.limit_drafts({"a": [4]}) == {"a": 0}
        assert manager.result(plan, ModelRunnerOutput()) == {}
        request.output_token_ids.append(4)
        assert manager.limit_drafts({"a": [5]}) == {"a": 0}
        (fault,) = manager.result(plan, ModelRunnerOutput()).values()
        assert fault.message.startswith("plugin 'backend': its grammar failed: ZeroDivisionError")

    def test_waiting_returns_when_there_is_nothing_to_wait_for(self, manager):
        manager.wait()
        request = live("a", "x")
        ready(manager, request)
        manager.wait()

    def test_closing_begins_no_other_and_closes_the_backend(self, manager):
        for i in range(3):
            is_ready(manager, live(f"r{i}", f"late {i}"))
        wait_until(lambda: len(Backend.compiled) == 2)
        manager.close()
        Backend.may.set()
        threads = [t for t in threading.enumerate() if t.name == "hardpoint-grammar"]
        for thread in threads:
            thread.join(60)
        assert sorted(Backend.compiled) == ["closed", "late 0", "late 1"]


class OnlyLLGuidance:
    """llguidance."""

    def source(self, kind, name):
        return "plugin 'llguidance'"

    def create(self, kind, name, context_type, **fields):
        options = LLGuidance.Options()
        return LLGuidance(context_type(name="llguidance", options=options, **fields))


class TestAVocabularyThatLacksBytes:
    """It has the texts "a", "ab", "[", "]", "1", and half of "é"."""

    VOCABULARY = Vocabulary((b"a", b"ab", b"[", b"]", b"1", b"\xc3", b"", b"<end>"), (7,))

    @pytest.fixture
    def manager(self):
        it = manager_of(OnlyLLGuidance(), EngineConfig(), self.VOCABULARY)
        yield it
        it.close()

    @pytest.mark.parametrize(
        "description", [{"regex": "x+"}, {"json": {"type": "string"}}, {"choice": ["b", "c"]}]
    )
    def test_no_text_can_begin(self, manager, description):
        (name,) = description
        words = rf"structured\.{name}: llguidance: no text of this model's tokens fits it$"
        with pytest.raises(RequestError, match=words):
            ready(manager, live("r", StructuredOutputs(**description)))

    def test_a_text_is_made_of_those_that_there_are(self, manager):
        request = live("r", StructuredOutputs(json={"type": "array", "const": [1]}))
        ready(manager, request)
        for token in (2, 4, 3):
            assert bitmask(manager, "r").bitmask[0, 0] == 1 << token
            request.output_token_ids.append(token)
        assert tokens_in(bitmask(manager, "r")) == {END}

    @pytest.mark.parametrize(("regex", "first"), [("abc", {0, 1}), ("é", {5})])
    def test_one_that_cannot_be_finished_is_an_error_when_it_comes_to_that(
        self, manager, regex, first
    ):
        request = live("r", StructuredOutputs(regex=regex))
        ready(manager, request)
        assert tokens_in(bitmask(manager, "r")) == first
        request.output_token_ids.append(max(first))
        bitmask(manager, "r")
        (fault,) = manager.result(
            SchedulerOutput(num_scheduled_tokens={"r": 1}), ModelRunnerOutput()
        ).values()
        assert fault.message == (
            "structured.regex: llguidance: it allows no token after the output so far"
        )


def tokens_in(mask):
    bits = np.unpackbits(mask.bitmask.view(np.uint8), axis=1, bitorder="little")
    return frozenset(np.flatnonzero(bits[0]).tolist())


class TestRequestIds:
    def test_one_that_is_used_again_at_once_is_another_request(self, manager):
        first = live("a", "x")
        ready(manager, first)
        first.output_token_ids += [5]
        assert (bitmask(manager, "a").bitmask[0, 0] >> 3) & 1 == 0
        manager.ended("a")
        second = live("a", "y")
        ready(manager, second)
        assert (bitmask(manager, "a").bitmask[0, 0] >> 3) & 1 == 1

    def test_one_whose_compilation_is_under_way_can_be_used_again(self, manager):
        assert not is_ready(manager, live("a", "late 1"))
        manager.ended("a")
        second = live("a", "late 2")
        assert not is_ready(manager, second)
        Backend.may.set()
        ready(manager, second)
        assert bitmask(manager, "a").bitmask[0, 0] == sum(1 << token for token in DIGITS)

    def test_one_that_has_ended_in_the_plan_that_made_it_ready(self, manager):
        request = live("a", "x")
        ready(manager, request)
        manager.ended("a")
        assert bitmask(manager, "a") is None

    def test_one_that_has_ended_since_the_plan_may_have_any_token(self, manager):
        ready(manager, live("a", "x"))
        manager.begin(SchedulerOutput())
        manager.ended("a")
        assert bitmask(manager, "a") is None


def test_a_grammar_that_cannot_go_on_is_a_fault_of_its_request_alone(manager):
    wrong, right = live("a", "x"), live("b", "x")
    ready(manager, wrong)
    ready(manager, right)
    wrong.output_token_ids += [5, 4]
    mask = bitmask(manager, "a", "b").bitmask
    assert (mask[0] == -1).all()
    assert mask[1, 0] == sum(1 << token for token in DIGITS)
    plan = SchedulerOutput(step=1, num_scheduled_tokens={"a": 1, "b": 1})
    faults = manager.result(plan, ModelRunnerOutput())
    assert {name: fault.message for name, fault in faults.items()} == {
        "a": "structured.regex: backend: it does not allow the token 4, the output's number 2"
    }
    assert manager.result(plan, ModelRunnerOutput()) == {}
