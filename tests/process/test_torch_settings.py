"""A plugin that changes torch's settings: they are restored, and nothing crashes.

In a step, they are restored once per step, or after each call with `debug.watch_plugins`, which
names the plugin. Outside of steps, they are restored after each call, and the plugin is named.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from support.driving import FINAL
from support.fault_cases import run_all
from support.samples import Sample

from hardpoint import LLM, SamplingParams, plugins
from hardpoint.builtin_plugins.executors.uniproc import UniprocExecutor
from hardpoint.builtin_plugins.loaders.dummy import DummyLoader
from hardpoint.builtin_plugins.native import check_rows, check_tensors
from hardpoint.builtin_plugins.policies import FirstComeFirstServed
from hardpoint.builtin_plugins.scheduling import DefaultScheduler
from hardpoint.host.system import torch_state
from hardpoint.kernels import cpu
from hardpoint.plugins import (
    EngineHalf,
    FrontendHalf,
    LogitsProcessor,
    Phase,
    StepPart,
    WorkerHalf,
    hookimpl,
)
from hardpoint.testing import scripted_config, scripted_engine

HERE = __name__
WATCH = {"debug": {"watch_plugins": True}}
PARAMS = SamplingParams(temperature=1.0, seed=1, max_tokens=4, **FINAL)
CHANGES = {
    "default device": lambda: torch.set_default_device("meta"),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "use of deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "inference mode": lambda: enter(torch.inference_mode(not torch.is_inference_mode_enabled())),
    "recording of gradients": lambda: torch.set_grad_enabled(not torch.is_grad_enabled()),
}
ENTERED = []


def crossed(*methods, also=()):
    """Parametrize a test by methods and settings, so that the short run has each of them once.

    Args:
        also: pairs of method and setting that the short run has, too.
    """
    return pytest.mark.parametrize(
        ("method", "setting"),
        [
            pytest.param(method, setting, marks=[] if is_short else pytest.mark.nightly)
            for row, method in enumerate(methods)
            for column, setting in enumerate(CHANGES)
            for is_short in [
                row == column or (row == 0 and column >= len(methods)) or (method, setting) in also
            ]
        ],
    )


def enter(mode):
    """Enter a mode, which lasts as long as the object, and leave it on."""
    mode.__enter__()
    ENTERED.append(mode)


class Changes(LogitsProcessor):
    """Changes one of torch's settings in one of its methods."""

    contract = 1
    phase = Phase.MASK

    class Options(plugins.Options):
        setting: str
        method: str

    def __init__(self, context):
        super().__init__(context)
        self.change("constructor")

    def change(self, method):
        if self.options.method == method:
            CHANGES[self.options.setting]()

    def start(self, request):
        self.change("start")

    def advance(self, state, token):
        self.change("advance")

    def apply(self, logits, rows):
        self.change("apply")
        return logits


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.setattr(torch_state, "_logged", set())
    before = torch_state.read()
    yield
    changed = torch_state.read() != before
    torch_state.put_back(before, "a test", "body")
    assert not changed


@crossed("constructor", "start", "advance", "apply")
@pytest.mark.parametrize("ops", ["native_cpu", pytest.param("torch", marks=pytest.mark.nightly)])
def test_of_a_logits_processor(scripted, caplog, setting, method, ops):
    config = {
        "plugins": {"enable": [f"{HERE}:Changes"]},
        "plugin": {"changes": {"setting": setting, "method": method}},
        "ops": {"use": ops},
        **WATCH,
    }
    caplog.set_level(logging.WARNING, "hardpoint")
    engine = scripted_engine(scripted, config)
    finals = run_all(engine, [("a", "say abc", PARAMS)])
    engine.close()
    assert finals["a"].outputs[0].error is None
    logged = [record.message for record in caplog.records if "torch's" in record.message]
    (line,) = logged
    assert line.startswith(f"plugin 'changes' ({HERE}:Changes), asked for by plugins.enable[1]")
    assert f": its {method} changed torch's {setting} from " in line
    assert "which is put back" in line


