"""AsyncLLM: many tasks of one event loop, one engine process."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest
from support.async_requests import GREEDY, Hooked, collect, config, endless
from support.internals import client_of, engine_of, output_processor_of
from support.waiting import PATIENCE_S, HeldSteps, until

from hardpoint import (
    LLM,
    AsyncLLM,
    ConfigError,
    EngineTimeoutError,
    HardpointError,
    OverloadedError,
    RequestError,
    RequestOutputKind,
    SamplingParams,
)
from hardpoint.plugins.server import AsyncGenerator
from hardpoint.process.client import event_loop as relay
from hardpoint.testing import write_scripted_model

DELTA, CUMULATIVE = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE
DELTAS = SamplingParams(temperature=0.0, max_tokens=20, output_kind=DELTA)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_scripted_model(
        tmp_path_factory.mktemp("model"),
        {"say abc": " abc abc abc", "emoji": "go 😀 on", "long": "0123456789" * 8},
        max_position_embeddings=1 << 15,
    )


@pytest.fixture(scope="module")
def shared(folder):
    """A runner of one loop, and an engine that belongs to it."""
    with asyncio.Runner() as runner:
        llm = AsyncLLM(config=config(folder, scheduler={"max_num_seqs": 40, "max_waiting": 40}))
        yield runner, llm
        runner.run(llm.aclose())


@pytest.fixture
def run(shared):
    """Run a test's coroutine function with the engine; nothing may be left of its requests."""
    runner, llm = shared

    async def checked(main):
        result = await asyncio.wait_for(main(llm), 2 * PATIENCE_S)
        assert output_processor_of(engine_of(llm)).num_unfinished_requests() == 0
        await asyncio.wait_for(no_requests(llm), PATIENCE_S)
        return result

    return lambda main: runner.run(checked(main))


@pytest.fixture
def llm(run, shared):
    """The engine, for tests that are coroutine functions; `run` runs them."""
    return shared[1]


async def no_requests(llm) -> None:
    """Wait until the engine has no requests."""
    while (stats := await llm.engines.scheduler_stats()).num_running or stats.num_waiting:
        await asyncio.sleep(0.01)


async def collect_slowly(llm, params) -> list:
    """Collect the outputs of a request, and see a whole other one to its end after each of them."""
    outputs = []
    async for output in llm.generate("long", params):
        outputs.append(output)
        await collect(llm.generate("long", params))
    return outputs


def joined(outputs, index=0) -> str:
    return "".join(c.text for o in outputs for c in o.outputs if c.index == index)


