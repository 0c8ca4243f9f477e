"""IO processors in LLM and AsyncLLM: other inputs, other outputs, and who is told what fails."""

from __future__ import annotations

import asyncio
import json
import threading

import numpy as np
import pytest
from support.plugins.io_processors import (
    GO_ON,
    WAITING,
    Harmful,
    InRounds,
    Measurements,
    Nearest,
    Writes,
)
from support.plugins.slow import Slow
from support.waiting import PATIENCE_S, until

from hardpoint import LLM, AsyncLLM, PoolingParams, SamplingParams
from hardpoint.calls.io_processors import ProcessorCall, RoundLimits
from hardpoint.errors import (
    ConfigError,
    EngineClosedError,
    PluginFaultError,
    PluginLoadError,
    PromptTooLongError,
    RequestEndedError,
    RequestError,
)
from hardpoint.plugins import IOProcessor
from hardpoint.testing import IOProcessorSuite, scripted_config

ROWS = {"rows": [[0.9, 0.8], [-0.7, -1.0, -0.9], [1.0]]}


class TestNearest(IOProcessorSuite):
    processor = Nearest
    samples = [ROWS, {"rows": []}, {"rows": [[0.0] * 64], "vectors": True}]
    refused = [{"rows": [[]]}, {"rows": [[2.0]]}, {"rows": [[0.0] * 65]}]


class TestWrites(IOProcessorSuite):
    processor = Writes
    samples = [["a", "b"], ["say abc"]]
    refused = ["a", [1], {"a": "b"}]


def config(scripted, *processors, **tables):
    """Return a configuration with processors, by class."""
    names = [f"{one.__module__}:{one.__qualname__}" for one in processors]
    enabled = [*scripted_config(scripted)["plugins"]["enable"], *names]
    plugins = {"enable": enabled, **tables.pop("plugins", {})}
    return scripted_config(scripted, {"plugins": plugins, **tables})


@pytest.fixture(scope="module")
def llm(scripted):
    """A model with three processors, none of which is quarantined."""
    tables = {"plugins": {"quarantine_after": 0}}
    with LLM(config=config(scripted, Nearest, Writes, Harmful, **tables)) as llm:
        yield llm


class Undeclared(IOProcessor):
    contract = 1

    def pre_process(self, request):
        return []

    def post_process(self, request, outputs):
        return outputs


class Tokenises(Writes):
    contract = 1
    opened = []

    def __init__(self, context):
        super().__init__(context)
        self.opened.append((context, context.tokenizer(), context.tokenizer()))


class TestAProgram:
    def test_rows_of_numbers_become_names(self, llm):
        found = llm.plugins.process(ROWS | {"vectors": True}, "nearest")
        prompts = [[round(50 * n) + 50 for n in row] for row in ROWS["rows"]]
        expected = llm.embed(prompts, PoolingParams(pooler="mean"))
        for (_, vector), output in zip(found, expected, strict=True):
            assert np.array_equal(vector, output.outputs)
        assert llm.plugins.process(Measurements(rows=[[1.0, 1.0]]), "nearest") == [("high", None)]
        assert llm.plugins.process({"rows": [[-1.0, -1.0]]}, io_processor="nearest") == [
            ("low", None)
        ]

    def test_its_answer_as_json(self, llm):
        answer = llm.plugins.process({"rows": [[1.0, 1.0]]}, "nearest", as_json=True)
        assert json.loads(answer) == {"names": ["high"], "vectors": None}

    def test_the_model_may_write(self, llm):
        texts = ["say abc", "emoji", "say abc "]
        expected = llm.generate(texts, SamplingParams(max_tokens=4, temperature=0.0))
        found = llm.plugins.process(texts, "writes")
        assert list(found.values()) == [output.outputs[0].text for output in expected]

    def test_no_prompts_no_requests(self, llm):
        assert llm.plugins.process([], "writes") == {}

    def test_options_are_those_of_each_request(self, llm):
        with pytest.raises(RequestError, match=r"prompts\[0\]: priority: expected a whole number"):
            llm.plugins.process(["a"], "writes", priority="x")
        with pytest.raises(TypeError, match="unexpected keyword argument 'prority'"):
            llm.plugins.process(["a"], "writes", prority=1)
        with pytest.raises(RequestEndedError, match=r"writes': prompts\[0\]: .* \"timeout\"$"):
            llm.plugins.process(["a"], "writes", timeout=1e-9)
        assert llm.llm_engine.has_unfinished_requests() is False


