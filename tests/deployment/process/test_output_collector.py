"""A request's collector: one output at most, and nothing lost."""

from __future__ import annotations

import asyncio
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.searching import examples
from support.waiting import PATIENCE_S

from hardpoint import CompletionOutput, Logprob, RequestOutput, RequestOutputKind
from hardpoint.plugins.requests import ToolCall, WeightRun
from hardpoint.plugins.requests.stats import RequestMetrics
from hardpoint.process.output_collector import RequestOutputCollector

DELTA, CUMULATIVE, FINAL_ONLY = (
    RequestOutputKind.DELTA,
    RequestOutputKind.CUMULATIVE,
    RequestOutputKind.FINAL_ONLY,
)


def completion(index=0, text="a", tokens=(1,), **fields) -> CompletionOutput:
    return CompletionOutput(index=index, text=text, token_ids=list(tokens), **fields)


def output(*completions, finished=False, **fields) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        prompt="p",
        prompt_token_ids=[1],
        outputs=list(completions),
        finished=finished,
        **fields,
    )


def logprobs(token: int) -> list:
    return [{token: Logprob(-float(token), 1, "x")}]


def call(index, arguments, name=None):
    return ToolCall(index=index, id=name and f"call_{name}", name=name, arguments=arguments)


class TestDeltas:
    def test_their_parts_are_joined(self):
        collector = RequestOutputCollector(DELTA)
        first = completion(reasoning="So", tool_calls=None)
        second = completion(reasoning=".", content="Yes", tool_calls=[call(0, "{", "f")])
        third = completion(content="!", tool_calls=[call(0, "}"), call(1, "", "g")], warning="w")
        for part in (first, second, third):
            collector.put(output(part))
        (held,) = collector.get_nowait().outputs
        assert (held.reasoning, held.content, held.warning) == ("So.", "Yes!", "w")
        assert [(c.index, c.id, c.name, c.arguments) for c in held.tool_calls] == [
            (0, "call_f", "f", "{}"),
            (1, "call_g", "g", ""),
        ]

    def test_the_first_is_held_as_it_is(self):
        collector, first = RequestOutputCollector(DELTA), output(completion())
        collector.put(first)
        assert collector.get_nowait() is first
        assert collector.get_nowait() is None

    def test_later_ones_are_laid_behind(self):
        collector = RequestOutputCollector(DELTA)
        first = completion(
            text="ab", tokens=(1, 2), cumulative_logprob=-3.0, logprobs=logprobs(1) + logprobs(2)
        )
        two = completion(
            text="c",
            tokens=(3,),
            cumulative_logprob=-6.0,
            logprobs=logprobs(3),
            finish_reason="stop",
            stop_reason="c",
            metrics=RequestMetrics(num_prompt_tokens=1),
        )
        collector.put(output(first))
        collector.put(output(two, finished=True))
        held = collector.get_nowait()
        assert held.finished
        (merged,) = held.outputs
        assert (merged.text, merged.token_ids) == ("abc", [1, 2, 3])
        assert merged.cumulative_logprob == -6.0
        assert [list(entry) for entry in merged.logprobs] == [[1], [2], [3]]
        assert (merged.finish_reason, merged.stop_reason) == ("stop", "c")
        assert held.metrics is merged.metrics is two.metrics

    def test_the_newest_versions_and_figures_stand(self):
        collector = RequestOutputCollector(DELTA)
        runs = [WeightRun(0, "0", "0"), WeightRun(1, "1", "1")]
        collector.put(output(completion(weight_runs=runs[:1], part_figures={"a": {"x": 1}})))
        collector.put(output(completion(weight_runs=runs, part_figures={"a": {"x": 2}})))
        (merged,) = collector.get_nowait().outputs
        assert merged.weight_runs == runs
        assert merged.part_figures == {"a": {"x": 2}}

    def test_each_completion_by_itself(self):
        collector = RequestOutputCollector(DELTA)
        for index, text in ((1, "x"), (0, "a"), (1, "y"), (0, "b")):
            collector.put(output(completion(index, text)))
        held = collector.get_nowait()
        assert [(c.index, c.text) for c in held.outputs] == [(0, "ab"), (1, "xy")]

    def test_log_probabilities_of_the_prompt_are_joined_too(self):
        collector = RequestOutputCollector(DELTA)
        collector.put(output(completion(), prompt_logprobs=[None]))
        collector.put(output(completion(), prompt_logprobs=logprobs(4)))
        assert collector.get_nowait().prompt_logprobs == [None, *logprobs(4)]

    def test_an_error_of_the_request_is_kept(self):
        collector = RequestOutputCollector(DELTA)
        collector.put(output(completion()))
        collector.put(output(completion(text="", tokens=(), finish_reason="error", error="why")))
        (merged,) = collector.get_nowait().outputs
        assert (merged.text, merged.finish_reason, merged.error) == ("a", "error", "why")


