"""Components of the first contract run unchanged, each with one warning, and are shown as such."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from types import SimpleNamespace

import pytest
import torch
from support.plugins import of_contract_1
from support.plugins.fake import component

from hardpoint import LLM, SamplingParams
from hardpoint.cli import main
from hardpoint.errors import ConfigError, RequestError
from hardpoint.host.registry.adapters.contract_1 import adapt_earlier
from hardpoint.host.registry.kinds import KINDS
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins import (
    Command,
    EngineConfig,
    LogitsContext,
    Model,
    SamplerContext,
    SchedulerContext,
)
from hardpoint.plugins.component import Component
from hardpoint.testing import scripted_config, write_scripted_model

HERE = of_contract_1.__name__
SMALL = {"kv_cache": {"num_blocks": 16, "block_size": 4}, "max_model_len": 48}
CASES = {
    "eviction_policies": ("Deepest", "kv_cache.eviction"),
    "executors": ("Plain", "executor.use"),
    "reasoning_parsers": ("Thoughts", "plugins.enable[1]"),
    "schedulers": ("OneByOne", "scheduler.use"),
}
"""By kind: a class, and the path that names it."""


def config_of(model, kind):
    name, path = CASES[kind]
    table, _, field = path.partition(".")
    value = f"{HERE}:{name}"
    config = {**SMALL, "kv_cache": dict(SMALL["kv_cache"])}
    if kind == "reasoning_parsers":
        enable = {"plugins": {"enable": [value]}, "reasoning": {"parser": "thoughts"}}
        return scripted_config(model, config | enable)
    config[table] = {**config.get(table, {}), field: value}
    return scripted_config(model, config)


def answers(llm):
    prompts = [[97 + n % 3] * (9 + n) for n in range(8)]
    params = [SamplingParams(seed=n, max_tokens=6, ignore_eos=True) for n in range(8)]
    both = [llm.generate(prompts, params) for _ in range(2)]
    return [output.outputs[0].token_ids for outputs in both for output in outputs]


@pytest.fixture(scope="module")
def plain(scripted):
    with LLM(config=scripted_config(scripted, SMALL)) as llm:
        return answers(llm)


@pytest.mark.parametrize("kind", CASES)
def test_it_runs_with_one_warning(scripted, plain, caplog, kind):
    caplog.set_level(logging.WARNING, "hardpoint")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with LLM(config=config_of(scripted, kind)) as llm:
            assert answers(llm) == plain
            llm.reset_prefix_cache() if kind == "eviction_policies" else None
            assert not llm.plugins.health().fallbacks
    name, path = CASES[kind]
    (warning,) = [record.getMessage() for record in caplog.records]
    assert f"{HERE}:{name}), asked for by {path}" in warning
    assert warning.endswith(
        f": it states contract 1 of {kind}, and runs as before until hardpoint 0.3; the current "
        f"one is 2: see docs/contract-history.md"
    )


def test_every_kind_that_changed_has_a_case():
    assert set(CASES) | {"tool_parsers"} == {k.name for k in KINDS.values() if k.contract == 2}


def test_an_eviction_policy_gets_blocks_and_hears_of_dropped_ones(scripted):
    of_contract_1.SEEN.clear()
    with LLM(config=config_of(scripted, "eviction_policies")) as llm:
        llm.generate([[97] * 9], SamplingParams(max_tokens=1))
        llm.reset_prefix_cache()
    assert of_contract_1.SEEN == [("released", [1, 0]), ("taken", 2)]


def test_the_error_of_a_start_is_not_hidden_by_close(scripted):
    config = scripted_config(scripted, {"executor": {"use": f"{HERE}:Unready"}})
    with pytest.raises(ConfigError, match=r"^no machine is free$"):
        LLM(config=config)


def test_a_scheduler_gets_transfers_and_gates_by_their_earlier_names():
    adapted = adapt_earlier(of_contract_1.OneByOne, KINDS["schedulers"])
    moves = SimpleNamespace(
        get_num_new_matched_tokens=lambda request, computed: (4, True),
        update_state_after_alloc=None,
        request_finished=None,
    )
    held = SimpleNamespace(holds=lambda request: request == "a")
    cache = SimpleNamespace(groups=[0, 1], free=lambda request: f"{request} is free")
    limits = SimpleNamespace(max_waiting_tokens=None)
    fields = {"kv_cache": cache, "limits": limits, "policy": None, "clock": None}
    context = SchedulerContext(name="x", options=None, transfers=moves, **fields)
    earlier = adapted(context).context
    assert earlier.connector.get_num_new_matched_tokens("a", 0) == (4, True)
    assert earlier.connector.build_connector_meta(None) is None
    assert earlier.kv_cache.num_common_prefix_blocks(["a"]) == [0, 0]
    assert earlier.kv_cache.free("a") == "a is free"
    assert earlier.grammars is None
    assert adapted(earlier).context is earlier
    assert not hasattr(context, "connector")
    assert not hasattr(context, "grammars")
    gated = adapted(dataclasses.replace(context, gates=held)).context
    assert [gated.grammars.uses(name) for name in "ab"] == [True, False]
    assert dataclasses.replace(gated, grammars=None).gates is held


def test_a_scheduler_that_refuses_grammars_refuses_requests_that_have_one(scripted):
    with LLM(config=config_of(scripted, "schedulers")) as llm:
        with pytest.raises(RequestError, match=r"scheduler 'one_by_one' refuses grammars"):
            llm.generate("x", SamplingParams(structured={"regex": "[0-9]{3}"}))
        (output,) = llm.generate("x", SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3


def test_a_reasoning_parser_splits_whole_outputs(scripted_thoughts):
    with LLM(config=config_of(scripted_thoughts, "reasoning_parsers")) as llm:
        messages = [[{"role": "user", "content": "think"}]]
        greedy = SamplingParams(temperature=0.0, max_tokens=40)
        (answer,) = llm.chat(messages, greedy)[0].outputs
        assert (answer.reasoning, answer.content) == ("by and by", "Yes")


@pytest.fixture
def scripted_thoughts(tmp_path):
    return write_scripted_model(tmp_path, {"user: think\nassistant: ": "by and by=>Yes"})


def test_built_ins_state_the_current_contract():
    found = resolve_plugins(EngineConfig())
    classes = [found.target(entry) for entry in found.manifest.entries]
    kinds = [KINDS[entry.kind] for entry in found.manifest.entries]
    stated = {
        f"{cls.__module__}:{cls.__name__}": cls.contract
        for cls, kind in zip(classes, kinds, strict=True)
        if isinstance(cls, type) and issubclass(cls, Component) and cls.contract != kind.contract
    }
    assert stated == {}
    assert not found.warnings


def test_the_list_of_plugins_names_the_contract(capsys, folder):
    setting = f'kv_cache.eviction="{HERE}:Deepest"'
    assert main(["plugins", "list", "--set", setting]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "deepest" in line]
    assert line.endswith(", through adapter contract 1")


def test_contexts_that_were_made_by_hand_are_made_as_before():
    device = torch.device("cpu")
    logits = LogitsContext(name="x", options=None, device=device, vocab_size=3, max_num_seqs=1)
    sampler = SamplerContext(name="x", options=None, device=device, vocab_size=3)
    for context in (logits, sampler):
        assert context.ops.argmax(torch.tensor([[0.0, 2.0, 1.0]])).tolist() == [1]


@pytest.mark.parametrize("name", ["hidden_size", "n_embd", "d_model"])
def test_the_width_of_a_model_has_the_name_that_its_checkpoint_gives_it(name):
    context = SimpleNamespace(
        name="m", options=None, config=SimpleNamespace(hf={"n_layer": 2, name: 48})
    )
    assert component(Model)(context).hidden_size == 48


def test_a_command_gets_the_plugins_that_a_configuration_names(capsys, folder):
    seen = []

    def run(options, context):
        plugins = context.load_plugins(*context.load_config())
        seen.extend(entry.name for entry in plugins.entries("eviction_policies"))
        return 0

    of_contract_1.COMMANDS[:] = [Command("peek", "Look.", lambda parser: None, run)]
    setting = f'plugins.enable=["{HERE}:Peeking"]'
    assert main(["--set", setting, "peek"]) == 0
    assert seen == ["lru"]
