"""Conversations that stay open: their states, their turns, and what ends them."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import tracemalloc
from pathlib import Path

import pytest
from support.async_requests import config, endless
from support.internals import engine_of, open_conversations_of, output_processor_of
from support.waiting import PATIENCE_S, HeldSteps, until

from hardpoint import (
    LLM,
    AsyncLLM,
    ConversationEndedError,
    EngineDeadError,
    HardpointError,
    OverloadedError,
    PoolingParams,
    PromptPart,
    RequestError,
    RequestOutputKind,
    SamplingParams,
)
from hardpoint.conversations.states import (
    TRANSITIONS,
    ConversationEvent,
    ConversationState,
    OpenConversations,
)
from hardpoint.errors import PromptTooLongError
from hardpoint.plugins.config.engine import ConversationsConfig
from hardpoint.testing import ScriptedClock, scripted_config, write_scripted_model

PAGE = Path(__file__).parents[2] / "docs" / "sessions.md"
LENGTH = 512
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
SEEDED = SamplingParams(temperature=1.0, seed=11, max_tokens=20, ignore_eos=True)
DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
E, S = ConversationEvent, ConversationState


def opened(clock=None, max_model_len=100, keep_last=True, **settings):
    clock = clock or ScriptedClock()
    table = ConversationsConfig(**{"lease_seconds": 10.0, **settings})
    book = OpenConversations(table, max_model_len, clock)
    return book, book.open(keep_last=keep_last), clock


WALKS = {
    S.IDLE: lambda history: None,
    S.APPENDING: lambda history: history.append([1]),
    S.RUNNING: lambda history: (history.append([1]), history.begin()),
    S.ENDED: lambda history: history.end("it was closed"),
}
APPLIED = {
    E.APPEND: lambda history, clock: history.append([2]),
    E.COMMIT: lambda history, clock: history.begin(),
    E.FINISH: lambda history, clock: history.finish([3]),
    E.FAIL: lambda history, clock: history.fail(),
    E.CANCEL: lambda history, clock: history.cancel(),
    E.EXPIRE: lambda history, clock: clock.advance(10.0),
    E.END: lambda history, clock: history.end("it was closed"),
}


def table_of_the_page():
    """The cells of the page's table of states and events."""
    lines = PAGE.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| state | APPEND"))
    rows = [[c.strip(" `") for c in line.strip("|").split("|")] for line in lines[start:][:6]]
    events = [E[name] for name in rows[0][1:]]
    return {S[row[0]]: dict(zip(events, row[1:], strict=True)) for row in rows[2:]}