class TestWhatIsWrong:
    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (None, "data: expected a table, got None"),
            ({}, "data.rows: missing"),
            ({"rows": [[0.5], [0.1, 7]]}, r"data.rows\[1\]\[1\]: expected a number <= 1.*got 7"),
            ({"rows": [], "row": 1}, r"data.row: unknown field \(did you mean 'rows'\?\)|data.row"),
        ],
    )
    def test_an_input_is_refused_by_its_path(self, llm, data, message):
        with pytest.raises(RequestError, match=f"^{message}"):
            llm.plugins.process(data, "nearest")
        assert llm.plugins.health().faults == {}

    def test_a_prompt_that_is_refused_is_named(self, llm):
        expected = r"^data: the IO processor 'writes': prompts\[1\]: prompt: the prompt is too long"
        with pytest.raises(PromptTooLongError, match=expected):
            llm.plugins.process(["a", "b" * 2000], "writes")
        assert llm.llm_engine.has_unfinished_requests() is False

    def test_names(self, llm):
        known = "^io_processor: expected one of harmful, nearest, writes, got "
        with pytest.raises(RequestError, match=rf"{known}'nearst' \(did you mean 'nearest'\?\)"):
            llm.plugins.process(ROWS, "nearst")
        with pytest.raises(RequestError, match=f"{known}none$"):
            llm.plugins.process(ROWS)
        with pytest.raises(RequestError, match=f"{known}7$"):
            llm.plugins.process(ROWS, 7)

    def test_none_is_enabled(self, scripted):
        with LLM(config=scripted_config(scripted)) as llm:
            with pytest.raises(RequestError, match="^data: expected none, because no IO"):
                llm.plugins.process(ROWS)
            expected = "^io_processor: expected none, because no .*enabled.*, got 'spans'"
            with pytest.raises(RequestError, match=expected):
                llm.plugins.process(ROWS, "spans")


class TestFaults:
    @pytest.mark.parametrize("method", ["parse_request", "pre_process", "post_process"])
    def test_one_that_raises_is_named(self, llm, method):
        with pytest.raises(PluginFaultError, match=rf"'harmful'.*{method} failed: KeyError: 'mis"):
            llm.plugins.process({method: "fails"}, "harmful")
        assert llm.plugins.process({"rows": []}, "nearest") == []

    @pytest.mark.parametrize(
        ("request_", "message"),
        [
            ({"pre_process": "x"}, "pre_process returned 'x', expected a list of pairs"),
            ({"pre_process": [1]}, r"pre_process returned 1 at \[0\], expected a pair of a prompt"),
            ({"pre_process": [("x", 1)]}, r"pre_process returned .* at \[0\], expected a pair"),
            ({"post_process": "refuses"}, "post_process failed: .*RequestError: data.x"),
            ({"output_to_response": object()}, "output_to_response returned .*which is no JSON"),
            ({"output_to_response": [np.nan]}, "output_to_response returned .*which is no JSON"),
        ],
    )
    def test_one_that_returns_what_cannot_be_used_is_named(self, llm, request_, message):
        with pytest.raises(PluginFaultError, match=rf"'harmful'.*{message}"):
            llm.plugins.process(request_, "harmful", as_json=True)

    def test_a_refusal_is_no_fault(self, scripted):
        with LLM(config=config(scripted, Harmful)) as llm:
            for method in ("parse_request", "pre_process"):
                with pytest.raises(RequestError, match=r"^data\.x: expected another one$"):
                    llm.plugins.process({method: "refuses"})
            assert llm.plugins.health().faults == {}

    def test_one_that_fails_for_several_requests_is_quarantined(self, scripted):
        tables = {"plugins": {"quarantine_after": 2}}
        with LLM(config=config(scripted, Harmful, Writes, **tables)) as llm:
            for _ in range(2):
                with pytest.raises(PluginFaultError):
                    llm.plugins.process({"post_process": "fails"}, "harmful")
            assert llm.plugins.health().faults == {"harmful": 2}
            assert "KeyError" in llm.plugins.health().quarantined["harmful"]
            expected = "^io_processor: 'harmful' is quarantined, for it ended 2 requests; the first"
            with pytest.raises(RequestError, match=expected):
                llm.plugins.process({}, "harmful")
            assert llm.plugins.process([], "writes") == {}

    def test_one_that_cannot_be_built_stops_the_start(self, scripted):
        with pytest.raises(PluginLoadError, match="'undeclared'.*expected a class `Request`"):
            LLM(config=scripted_config(scripted), plugins=[Undeclared])
        tables = {"plugin": {"nearest": {"prototypes": {}}}}
        with pytest.raises(ConfigError, match="^plugin.nearest.prototypes: expected at least one"):
            LLM(config=config(scripted, Nearest, **tables))

    def test_a_closed_engine_processes_nothing(self, scripted):
        with LLM(config=config(scripted, Writes)) as llm:
            llm.plugins.process([])
        with pytest.raises(EngineClosedError, match="the engine is closed"):
            llm.plugins.process([])


