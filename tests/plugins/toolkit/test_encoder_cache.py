"""Room for embeddings: shared while held, kept while there is room, dropped once and told once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.searching import examples

from hardpoint import SamplingParams
from hardpoint.plugins import EngineCoreRequest, Request
from hardpoint.plugins.requests import MultiModalFeature
from hardpoint.toolkit.encoder_cache import EncoderCacheManager, encoder_budget

LENGTHS = {"cat": 4, "dog": 6, "owl": 3, "fox": 5, "elk": 10}


def request(request_id, *names):
    features = [MultiModalFeature(name, 10 * at, LENGTHS[name]) for at, name in enumerate(names)]
    source = EngineCoreRequest(
        request_id=request_id, prompt_token_ids=[1], params=SamplingParams(), features=features
    )
    return Request(source)


def put(cache, owner, *indices):
    """Allocate features as a scheduler does, and let it be seen that there was room."""
    for index in indices or range(len(owner.source.features)):
        if not cache.holds(owner, index):
            assert cache.can_allocate(owner, index, 0)
            cache.allocate(owner, index)


def past(cache, owner):
    """Add and end a request; return the features dropped for it."""
    put(cache, owner)
    dropped = cache.take_freed()
    cache.free(owner)
    return dropped


def test_a_feature_is_there_once_it_is_allocated():
    cache = EncoderCacheManager(10)
    a = request("a", "cat")
    assert not cache.holds(a, 0)
    assert cache.can_allocate(a, 0, reserved=0)
    assert not cache.holds(a, 0)  # asking changes nothing
    cache.allocate(a, 0)
    assert cache.holds(a, 0)
    assert cache.num_free_tokens == 6


def test_two_requests_share_equal_content():
    cache = EncoderCacheManager(6)
    a, b = request("a", "dog"), request("b", "dog")
    put(cache, a)
    assert cache.holds(b, 0)
    cache.free(a)
    assert not cache.can_allocate(request("c", "cat"), 0, reserved=0)  # b holds all there is
    cache.free(b)
    assert cache.can_allocate(request("c", "cat"), 0, reserved=0)


def test_room_that_is_promised_is_not_given_twice():
    cache = EncoderCacheManager(10)
    a = request("a", "cat", "dog", "owl")
    assert cache.can_allocate(a, 0, reserved=0)
    assert cache.can_allocate(a, 1, reserved=4)
    assert not cache.can_allocate(a, 2, reserved=10)


def test_what_nobody_holds_stays_until_its_room_is_needed():
    cache = EncoderCacheManager(10)
    a, b = request("a", "cat"), request("b", "dog")
    past(cache, a)
    assert cache.num_free_tokens == 10
    put(cache, b)  # there was room beside it
    assert cache.take_freed() == []
    assert cache.holds(request("c", "cat"), 0)


def test_what_was_let_go_first_goes_first_and_is_told_once():
    cache = EncoderCacheManager(13)
    a, b, c = request("a", "cat"), request("b", "dog"), request("c", "owl")
    put(cache, a)
    put(cache, b)
    put(cache, c)
    assert cache.take_freed() == []
    for owner in (b, c, a):
        cache.free(owner)
    put(cache, request("d", "fox"))
    assert cache.take_freed() == ["dog"]
    assert cache.take_freed() == []
    put(cache, request("e", "owl", "cat"))  # both are still there
    assert cache.take_freed() == []


def test_nothing_is_dropped_for_a_request_that_is_not_admitted_after_all():
    cache = EncoderCacheManager(10)
    a, b = request("a", "cat"), request("b", "elk")
    past(cache, a)
    assert cache.can_allocate(b, 0, reserved=0)
    assert cache.take_freed() == []
    assert cache.holds(a, 0)


def test_a_promise_is_kept_when_a_cached_feature_is_asked_for_afterwards():
    cache = EncoderCacheManager(10)
    a, b = request("a", "cat"), request("b", "elk")
    past(cache, a)
    assert cache.can_allocate(b, 0, reserved=0)  # which takes the room of "cat"
    assert not cache.holds(a, 0)
    assert not cache.can_allocate(a, 0, reserved=10)
    cache.allocate(b, 0)
    assert cache.take_freed() == ["cat"]


def test_the_same_content_twice_in_a_request_takes_room_once():
    cache = EncoderCacheManager(6)
    a = request("a", "dog", "dog")
    put(cache, a)
    assert cache.num_free_tokens == 0
    cache.free_input(a, 0)
    assert cache.num_free_tokens == 0  # the second place still needs it
    cache.free_input(a, 1)
    assert cache.num_free_tokens == 6


def test_allocating_both_places_of_one_content_in_a_step_takes_room_once():
    cache = EncoderCacheManager(12)
    a = request("a", "dog", "dog")
    assert cache.can_allocate(a, 0, reserved=0)
    assert cache.can_allocate(a, 1, reserved=6)
    cache.allocate(a, 0)
    cache.allocate(a, 1)
    assert cache.num_free_tokens == 6


def test_giving_back_twice_is_giving_back_once():
    cache = EncoderCacheManager(10)
    a, b = request("a", "cat", "dog"), request("b", "dog")
    put(cache, a)
    put(cache, b)
    for _ in range(2):
        cache.free_input(a, 1)
        cache.free(a)
        cache.free(a)
    assert cache.num_free_tokens == 4  # b holds "dog"
    cache.free_input(request("stranger", "dog"), 0)
    cache.free(request("stranger", "dog"))
    assert cache.num_free_tokens == 4


def test_a_feature_that_comes_back_in_the_same_step_is_not_told_as_dropped():
    cache = EncoderCacheManager(10)
    a, b = request("a", "cat"), request("b", "elk")
    past(cache, a)
    put(cache, b)  # drops "cat"
    cache.cancel(b, 0)
    put(cache, a)  # encodes "cat" anew
    assert cache.take_freed() == ["elk"]
    assert cache.holds(a, 0)


def test_what_is_cancelled_is_not_there_and_nobody_holds_it():
    cache = EncoderCacheManager(10)
    a, b = request("a", "cat"), request("b", "cat")
    put(cache, a)
    put(cache, b)
    cache.cancel(a, 0)
    assert not cache.holds(b, 0)
    assert cache.num_free_tokens == 10
    cache.free(a)
    cache.free(b)
    cache.cancel(b, 0)  # both had it in their plan
    assert cache.take_freed() == ["cat"]  # workers may have got as far as encoding it


def test_what_is_cancelled_when_nobody_holds_it_any_more_gives_its_room_back():
    cache = EncoderCacheManager(10)
    a = request("a", "elk")
    past(cache, a)
    cache.cancel(a, 0)
    put(cache, request("b", "dog", "cat"))
    assert cache.num_free_tokens == 0
    assert cache.take_freed() == ["elk"]


def test_a_feature_larger_than_the_cache_never_fits():
    cache = EncoderCacheManager(9)
    a = request("a", "elk")
    assert not cache.can_allocate(a, 0, reserved=0)
    with pytest.raises(ValueError, match="no room for 'elk'.*needs 10 tokens, and of 9 only 9"):
        cache.allocate(a, 0)
    assert cache.num_free_tokens == 9


def test_a_model_that_encodes_nothing_has_no_room():
    assert not EncoderCacheManager(0).can_allocate(request("a", "owl"), 0, reserved=0)


def test_one_rule_gives_both_budgets():
    assert encoder_budget(2048, longest_feature=0) == 0
    assert encoder_budget(2048, longest_feature=576) == 2048
    assert encoder_budget(512, longest_feature=576) == 576  # encoded whole or not at all


class Naive:
    """The same books as plain lists, summed anew at each question."""

    def __init__(self, room):
        self.room = room
        self.held = []  # (owner, index, name)
        self.cached = []  # names that nobody holds, let go first in front
        self.dropped = []
        self.encoded = []

    def names(self):
        return {name for _, _, name in self.held}

    def free_room(self):
        return self.room - sum(LENGTHS[name] for name in self.names())

    def hold(self, owner, index, name):
        if name in self.cached:
            self.cached.remove(name)
        if (owner, index, name) not in self.held:
            self.held.append((owner, index, name))

    def allocate(self, owner, index, name):
        if name not in self.names() and name not in self.cached:
            while self.free_room() - sum(map(LENGTHS.get, self.cached)) < LENGTHS[name]:
                self.dropped.append(self.cached.pop(0))
            if name in self.dropped:
                self.dropped.remove(name)
            self.encoded.append(name)
        self.hold(owner, index, name)

    def free(self, owner, indices):
        for entry in sorted(entry for entry in self.held if entry[0] == owner):
            if entry[1] in indices:
                self.held.remove(entry)
                if entry[2] not in self.names():
                    self.cached.append(entry[2])

    def cancel(self, name):
        if name in self.names() or name in self.cached:
            self.held = [entry for entry in self.held if entry[2] != name]
            self.cached = [other for other in self.cached if other != name]
            self.dropped.append(name)
            self.encoded = [other for other in self.encoded if other != name]


def plan(cache, naive, owner, limit):
    """Choose features in order, as a scheduler does for a request that may be admitted."""
    reserved, chosen = 0, []
    for index, feature in enumerate(owner.source.features[:limit]):
        name, length = feature.identifier, feature.length
        known = name in naive.names()
        fits = known or reserved + length <= naive.free_room()
        is_held = cache.holds(owner, index)
        assert is_held == (known or (name in naive.cached and fits))
        if is_held:
            naive.hold(owner.request_id, index, name)
            continue
        assert cache.can_allocate(owner, index, reserved) == fits
        if not fits:
            break
        reserved += length
        chosen.append(index)
    return chosen


steps = st.lists(
    st.tuples(
        st.sampled_from(["admit", "refuse", "withdraw", "lose", "free", "free_input"]),
        st.integers(0, 3),  # which request
        st.integers(0, 4),  # how many of its features, or which one
        st.booleans(),  # whether the step ends here
    ),
    max_size=60,
)
contents = st.lists(st.lists(st.sampled_from(sorted(LENGTHS)), max_size=4), min_size=4, max_size=4)


@examples(200)
@given(st.integers(0, 20), contents, steps)
def test_it_agrees_with_plain_lists_and_workers_have_what_is_held(room, contents, steps):
    cache, naive, worker = EncoderCacheManager(room), Naive(room), set()
    requests = [request(f"r{at}", *names) for at, names in enumerate(contents)]

    def end_step():
        told, encoded = cache.take_freed(), set(naive.encoded)
        assert told == naive.dropped
        worker.difference_update(told)
        worker.update(encoded)
        naive.dropped, naive.encoded = [], []
        assert worker == naive.names() | set(naive.cached)
        assert sum(LENGTHS[name] for name in worker) <= room

    for action, which, number, step_ends in steps:
        owner = requests[which]
        if action in ("free", "free_input"):
            end_step()
            indices = range(5) if action == "free" else [number]
            cache.free(owner) if action == "free" else cache.free_input(owner, number)
            naive.free(owner.request_id, indices)
            continue
        chosen = plan(cache, naive, owner, number)
        if action != "refuse":
            for index in chosen:
                naive.allocate(owner.request_id, index, owner.source.features[index].identifier)
                cache.allocate(owner, index)  # what was promised is there
        if action == "lose":
            end_step()  # told, but perhaps not carried out
        if action in ("withdraw", "lose"):
            for index in chosen:
                cache.cancel(owner, index)
                naive.cancel(owner.source.features[index].identifier)
        assert cache.num_free_tokens == naive.free_room() >= 0
        if step_ends or action == "refuse":  # a promise binds as long as the step
            end_step()
