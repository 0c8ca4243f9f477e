"""The effects of enabling a component: order, names in use, refusals, cost of a run."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis.errors import NoSuchExample
from hypothesis.strategies import SearchStrategy

from hardpoint.configuration.catalog import Catalog
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.errors import HardpointError
from hardpoint.host.registry.kinds import PluginKind
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins import SamplingParams
from hardpoint.plugins.commands import ComponentInfo
from hardpoint.plugins.config import ConfigSources, EngineConfig
from hardpoint.plugins.requests.stats import PluginMeter, PluginReport
from hardpoint.testing.scripted import scripted_engine, write_scripted_model
from hardpoint.typed import convert

RUN_KINDS = frozenset(
    {
        "logits_processors",
        "samplers",
        "schedulers",
        "scheduling_policies",
        "eviction_policies",
        "kv_event_publishers",
        "kv_connectors",
        "kv_stores",
        "stat_sinks",
        "step_parts",
        "speculators",
        "hooks",
    }
)
"""Kinds with components that work in a run of the scripted model."""

_MODEL_TABLES = (
    *("model", "dtype", "device", "load", "attention", "ops", "quantization", "tokenizer"),
    *("parallel", "executor", "adapters", "grammar", "reasoning", "tools"),
)
"""Tables that a scripted run does not take from the configuration: it has a model of its own."""

_NUM_REQUESTS = 8
_NUM_TOKENS = 48
_ROUNDS = 5


def describe_enabling(
    kind: PluginKind,
    info: ComponentInfo,
    config: EngineConfig,
    sources: ConfigSources,
    options: Mapping[str, Any],
) -> tuple[dict[str, Any], EngineConfig | None]:
    """Return the record of an enabled component, and the configuration with it."""
    record: dict[str, Any] = {"record": "enabling", "problem": "", "order": [], "in_place_of": []}
    try:
        plugins = resolve_plugins(config, sources)
        before = Catalog(plugins, config, sources)
        on = [c for c in before.components() if c.enabled and c.kind == kind.name]
        info = next((c for c in before.components() if _same(c, info)), info)
        record["is_on"] = info.enabled
        record["others_of_its_name"] = [
            f"{c.value} ({c.package})"
            for c in before.components()
            if (c.kind, c.name) == (info.kind, info.name) and not _same(c, info)
        ]
        changed = config if info.enabled else before.choosing(kind, info)
        if options:
            tree = msgspec.to_builtins(changed)
            tree["plugin"][info.name] = dict(options)
            changed = convert(tree, type(changed), path="")
        resolved = resolve_plugins(changed, sources)
        resolved.hooks()
        after = [
            c
            for c in Catalog(resolved, changed, sources).components()
            if c.enabled and c.kind == kind.name
        ]
    except HardpointError as error:
        return {**record, "problem": str(error)}, None
    record["order"] = [c.name for c in after]
    record["in_place_of"] = [c.value for c in on if not any(_same(c, other) for other in after)]
    return record, changed


def _same(first: ComponentInfo, other: ComponentInfo) -> bool:
    return (first.kind, first.value) == (other.kind, other.value)


def describe_cost(
    kind: PluginKind, name: str, suite: Any, config: EngineConfig, changed: EngineConfig | None
) -> dict[str, Any]:
    """Return the cost of a run of the scripted model with and without a component.

    Args:
        kind: the component's.
        name: under which it is enabled.
        suite: its test class, for the arguments of requests.
        config: the configuration without it.
        changed: the one with it; None if it is refused.
    """
    record: dict[str, Any] = {"record": "cost", "reason": ""}
    if kind.name not in RUN_KINDS:
        return {**record, "reason": f"a run of the scripted model uses no {kind.name}"}
    if changed is None:
        return {**record, "reason": "it cannot be enabled"}
    arguments = _example(suite) if kind.takes_arguments else {}
    plugin_args = {name: arguments} if arguments else {}
    runs: list[tuple[EngineConfig, Mapping[str, Any]]] = [(config, {}), (changed, plugin_args)]
    if config == changed and not plugin_args:
        runs.pop()  # it is on, and has no arguments: both are the same
    try:
        seconds, meters = _measure(runs)
    except HardpointError as error:
        return {**record, "reason": f"a run of the scripted model was refused: {error}"}
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        return {**record, "reason": f"a run of the scripted model failed: {cause}"}
    with_it = seconds[-1]
    record |= {"us_per_step": round(with_it * 1e6, 1), "rows_per_step": _NUM_REQUESTS}
    if len(seconds) > 1:
        record["us_per_step_without"] = round(seconds[0] * 1e6, 1)
    if (meter := meters.get(name)) is not None and meter.rows:
        record["metered"] = {
            "us_per_row": round(meter.seconds / meter.rows * 1e6, 2),
            "us_per_step": round(meter.seconds / meter.steps * 1e6, 2),
            "rows": meter.rows,
            "steps": meter.steps,
        }
    elif kind.name == "logits_processors":
        record["reason"] = "no request of the run used it: its suite has no `arguments`"
    return record


def _example(suite: Any) -> Any:
    strategy = getattr(suite, "arguments", None)
    if not isinstance(strategy, SearchStrategy):  # such as a property that skips a test
        return {}
    quiet = settings(
        max_examples=20,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with contextlib.suppress(NoSuchExample):
        return find(strategy.map(msgspec.to_builtins), bool, settings=quiet)
    return {}


def _open(model: Path, config: EngineConfig) -> LLMEngine:
    tree = msgspec.to_builtins(config.without_tables())
    extra = {key: value for key, value in tree.items() if key not in _MODEL_TABLES}
    return scripted_engine(model, extra, clock=time.monotonic)


def _measure(
    runs: Sequence[tuple[EngineConfig, Mapping[str, Any]]],
) -> tuple[list[float], Mapping[str, PluginMeter]]:
    """Return the median seconds of a step of each run, and the meters of the last one.

    Args:
        runs: the configuration and the `plugin_args` of each run. Rounds take turns.
    """
    seconds_by_run: list[list[float]] = [[] for _ in runs]
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        model = write_scripted_model(folder / "model")
        engines = [opened.enter_context(contextlib.closing(_open(model, c))) for c, _ in runs]
        for number in range(_ROUNDS + 1):
            for seconds, engine, (_, arguments) in zip(seconds_by_run, engines, runs, strict=True):
                step_seconds = _round(engine, arguments, str(number))
                if number:  # the first one warms up
                    seconds.append(step_seconds)
        report: PluginReport = engines[-1].call_utility("plugin_report")
    return [statistics.median(seconds) for seconds in seconds_by_run], report.meters


def _round(engine: LLMEngine, arguments: Mapping[str, Any], name: str) -> float:
    params = SamplingParams(
        max_tokens=_NUM_TOKENS,
        temperature=1.0,
        seed=1,
        ignore_eos=True,
        plugin_args=dict(arguments),
    )
    for index in range(_NUM_REQUESTS):
        engine.add_request(f"{name}-{index}", {"prompt_token_ids": [index + 1] * 16}, params)
    steps, began = 0, time.perf_counter()
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
    return (time.perf_counter() - began) / max(steps, 1)
