"""After a death in a step: who is named, who may send again, and who is quarantined."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import msgspec
import pytest
from support.process.harness import hangs, process_config
from support.process.slow_requests import UNFINISHED
from support.waiting import until

from hardpoint import LLM, AsyncLLM, RequestError, SamplingParams, plugins
from hardpoint.errors import EngineDeadError
from hardpoint.plugins import LogitsProcessor, Phase

GREEDY = {"temperature": 0.0, "ignore_eos": True}
HERE = __name__


class Exits(LogitsProcessor):
    """Ends the process in the step after some tokens."""

    contract = 1
    phase = Phase.BIAS

    class Arguments(plugins.Arguments):
        after: int

    def apply(self, logits, rows):
        for request, arguments in zip(rows.requests, rows.arguments(), strict=True):
            if len(request.output_token_ids) >= arguments.after:
                os._exit(41)
        return logits


async def error_of(llm, request_id, **fields):
    params = SamplingParams(**GREEDY, max_tokens=fields.pop("max_tokens", 400), **fields)
    with pytest.raises(EngineDeadError) as error:
        async for _ in llm.generate("x", params, request_id):
            pass
    return str(error.value)


async def test_the_plugin_and_the_requests_of_the_step_are_named_and_it_is_quarantined(scripted):
    config = process_config(
        scripted,
        {
            "plugins": {"enable": [f"{HERE}:Exits"]},
            "scheduler": {"max_num_seqs": 2},
            "engine": {"resume": "off"},
        },
    )

    async def die(llm):
        """All requests are there before the first step."""
        await llm.engines.pause("keep")
        bad = error_of(llm, "bad", plugin_args={"exits": {"after": 20}})
        errors = asyncio.gather(bad, error_of(llm, "other"), error_of(llm, "waiting"))
        while len(await llm.engines.live_requests()) < 3:
            await asyncio.sleep(0.01)
        with contextlib.suppress(EngineDeadError):  # it may die before it has answered
            await llm.engines.resume()
        return await errors

    async with AsyncLLM(config=config, restart="on_failure") as llm:
        for times in (1, 2):
            bad, other, waiting = await die(llm)
            common = (
                f"exited with code 41, in apply() of plugin 'exits' ({HERE}:Exits), asked for "
                "by plugins.enable[1] (argument AsyncLLM(config=...)); requests of that step "
                "that used third-party plugins: "
                "'bad' (exits); the request "
            )
            assert bad.endswith(f"{common}was in the step in which it died")
            assert other.endswith(f"{common}was in the step in which it died")
            assert waiting.endswith(f"{common}may be sent again")
            health = await llm.plugins.health()
            assert health.restarts == times
            assert health.ok == (times == 1)
        assert (
            "the engine died 2 times within 60 s in apply() of plugin"
            in health.quarantined["exits"]
        )
        with pytest.raises(RequestError, match=r"plugin_args.exits: the plugin is quaran.*2 t"):
            await error_of(llm, "bad", plugin_args={"exits": {"after": 20}})
        params = SamplingParams(**GREEDY, max_tokens=3)
        assert [output async for output in llm.generate("x", params)][-1].finished


def test_a_request_whose_plugin_is_quarantined_meanwhile_is_refused_by_that_name(scripted):
    engine = {"restart": "on_failure", "max_resumes": 9}
    enable = ["support.plugins.slow:Slow", f"{HERE}:Exits"]
    config = process_config(scripted, {"plugins": {"enable": enable}, "engine": engine})
    bad = SamplingParams(**GREEDY, max_tokens=400, plugin_args={"exits": {"after": 0}})
    # It runs when the bad one is sent, however long the program takes to send that.
    slowly = {**UNFINISHED.plugin_args, "exits": {"after": 1000}}
    other = msgspec.structs.replace(UNFINISHED, plugin_args=slowly)
    with LLM(config=config) as llm:
        outputs = llm.generate(["x", "x"], [other, bad])
        errors = [output.outputs[0].error for output in outputs]
        assert errors[1].endswith("was in the step of 2 engines when they died; it runs no more")
        assert errors[0].startswith(
            "plugin_args.exits: the plugin is quarantined: the engine died 2 times within 60 s in "
            f"apply() of plugin 'exits' ({HERE}:Exits)"
        )


@pytest.mark.nightly
async def test_a_kill_from_outside_quarantines_no_plugin(scripted, tmp_path):
    config = process_config(
        scripted,
        {"plugins": {"enable": ["support.plugins.slow:Slow"]}, "engine": {"resume": "off"}},
    )

    async def die(llm, begun):
        stream = llm.generate("x", hangs(begun))
        next_ = asyncio.ensure_future(anext(stream))
        await until(begun.exists, "the step")
        os.kill(llm.engines.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError) as error:
            await next_
        return str(error.value)

    async with AsyncLLM(config=config, restart="on_failure") as llm:
        for times in range(2):
            message = await die(llm, tmp_path / str(times))
            assert "(SIGKILL), which others send, while apply() of plugin 'slow'" in message
        assert [output async for output in llm.generate("x")][-1].finished
        assert (await llm.plugins.health()).quarantined == {}