class TestStates:
    def test_the_page_has_every_state_and_event(self):
        table = table_of_the_page()
        assert {state: set(row) for state, row in table.items()} == {s: set(E) for s in S}

    @pytest.mark.parametrize(("state", "event"), list(itertools.product(S, E)))
    def test_each_event_in_each_state(self, state, event):
        cell = table_of_the_page()[state][event]
        _, history, clock = opened()
        WALKS[state](history)
        assert history.state is state
        if cell == "error":
            with pytest.raises(RequestError, match="has ended: it was closed|has a turn that runs"):
                APPLIED[event](history, clock)
            assert event not in TRANSITIONS[state]
            assert history.state is state
            return
        if cell == "none":
            assert event not in TRANSITIONS[state]
            if event is E.EXPIRE:
                APPLIED[event](history, clock)
                assert history.state is state
            return
        APPLIED[event](history, clock)
        assert history.state is S[cell.split(",")[0]]

    def test_parts_that_came_meanwhile_wait_for_the_next_turn(self):
        _, history, _ = opened()
        history.append([1])
        assert history.begin() == [1]
        history.append([4])
        assert TRANSITIONS[S.RUNNING][E.FINISH] == (S.IDLE, S.APPENDING)
        history.finish([2, 3])
        assert (history.state, history.token_ids, history.num_turns) == (S.APPENDING, [1, 2, 3], 1)
        assert history.begin() == [1, 2, 3, 4]

    def test_a_turn_that_fails_leaves_the_conversation_as_it_was(self):
        book, history, _ = opened()
        history.append([1])
        history.begin()
        history.append([4])
        history.fail()
        assert (history.state, history.token_ids, history.num_turns) == (S.APPENDING, [], 0)
        assert history.begin() == [1, 4]
        assert book.num_tokens == 2

    @pytest.mark.parametrize("ends", [E.FINISH, E.FAIL, E.END])
    def test_a_turn_that_the_collector_ends_waits_for_a_transition(self, ends):
        book, history, clock = opened()
        WALKS[S.RUNNING](history)
        with book.lock:
            APPLIED[ends](history, clock)
            assert history.state is S.RUNNING
        assert history.state is TRANSITIONS[S.RUNNING][ends][0]

    def test_the_last_token_may_be_dropped(self):
        _, history, _ = opened(keep_last=False)
        history.append([1])
        history.begin()
        history.finish([2, 3])
        assert history.token_ids == [1, 2]

    def test_a_lease_runs_out_and_frees_what_it_held(self):
        book, history, clock = opened()
        history.append([1, 2])
        clock.advance(9.0)
        history.append([3])  # begins it anew
        clock.advance(9.0)
        assert (history.seconds_left, book.num_tokens, len(book)) == (1.0, 3, 1)
        clock.advance(1.0)
        words = r"lease of 10 s has run out \(conversations.lease_seconds\)"
        with pytest.raises(ConversationEndedError, match=words):
            history.append([4])
        assert (book.num_tokens, len(book), history.token_ids) == (0, 0, [])

    def test_a_commit_without_parts_renews_no_lease(self):
        _, history, clock = opened()
        clock.advance(9.0)
        assert history.begin() is None
        clock.advance(1.0)
        assert history.state is S.ENDED

    def test_there_are_as_many_as_may_be(self):
        book, first, _ = opened(max_open=2, max_tokens=5)
        second = book.open()
        with pytest.raises(OverloadedError, match=r"conversations.max_open: 2 conversations are"):
            book.open()
        first.append([1, 2, 3])
        words = r"conversations.max_tokens: open conversations hold 3 tokens, and 3 more .* than 5"
        with pytest.raises(OverloadedError, match=words):
            second.append([1, 2, 3])
        first.end("it was closed")
        second.append([1, 2, 3])
        assert (book.num_tokens, len(book)) == (3, 1)

    def test_a_part_too_many(self):
        book, history, _ = opened(max_model_len=4)
        history.append([1, 2])
        words = "conversation has 2 tokens and this part 2, .* maximum context length is 4 tokens"
        with pytest.raises(PromptTooLongError, match=words):
            history.append([3, 4])
        history.append([3])
        assert (history.state, book.num_tokens) == (S.APPENDING, 3)

    @pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.nightly)])
    def test_memory_of_open_conversations_is_bounded(self, count):
        book, history, clock = opened(max_open=count, max_model_len=2000)
        history.end("it was closed")
        tracemalloc.start()
        try:
            held = [book.open() for _ in range(count)]
            for history in held:
                history.append(range(1000))
                history.begin()
                history.finish([1])
            taken = tracemalloc.get_traced_memory()[0]
            assert taken < count * 7000  # 4 bytes a token, the list's spare room, and the object
            assert (len(book), book.num_tokens) == (count, count * 1001)
            clock.advance(10.0)
            assert (len(book), book.num_tokens) == (0, 0)
            assert tracemalloc.get_traced_memory()[0] < taken / 4
        finally:
            tracemalloc.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_scripted_model(
        tmp_path_factory.mktemp("model"),
        {"say abc": " abc abc abc", "none": ""},
        max_position_embeddings=LENGTH,
    )


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(config=scripted_config(folder)) as opened_llm:
        yield opened_llm


def tokens_of(outputs):
    return [token for output in outputs for token in output.outputs[0].token_ids]