class TestGenerate:
    async def test_kinds(self, llm):
        deltas = await collect(llm.generate("say abc", DELTAS))
        assert joined(deltas) == " abc abc abc"
        assert [o.finished for o in deltas] == [False] * (len(deltas) - 1) + [True]
        whole = (await collect(llm.generate("say abc", GREEDY)))[-1]
        assert (whole.outputs[0].text, whole.outputs[0].finish_reason) == (
            " abc abc abc",
            "stop",
        )
        final = SamplingParams(
            temperature=0.0, max_tokens=20, output_kind=RequestOutputKind.FINAL_ONLY
        )
        (only,) = await collect(llm.generate("say abc", final))
        assert only.outputs[0].text == " abc abc abc"

    async def test_many_at_once_each_its_own(self, llm):
        prompts = ["say abc", "emoji", "long"] * 10
        params = SamplingParams(temperature=0.0, max_tokens=90, output_kind=DELTA)
        streams = [collect(llm.generate(p, params)) for p in prompts]
        texts = [joined(outputs) for outputs in await asyncio.gather(*streams)]
        assert texts == [" abc abc abc", "go 😀 on", "0123456789" * 8] * 10

    def test_completions(self, run):
        async def main(llm):
            params = SamplingParams(
                n=3, temperature=1.0, seed=4, max_tokens=9, ignore_eos=True, output_kind=DELTA
            )
            deltas = await collect(llm.generate("x", params))
            assert sum(len(c.token_ids) for o in deltas for c in o.outputs) == 27
            return [joined(deltas, index) for index in range(3)]

        assert len(set(run(main))) == 3

    async def test_default_ids_differ_and_given_ones_are_kept(self, llm):
        ids = [(await collect(llm.generate("x", GREEDY)))[0].request_id for _ in range(2)]
        assert ids[0] != ids[1]
        twins = [collect(llm.generate(p, DELTAS, "twin")) for p in ("say abc", "emoji")]
        for outputs, text in zip(
            await asyncio.gather(*twins), (" abc abc abc", "go 😀 on"), strict=True
        ):
            assert {output.request_id for output in outputs} == {"twin"}
            assert joined(outputs) == text

    async def test_extras_reach_the_engine(self, llm):
        outputs = await collect(llm.generate("x", endless(), timeout=0.1))
        assert outputs[-1].outputs[0].finish_reason == "timeout"
        with pytest.raises(RequestError, match="^not today$"):
            await collect(llm.generate("x", GREEDY, tags={"refuse": "1"}))
        with pytest.raises(RequestError, match="priority: expected a whole number, got 'hig"):
            await collect(llm.generate("x", GREEDY, priority="high"))

    @pytest.mark.parametrize(
        ("prompt", "params", "words"),
        [
            ("", GREEDY, "prompt: expected at least one token"),
            (3, GREEDY, "prompt: expected text or a list of token ids, got int"),
            ({"text": "x"}, GREEDY, "prompt: expected a mapping with either"),
            ("x", {"n": 1}, "sampling_params: expected SamplingParams, got dict"),
            ("x", SamplingParams(top_p=3.0), "top_p: expected a number <= 1"),
            ("x", SamplingParams(logits_processors=[max]), "logits_processors: callables cannot"),
            ("x" * 40_000, GREEDY, "prompt: the prompt is too long: 40000 tokens"),
        ],
    )
    async def test_what_is_wrong_is_refused(self, llm, prompt, params, words):
        with pytest.raises(RequestError, match=words):
            await collect(llm.generate(prompt, params))

    async def test_too_many_are_refused_as_such(self, llm):
        tasks = [asyncio.create_task(collect(llm.generate("x", endless()))) for _ in range(99)]
        # 40 run and 40 wait, at most
        await until(lambda: sum(task.done() for task in tasks) >= 19, "the refusals")
        refused = [task.exception() for task in tasks if task.done()]
        assert {type(error) for error in refused} == {OverloadedError}
        assert "40 requests are waiting, the maximum" in str(refused[0])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def test_hooks_hear_of_the_end(self, run):
        run(lambda llm: collect(llm.generate("say abc", GREEDY, "heard")))
        assert Hooked.finished.count("heard") == 1


class TestLeaving:
    async def test_breaking_out_aborts(self, llm):
        async for output in llm.generate("x", endless()):
            assert not output.finished
            break

    async def test_aclose_aborts(self, llm):
        outputs = llm.generate("x", endless())
        await anext(outputs)
        await outputs.aclose()

    async def test_cancelling_aborts(self, llm):
        task = asyncio.create_task(collect(llm.generate("x", endless())))
        while not (await llm.engines.scheduler_stats()).num_running:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    def test_an_error_of_the_consumer_aborts(self, run):
        async def main(llm):
            async with contextlib.aclosing(llm.generate("x", endless())) as outputs:
                async for _ in outputs:
                    raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            run(main)
        run(lambda llm: llm.plugins.health())  # checks that nothing is left

    @pytest.mark.parametrize("n", [1, 3])
    async def test_abort_ends_it_with_what_it_has(self, llm, n):
        outputs = []

        async def take():
            async for output in llm.generate("x", endless(n=n), "mine"):
                outputs.append(output)

        task = asyncio.create_task(take())
        other = asyncio.create_task(collect(llm.generate("x", endless(max_tokens=80))))
        await until(lambda: joined(outputs), "some text")
        await llm.abort(["mine", "never seen"])
        await asyncio.wait_for(task, PATIENCE_S)
        assert outputs[-1].finished
        reasons = [c.finish_reason for o in outputs for c in o.outputs if c.finish_reason]
        assert reasons == ["abort"] * n
        assert (await other)[-1].outputs[0].finish_reason == "length"

    async def test_abort_takes_one_id_as_well(self, llm):
        outputs = llm.generate("x", endless(), "mine")
        await anext(outputs)
        await llm.abort("mine")
        last = (await collect(outputs))[-1]
        assert last.outputs[0].finish_reason == "abort"


