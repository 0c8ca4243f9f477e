"""A fault has the same consequence and words in a built-in as in a stranger, in a whole engine.

Of the kinds whose calls are written by hand; `test_declared_behaviour` has the others. The one
exception: a built-in logits processor is never quarantined.
"""

from __future__ import annotations

import re
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from support.driving import FINAL
from support.fault_cases import run_all

from hardpoint import RequestError, SamplingParams, plugins
from hardpoint.builtin_plugins.executors.uniproc import UniprocExecutor
from hardpoint.builtin_plugins.logits.truncation import MinP
from hardpoint.builtin_plugins.sampler import DefaultSampler
from hardpoint.builtin_plugins.scheduling import DefaultScheduler
from hardpoint.errors import EngineDeadError
from hardpoint.host.boundary import activity, guard
from hardpoint.host.boundary.logits import processor_runner
from hardpoint.plugins import LogitsProcessor, Phase
from hardpoint.testing import scripted_engine

SECONDS = 0.02
FIELDS = {"temperature": 1.0, "seed": 1, "max_tokens": 3, "ignore_eos": True, **FINAL}


class OddLogits(LogitsProcessor):
    contract = 1
    phase = Phase.TRUNCATE

    class Arguments(plugins.Arguments):
        min_p: float

    apply = MinP.apply


class OddSampler(DefaultSampler):
    contract = 1


class OddScheduler(DefaultScheduler):
    contract = 1


class OddExecutor(UniprocExecutor):
    contract = 1


# kind: the stranger, its built-in, how the stranger is configured
COMPONENTS = {
    "logits_processors": (OddLogits, MinP, {"plugins": {"enable": [f"{__name__}:OddLogits"]}}),
    "samplers": (OddSampler, DefaultSampler, {"sampler": {"use": f"{__name__}:OddSampler"}}),
    "schedulers": (
        OddScheduler,
        DefaultScheduler,
        {"scheduler": {"use": f"{__name__}:OddScheduler"}},
    ),
    "executors": (OddExecutor, UniprocExecutor, {"executor": {"use": f"{__name__}:OddExecutor"}}),
}
CALLS = [
    ("logits_processors", "apply"),
    ("samplers", "sample"),
    ("schedulers", "schedule"),
    ("schedulers", "update"),
    ("executors", "execute_model"),
]
calls = pytest.mark.parametrize(("kind", "method"), CALLS)


def raising(error):
    def method(self, *_, **__):  # with `self`, by which a frame is a component's
        raise type(error)(*error.args)  # a new one, without the frames of another engine

    return method


def wrong(*_, **__):
    return object()


def writing(self, logits=None, *_, **__):
    """Damage what logits it gets, and fail."""
    if isinstance(logits, torch.Tensor):
        logits.fill_(torch.nan)
    raise LookupError("written")


FAULTS = {
    "raises": raising(ValueError("oh")),
    "KeyboardInterrupt": raising(KeyboardInterrupt("oh")),
    "SystemExit": raising(SystemExit(3)),
    "returns something else": wrong,
    "writes": writing,
}


def engine_of(scripted, monkeypatch, kind, method, does, *, built_in, **config):
    """Return an engine in which a method of the stranger or built-in does something else."""
    stranger, own, configured = COMPONENTS[kind]
    monkeypatch.setattr(own if built_in else stranger, method, does, raising=False)
    return scripted_engine(scripted, config if built_in else {**configured, **config})


def request(request_id, kind, *, built_in):
    own = {}
    if kind == "logits_processors":
        name = "min_p" if built_in else "odd_logits"
        own = {"plugin_args": {name: {"min_p": 0.1}}}
    return request_id, "say abc", SamplingParams(**FIELDS, **own)


def words(text, kind):
    """Return a message without what differs between the two plugins."""
    text = re.sub(r"plugin '\w+' \(.*?\)(, asked for by [\w.\[\]]+|, a default)?:", "PLUGIN:", text)
    names = "default|uniproc|min_p|odd_logits|odd_sampler|odd_scheduler|odd_executor"
    text = re.sub(rf"'({names})'", "NAME", text)
    return re.sub(r"0x\w+", "ADDRESS", text)


