"""The guard around a scheduling policy: nonsense and errors end no step, and are told in words."""

from __future__ import annotations

import heapq
import math
import signal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.plugins.policies import LOAD, request
from support.searching import examples

from hardpoint.builtin_plugins.policies import Fair, FirstComeFirstServed, Priority
from hardpoint.errors import PluginFaultError
from hardpoint.host.boundary.faults import StepFaults
from hardpoint.host.boundary.policy import guarded_policy
from hardpoint.plugins import PolicyContext, SchedulingPolicy
from hardpoint.plugins.component import Source

OPTIONAL = ["group", "group_key", "admit", "victim", "added", "scheduled", "preempted", "finished"]

A, B, C = (request(name, arrival=at) for name, at in [("a", 1.0), ("b", 2.0), ("c", 3.0)])
CALLS = {
    "key": (A,),
    "group": (A,),
    "group_key": ("g", 0.0),
    "admit": (A, LOAD),
    "victim": ([A, B], LOAD),
    "added": (A,),
    "scheduled": (A, 3),
    "preempted": (A,),
    "finished": (A,),
}


class Told(list):
    """A reporter that remembers."""

    def __call__(self, words, cause):
        self.append((words, cause))

    @property
    def words(self):
        return [words for words, _ in self]


def policy_of(**methods):
    """Build a policy with these methods; `key` is the arrival unless given."""
    methods.setdefault("key", lambda self, request: request.arrival_time)
    cls = type("Odd", (SchedulingPolicy,), {"contract": 1, **methods})
    return cls(PolicyContext(name="odd", options=cls.Options()))


def guard_of(told=None, **methods):
    return guarded_policy(policy_of(**methods), Told() if told is None else told)


def returning(value):
    return lambda self, *arguments: value


def raising(error):
    def method(self, *arguments):
        raise error

    return method


class TestWhatIsThere:
    def test_it_is_the_policy_to_whoever_asks(self):
        fair = Fair(PolicyContext(name="mine", options=Fair.Options(tag="team")))
        guard = guarded_policy(fair, Told())
        assert guard.wrapped is fair
        assert guard.context is fair.context
        assert (guard.name, guard.options.tag) == ("mine", "team")
        assert guard.state_format == Fair.state_format != ""

    @pytest.mark.parametrize("name", OPTIONAL)
    def test_what_a_policy_does_not_override_is_seen_and_costs_nothing(self, name):
        assert guard_of().overridden == frozenset()
        policy = policy_of(**{name: returning(None)})
        assert guarded_policy(policy, Told()).overridden == policy.overridden == {name}

    def test_methods_inherited_from_another_policy_are_guarded(self):
        class Child(Priority):
            contract = 1

        guard = guarded_policy(Child(PolicyContext(name="p", options=None)), Told())
        assert "victim" in guard.overridden
        assert guard.victim([A, B], LOAD) is B

    def test_a_method_that_an_instance_gave_itself_is_guarded(self):
        def init(self, context):
            SchedulingPolicy.__init__(self, context)
            self.admit = lambda request, load: "not today"

        guard = guard_of(__init__=init)
        assert guard.overridden == {"admit"}
        assert guard.admit(A, LOAD) == "not today"

    def test_sound_answers_go_through(self):
        seen = []
        told = Told()
        note = {
            name: lambda self, *arguments, name=name: seen.append((name, *arguments))
            for name in ("added", "scheduled", "preempted", "finished")
        }
        guard = guard_of(
            told,
            group=returning("g"),
            admit=lambda self, request, load: "full" if load is LOAD else None,
            victim=lambda self, running, load: running[0],
            **note,
        )
        assert guard.group(A) == "g"
        assert guard.admit(A, LOAD) == "full"
        assert guard.victim([A, B], LOAD) is A
        for name in note:
            assert getattr(guard, name)(*CALLS[name]) is None
        assert seen == [(name, A.view, *CALLS[name][1:]) for name in note]
        assert told == []

    def test_closing_closes_the_policy(self):
        closed = []
        guard_of(close=lambda self: closed.append(self.name)).close()
        assert closed == ["odd"]


