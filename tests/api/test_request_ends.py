"""Output formats change outputs in LLM and AsyncLLM, and notice once how each request ends."""

from __future__ import annotations

import asyncio
import collections

import pytest
from support.plugins.ending import Fails, Upper
from support.plugins.slow import Slow
from support.process.slow_requests import UNFINISHED
from support.waiting import PATIENCE_S

from hardpoint import LLM, AsyncLLM, SamplingParams
from hardpoint.errors import EngineClosedError, RequestError
from hardpoint.testing import scripted_config

SHORT = SamplingParams(max_tokens=3, temperature=0.0)
FAILING = SamplingParams(max_tokens=3, plugin_args={"fails": {"fails": True}})
OUTCOMES = {"finished": SHORT, "aborted": UNFINISHED, "failed": FAILING}


def config(scripted, **tables):
    """Return a configuration with the part and the processors."""
    enabled = [f"{plugin.__module__}:{plugin.__qualname__}" for plugin in (Upper, Fails, Slow)]
    plugins = {"enable": enabled, "quarantine_after": 0}
    return scripted_config(scripted, {"plugins": plugins, **tables})


@pytest.fixture(params=[True, False], ids=["in_process", "engine process"])
def llm(scripted, request):
    with Upper.noting(), LLM(config=config(scripted, engine={"in_process": request.param})) as llm:
        yield llm


def ends():
    """Return how often requests ended in which way; each format has one end, then it is closed."""
    assert {tuple(events[1:]) for events in Upper.events} <= {("closed",)}
    return dict(collections.Counter(events[0] for events in Upper.events))


def test_outputs_are_changed_and_each_request_has_one_end(llm):
    assert llm.generate("say abc", SHORT)[0].outputs[0].text == " AB"
    for number in range(60):
        outcome = list(OUTCOMES)[number % 3]
        stream = llm.stream("say abc", OUTCOMES[outcome])
        if outcome == "aborted":
            if number % 2:
                next(stream)
            stream.close()
        else:
            texts = [output.outputs[0].text for output in stream]
            assert "".join(texts) == (" AB" if outcome == "finished" else "")
    assert ends() == {"finished": 21, "aborted": 20, "failed": 20}


def test_a_request_with_several_completions_has_one_end(llm):
    llm.generate("say abc", SamplingParams(n=3, max_tokens=2))
    assert ends() == {"finished": 1}
    with pytest.raises(RequestError, match="^max_tokens"):
        llm.generate("say abc", SamplingParams(n=3, max_tokens=-1))
    llm.generate("say abc", SHORT, timeout=1e-9)
    assert ends() == {"finished": 1, "aborted": 1}


def test_a_rejected_request_has_one_end(llm):
    with pytest.raises(RequestError, match="^tags: expected others"):
        llm.generate("say abc", SHORT, tags={"fails in": "prepare"})
    assert ends() == {"failed": 1}


def test_closing_ends_the_live_requests(llm):
    streams = [llm.stream("say abc", UNFINISHED) for _ in range(2)]
    next(streams[0])
    llm.close()
    assert ends() == {"aborted": 2}


@pytest.mark.parametrize("method", ["open", "end", "close"])
def test_a_fault_of_a_format_names_its_part(llm, method):
    (output,) = llm.generate("say abc", SHORT, tags={"fails in": method})
    (completion,) = output.outputs
    assert completion.finish_reason == "error"
    assert "plugin 'upper'" in completion.error
    assert completion.error.endswith(f"its {method}() failed: KeyError: 'missing'")
    assert llm.generate("say abc", SHORT)[0].outputs[0].text == " AB"
    assert len(ends()) == (1 if method != "open" else 2)
    assert llm.plugins.health().faults == {"upper": 1}


def test_a_fault_after_an_abort_is_logged(llm, caplog):
    stream = llm.stream("say abc", UNFINISHED, tags={"fails in": "end"})
    next(stream)
    stream.close()
    assert "its end() failed: KeyError: 'missing', after its request has ended" in caplog.text
    assert ends() == {"aborted": 1}


def test_each_request_of_an_event_loop_has_one_end(scripted):
    async def one(llm, number):
        outcome = list(OUTCOMES)[number % 3]
        outputs = llm.generate("say abc", OUTCOMES[outcome])
        if outcome != "aborted":
            texts = [output.outputs[0].text async for output in outputs]
            return texts[-1]
        if number % 2:
            await anext(outputs)
            await outputs.aclose()
            return ""
        task = asyncio.ensure_future(anext(outputs))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await outputs.aclose()
        return ""

    async def main():
        async with AsyncLLM(config=config(scripted)) as llm:
            texts = await asyncio.gather(*(one(llm, number) for number in range(60)))
            assert texts == [" AB", "", ""] * 20
            assert ends() == dict.fromkeys(OUTCOMES, 20)
            live = llm.generate("say abc", UNFINISHED)
            await anext(live)
        with pytest.raises(EngineClosedError):
            await anext(live)

    with Upper.noting():
        with asyncio.Runner() as runner:
            runner.run(asyncio.wait_for(main(), 2 * PATIENCE_S))
        assert ends() == {"finished": 20, "aborted": 21, "failed": 20}