class TestOtherKinds:
    @pytest.mark.parametrize("kind", [CUMULATIVE, FINAL_ONLY])
    def test_the_newest_stands(self, kind):
        collector = RequestOutputCollector(kind)
        collector.put(output(completion(text="a"), num_cached_tokens=0))
        collector.put(output(completion(text="ab"), finished=True, num_cached_tokens=16))
        held = collector.get_nowait()
        assert [c.text for c in held.outputs] == ["ab"]
        assert held.finished
        assert held.num_cached_tokens == 16

    def test_no_completion_is_lost_for_another_ones_sake(self):
        collector = RequestOutputCollector(CUMULATIVE)
        collector.put(output(completion(0, "done", finish_reason="stop")))
        collector.put(output(completion(1, "x")))
        collector.put(output(completion(1, "xy")))
        held = collector.get_nowait()
        assert [(c.index, c.text) for c in held.outputs] == [(0, "done"), (1, "xy")]
        assert held.outputs[0].finish_reason == "stop"


class TestErrors:
    def test_an_error_takes_the_place_of_an_output_and_stays(self):
        collector = RequestOutputCollector(DELTA)
        collector.put(output(completion()))
        collector.put(ValueError("first"))
        collector.put(output(completion(), finished=True))
        collector.put(KeyError("second"))
        with pytest.raises(ValueError, match="^first$"):
            collector.get_nowait()
        assert collector.get_nowait() is None

    async def test_whoever_waits_gets_it(self):
        collector = RequestOutputCollector(DELTA)
        waiting = asyncio.create_task(collector.get())
        await asyncio.sleep(0)
        collector.put(ValueError("broken"))
        with pytest.raises(ValueError, match="broken"):
            await asyncio.wait_for(waiting, PATIENCE_S)


class TestWaiting:
    def test_get_waits_without_polling(self):
        async def main():
            collector, wakeups = RequestOutputCollector(DELTA), 0
            loop = asyncio.get_running_loop()
            waiting = asyncio.create_task(collector.get())
            run_once = loop._run_once

            def counted():
                nonlocal wakeups
                wakeups += 1
                run_once()

            loop._run_once = counted
            await asyncio.sleep(0.2)
            assert wakeups < 5
            collector.put(output(completion(text="now")))
            assert (await waiting).outputs[0].text == "now"

        asyncio.run(main())

    async def test_get_clears_the_slot(self):
        collector = RequestOutputCollector(CUMULATIVE)
        collector.put(output(completion()))
        await collector.get()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(collector.get(), 0.01)
        collector.put(output(completion(text="later")))
        assert (await collector.get()).outputs[0].text == "later"


Step = st.one_of(
    st.none(), st.tuples(st.integers(0, 2), st.text(max_size=3), st.lists(st.integers(0, 9)))
)


@examples(200)
@given(steps=st.lists(Step, max_size=30), kind=st.sampled_from([DELTA, CUMULATIVE]))
def test_a_reader_at_any_pace_sees_the_same(steps, kind):
    """Without a reader, outputs grow each completion. The oracle is a reader who misses nothing."""
    collector = RequestOutputCollector(kind)
    whole: dict[int, tuple[str, list[int]]] = {}
    seen: dict[int, tuple[str, list[int]]] = {}

    def read():
        held = collector.get_nowait()
        for each in held.outputs if held is not None else ():
            text, tokens = seen.get(each.index, ("", [])) if kind is DELTA else ("", [])
            seen[each.index] = (text + each.text, tokens + each.token_ids)

    for step in steps:
        if step is None:
            read()
            assert collector.get_nowait() is None
            assert seen == whole
            continue
        index, text, tokens = step
        before = whole.get(index, ("", []))
        whole[index] = (before[0] + text, before[1] + tokens)
        shown = (text, tokens) if kind is DELTA else whole[index]
        collector.put(output(completion(index, *shown)))
    read()
    assert seen == whole


def test_what_nobody_reads_is_bounded():
    """20 000 deltas that nobody takes are one output, not 20 000."""
    collector = RequestOutputCollector(DELTA)
    tracemalloc.start()
    for token in range(20_000):
        collector.put(output(completion(text="abcd", tokens=(token % 50,))))
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held_bytes < 500_000  # 80 000 characters and 20 000 references
    assert len(collector.get_nowait().outputs[0].token_ids) == 20_000