class Policy(Sample, FirstComeFirstServed, contract=1):
    class Options(plugins.Options):
        setting: str
        method: str

    def key(self, request):
        if self.options.method == "key":
            CHANGES[self.options.setting]()
        return super().key(request)

    def scheduled(self, request, tokens):
        if self.options.method == "scheduled":
            CHANGES[self.options.setting]()


class Runs(UniprocExecutor):
    contract = 2
    setting = ""

    def execute_model(self, plan):
        CHANGES[self.setting]()
        return super().execute_model(plan)


class Scheduler(DefaultScheduler):
    contract = 2
    setting = ""
    method = ""

    def schedule(self):
        if self.method == "schedule":
            CHANGES[self.setting]()
        return super().schedule()

    def update(self, plan, result):
        if self.method == "update":
            CHANGES[self.setting]()
        return super().update(plan, result)


class Part(Sample, StepPart, contract=1):
    class Options(plugins.Options):
        setting: str
        method: str

    def change(self, method):
        if self.options.method == method:
            CHANGES[self.options.setting]()

    def frontend_half(self, context):
        self.change("frontend_half")
        return FrontendHalf()

    def engine_half(self, context):
        self.change("engine_half")
        return EngineHalf()

    def worker_half(self, context):
        self.change("worker_half")
        return WorkerHalf()


@crossed("frontend_half", "engine_half", "worker_half")
def test_of_what_makes_the_halves_of_a_step_part(scripted, caplog, setting, method):
    config = {
        "plugins": {"enable": [f"{HERE}:Part"]},
        "plugin": {"part": {"setting": setting, "method": method}},
    }
    engine = scripted_engine(scripted, config)
    finals = run_all(engine, [("a", "say abc", PARAMS)])
    engine.close()
    assert finals["a"].outputs[0].error is None
    (line,) = lines(caplog)
    assert line.startswith(f"plugin 'part' ({HERE}:Part), asked for by plugins.enable[1]")
    assert f": its {method} changed torch's {setting} from " in line


class Loader(DummyLoader):
    contract = 1
    setting = ""
    method = ""

    @classmethod
    def change(cls, method):
        if cls.method == method:
            CHANGES[cls.setting]()

    @classmethod
    def recognises(cls, files):
        cls.change("recognises")
        return True

    @classmethod
    def wraps(cls, options):
        cls.change("wraps")
        return super().wraps(options)

    def architecture(self):
        self.change("architecture")
        return super().architecture()

    def config(self):
        self.change("config")
        return super().config()

    def weights(self, shapes):
        self.change("weights")
        yield from super().weights(shapes)  # a generator, which changes it when it begins


@crossed("recognises", "wraps", "architecture", "config", "weights")
def test_of_a_loader(scripted, caplog, monkeypatch, setting, method):
    monkeypatch.setattr(Loader, "setting", setting)
    monkeypatch.setattr(Loader, "method", method)
    config = {"load": {"use": f"{HERE}:Loader"}}
    if method == "recognises":
        config = {
            "load": {"use": "auto"},
            "plugins": {"replace": {"safetensors": f"{HERE}:Loader"}},
        }
    engine = scripted_engine(scripted, config)
    engine.close()
    logged = lines(caplog)
    assert logged
    for line in logged:
        assert f"({HERE}:Loader), asked for by " in line
        changed = f"changed torch's {setting} from "
        # The weights of this loader depend on its own config().
        assert f": its {method} {changed}" in line or f": its weights {changed}" in line


class Hooks:
    """Changes a setting in the hook that it is made for."""

    contract = 1

    def __init__(self, hook, setting):
        self.hook, self.setting = hook, setting

    def change(self, hook):
        if self.hook == hook:
            CHANGES[self.setting]()

    @hookimpl
    def request_received(self, request):
        self.change("request_received")

    @hookimpl
    def step_planned(self, record):
        self.change("step_planned")

    @hookimpl
    def request_finished(self, output):
        self.change("request_finished")


