"""Plugins that a program hands over as objects: LLM(plugins=[...])."""

from __future__ import annotations

import asyncio
import math
import sys
import textwrap

import pytest
from support.processes import run

from hardpoint import LLM, AsyncLLM, RequestError, SamplingParams
from hardpoint.configuration.catalog import Catalog
from hardpoint.errors import PluginLoadError
from hardpoint.plugins import LogitsProcessor, Phase, SchedulingPolicy, hookimpl
from hardpoint.plugins.config import ConfigSources
from hardpoint.testing import scripted_config
from hardpoint.typed import Strict

HERE = __name__
GREEDY = SamplingParams(temperature=0.0, max_tokens=3)


class Only(LogitsProcessor):
    """Allow one token."""

    contract = 1
    phase = Phase.MASK

    def apply(self, logits, rows):
        kept = logits.clone().fill_(-math.inf)
        kept[:, 65] = 0.0
        return kept


class LastFirst(SchedulingPolicy):
    contract = 1

    def key(self, request):
        return -request.arrival_time


class QuotaConfig(Strict):
    tokens: int = 3


class Quota:
    """Components, a table of the configuration, and a hook with state, as one object."""

    contract = 1
    config_table = ("quota", QuotaConfig)

    def __init__(self):
        self.prompts = []

    @hookimpl
    def engine_started(self, config):
        self.limit = config.table(QuotaConfig).tokens

    @hookimpl
    def request_received(self, request):
        if len(request.prompt_token_ids) > self.limit:
            raise ValueError(f"at most {self.limit} tokens")
        self.prompts.append(len(request.prompt_token_ids))

    @hookimpl
    def hardpoint_components(self):
        return {"only": Only, "last_first": LastFirst}


def settings(scripted, **extra):
    return scripted_config(scripted, {"quota": {"tokens": 8}} | extra)


@pytest.mark.parametrize("in_process", [True, False], ids=["in_process", "own_process"])
def test_one_object_gives_components_hooks_and_a_table(scripted, in_process):
    quota = Quota()
    extra = {"engine": {"in_process": in_process}, "scheduler": {"policy": "last_first"}}
    with LLM(config=settings(scripted, **extra), plugins=[quota]) as llm:
        assert llm.generate("say abc", GREEDY)[0].outputs[0].text == "bbb"
        with pytest.raises(RequestError, match="^at most 8 tokens"):
            llm.generate("x" * 9, GREEDY)
        assert quota.prompts == [7]
        origins = {(e.kind, e.name): e.origin for e in llm.plugins.manifest.entries}
        assert origins["logits_processors", "only"] == "plugins= of LLM, item 0"
        assert origins["hooks", "quota"] == "plugins= of LLM, item 0"
        policy = "scheduling_policies", "last_first"
        assert origins[policy] == "scheduler.policy (argument LLM(config=...))"
        llm.plugins.set_policy("fcfs")
        llm.plugins.set_policy("last_first")


def test_the_catalog_lists_them(scripted):
    quota = Quota()
    with LLM(config=settings(scripted), plugins=[quota]) as llm:
        catalog = Catalog(llm.llm_engine.parts.plugins, llm.config, ConfigSources())
        listed = {f"{c.kind}/{c.name}": c for c in catalog.components()}
        assert listed["logits_processors/only"].reason == "plugins= of LLM, item 0"
        assert listed["scheduling_policies/last_first"].reason == (
            "not chosen by scheduler.policy (default)"
        )
        assert catalog.details("hooks/quota").hooks == [
            "engine_started",
            "hardpoint_components",
            "request_received",
        ]
        assert catalog.details("last_first").interface == "SchedulingPolicy"


def test_async_llm_takes_them_too(scripted):
    async def answer():
        quota = Quota()
        async with AsyncLLM(config=settings(scripted), plugins=[quota]) as llm:
            *_, last = [output async for output in llm.generate("say abc", GREEDY)]
            (only,) = [e for e in llm.plugins.manifest.entries if e.name == "only"]
            assert only.origin == "plugins= of AsyncLLM, item 0"
            return last.outputs[0].text, quota.prompts

    assert asyncio.run(answer()) == ("bbb", [7])


def test_a_component_that_no_process_finds_is_refused(scripted):
    class Local(Only):
        contract = 1

    with pytest.raises(PluginLoadError) as error:
        LLM(config=scripted_config(scripted), plugins=[Local])
    assert str(error.value).startswith("plugin 'local' (test_handed_over:test_a_component_")
    assert "exists only inside a function, where neither an import nor another" in str(error.value)
    assert "define it at the top level of a module" in str(error.value)


SCRIPT = """
    import math
    from hardpoint import LLM, SamplingParams
    from hardpoint.plugins import LogitsProcessor, Phase, hookimpl
    from hardpoint.testing import scripted_config

    class Only(LogitsProcessor):
        contract = 1
        phase = Phase.MASK

        def apply(self, logits, rows):
            return logits.clone().fill_(-math.inf).index_fill_(1, logits.new_tensor([65]).long(), 0)

    class Steps:
        contract = 1

        @hookimpl
        def step_planned(self, record):
            "It runs in the engine's process."

        @staticmethod
        @hookimpl
        def hardpoint_components():
            return {{"only": Only}}

    steps = Steps()
    config = scripted_config({folder!r}, {{"engine": {{"in_process": False}}}})
    with LLM(config=config, plugins=[steps]) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=3)
        (only,) = [entry for entry in llm.plugins.manifest.entries if entry.name == "only"]
        print(llm.generate("say abc", params)[0].outputs[0].text, only.value)
"""


def test_a_script_hands_over_what_it_defines_itself(scripted, tmp_path):
    script = textwrap.dedent(SCRIPT).format(folder=str(scripted))
    (tmp_path / "example.py").write_text(script)
    assert run(sys.executable, "example.py", cwd=tmp_path).strip() == "bbb __main__:Only"