class TestErrors:
    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("key", "key() of request 'a' failed"),
            ("group", "group() of request 'a' failed"),
            ("group_key", "group_key() of group 'g' failed"),
            ("admit", "admit() of request 'a' failed"),
            ("victim", "victim() failed"),
            ("added", "added() of request 'a' failed"),
            ("scheduled", "scheduled() of request 'a' failed"),
            ("preempted", "preempted() of request 'a' failed"),
            ("finished", "finished() of request 'a' failed"),
        ],
    )
    def test_each_is_told_with_its_cause_and_fcfs_decides(self, name, words):
        told, error = Told(), RuntimeError("oh")
        guard = guard_of(told, **{name: raising(error)})
        answer = getattr(guard, name)(*CALLS[name])
        assert told == [(words, error)]
        if name == "victim":
            assert answer is B
        elif name not in ("key", "group_key"):
            assert answer is None

    @pytest.mark.parametrize("name", ["key", *OPTIONAL])
    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
    def test_each_is_told_whatever_its_class(self, name, error):
        told = Told()
        getattr(guard_of(told, **{name: raising(error())}), name)(*CALLS[name])
        ((_, cause),) = told
        assert isinstance(cause, error)

    @pytest.mark.parametrize("name", ["key", *OPTIONAL])
    def test_an_interrupt_of_the_user_passes(self, name):
        told = Told()
        guard = guard_of(told, **{name: lambda *_: signal.raise_signal(signal.SIGINT)})
        with pytest.raises(KeyboardInterrupt):
            getattr(guard, name)(*CALLS[name])
        assert told == []

    @pytest.mark.parametrize("name", ["key", *OPTIONAL])
    def test_wrong_parameters_are_an_error_of_the_policy(self, name):
        told = Told()
        getattr(guard_of(told, **{name: lambda self: None}), name)(*CALLS[name])
        ((_, cause),) = told
        assert isinstance(cause, TypeError)

    @pytest.mark.parametrize("name", ["export_state", "import_state"])
    def test_those_of_the_books_reach_the_caller(self, name):
        told = Told()
        guard = guard_of(told, **{name: raising(ValueError("no books"))})
        with pytest.raises(ValueError, match="no books"):
            getattr(guard, name)(*([{}] if name == "import_state" else []))
        assert told == []

    def test_books_are_handed_over(self):
        books = []
        guard = guard_of(
            export_state=returning({"n": 1}),
            import_state=lambda self, state: books.append(state),
        )
        guard.import_state(guard.export_state())
        assert books == [{"n": 1}]

    @pytest.mark.parametrize(
        "methods",
        [
            {"key": returning(None)},
            {"group": returning([])},
            {"group_key": returning(math.nan)},
            {"admit": returning(1)},
            {"victim": returning(C)},
            *({name: raising(ValueError("oh"))} for name in ["key", *OPTIONAL]),
        ],
        ids=lambda methods: next(iter(methods)),
    )
    def test_with_on_error_engine_they_end_it_and_name_the_plugin(self, methods):
        source = Source("odd", "acme:Odd", "acme", "1.0", "default")
        report = StepFaults(ends_engine=["odd"]).reporter(source)
        guard = guard_of(report, **methods)
        (name,) = methods
        with pytest.raises(PluginFaultError, match=rf"^plugin 'odd' \(acme 1\.0.*\): {name}\(\)"):
            getattr(guard, name)(*CALLS[name])

    def test_keys_that_do_not_compare_end_it_too(self):
        source = Source("odd", "acme:Odd", "acme", "1.0", "default")
        guard = guard_of(
            StepFaults(ends_engine=["odd"]).reporter(source),
            key=lambda self, request: 1 if request is A.view else "x",
        )
        heap = [guard.key(A)]
        with pytest.raises(PluginFaultError, match="key\\(\\) of requests 'b' and 'a' do not comp"):
            heapq.heappush(heap, guard.key(B))

    def test_health_counts_them(self):
        faults = StepFaults()
        source = Source("odd", "acme:Odd", "acme", "1.0", "default")
        guard = guard_of(faults.reporter(source), victim=returning(None))
        for _ in range(3):
            assert guard.victim([A, B], LOAD) is B
        fault = faults.report()["odd"]
        assert fault.count == 3
        assert "victim() returned None, which is not running" in fault.message


class Silent:
    """An object whose repr fails."""

    def __repr__(self):
        raise RuntimeError("no words")