class TestTurns:
    @pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
    @pytest.mark.parametrize("keep_last", [True, False])
    def test_a_turn_equals_a_request_with_all_tokens_before_it(self, llm, params, keep_last):
        with llm.open_conversation(params, keep_last=keep_last, cache_salt="here") as talk:
            history, computed = [], 0
            for turn, text in enumerate(["say abc", " and once more", ", please", " a"]):
                history += llm.tokenizer.encode(text, add_special_tokens=not turn)
                outputs = list(talk.send(text))
                (alone,) = llm.generate({"prompt_token_ids": history}, params)
                tokens = tokens_of(outputs)
                assert tokens == alone.outputs[0].token_ids
                assert outputs[-1].outputs[0].finish_reason == alone.outputs[0].finish_reason
                assert {output.turn for output in outputs} == {turn}
                # Whole blocks of what the turn before has computed: all but its last token.
                assert outputs[-1].num_cached_tokens == computed - computed % 16
                computed = len(history) + len(tokens) - 1
                history += tokens if keep_last else tokens[:-1]
                assert talk.token_ids == history

    def test_several_parts_before_a_turn(self, llm):
        with llm.open_conversation(GREEDY) as talk:
            talk.append("sa")
            talk.append([])
            talk.append("")
            talk.append(llm.tokenizer.encode("y abc", add_special_tokens=False))
            (*_, last) = talk.commit()
            assert last.prompt_token_ids == llm.tokenizer.encode("say abc")
            assert (list(talk.commit()), talk.num_turns) == ([], 1)  # nothing came: no turn

    def test_a_stop_first(self, llm):
        with llm.open_conversation(GREEDY) as talk:
            (only,) = talk.send("none")
            stop = only.outputs[0]
            assert (stop.finish_reason, len(stop.token_ids)) == ("stop", 1)
            assert talk.token_ids[-1:] == stop.token_ids
            assert [o.turn for o in talk.send("say abc")][-1] == 1

    def test_the_newest_parameters_hold(self, llm):
        with llm.open_conversation(GREEDY) as talk:
            two = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
            assert len(tokens_of(talk.send("say abc", two))) == 2
            with pytest.raises(RequestError, match="temperature: .* -1"):
                list(talk.send("more", SamplingParams(temperature=-1.0)))
            assert talk.state is S.APPENDING  # the part waits for right parameters
            outputs = list(talk.commit())
            assert (len(tokens_of(outputs)), outputs[0].turn) == (2, 1)

    def test_a_stop_string_ends_a_turn_and_stays(self, llm):
        params = SamplingParams(temperature=0.0, max_tokens=20, stop=["c a"])
        with llm.open_conversation(params) as talk:
            outputs = list(talk.send("say abc"))
            assert "".join(o.outputs[0].text for o in outputs) == " ab"
            assert outputs[-1].outputs[0].stop_reason == "c a"
            assert llm.tokenizer.decode(talk.token_ids).endswith("say abc abc a")

    def test_a_grammar_begins_anew_in_each_turn(self, llm):
        params = SamplingParams(temperature=1.0, seed=3, structured={"choice": ["yes", "no"]})
        with llm.open_conversation(params) as talk:
            for text in ("a", "b"):
                answer = "".join(o.outputs[0].text for o in talk.send(text))
                assert answer in ("yes", "no")

    def test_leaving_early_keeps_what_was_taken(self, llm):
        with llm.open_conversation(GREEDY) as talk:
            outputs = talk.send("say abc")
            first = next(outputs)
            with pytest.raises(RequestError, match="has a turn that runs"):
                next(talk.commit())
            outputs.close()
            prompt = llm.tokenizer.encode("say abc")
            assert talk.token_ids == [*prompt, *first.outputs[0].token_ids]
            assert (talk.state, talk.num_turns) == (S.IDLE, 1)
            assert not engine_of(llm).has_unfinished_requests()

    @pytest.mark.parametrize(
        ("prompt", "words"),
        [
            ([99_999], r"prompt_token_ids\[0\]: expected a whole number from 0 to"),
            (b"x", "prompt: expected text or a list of token ids, got bytes"),
            ("\ud800", "prompt: .*UTF-8|prompt: .*surrogate"),
            (
                {"type": "token", "prompt_token_ids": [1], "cache_salt": "a"},
                "prompt.cache_salt: expected none in a part",
            ),
            (
                {"prompt": "see", "multi_modal_data": {"image": [b"png"]}},
                r"got the keys \['multi_modal_data', 'prompt'\]; parts of a conversation",
            ),
            (
                {"text": "a", "text_pair": "b"},
                r"got the keys \['text', 'text_pair'\]; parts of a conversation",
            ),
            (
                {"prompt_embeds": [[0.5]]},
                r"expected a mapping .* got the keys \['prompt_embeds'\]; parts of a conversation",
            ),
            ([1] * LENGTH, "the conversation has 0 tokens and this part 512"),
        ],
    )
    def test_a_wrong_part_is_refused_alone(self, llm, prompt, words):
        with llm.open_conversation(GREEDY) as talk:
            talk.append("say abc")
            if "has 0 tokens" in words:
                words = words.replace("0 tokens", "7 tokens")
            with pytest.raises(RequestError, match=words):
                talk.append(prompt)
            assert talk.state is S.APPENDING
            assert len(tokens_of(talk.commit())) == 13

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"sampling_params": SamplingParams(n=2)}, "n: expected 1 in a conversation.* got 2"),
            ({"sampling_params": PoolingParams()}, "SamplingParams, got PoolingParams"),
            ({"sampling_params": 3}, "sampling_params: expected SamplingParams, got int"),
            ({"truncate_prompt_tokens": 4}, "truncate_prompt_tokens: expected none in a conv.* 4"),
        ],
    )
    def test_what_has_no_place_in_a_conversation(self, llm, options, words):
        with pytest.raises(RequestError, match=words):
            llm.open_conversation(**options)
        assert len(open_conversations_of(llm)) == 0

    def test_a_part_after_the_end(self, llm):
        talk = llm.open_conversation(GREEDY)
        talk.close()
        talk.close()
        for call in (lambda: talk.append("a"), lambda: list(talk.commit())):
            with pytest.raises(ConversationEndedError, match="has ended: it was closed"):
                call()

    def test_preempted_and_beyond_max_num_seqs(self, folder):
        # 12 blocks of 16 tokens: two conversations run, and one has to give way.
        table = {
            "kv_cache": {"num_blocks": 12},
            "max_model_len": 192,
            "scheduler": {"max_num_seqs": 2},
        }
        params = SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True)
        with LLM(config=scripted_config(folder, table)) as small:
            talks = [small.open_conversation(params) for _ in range(4)]
            for turn in range(2):
                streams = [t.send(f"{turn} {i}") for i, t in enumerate(talks)]
                got = [[] for _ in talks]
                live = dict(enumerate(streams))
                while live:  # in turns, so that all run at once
                    for i, stream in list(live.items()):
                        if (output := next(stream, None)) is None:
                            del live[i]
                        else:
                            got[i] += output.outputs[0].token_ids
                for talk, tokens in zip(talks, got, strict=True):
                    prompt = talk.token_ids[:-60]
                    (alone,) = small.generate({"prompt_token_ids": prompt}, params)
                    assert tokens == alone.outputs[0].token_ids
            assert small.engines.scheduler_stats().num_preemptions > 0

    @pytest.mark.parametrize(
        "table",
        [
            {"scheduler": {"max_num_batched_tokens": 24}},
            {"kv_cache": {"prefix_caching": False}},
            {"speculation": {"use": ["ngram"]}},
            {"scheduler": {"asynchronous": True}},
        ],
        ids=["chunks", "no prefix cache", "drafts", "planned ahead"],
    )
    def test_a_conversation_has_the_same_tokens_with_each_feature(self, llm, folder, table):
        params = SamplingParams(temperature=1.0, seed=7, max_tokens=20, ignore_eos=True)

        def history_of(model):
            with model.open_conversation(params) as talk:
                for text in ("say abc", " and a longer part than one chunk takes", ", more"):
                    list(talk.send(text))
                return talk.token_ids

        with LLM(config=scripted_config(folder, table)) as other:
            assert history_of(other) == history_of(llm)

    def test_a_conversation_without_room_to_answer(self, llm):
        params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
        with llm.open_conversation(params) as talk:
            outputs = list(talk.send("say abc"))
            assert outputs[-1].outputs[0].finish_reason == "length"
            assert len(talk.token_ids) == LENGTH
            words = f"has {LENGTH} tokens and this part 1, .* length is {LENGTH} tokens"
            with pytest.raises(PromptTooLongError, match=words):
                talk.append([1])

    def test_the_end_of_the_engine_ends_them(self, folder):
        with LLM(config=scripted_config(folder)) as short:
            talk = short.open_conversation(GREEDY)
        with pytest.raises(ConversationEndedError, match="has ended: the engine was closed"):
            talk.append("say abc")