ROUNDS = {"rounds": [[[1], [2], []], [], [[3]]]}


@pytest.mark.parametrize("in_process", [True, False])
class TestSeveralRounds:
    @pytest.fixture
    def opened(self, scripted, in_process):
        InRounds.over.clear()
        plugins = {"quarantine_after": 0, "io_rounds": 4, "io_prompts": 9}
        sinks = {"sinks": ["prometheus"]}
        tables = {"plugins": plugins, "engine": {"in_process": in_process}, "stats": sinks}
        with LLM(config=config(scripted, InRounds, **tables)) as llm:
            yield llm

    def test_each_round_has_the_outputs_of_its_prompts(self, opened):
        assert opened.plugins.process(ROUNDS) == [1, 3, 0, 1]
        assert opened.plugins.process({"rounds": []}, as_json=True) == b"[1]"
        assert InRounds.over[""] == ["returned", "returned"]
        lines = opened.metrics().splitlines()
        (prompts,) = [line for line in lines if line.startswith("hardpoint:prompt_tokens_total{")]
        assert float(prompts.rpartition(" ")[2]) == 2 + 3 + 1 + 2

    def test_an_error_of_a_round_ends_the_call(self, opened):
        expected = (
            r"^data: the IO processor 'in_rounds': round 3: prompts\[1\]: prompt_token_ids\[0"
        )
        with pytest.raises(RequestError, match=expected):
            opened.plugins.process({"rounds": [[[1]], [[1], [9999], [1]], [[1]]]})
        expected = r"'in_rounds'.*its post_process failed: KeyError: 'missing'"
        with pytest.raises(PluginFaultError, match=expected):
            opened.plugins.process({"rounds": [[[1]], "fails"]})
        expected = r"'in_rounds'.*its post_process yielded 'text', expected a list of pairs"
        with pytest.raises(PluginFaultError, match=expected):
            opened.plugins.process({"rounds": ["text"]})
        assert InRounds.over[""] == ["ended", "ended", "ended"]
        assert opened.llm_engine.has_unfinished_requests() is False
        assert opened.plugins.health().faults == {"in_rounds": 2}

    def test_rounds_and_prompts_are_limited(self, opened):
        assert opened.plugins.process({"rounds": [[[1]]] * 3}) == [1, 1, 1, 1]
        expected = r"yielded prompts after 4 rounds, expected its output \(plugins.io_rounds\)$"
        with pytest.raises(PluginFaultError, match=expected):
            opened.plugins.process({"rounds": [[[1]]] * 4})
        expected = (
            r"^data: expected at most 9 prompts in all rounds \(plugins.io_prompts\), got 11$"
        )
        with pytest.raises(RequestError, match=expected):
            opened.plugins.process({"rounds": [[[1]] * 5] * 2})
        opened.engines.set_config({"plugins.io_prompts": 11})
        assert opened.plugins.process({"rounds": [[[1]] * 5] * 2}) == [1, 5, 5]
        assert InRounds.over[""] == ["returned", "ended", "ended", "returned"]

    def test_a_generator_that_does_not_end_is_a_fault(self, opened, caplog):
        with pytest.raises(RequestError, match=r"round 2: prompts\[0\]: prompt_token_ids"):
            opened.plugins.process({"rounds": [[[9999]]], "goes_on": True})
        expected = "its post_process failed: RuntimeError: generator ignored GeneratorExit, after"
        assert expected in caplog.text
        assert opened.plugins.health().faults == {"in_rounds": 1}