class TestNonsense:
    @pytest.mark.parametrize(
        ("reason", "shown"),
        [("", "''"), (False, "False"), (0, "0"), (["x"], "['x']"), (b"no", "b'no'")],
    )
    def test_a_reason_that_is_none_admits(self, reason, shown):
        told = Told()
        assert guard_of(told, admit=returning(reason)).admit(A, LOAD) is None
        assert told.words == [
            f"admit() of request 'a' returned {shown}, "
            "expected None or the reason as a string that is not empty"
        ]

    @pytest.mark.parametrize("victim", [None, C, "a", 0, A.request_id])
    def test_a_victim_that_does_not_run_is_the_latest_admitted(self, victim):
        told = Told()
        assert guard_of(told, victim=returning(victim)).victim([A, B], LOAD) is B
        assert told.words == [f"victim() returned {victim!r}, which is not running"]

    def test_a_copy_of_a_request_is_no_victim(self):
        told = Told()
        guard_of(told, victim=returning(request("a", arrival=1.0))).victim([A, B], LOAD)
        assert len(told) == 1

    def test_a_policy_cannot_disorder_who_runs(self):
        running = [A, B]
        told = Told()
        guard = guard_of(told, victim=lambda self, running, load: running.pop())
        assert guard.victim(running, LOAD) is B
        assert running == [A, B]
        assert told.words == ["victim() failed"]

    @pytest.mark.parametrize("group", [[1], {"a": 1}, math.nan, (1, math.nan), ([],), np.zeros(2)])
    def test_what_cannot_tell_groups_apart_is_the_common_group(self, group):
        told = Told()
        assert guard_of(told, group=returning(group)).group(A) is None
        expected = "expected something hashable that is equal to itself"
        assert told.words == [f"group() of request 'a' returned {group!r}, {expected}"]

    def test_a_group_whose_comparison_fails_is_none(self):
        class Angry:
            __hash__ = object.__hash__

            def __eq__(self, other):
                raise RuntimeError("leave me")

        told = Told()
        assert guard_of(told, group=returning(Angry())).group(A) is None
        assert len(told) == 1

    def test_the_policy_is_not_asked_about_a_group_that_it_did_not_name(self):
        told, asked = Told(), []
        guard = guard_of(
            told,
            group=lambda self, request: {"a": "g"}[request.request_id],
            group_key=lambda self, group, now: asked.append(group) or 0,
        )
        keys = [guard.group_key(guard.group(it), 0.0) for it in (A, B)]
        assert asked == ["g"]
        assert keys[0] == keys[1]
        assert told.words == ["group() of request 'b' failed"]

    def test_a_group_of_its_own_may_be_none(self):
        guard = guard_of(group=returning(None), group_key=returning(5))
        other = guard_of(group=returning(None), group_key=returning(6))
        assert guard.group(A) is None
        assert guard.group_key(None, 0.0) < other.group_key(None, 0.0)

    def test_messages_stay_short_and_are_made_of_anything(self):
        told = Told()
        guard_of(told, victim=returning("x" * 5000)).victim([A], LOAD)
        guard_of(told, victim=returning(Silent())).victim([A], LOAD)
        assert len(told.words[0]) < 150
        assert told.words[1] == "victim() returned a Silent, which is not running"


class OnlyLess:
    """A value that has an order and no equality."""

    def __init__(self, number):
        self.number = number

    def __lt__(self, other):
        return self.number < other.number


class Moody:
    """A value that compares with itself and nothing else."""

    def __lt__(self, other):
        if other is not self:
            raise OSError("moody")
        return False


numbers = st.integers(-3, 3)
values = st.one_of(
    numbers,
    st.floats(allow_nan=True),
    st.text(max_size=2),
    st.none(),
    st.tuples(numbers, st.one_of(numbers, st.text(max_size=1))),
    st.lists(numbers, max_size=2),
    st.builds(OnlyLess, numbers),
    st.builds(Moody),
    st.builds(dict),
    st.just(np.zeros(2)),
)