@pytest.fixture(scope="module")
def shared(folder):
    """A runner of one loop, and an engine that belongs to it."""
    with asyncio.Runner() as runner:
        llm = AsyncLLM(config=config(folder), restart="on_failure")
        yield runner, llm
        runner.run(llm.aclose())


@pytest.fixture
def run(shared):
    """Run a test's coroutine function; nothing may be left of its conversations and requests."""
    runner, llm = shared

    async def checked(main):
        result = await asyncio.wait_for(main(llm), 2 * PATIENCE_S)
        assert len(open_conversations_of(llm)) == 0
        assert output_processor_of(engine_of(llm)).num_unfinished_requests() == 0
        return result

    return lambda main: runner.run(checked(main))


@pytest.fixture
def async_llm(run, shared):
    """The engine, for tests that are coroutine functions; `run` runs them."""
    return shared[1]


async def of(*parts):
    for part in parts:
        yield part


async def ceasing(*parts):
    """Send parts, and then wait for ever."""
    for part in parts:
        yield part
    await asyncio.Event().wait()


@pytest.fixture
def histories(monkeypatch):
    """The conversations that were opened."""
    found, plain = [], OpenConversations.open

    def open_(*args, **options):
        found.append(plain(*args, **options))
        return found[-1]

    monkeypatch.setattr(OpenConversations, "open", open_)
    return found