def test_the_timeout_of_a_call_is_that_of_all_rounds():
    times = iter([10.0, 13.0, 19.0])
    call = ProcessorCall("a", RoundLimits(rounds=9, prompts=9, clock=lambda: next(times)))
    call.begin_round([])
    assert call.options({"timeout": 5, "priority": 1}) == {"timeout": 5, "priority": 1}
    call.begin_round([])
    assert call.options({"timeout": 5, "priority": 1}) == {"timeout": 2.0, "priority": 1}
    assert 0 < call.options({"timeout": 5})["timeout"] < 1e-300
    assert call.options({"priority": 1}) == {"priority": 1}


def test_calls_of_one_processor_wait_for_one_another_and_for_no_other(llm):
    GO_ON.clear()
    WAITING.clear()
    found = []

    def call(data):
        found.append(llm.plugins.process(data, "harmful"))

    threads = [
        threading.Thread(target=call, args=(data,)) for data in ({"parse_request": "waits"}, {})
    ]
    threads[0].start()
    try:
        assert WAITING.wait(PATIENCE_S)
        threads[1].start()
        assert llm.plugins.process({"rows": [[1.0, 1.0]]}, "nearest") == [("high", None)]
        assert found == []
    finally:
        GO_ON.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert len(found) == 2


@pytest.fixture(scope="module")
def shared(scripted):
    """A runner of one loop, and a model that belongs to it."""
    tables = {"engine": {"in_process": False}, "plugins": {"quarantine_after": 0}}
    with asyncio.Runner() as runner:
        llm = AsyncLLM(config=config(scripted, Nearest, Harmful, InRounds, Slow, **tables))
        yield runner, llm
        runner.run(llm.aclose())


@pytest.fixture
def run(shared):
    runner, llm = shared
    return lambda main: runner.run(asyncio.wait_for(main(llm), 2 * PATIENCE_S))


@pytest.fixture
def async_llm(run, shared):
    """The model, for tests that are coroutine functions; `run` runs them."""
    return shared[1]


