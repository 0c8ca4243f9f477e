"""Prefix cache retention: fields of requests, and retained blocks."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from support.waiting import wait_until

from hardpoint import LLM, RequestError, SamplingParams
from hardpoint.builtin_plugins.step_parts.retention.sessions import RetainedSessions
from hardpoint.plugins import (
    CachedRequests,
    EngineCoreRequest,
    ModelRunnerOutput,
    NewRequest,
    Request,
    SchedulerOutput,
)
from hardpoint.plugins.kv_cache import RetainedBlocks
from hardpoint.plugins.requests.params import Retention
from hardpoint.testing import scripted_config, write_scripted_model
from hardpoint.testing.scripted import ScriptedClock

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
TEXT = "the first conversation " * 3  # 17 full blocks of 4
BLOCKS = 17


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_scripted_model(tmp_path_factory.mktemp("scripted"))


def opened(folder, *, share=0.5, **settings):
    fields = {
        "kv_cache": {"num_blocks": 40, "block_size": 4},
        "max_model_len": 150,
        "plugin": {"retention": {"share": share, "max_seconds": 600}},
    }
    return LLM(config=scripted_config(folder, {**fields, **settings}))


def ask(llm, text=TEXT, **options):
    return llm.generate([text], GREEDY, **options)[0]


_counter = itertools.count()


def fill(llm):
    """Use more blocks than the cache has, by prompts that share nothing."""
    for _ in range(8):
        ask(llm, f"{next(_counter)} another text " * 4)


def answer(output):
    return output.outputs[0].part_figures["retention"]


def test_blocks_outlive_other_requests(folder):
    with opened(folder) as llm:
        ask(llm)
        fill(llm)
        assert ask(llm).num_cached_tokens == 0
        retained = ask(llm, session="a", retain_seconds=60)
        expected = {"outcome": "accepted", "seconds": 60.0, "num_blocks": BLOCKS + 1}
        assert answer(retained) == expected
        fill(llm)
        again = ask(llm)
        assert again.num_cached_tokens == 4 * BLOCKS
        assert again.outputs[0].part_figures is None
        assert again.outputs[0].token_ids == retained.outputs[0].token_ids
        stats = llm.engines.scheduler_stats()
        assert (stats.num_retained_blocks, stats.num_retained_hits) == (BLOCKS + 1, BLOCKS)
        assert stats.num_retained_evictions == 0
        assert llm.plugins.health().fallbacks == {}


def test_a_session_that_is_released_is_as_others(folder):
    with opened(folder) as llm:
        ask(llm, session="a", retain_seconds=60)
        ask(llm, "another session", session="b", retain_seconds=60)
        assert llm.engines.release_session("a", cache_salt="x") == "missing"
        assert llm.engines.release_session("a") == "accepted"
        assert llm.engines.release_session("a") == "missing"
        assert 0 < llm.engines.scheduler_stats().num_retained_blocks < BLOCKS  # of b
        fill(llm)
        assert ask(llm).num_cached_tokens == 0


def test_what_two_sessions_share_stays_for_the_other(folder):
    with opened(folder) as llm:
        ask(llm, session="a", retain_seconds=60)
        ask(llm, session="b", retain_seconds=60)
        assert llm.engines.release_session("a") == "accepted"
        fill(llm)
        assert ask(llm).num_cached_tokens == 4 * BLOCKS
        assert llm.engines.release_session("b") == "accepted"
        assert llm.engines.scheduler_stats().num_retained_blocks == 0


def test_time_ends_it(folder):
    with opened(folder) as llm:
        ask(llm, session="a", retain_seconds=0.01)
        wait_until(lambda: not llm.engines.scheduler_stats().num_retained_blocks)
        fill(llm)
        assert ask(llm).num_cached_tokens == 0
        assert llm.engines.release_session("a") == "missing"


def test_the_share_of_a_salt_is_clipped_from_the_end(folder):
    with opened(folder, share=0.25) as llm:  # 10 blocks
        clipped = ask(llm, session="a", retain_seconds=60)
        assert answer(clipped) == {"outcome": "clipped", "seconds": 60.0, "num_blocks": 10}
        assert answer(ask(llm, "more", session="b", retain_seconds=60))["outcome"] == "rejected"
        other = ask(llm, "of another", session="a", retain_seconds=60, cache_salt="their own")
        assert answer(other)["outcome"] == "accepted"
        fill(llm)
        assert ask(llm).num_cached_tokens == 40


def test_long_times_are_cut_to_the_longest(folder):
    with opened(folder) as llm:
        assert answer(ask(llm, session="a", retain_seconds=1e9)) == {
            "outcome": "clipped",
            "seconds": 600.0,
            "num_blocks": BLOCKS + 1,
        }


@pytest.mark.parametrize(
    "settings", [{"share": 0.0}, {"kv_cache": {"num_blocks": 40, "prefix_caching": False}}]
)
def test_nothing_is_retained_where_nothing_can_be(folder, settings):
    with opened(folder, **settings) as llm:
        refused = answer(ask(llm, session="a", retain_seconds=60))
        assert (refused["outcome"], refused["num_blocks"]) == ("rejected", 0)
        assert llm.engines.scheduler_stats().num_retained_blocks == 0
        assert llm.engines.release_session("a") == "missing"


def test_a_wish_is_no_guarantee(folder):
    with opened(folder, share=1.0) as llm:
        ask(llm, session="a", retain_seconds=60)
        long = "a prompt that needs nearly all blocks, those of the session, too " * 2
        assert ask(llm, long).num_cached_tokens == 0
        stats = llm.engines.scheduler_stats()
        assert stats.num_retained_evictions > 0
        assert stats.num_retained_blocks + stats.num_retained_evictions == BLOCKS + 1


def test_a_reset_of_the_cache_ends_it(folder):
    with opened(folder) as llm:
        ask(llm, session="a", retain_seconds=60)
        llm.reset_prefix_cache()
        assert llm.engines.scheduler_stats().num_retained_blocks == 0
        assert llm.engines.scheduler_stats().num_retained_evictions == 0
        assert llm.engines.release_session("a") == "missing"


def test_a_conversation_that_grows_keeps_all_of_it(folder):
    with opened(folder, share=1.0) as llm:
        history, computed = list(range(10)), 0
        for _ in range(4):
            output = ask(llm, history, session="a", retain_seconds=60)
            assert output.num_cached_tokens == computed // 4 * 4
            history += output.outputs[0].token_ids
            computed = len(history) - 1  # the last token has no keys
            history += range(7)
            fill(llm)
        assert answer(output)["outcome"] == "accepted"


def test_requests_in_a_batch_and_in_a_process_of_the_engine(folder):
    with opened(folder, engine={"in_process": False}) as llm:
        texts = [f"conversation {name}" for name in "abc"]
        outputs = llm.generate(
            texts, GREEDY, session=["a", None, "c"], retain_seconds=[60, None, 30]
        )
        figures = [output.outputs[0].part_figures for output in outputs]
        assert figures[1] is None
        assert [figures[i]["retention"]["seconds"] for i in (0, 2)] == [60.0, 30.0]
        assert llm.engines.release_session("c") == "accepted"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"session": "a"}, "retain_seconds: expected a value with session, got none"),
        ({"retain_seconds": 1.0}, "session: expected a value with retain_seconds, got none"),
        (
            {"session": "", "retain_seconds": 1.0},
            "session: expected a name of 1 to 256 characters, got ''",
        ),
        ({"session": "a", "retain_seconds": 0.0}, "retain_seconds: expected seconds > 0, got 0.0"),
        (
            {"session": "a", "retain_seconds": float("inf")},
            "retain_seconds: expected a finite number, got inf",
        ),
    ],
)
def test_wrong_wishes_are_refused_by_field(folder, options, message):
    with opened(folder) as llm:
        with pytest.raises(RequestError) as refused:
            ask(llm, **options)
        assert message in str(refused.value)
        with pytest.raises(RequestError, match="session: expected a text, got 5"):
            llm.engines.release_session(5)
        assert ask(llm).num_cached_tokens == 0


class Sessions:
    """Sessions of requests with equal prompts, without an engine."""

    def __init__(self):
        self.retained, self.clock = RetainedBlocks(num_blocks=100), ScriptedClock(now=0.0)
        context = SimpleNamespace(
            block_hashes=lambda request, count: [bytes([index]) for index in range(count)],
            clock=self.clock,
            block_size=4,
            retained=self.retained,
        )
        self.half = RetainedSessions(context, max_seconds=3600.0, share=1.0, max_sessions=10)

    def add(self, name, length=16, seconds=600.0):
        source = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=list(range(length)),
            params=SamplingParams(),
            retention=Retention("s", seconds),
        )
        request = Request(source)
        self.half.gate(request)
        return request

    def step(self, request, tokens, *, is_first=True, resumed=False):
        """Compute tokens of a request; schedulers count them when they plan the step."""
        computed, name = request.num_computed_tokens, request.request_id
        request.num_computed_tokens += tokens
        new, cached = NewRequest(request.source, (), [[]], computed, resumed), CachedRequests()
        plan = SchedulerOutput(
            new_requests=[new] if is_first else [],
            cached_requests=cached if is_first else CachedRequests([name], [computed]),
            num_scheduled_tokens={name: tokens},
        )
        self.half.result(plan, ModelRunnerOutput())

    def evict(self):
        """Evict all blocks."""
        self.retained.lost += self.retained.deadlines
        self.retained.deadlines.clear()

    def num_retained(self):
        stats = SimpleNamespace()
        self.half.add_stats(stats)
        return stats.num_retained_blocks


@pytest.mark.parametrize(("first", "count"), [(16, 4), (4, 1)])
def test_blocks_that_are_computed_again_are_retained_again(first, count):
    sessions = Sessions()
    request = sessions.add("a")
    sessions.step(request, 16)
    sessions.evict()
    request.num_computed_tokens = 0
    sessions.step(request, first, resumed=True)
    assert sessions.half.figures("a")["num_blocks"] == sessions.num_retained() == count
    sessions.half.ended("a")
    sessions.clock.advance(601)
    assert sessions.num_retained() == 0


def test_no_block_stays_after_a_resumed_request_that_computed_fewer():
    sessions = Sessions()
    request = sessions.add("a")
    sessions.step(request, 16)
    request.num_computed_tokens = 0
    sessions.step(request, 4, resumed=True)
    sessions.half.ended("a")
    sessions.clock.advance(601)
    assert sessions.num_retained() == 0


def test_common_blocks_stay_while_another_request_of_the_session_runs():
    sessions = Sessions()
    first, second = sessions.add("a", 24, seconds=1.0), sessions.add("b")
    sessions.step(first, 24)
    sessions.step(second, 16)
    sessions.half.ended("a")
    sessions.clock.advance(2)
    assert sessions.num_retained() == 4
    sessions.half.ended("b")
    sessions.clock.advance(599)
    assert sessions.num_retained() == 4
    sessions.clock.advance(2)
    assert sessions.num_retained() == 0


def test_blocks_count_when_they_are_computed():
    sessions = Sessions()
    request = sessions.add("a", 64)
    sessions.step(request, 16)
    assert sessions.half.figures("a")["num_blocks"] == sessions.num_retained() == 4
    sessions.step(request, 6, is_first=False)
    assert sessions.half.figures("a")["num_blocks"] == sessions.num_retained() == 5