def lines(caplog):
    return [record.message for record in caplog.records if "torch's" in record.message]


@crossed("key", "scheduled", "schedule", "update")
def test_of_what_plans_steps(scripted, caplog, monkeypatch, setting, method):
    kind = "policy" if method in ("key", "scheduled") else "scheduler"
    monkeypatch.setattr(Scheduler, "setting", setting)
    monkeypatch.setattr(Scheduler, "method", method)
    config = {
        "policy": {
            "scheduler": {"policy": f"{HERE}:Policy"},
            "plugin": {"policy": {"setting": setting, "method": method}},
        },
        "scheduler": {"scheduler": {"use": f"{HERE}:Scheduler"}},
    }[kind]
    engine = scripted_engine(scripted, config | WATCH)
    finals = run_all(engine, [("a", "say abc", PARAMS)])
    engine.close()
    assert finals["a"].outputs[0].error is None
    (line,) = lines(caplog)
    assert line.startswith(f"plugin '{kind}' ({HERE}:{kind.title()}), asked for by scheduler.")
    assert f": its {method} changed torch's {setting} from " in line


# The engine's own worker, which an executor may run in this thread, sets the number of threads.
@pytest.mark.parametrize(
    "setting", [setting for setting in CHANGES if setting != "number of threads"]
)
def test_of_an_executor(scripted, caplog, monkeypatch, setting):
    monkeypatch.setattr(Runs, "setting", setting)
    engine = scripted_engine(scripted, {"executor": {"use": f"{HERE}:Runs"}, **WATCH})
    finals = run_all(engine, [("a", "say abc", PARAMS)])
    engine.close()
    assert finals["a"].outputs[0].error is None
    (line,) = lines(caplog)
    assert line.startswith(f"plugin 'runs' ({HERE}:Runs), asked for by executor.use")
    assert f": its execute_model changed torch's {setting} from " in line


class Once(LogitsProcessor):
    """Changes a setting in the first call of one of its methods, and notes each step's settings."""

    contract = 1
    phase = Phase.MASK
    changes: ClassVar[dict[str, Callable[[], object]]] = {}
    seen: ClassVar[list[torch_state.State]] = []

    @classmethod
    def change(cls, method):
        cls.changes.pop(method, lambda: None)()

    def start(self, request):
        self.change("start")

    def advance(self, state, token):
        self.change("advance")

    def apply(self, logits, rows):
        self.seen.append(torch_state.read())
        self.change("apply")
        return logits


class OncePolicy(Sample, FirstComeFirstServed, contract=1):
    def added(self, request):
        Once.change("added")

    def key(self, request):
        Once.change("key")
        return super().key(request)

    def scheduled(self, request, tokens):
        Once.change("scheduled")


class OnceScheduler(Sample, DefaultScheduler, contract=2):
    def schedule(self):
        Once.change("schedule")
        return super().schedule()

    def update(self, plan, result):
        Once.change("update")
        return super().update(plan, result)


class OncePart(Sample, StepPart, contract=1):
    def engine_half(self, context):
        return OnceEngineHalf()

    def worker_half(self, context):
        return OnceWorkerHalf()


class OnceEngineHalf(EngineHalf):
    def begin(self, plan):
        Once.change("begin of the engine half")
        return b"for the worker half"


class OnceWorkerHalf(WorkerHalf):
    def begin(self, plan, data):
        Once.change("begin of the worker half")


HARMLESS = {"default device": lambda: torch.set_default_device("cpu")}
"""Changes that the rest of the step does not notice."""

ONCE = {
    "plugins": {"enable": [f"{HERE}:Once", f"{HERE}:OncePart"]},
    "scheduler": {"use": f"{HERE}:OnceScheduler", "policy": f"{HERE}:OncePolicy"},
}