class TestPace:
    async def test_a_slow_consumer_gets_merged_deltas(self, llm):
        params = SamplingParams(temperature=0.0, max_tokens=90, output_kind=DELTA)
        outputs = await collect_slowly(llm, params)
        assert joined(outputs) == "0123456789" * 8
        assert len(outputs) <= 2

    async def test_a_kind_given_as_its_number_is_that_kind(self, llm):
        params = SamplingParams(temperature=0.0, max_tokens=90, output_kind=int(DELTA))
        outputs = await collect_slowly(llm, params)
        assert joined(outputs) == "0123456789" * 8
        assert len(outputs) <= 2

    async def test_a_consumer_that_never_reads_holds_one_output(self, llm):
        outputs = llm.generate("x", endless())
        await anext(outputs)
        await collect(llm.generate("x", endless(max_tokens=60)))  # in the same steps
        merged = await anext(outputs)
        assert len(merged.outputs[0].token_ids) > 20
        await outputs.aclose()

    async def test_a_large_batch_lets_others_have_the_loop(self, llm, monkeypatch):
        monkeypatch.setattr(relay, "_CHUNK_SIZE", 4)

        engine, sizes, turn, turns = engine_of(llm), [], 0, []
        take = engine._process_outputs

        def noted(batch):
            sizes.append(len(batch.outputs))
            turns.append(turn)
            take(batch)

        async def another():
            nonlocal turn
            while True:
                turn += 1
                await asyncio.sleep(0)

        engine._process_outputs = noted
        task = asyncio.create_task(another())
        try:
            params = SamplingParams(temperature=0.0, max_tokens=90, output_kind=DELTA)
            streams = [collect(llm.generate("long", params)) for _ in range(20)]
            for outputs in await asyncio.gather(*streams):
                assert joined(outputs) == "0123456789" * 8
        finally:
            task.cancel()
            del engine._process_outputs
        assert max(sizes) == 4
        assert turns == sorted(set(turns))  # another task had its turn between two chunks

    async def test_a_long_text_is_tokenised_beside_the_loop(self, llm):
        threads, go_on = [], threading.Event()
        tokenizer = llm.tokenizer
        encode = tokenizer.encode

        def slowly(text, **given):
            threads.append(threading.current_thread())
            assert go_on.wait(PATIENCE_S), "the event loop stands still"
            return encode(text, **given)

        tokenizer.encode = slowly
        try:
            task = asyncio.create_task(collect(llm.generate("y" * 3000, GREEDY)))
            await until(lambda: threads, "the tokenizer to be asked")
            go_on.set()
            assert len((await task)[-1].prompt_token_ids) == 3000
        finally:
            tokenizer.encode = encode
        assert threads[0] is not threading.main_thread()


class TestQuestions:
    async def test_all_of_them(self, llm):
        outputs = llm.generate("x", endless(), "r")
        await anext(outputs)
        assert await llm.debug.why_waiting("r") == {0: None}
        assert (await llm.engines.scheduler_stats()).num_running == 1
        assert (await llm.plugins.meters())["slow"].rows > 0
        health = await llm.plugins.health()
        assert (health.ok, health.restarts) == (True, 0)
        await llm.reset_prefix_cache(recompute_running=True)
        await outputs.aclose()
        with pytest.raises(RequestError, match="request_id: 'r' is not a live request"):
            await llm.debug.why_waiting("r")
        assert (llm.is_running, llm.errored, llm.dead_error) == (True, False, None)

    async def test_the_policy_can_change_under_way(self, llm):
        task = asyncio.create_task(collect(llm.generate("x", endless(max_tokens=60))))
        before = llm.plugins.manifest.generation
        await asyncio.gather(
            llm.plugins.set_policy("fair", {"tag": "team"}), llm.plugins.set_policy("fcfs")
        )
        assert llm.plugins.manifest.generation == before + 2
        assert llm.config.scheduler.policy == "fcfs"
        with pytest.raises(ConfigError, match=r"^plugin\.fair\.tga: unknown field"):
            await llm.plugins.set_policy("fair", {"tga": "team"})
        assert (await task)[-1].outputs[0].finish_reason == "length"

    async def test_no_answer_in_time(self, folder, tmp_path, monkeypatch):
        held = HeldSteps(tmp_path)
        params = endless(max_tokens=1, plugin_args=held.slow())
        own = config(folder, engine={"call_timeout_seconds": 2 * PATIENCE_S})
        async with AsyncLLM(config=own) as llm:
            assert client_of(llm).utility_timeout("scheduler_stats") == 2 * PATIENCE_S
            monkeypatch.setattr(client_of(llm), "_timeout_s", 0.2)
            task = asyncio.create_task(collect(llm.generate("x", params)))
            await until(held.have_begun, "the step")
            with pytest.raises(EngineTimeoutError, match=r"scheduler_stats within 0.2 s"):
                await llm.engines.scheduler_stats()
            held.let_go()
            await task
            monkeypatch.undo()  # from here on there shall be an answer
            assert (await llm.engines.scheduler_stats()).num_running == 0