async def reaches(histories, state, num_turns):
    """Wait until the last conversation has a state, and so many turns."""
    await until(
        lambda: [(one.state, one.num_turns) for one in histories[-1:]] == [(state, num_turns)],
        f"the state {state}",
    )


async def extend(found, outputs):
    async for output in outputs:
        found.append(output)


async def killing(llm, outputs):
    """Kill each engine that sends some of the outputs."""
    last = None
    async for _ in outputs:
        if (pid := llm.engines.pid) not in (None, last):
            os.kill(pid, signal.SIGKILL)
            last = pid


async def taken(outputs):
    return [output async for output in outputs]


class TestIterators:
    async def test_each_part_has_its_turn(self, async_llm):
        parts = of("say abc", PromptPart("x", commit=False), "", "", " say abc")
        params = SamplingParams(temperature=0.0, max_tokens=20, output_kind=FINAL_ONLY)
        outputs = await taken(async_llm.generate(parts, params, "mine"))
        assert [(o.turn, o.finished, o.request_id) for o in outputs] == [
            (turn, True, "mine") for turn in range(3)
        ]
        assert outputs[0].outputs[0].text == " abc abc abc"
        before = [*outputs[0].prompt_token_ids, *outputs[0].outputs[0].token_ids]
        x = async_llm.tokenizer.encode("x", add_special_tokens=False)
        assert outputs[1].prompt_token_ids == [*before, *x]
        assert outputs[1].num_cached_tokens == 16

    @pytest.mark.parametrize(
        ("parts", "turns", "words"),
        [
            (["a", [-1]], 1, r"parts\[1\]: prompt_token_ids\[0\]: expected a whole number"),
            ([3], 0, r"parts\[0\]: prompt: expected text or a list of token ids, got int"),
            (
                [PromptPart("a", SamplingParams(n=2))],
                0,
                r"parts\[0\]: n: expected 1 in a conversation",
            ),
            (
                ["a", PromptPart("b", SamplingParams(max_tokens=0))],
                1,
                r"parts\[1\]: max_tokens: expected",
            ),
        ],
    )
    async def test_a_wrong_part_ends_it(self, async_llm, parts, turns, words):
        params = SamplingParams(temperature=0.0, max_tokens=3, output_kind=FINAL_ONLY)
        outputs = []
        with pytest.raises(RequestError, match=words):
            await extend(outputs, async_llm.generate(of(*parts), params))
        assert len(outputs) == turns

    async def test_an_error_of_the_sender_is_the_consumers(self, async_llm):
        async def broken():
            yield "say abc"
            raise LookupError("no more")

        with pytest.raises(LookupError, match="no more"):
            await taken(async_llm.generate(broken(), GREEDY))

    async def test_a_slow_sender_loses_its_lease(self, async_llm, monkeypatch):
        table, outputs = open_conversations_of(async_llm), []

        def hold(history):
            """Let leases be short from the second turn on, which itself has none."""
            OpenConversations.hold(table, history)
            if history.num_turns == 1:
                short = ConversationsConfig(lease_seconds=0.2)
                monkeypatch.setattr(table, "_config", short)

        monkeypatch.setattr(table, "hold", hold)
        words = r"its lease of 0.2 s has run out \(conversations.lease_seconds\)"
        with pytest.raises(ConversationEndedError, match=words):
            await extend(outputs, async_llm.generate(ceasing("say abc", "b"), GREEDY))
        assert {output.turn for output in outputs} == {0, 1}

    async def test_an_abort_ends_it_in_each_state(self, async_llm, histories):
        async def aborted(parts, params, state):
            histories.clear()
            task = asyncio.ensure_future(taken(async_llm.generate(ceasing(*parts), params, "mine")))
            await reaches(histories, state, 0)
            await async_llm.abort("mine")
            return await task

        assert await aborted([], GREEDY, S.IDLE) == []
        assert await aborted([PromptPart("a", commit=False)], GREEDY, S.APPENDING) == []
        outputs = await aborted(["say abc"], endless(0.1, max_tokens=400), S.RUNNING)
        assert outputs[-1].outputs[0].finish_reason == "abort"

    async def test_closing_the_engine_ends_who_waits_for_a_part(self, folder, histories):
        llm = AsyncLLM(config=scripted_config(folder))
        waiting = asyncio.ensure_future(taken(llm.generate(ceasing("a"), GREEDY)))
        await reaches(histories, S.IDLE, 1)
        await llm.aclose()
        with pytest.raises(HardpointError, match="closed"):
            await waiting

    def test_leaving_the_loop_ends_the_sender_too(self, run):
        ended = []

        async def parts():
            try:
                for _ in range(9):
                    yield "say abc"
            finally:
                ended.append(True)

        async def main(llm):
            async for _ in llm.generate(source := parts(), GREEDY):
                break
            await source.aclose()

        run(main)
        assert ended == [True]


