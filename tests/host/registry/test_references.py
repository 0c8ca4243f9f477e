"""Components that a configuration from Python holds as classes instead of by their names."""

from __future__ import annotations

import functools
import math

import pytest

from hardpoint import LLM, ConfigError, SamplingParams
from hardpoint.configuration.loading import config_from
from hardpoint.errors import PluginContractError
from hardpoint.host.registry.references import with_references
from hardpoint.plugins import EngineConfig, LogitsProcessor, Phase, SchedulingPolicy
from hardpoint.plugins.config_tables import PluginsConfig, PluginUse, SchedulerConfig
from hardpoint.testing import scripted_config

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


class Unfit:
    """It is no plugin."""


def local_class():
    class Local(Only):
        contract = 1

    return Local


Renamed = type("Only", (Only,), {"contract": 1, "__module__": HERE})


def plugins(**fields) -> EngineConfig:
    return config_from({"plugins": fields})[0]


@pytest.mark.parametrize("in_process", [True, False], ids=["in_process", "own_process"])
def test_a_class_runs_as_by_its_fqcn(scripted, in_process):
    extra = {"engine": {"in_process": in_process}}
    config = scripted_config(scripted, extra)
    config["plugins"]["enable"] += [Only]
    config["scheduler"] = {"policy": LastFirst}
    with LLM(config=config) as llm:
        assert llm.generate("say abc", GREEDY)[0].outputs[0].text == "bbb"
        assert llm.config.plugins.enable[-1] == f"{HERE}:Only"
        assert llm.config.scheduler.policy == f"{HERE}:LastFirst"
        llm.plugins.set_policy("fcfs")
        llm.plugins.set_policy(LastFirst)
        assert llm.config.scheduler.policy == f"{HERE}:LastFirst"


@pytest.mark.parametrize(
    "config",
    [
        {"plugins": {"enable": (Only, {"use": Only, "name": "b"})}, "scheduler": {"use": Only}},
        {"plugins": PluginsConfig(enable=[Only, PluginUse(use=Only, name="b")])}
        | {"scheduler": SchedulerConfig(use=Only)},
        EngineConfig(
            plugins=PluginsConfig(enable=[Only, PluginUse(use=Only, name="b")]),
            scheduler=SchedulerConfig(use=Only),
        ),
    ],
    ids=["tables", "structs", "whole"],
)
def test_it_stands_wherever_a_name_may_stand(config):
    (first, second), use = (c := config_from(config)[0]).plugins.enable, c.scheduler.use
    assert (first, second.use, second.name, use) == (f"{HERE}:Only",) * 2 + ("b", f"{HERE}:Only")
    assert plugins(replace={"min_p": Only}).plugins.replace == {"min_p": f"{HERE}:Only"}
    for path in ("kv_events.publishers", "stats.sinks"):
        assert with_references([Only], path, "here") == [f"{HERE}:Only"]
    for path in ("sampler.use", "executor.use", "attention.use", "kv_cache.eviction"):
        assert with_references(Only, path, "here") == f"{HERE}:Only"
    assert with_references(Only, "model", "here") is Only


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            local_class(),
            rf"{HERE}:local_class.<locals>.Local exists only inside a function, .* define it at "
            rf'the top level of a module, as "{HERE}:Local"',
        ),
        (lambda: 0, rf'{HERE}:<lambda> exists only .* with a name .* as "{HERE}:name"'),
        (Renamed, rf"{HERE}:Only cannot be found, for its module has another object of that name"),
        (functools.partial(Only), r"or a class, got a functools.partial; an object of a module is"),
        (math, r"or a class, got a builtins.module; .* enabled by its FQCN"),
    ],
    ids=["local", "lambda", "renamed", "partial", "module"],
)
def test_what_no_process_finds_by_a_name_is_refused_with_what_would_be_right(target, message):
    with pytest.raises(ConfigError, match=rf"^plugins.enable\[1\]: .*{message}") as caught:
        plugins(enable=["fair", target])
    assert str(caught.value).endswith("(from argument LLM(config=...))")
    with pytest.raises(ConfigError, match=rf"^scheduler.policy: .*{message}"):
        config_from({"scheduler": {"policy": target}})


def test_it_gets_the_errors_of_its_fqcn(scripted):
    messages = []
    for reference in (Unfit, f"{HERE}:Unfit"):
        config = scripted_config(scripted)
        config["plugins"]["enable"] += [reference]
        with pytest.raises(PluginContractError) as caught:
            LLM(config=config)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert f"({HERE}:Unfit), asked for by plugins.enable[1]" in messages[0]
