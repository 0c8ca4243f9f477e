"""Read-only lists, dicts and structs: every mutator is refused, reading and copying is as usual."""

from __future__ import annotations

import copy
import pickle

import msgspec
import pytest

from hardpoint.host.boundary.policy import RequestView
from hardpoint.plugins import EngineCoreRequest, Request, SamplingParams
from hardpoint.plugins.requests.stats import IterationStats, PrefixCacheStats, SchedulerStats
from hardpoint.typed import ReadOnlyDict, ReadOnlyList, read_only

LIST, DICT = ReadOnlyList([3, 1, 2]), ReadOnlyDict(a=1, b=2)


def mutators(value):
    """The methods of a list or dict that change it, found by trying all of them."""
    methods = []
    for name in dir(value):
        if name in ("__class__", "__init__", "__setattr__", "__delattr__"):
            continue
        for arguments in ((), (0,), ("a",), ([9],), ({"c": 9},), (0, 9), ("a", 9), ("c", 9)):
            tried = copy.copy(value)
            method = getattr(tried, name)
            try:
                method(*arguments)
            except Exception:
                continue
            if tried != value or (isinstance(value, dict) and list(tried) != list(value)):
                methods.append((name, arguments))
    return methods


@pytest.mark.parametrize(("plain", "shown"), [([3, 1, 2], LIST), ({"a": 1, "b": 2}, DICT)])
def test_every_method_that_changes_it_is_refused(plain, shown):
    methods = mutators(plain)
    assert len({name for name, _ in methods}) >= 7
    for name, arguments in methods:
        with pytest.raises(TypeError, match="is read-only: it belongs to the engine"):
            getattr(shown, name)(*arguments)
    assert shown == plain


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v))]
)
def test_a_copy_is_an_ordinary_object(copied):
    assert type(copied(LIST)) is list
    assert type(copied(DICT)) is dict
    stats = read_only(IterationStats(finished=[], time_to_first_token=[1.0]))
    assert type(copied(stats)) is IterationStats
    assert copied(stats) == stats == IterationStats(time_to_first_token=[1.0])


def test_structs_are_frozen_at_any_depth_and_encoded_as_before():
    scheduler = SchedulerStats(
        num_running=1, num_waiting=2, kv_cache_usage=0.5, prefix_cache=PrefixCacheStats()
    )
    stats = IterationStats(scheduler=scheduler, inter_token_latency=[0.5])
    shown = read_only(stats)
    assert msgspec.msgpack.encode(shown) == msgspec.msgpack.encode(stats)
    assert shown == stats
    assert stats == shown
    for owner, name in ((shown, "engine_index"), (shown.scheduler.prefix_cache, "requests")):
        with pytest.raises(AttributeError, match="immutable type"):
            setattr(owner, name, 7)
    with pytest.raises(TypeError, match="this list is read-only"):
        shown.inter_token_latency.append(1.0)
    stats.inter_token_latency.append(1.0)
    assert shown.inter_token_latency == [0.5]


def test_a_view_shows_all_of_its_request_and_follows_it():
    source = EngineCoreRequest(
        request_id="r", prompt_token_ids=[1, 2], params=SamplingParams(), tags={"tenant": "a"}
    )
    request = Request(source, order=3)
    view = RequestView(request)
    request.append(7)
    request.num_computed_tokens = 2
    names = {name for name in dir(Request) if not name.startswith("_")} - {"append", "token_ids"}
    for name in names:
        assert getattr(view, name) == getattr(request, name), name
    assert view.token_ids(1, 3) == [2, 7]
    assert repr(view) == repr(request)
    for name in names:
        with pytest.raises(AttributeError, match=f"{name}: a request is read-only for policies"):
            setattr(view, name, None)