class TestTasks:
    async def test_two_senders_and_a_turn(self, async_llm, tmp_path):
        held = HeldSteps(tmp_path)
        params = endless(max_tokens=30, plugin_args=held.slow())
        async with async_llm.open_conversation(params) as talk:
            running = asyncio.ensure_future(taken(talk.send("say abc")))
            await until(lambda: talk.state is S.RUNNING, "the turn")
            await asyncio.gather(talk.append("one"), talk.append(" two"))
            with pytest.raises(RequestError, match="has a turn that runs"):
                await taken(talk.commit())
            held.let_go()
            outputs = await running
            assert talk.state is S.APPENDING
            later = async_llm.tokenizer.encode("one two", add_special_tokens=False)
            first = [*outputs[0].prompt_token_ids, *tokens_of(outputs)]
            second = await taken(talk.commit())
            assert second[0].prompt_token_ids == [*first, *later]

    async def test_a_turn_that_is_cancelled_keeps_its_tokens(self, async_llm):
        async with async_llm.open_conversation(endless(0.05, max_tokens=400)) as talk:
            await talk.cancel()  # nothing runs
            outputs = []
            async for output in talk.send("say abc"):
                outputs.append(output)
                if len(outputs) == 3:
                    await talk.cancel()
            assert outputs[-1].outputs[0].finish_reason == "abort"
            assert talk.token_ids == [*outputs[0].prompt_token_ids, *tokens_of(outputs)]
            assert (talk.state, talk.num_turns) == (S.IDLE, 1)
            short = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
            assert (await taken(talk.send("b", short)))[-1].turn == 1

    async def test_closing_ends_a_turn(self, async_llm):
        talk = async_llm.open_conversation(endless(0.05, max_tokens=400))
        running = asyncio.ensure_future(taken(talk.send("say abc")))
        await until(lambda: talk.state is S.RUNNING, "the turn")
        await talk.aclose()
        assert (await running)[-1].outputs[0].finish_reason == "abort"
        assert (talk.state, talk.token_ids) == (S.ENDED, [])

    async def test_it_outlives_an_engine_that_dies(self, async_llm, tmp_path):
        held = HeldSteps(tmp_path)
        params = endless(max_tokens=400, plugin_args=held.slow(0.1))
        async with async_llm.open_conversation(GREEDY) as talk:
            await taken(talk.send("say abc"))
            before = talk.token_ids
            with pytest.raises(EngineDeadError, match="engine.max_resumes"):
                await killing(async_llm, talk.send(" and", params))
            held.let_go()
            assert (talk.state, talk.token_ids) == (S.APPENDING, before)
            outputs = await taken(talk.commit())  # with the parameters that hold
            assert outputs[0].turn == 1
            assert outputs[0].prompt_token_ids[: len(before)] == before