class TestAnEventLoop:
    async def test_calls_run_beside_each_other(self, async_llm):
        calls = [
            async_llm.plugins.process({"rows": [[sign, sign]]}, "nearest")
            for sign in (1.0, -1.0) * 8
        ]
        found = await asyncio.gather(*calls)
        assert [name for ((name, _),) in found] == ["high", "low"] * 8
        answer = await async_llm.plugins.process({"rows": []}, "nearest", as_json=True)
        assert json.loads(answer) == {"names": [], "vectors": None}

    async def test_schemas_of_inputs(self, async_llm):
        schemas = async_llm.plugins.io_processor_schemas()
        assert schemas.keys() == {"nearest", "harmful", "in_rounds"}
        assert schemas["harmful"] == {}
        assert "rows" in schemas["nearest"]["$defs"]["Measurements"]["properties"]

    async def test_errors_are_those_of_a_program(self, async_llm):
        with pytest.raises(RequestError, match=r"^data.rows\[0\]\[0\]: expected .*got 3"):
            await async_llm.plugins.process({"rows": [[3]]}, "nearest")
        bad = [([1], PoolingParams()), ([9999], PoolingParams()), ([1], PoolingParams())]
        expected = r"^data: the IO processor 'harmful': prompts\[1\]: prompt_token_ids\[0\]"
        with pytest.raises(RequestError, match=expected):
            await async_llm.plugins.process({"pre_process": bad}, "harmful")
        with pytest.raises(PluginFaultError, match="'harmful'.*KeyError: 'missing'"):
            await async_llm.plugins.process({"post_process": "fails"}, "harmful")
        assert (await async_llm.plugins.health()).faults == {"harmful": 1}
        with pytest.raises(RequestEndedError) as ended:
            await async_llm.plugins.process({}, "harmful", timeout=1e-9)
        assert ended.value.finish_reason == "timeout"

    async def test_cancelling_ends_its_requests(self, async_llm):
        slow = {"slow": {"seconds": 0.1}}
        endless = SamplingParams(max_tokens=400, ignore_eos=True, plugin_args=slow)
        call = asyncio.create_task(
            async_llm.plugins.process({"params": endless, "prompts": 3}, "harmful")
        )
        while len(await async_llm.engines.live_requests()) < 3:
            await asyncio.sleep(0.005)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        while await async_llm.engines.live_requests():
            await asyncio.sleep(0.005)

    async def test_rounds(self, async_llm):
        calls = [async_llm.plugins.process(ROUNDS, "in_rounds") for _ in range(3)]
        assert await asyncio.gather(*calls) == [[1, 3, 0, 1]] * 3
        expected = r"^data: the IO processor 'in_rounds': round 2: prompts\[1\]: prompt_token_ids"
        with pytest.raises(RequestError, match=expected):
            await async_llm.plugins.process({"rounds": [[[1], [9999]]]}, "in_rounds")

    async def test_cancelling_ends_the_present_round(self, async_llm):
        endless = SamplingParams(
            max_tokens=400, ignore_eos=True, plugin_args={"slow": {"seconds": 0.1}}
        )
        data = {"rounds": [[[1], [2], [3]]], "params": endless, "name": "cancelled"}
        call = asyncio.create_task(async_llm.plugins.process(data, "in_rounds"))
        while len(await async_llm.engines.live_requests()) < 3:
            await asyncio.sleep(0.005)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: InRounds.over["cancelled"], "the generator to end")
        assert InRounds.over["cancelled"] == ["ended"]
        while await async_llm.engines.live_requests():
            await asyncio.sleep(0.005)

    def test_one_that_waits_delays_no_other(self, run):
        async def main(llm):
            call = asyncio.create_task(llm.plugins.process({"parse_request": "waits"}, "harmful"))
            try:
                assert await asyncio.to_thread(WAITING.wait, PATIENCE_S)
                assert await llm.plugins.process({"rows": []}, "nearest") == []
                assert not call.done()
            finally:
                GO_ON.set()
            assert await call == {"parse_request": "waits"}

        GO_ON.clear()
        WAITING.clear()
        run(main)

    async def test_a_closed_engine_processes_nothing(self, async_llm):
        await async_llm.aclose()
        with pytest.raises(EngineClosedError, match="the engine is closed"):
            await async_llm.plugins.process({}, "harmful")


def test_tokenizers_of_processors_are_their_own_and_are_closed(scripted):
    Tokenises.opened.clear()
    with LLM(config=scripted_config(scripted), plugins=[Tokenises]) as llm:
        ((context, one, other),) = Tokenises.opened
        assert context.max_model_len == llm.config.max_model_len
        assert context.model_config.vocab_size == 257
        assert one.encode("abc") == other.encode("abc") == llm.tokenizer.encode("abc")
        assert len({id(one), id(other), id(llm.tokenizer)}) == 3