class TestKeys:
    @staticmethod
    def keys(told, *values, arrivals=None):
        arrivals = arrivals or range(len(values))
        by_id = {str(i): value for i, value in enumerate(values)}
        guard = guard_of(told, key=lambda self, request: by_id[request.request_id])
        named = zip(by_id, arrivals, strict=True)
        return [guard.key(request(name, arrival=at)) for name, at in named]

    def test_are_in_the_policys_order(self):
        told = Told()
        small, large, equal = self.keys(told, (1, 5), (2, 0), (1, 5))
        assert small < large
        assert not large < small
        assert small == equal
        assert small != large
        assert told == []

    def test_a_value_that_has_only_an_order_can_be_equal(self):
        told = Told()
        one, other, more = self.keys(told, OnlyLess(1), OnlyLess(1), OnlyLess(2))
        assert one == other
        assert one != more
        assert (one, 7) < (other, 8) < (more, 0)
        assert told == []

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            (None, "returned None, which has no order"),
            ({}, "returned {}, which has no order"),
            (1j, "returned 1j, which has no order"),
            (math.nan, "returned nan, which is not equal to itself"),
            ((0, math.nan), "returned (0, nan), which is not equal to itself"),
            ((0, [math.nan]), "returned (0, [nan]), which is not equal to itself"),
            (np.zeros(2), "returned array([0., 0.]), which has no order"),
        ],
    )
    def test_a_value_without_an_order_is_told_at_once_and_the_arrival_counts(self, value, words):
        told = Told()
        early, broken, late = self.keys(told, 99, value, -99, arrivals=[1.0, 2.0, 3.0])
        assert told.words == [f"key() of request '1' {words}"]
        assert early < broken < late
        assert not late < broken

    def test_values_that_do_not_compare_are_told_once_and_the_arrival_counts(self):
        told = Told()
        text, number = self.keys(told, "a", 0, arrivals=[2.0, 1.0])
        for _ in range(3):
            assert number < text
            assert not text < number
        ((words, cause),) = told
        assert words == "key() of requests '1' and '0' do not compare"
        assert isinstance(cause, TypeError)

    def test_each_newcomer_that_does_not_compare_is_told(self):
        told = Told()
        first, second, third = self.keys(told, 1, "x", "y")
        assert first < second
        assert first < third
        assert second < third
        assert told.words == [
            "key() of requests '0' and '1' do not compare",
            "key() of requests '0' and '2' do not compare",
        ]

    def test_a_comparison_that_is_no_truth_value_is_an_error(self):
        class Vague:
            def __lt__(self, other):
                return np.zeros(2) if other is not self else False

        told = Told()
        early, late = self.keys(told, Vague(), Vague())
        assert early < late
        assert told.words == ["key() of requests '0' and '1' do not compare"]

    def test_keys_of_groups_that_do_not_compare_are_equal(self):
        told = Told()
        guard = guard_of(told, group_key=lambda self, group, now: group)
        text, number, nan = (guard.group_key(group, 0.0) for group in ("x", 3, math.nan))
        assert text == number == nan
        assert told.words == [
            "group_key() of group nan returned nan, which is not equal to itself",
            "group_key() of groups 'x' and 3 do not compare",
        ]

    @examples(100)
    @given(st.lists(st.tuples(values, st.integers(0, 5)), min_size=1, max_size=12))
    def test_a_heap_of_anything_works(self, drawn):
        """Whoever goes in comes out, once; nothing is raised."""
        told = Told()
        keys = self.keys(told, *(v for v, _ in drawn), arrivals=[at for _, at in drawn])
        heap = []
        for number, key in enumerate(keys):
            heapq.heappush(heap, (key, number))
        out = [heapq.heappop(heap)[1] for _ in keys]
        assert sorted(out) == list(range(len(keys)))

    @examples(50)
    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=12))
    def test_sound_keys_come_out_in_order_equal_ones_as_they_came(self, drawn):
        told = Told()
        keys = self.keys(told, *drawn)
        got = sorted(zip(keys, range(len(keys)), strict=True))
        assert [at for _, at in got] == sorted(range(len(drawn)), key=lambda at: (drawn[at], at))
        assert told == []

    def test_all_keys_broken_is_fcfs(self):
        told = Told()
        keys = self.keys(told, None, {}, 1j, arrivals=[3.0, 1.0, 2.0])
        assert [keys.index(key) for key in sorted(keys)] == [1, 2, 0]
        plain = FirstComeFirstServed(PolicyContext(name="fcfs", options=None))
        in_order = sorted([C, A, B], key=plain.key)
        broken = guard_of(told, key=raising(ValueError("oh")))
        assert sorted([C, A, B], key=broken.key) == in_order == [A, B, C]