@pytest.mark.parametrize("watch", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("asynchronous", [False, True])
@crossed(
    *("start", "advance", "apply", "schedule", "update", "key", "added", "scheduled"),
    *("begin of the engine half", "begin of the worker half"),
    also=[("advance", "default device")],  # it may run behind the end of a step
)
def test_later_steps_have_the_settings_of_the_start(
    scripted, caplog, monkeypatch, setting, method, asynchronous, watch
):
    threads = torch.get_num_threads()
    monkeypatch.setattr(Once, "changes", {method: HARMLESS.get(setting, CHANGES[setting])})
    monkeypatch.setattr(Once, "seen", [])
    config = ONCE | {"debug": {"watch_plugins": watch}}
    config["scheduler"] = config["scheduler"] | {"asynchronous": asynchronous}
    engine = scripted_engine(scripted, config)
    run_all(engine, [("a", "say abc", PARAMS)])
    assert not Once.changes, "it was not called"
    first = len(Once.seen)
    finals = run_all(engine, [("b", "say abc", PARAMS)])
    engine.close()
    assert finals["b"].outputs[0].error is None
    assert len(set(Once.seen[first:])) == 1
    expected = (None, torch.float32, threads, False, True, False)
    assert Once.seen[-1] == expected
    if watch:
        assert all("plugin 'once" in line for line in lines(caplog))
    if setting in ("default device", "default dtype", "use of deterministic algorithms"):
        assert lines(caplog)  # the worker leaves the other ones as they were at its end anyway
    for line in lines(caplog) if not watch else ():
        assert line.startswith(f"a plugin changed torch's {setting} from ")
        assert line.endswith("set debug.watch_plugins to find out which plugin does it")
    torch.set_num_threads(threads)  # the worker sets them in each step, the engine does not


class Notes(LogitsProcessor):
    """Notes the default dtype, then changes it, in each step."""

    contract = 1
    phase = Phase.MASK

    class Options(plugins.Options):
        path: str

    def apply(self, logits, rows):
        with open(self.options.path, "a", encoding="utf-8") as file:
            file.write(f"{torch.get_default_dtype()}\n")
        torch.set_default_dtype(torch.float64)
        return logits


@pytest.mark.parametrize(
    "places", [{}, {"executor": {"use": "multiproc"}}], ids=["engine process", "worker process"]
)
def test_processes_of_workers_restore_settings(scripted, tmp_path, capfd, places):
    config = {
        "plugins": {"enable": [f"{HERE}:Notes"]},
        "plugin": {"notes": {"path": str(tmp_path / "dtypes")}},
        "engine": {"in_process": False},
        **places,
    }
    with LLM(config=scripted_config(scripted, config)) as llm:
        (output,) = llm.generate("say abc", SamplingParams(temperature=0.0, max_tokens=4))
        assert output.outputs[0].text == " abc"
    assert (tmp_path / "dtypes").read_text().split() == ["torch.float32"] * 4
    assert "a plugin changed torch's default dtype from torch.float32" in capfd.readouterr().err


@crossed("request_received", "step_planned", "request_finished")
def test_of_hooks(scripted, caplog, setting, method):
    with LLM(config=scripted_config(scripted), plugins=[Hooks(method, setting)]) as llm:
        (output,) = llm.generate("say abc", SamplingParams(temperature=0.0, max_tokens=3))
        assert output.outputs[0].text == " ab"
    (line,) = lines(caplog)
    assert line.startswith(f"plugin 'hooks' ({HERE}:Hooks()), asked for by plugins= of LLM")
    assert f"{method} changed torch's {setting} from " in line


def test_kernels_are_tried_on_the_processor():
    torch.set_default_device("meta")
    try:
        assert cpu.load("plain") is not None
    finally:
        torch.set_default_device(None)


def test_what_kernels_cannot_read():
    with pytest.raises(TypeError, match=r"expected a torch.float32 tensor on cpu, got torch.float"):
        check_tensors(torch.float32, torch.empty(2, 3, device="meta"))
    with pytest.raises(TypeError, match=r"got torch.float64 \[2\] on cpu"):
        check_tensors(torch.float32, torch.empty(2), torch.empty(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="side by side"):
        check_rows(torch.empty(3, 2).T)
    check_rows(torch.empty(3, 1).T)