def consequences(scripted, monkeypatch, kind, method, does, *, built_in):
    """Return the consequences of a fault: errors of requests, of the engine, and counts."""
    with monkeypatch.context() as patch:
        engine = engine_of(scripted, patch, kind, method, does, built_in=built_in)
        engine.add_request(*request("bad", kind, built_in=built_in))
        if kind == "logits_processors":
            engine.add_request("good", "say abc", SamplingParams(**FIELDS))
        try:
            finals = run_all(engine, [])
        except EngineDeadError as error:
            return type(error).__name__, words(str(error), kind)
        found = [
            (name, final.outputs[0].finish_reason, words(final.outputs[0].error or "", kind))
            for name, final in sorted(finals.items())
        ]
        health = engine.health()
        found.append((list(health.faults.values()), health.quarantined))
        found.append(finals["good"].outputs[0].token_ids)
        engine.close()
        return found


@calls
@pytest.mark.parametrize("fault", FAULTS)
def test_a_built_in_is_treated_as_a_stranger_is(kind, method, fault, scripted, monkeypatch):
    found = [
        consequences(scripted, monkeypatch, kind, method, FAULTS[fault], built_in=built_in)
        for built_in in (False, True)
    ]
    assert found[0] == found[1]
    text = repr(found[0])
    assert ("PLUGIN" in text) or ("NAME" in text)  # the plugin is named
    if kind == "logits_processors":
        assert f"its {method} failed: " in text
        assert found[0][0][:2] == ("bad", "error")
        assert found[0][1][:2] == ("good", "length")
    else:
        assert found[0][0] == "EngineFaultError"


@calls
def test_an_interrupt_of_the_user_passes(kind, method, scripted, monkeypatch):
    for built_in in (False, True):
        with monkeypatch.context() as patch:
            interrupted = lambda *_, **__: signal.raise_signal(signal.SIGINT)  # noqa: E731
            engine = engine_of(scripted, patch, kind, method, interrupted, built_in=built_in)
            engine.add_request(*request("a", kind, built_in=built_in))
            with pytest.raises(KeyboardInterrupt):
                engine.step()
            assert engine.health().faults == {}
        engine.close()


def test_a_slow_built_in_is_counted_as_a_stranger_is(scripted, monkeypatch):
    found, now = [], [0.0]  # only what is slow takes time
    clock = SimpleNamespace(perf_counter=lambda: now[0], monotonic=time.monotonic)
    for module in (activity, guard, processor_runner):
        monkeypatch.setattr(module, "time", clock)
    for built_in in (False, True):
        apply = MinP.apply

        def slow(self, logits, rows, apply=apply):
            now[0] += SECONDS
            return apply(self, logits, rows)

        with monkeypatch.context() as patch:
            limited = {"plugins": {"slow_seconds": SECONDS / 2}}
            if not built_in:
                limited["plugins"]["enable"] = [f"{__name__}:OddLogits"]
            kind = "logits_processors"
            engine = engine_of(scripted, patch, kind, "apply", slow, built_in=built_in, **limited)
            run_all(engine, [request("a", kind, built_in=built_in)])
            found.append({words(name, kind): f.count for name, f in engine.health().slow.items()})
            engine.close()
    assert [list(slow.values()) for slow in found] == [[3], [3]]


def test_a_built_in_logits_processor_alone_is_never_quarantined(scripted, monkeypatch):
    for built_in in (False, True):
        with monkeypatch.context() as patch:
            kind, does = "logits_processors", raising(ValueError("oh"))
            config = {"plugins": {"quarantine_after": 2}}
            if not built_in:
                config["plugins"]["enable"] = [f"{__name__}:OddLogits"]
            engine = engine_of(scripted, patch, kind, "apply", does, built_in=built_in, **config)
            run_all(engine, [request(name, kind, built_in=built_in) for name in "ab"])
            assert bool(engine.health().quarantined) is not built_in
            if built_in:
                run_all(engine, [request("c", kind, built_in=True)])
            else:
                with pytest.raises(RequestError, match="the plugin is quarantined"):
                    engine.add_request(*request("c", kind, built_in=False))
            engine.close()