class TestBesides:
    def test_another_loop_is_told_so(self, shared):
        runner, llm = shared
        runner.run(llm.plugins.health())

        async def main():
            with pytest.raises(HardpointError, match="belongs to the event loop in which it was "):
                await collect(llm.generate("x", GREEDY))
            with pytest.raises(HardpointError, match="which is another one; open one engine per"):
                await llm.engines.scheduler_stats()

        thread = threading.Thread(target=asyncio.run, args=(main(),))
        thread.start()
        thread.join()
        runner.run(llm.plugins.health())

    def test_the_same_as_llm(self, folder, run):
        prompts = ["say abc", "emoji", "long"]
        with LLM(config=config(folder)) as llm:
            expected = [output.outputs[0].text for output in llm.generate(prompts, GREEDY)]

        async def main(llm):
            return [(await collect(llm.generate(p, GREEDY)))[-1].outputs[0].text for p in prompts]

        assert run(main) == expected


async def chat_outputs(llm, **options):
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    return [output.outputs[0] async for output in llm.chat(messages, DELTAS, **options)]


async def test_chat(llm):
    parts = await chat_outputs(llm, timeout=60, priority=1)
    assert sum(len(part.token_ids) for part in parts) == 20
    assert "".join(part.content or "" for part in parts) == "".join(p.text for p in parts)
    with pytest.raises(RequestError, match="tools: no parser finds calls"):
        await chat_outputs(llm, tools=[main_tool])
    with pytest.raises(RequestError, match="messages: expected"):
        async for _ in llm.chat("Hi"):
            pass
    async for _ in llm.chat([{"role": "user", "content": "Hi"}], endless()):
        break


def main_tool(city: str):
    """Tell the weather."""


class TestForServers:
    async def test_it_is_what_a_server_needs(self, llm):
        for name in vars(AsyncGenerator):
            assert name.startswith("_") or hasattr(llm, name), name

    async def test_live_requests_report_their_progress(self, llm):
        streams = [llm.generate("x", endless(), name, tags={"t": name}) for name in "ab"]
        for stream in streams:
            await anext(stream)
        first, second = await llm.engines.live_requests()
        assert (first.external_id, second.external_id) == ("a", "b")
        assert first.tags == {"t": "a"}
        assert first.status == "running"
        assert first.num_prompt_tokens == 1
        assert first.num_computed_tokens >= first.num_prompt_tokens
        assert first.num_output_tokens > 0
        assert first.age_seconds >= second.age_seconds >= 0
        (only,) = await llm.engines.live_requests(["b"])
        assert only.external_id == "b"
        assert await llm.engines.live_requests(["c"]) == []
        for stream in streams:
            await stream.aclose()
        await no_requests(llm)
        assert await llm.engines.live_requests() == []

    async def test_tokenise_and_a_rendered_conversation(self, llm):
        text = "say abc"
        assert llm.tokenizer.decode(await llm.model.tokenize(text)) == text
        long = "0123456789" * 1000  # which another thread tokenises
        ids = await llm.model.tokenize(long, add_special_tokens=False)
        assert llm.tokenizer.decode(ids) == long
        with pytest.raises(RequestError, match="expected text that UTF-8 can hold"):
            await llm.model.tokenize("\ud800")
        prompt = await llm.model.apply_chat_template([{"role": "user", "content": "Hi"}])
        assert prompt["prompt_token_ids"] == llm.tokenizer.encode(
            prompt["prompt"], add_special_tokens=False
        )
        assert "Hi" in prompt["prompt"]

    async def test_parallel_tool_calls_is_a_flag(self, llm):
        with pytest.raises(RequestError, match="parallel_tool_calls: expected true or false"):
            async for _ in llm.chat([{"role": "user", "content": "Hi"}], parallel_tool_calls="no"):
                pass
