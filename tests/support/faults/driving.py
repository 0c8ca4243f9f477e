"""Runs a case in an engine of this process, and collects all that a user sees of the fault."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from hardpoint import LLM, RequestError, typed
from hardpoint.builtin_plugins.kv_connectors.threads import TaskThreads
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.host.registry.kinds import KINDS
from hardpoint.plugins import EngineConfig
from hardpoint.plugins.server.hooks import hookimpl
from hardpoint.testing import ScriptedClock, scripted_config, write_scripted_model
from support.engines import build_engine
from support.faults import plugins
from support.faults.kinds import SETUPS, Request, Setup
from support.waiting import PATIENCE_S

STEPS = 500
"""Number of steps after which a case of a scheduler is given up, which is a consequence, too."""
DEAD = ("EngineDeadError", "EngineFaultError")
LATER = " later"
"""Ends the names of faults that begin when the engine has started."""
REFUSING = {
    "add_request",
    "prepare",
    "request_received",
    "compile",
    "State.fill_bitmask",
    "State.advance",
    "quantize",
}
"""Methods whose ValueError refuses a request or a model."""
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}

Outcome = dict[str, str]


class Case(NamedTuple):
    """One misbehaviour of a method, or of all methods that return nothing.

    Attributes:
        form: name of the class that works.
        methods: as in `Setup.methods`.
        fault: such as "raises" or "returns None".
        function: in place of the method; None is the method, but for what it returns.
    """

    setup: Setup
    form: str
    methods: tuple[str, ...]
    fault: str
    function: Callable[..., Any] | None

    @property
    def key(self) -> tuple[str, str, str]:
        """Where the case is in the file."""
        method = self.methods[0] if len(self.methods) == 1 else "*"
        variant = f" ({self.setup.variant})" if self.setup.variant else ""
        return self.setup.kind, f"{self.form}.{method}", f"{self.fault}{variant}"


def cases(kind: str) -> Iterator[Case]:
    """Yield the cases of a kind."""
    setups = [setup for setup in SETUPS if setup.kind == kind]
    for fault in ("is missing", "is 99"):
        yield Case(setups[0], setups[0].base.__name__, ("contract",), fault, None)
    for setup in setups:
        for method in setup.methods:
            for fault, function in faults_of(setup, method):
                yield Case(setup, setup.base.__name__, (method,), fault, function)
        if setup.void and not setup.variant:
            yield Case(setup, setup.base.__name__, tuple(setup.void), "return text", None)


def faults_of(setup: Setup, method: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield names of misbehaviours of a method, and functions that misbehave so."""

    # The engine finds who failed by the `self` of frames.
    def raises(self: Any, *_: Any, **__: Any) -> Any:
        raise ValueError(f"broken {method}")

    def fails(self: Any, *_: Any, **__: Any) -> Any:
        raise RuntimeError(f"broken {method}")

    yield "raises", raises
    if method in REFUSING:
        yield "raises no ValueError", fails
    if method not in {"__init__", *setup.void}:
        yield "returns None", lambda self, *_, **__: None
        yield "returns text", returns_text
    yield from setup.more.get(method, {}).items()
    if method in setup.late:
        yield f"raises{LATER}", raises
        yield f"returns None{LATER}", lambda self, *_, **__: None


def returns_text(self: Any, *_: Any, **__: Any) -> Any:
    return "nonsense"


def broken(case: Case) -> type:
    """Return a class that works but for the methods of a case."""
    base = case.setup.base
    contract = KINDS[case.setup.kind].contract
    body: dict[str, Any] = {"__module__": plugins.__name__, "contract": contract}
    states: dict[str, dict[str, Any]] = {}
    if case.methods == ("contract",):
        body = {"__module__": plugins.__name__, **({"contract": 99} if "99" in case.fault else {})}
        cls = type("Broken", (base,), body)
        if "contract" not in body and "contract" in vars(cls):
            del cls.contract  # which a `Sample` states
        return cls
    for method in case.methods:
        owner, _, name = method.rpartition(".")
        part = states.setdefault(owner, {}) if owner else body
        part[name] = in_place_of(getattr(base, owner) if owner else base, name, case)
    for owner, part in states.items():
        state = getattr(base, owner)
        body[owner] = type(state.__name__, (state,), part)
    return type("Broken", (base,), body)


def in_place_of(base: type, name: str, case: Case) -> Any:
    """Return the function as a method, a class method or a property, as in the class."""
    present = next((vars(cls)[name] for cls in base.__mro__ if name in vars(cls)), None)
    function = case.function or and_returns_text(present)
    if case.fault.endswith(LATER):
        function = only_later(present, function)
    if isinstance(present, classmethod):
        return classmethod(function)
    if present is not None and not callable(present):
        return property(function)
    if case.setup.kind == "hooks":
        arguments = present.__code__.co_varnames[: present.__code__.co_argcount]
        namespace = {"function": function}
        exec(f"def {name}({', '.join(arguments)}): return function(self)", namespace)
        return hookimpl(namespace[name])
    return function


def only_later(method: Any, misbehave: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that misbehaves once the engine has started."""

    def function(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (misbehave if plugins.started else method)(self, *args, **kwargs)

    return function


def and_returns_text(method: Any) -> Callable[..., Any]:
    """Return a function that calls a method, and returns a wrong result."""

    def function(self: Any, *args: Any, **kwargs: Any) -> Any:
        if callable(method) and not hasattr(method, "hardpoint_impl"):
            method(self, *args, **kwargs)
        return "nonsense"

    return function


class Warnings(logging.Handler):
    """Keeps the log records of the plugin."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().partition("\n")[0]
        if plugins.NAME in text.lower():
            self.texts.append(text)


def outcome(case: Case, folder: Path) -> Outcome:
    """Run a case; return its consequences with the messages.

    Args:
        case: to run.
        folder: folder of the models.
    """
    plugins.Broken, plugins.started = broken(case), False
    case.setup.before()
    log = logging.getLogger("hardpoint")
    handler = Warnings()
    log.addHandler(handler)
    texts: Outcome = {}
    try:
        run(case.setup, folder, texts)
    finally:
        log.removeHandler(handler)
    known = sorted((text for text in texts.values()), key=len, reverse=True)
    for number, text in enumerate(dict.fromkeys(handler.texts), 1):
        inside = next(
            (other_text for other_text in known if other_text and other_text in text), None
        )
        shown = text if inside is None else text.replace(inside, "{}")
        texts["log" if number == 1 else f"log {number}"] = shown
    return {key: normalised(text, folder) for key, text in texts.items()} or {"none": ""}


def run(setup: Setup, folder: Path, texts: Outcome) -> None:
    """Open an engine, use it and close it; record errors."""
    use = use_llm if setup.messages else use_engine
    try:
        engine = open_engine(setup, folder)
    except Exception as error:
        texts["start"] = text_of(error)
        return
    try:
        use(engine, setup, texts)
    finally:
        try:
            engine.close()
        except Exception as error:
            texts["close"] = text_of(error)


def open_engine(setup: Setup, folder: Path) -> Any:
    """Open an engine, or an LLM for a chat."""
    extra: dict[str, Any] = {"weight_cache": {"path": "off"}, **setup.config}
    config = scripted_config(folder / "scripted", extra)
    if setup.model == "llama":
        config["model"] = str(folder / "llama")
        if "attention" not in setup.config:
            config["attention"] = {"use": "torch"}
        if "ops" not in setup.config:
            config["ops"] = {"use": "torch"}
    if setup.kind == "models":
        config["plugins"] = {"enable": [{"use": plugins.USE, "name": "ScriptedForCausalLM"}]}
    if setup.messages:
        return LLM(config=config)
    return build_engine(
        typed.convert(config, EngineConfig, path=""), clock=ScriptedClock(tick=setup.tick)
    )


def use_llm(llm: LLM, setup: Setup, texts: Outcome) -> None:
    attempt(lambda: llm.chat(list(setup.messages)), "call chat", texts)


def use_engine(engine: LLMEngine, setup: Setup, texts: Outcome) -> None:
    """Run requests and make control calls."""
    plugins.started = True
    patience_s = 0.0 if setup.kind == "schedulers" else PATIENCE_S  # others wait for threads
    run_requests(engine, setup.requests, texts, patience_s)
    if setup.again and "engine" not in texts:
        if setup.kind != "eviction_policies":
            wait_for_stores()
            attempt(lambda: engine.call_utility("reset_prefix_cache"), "reset", texts)
        run_requests(engine, setup.again, texts, patience_s)
    for name, action in setup.actions.items():
        if any(text.startswith(DEAD) for text in texts.values()):
            return
        attempt(lambda action=action: action(engine), f"call {name}", texts)
    try:
        health = engine.health()
    except Exception as error:
        texts["health"] = text_of(error)
        return
    for name, fault in health.fallbacks.items():
        texts[f"fallback {name}"] = fault.message
    for name, message in health.quarantined.items():
        texts[f"quarantined {name}"] = message


def wait_for_stores() -> None:
    """Wait until the threads of KV stores have no task left."""
    for thread in threading.enumerate():
        owner = getattr(getattr(thread, "_target", None), "__self__", None)
        if isinstance(owner, TaskThreads):
            assert owner.drain(PATIENCE_S)


def attempt(action: Callable[[], Any], name: str, texts: Outcome) -> bool:
    """Call a function; note the error that it raises, and return whether it raised none."""
    try:
        action()
    except Exception as error:
        texts[name] = text_of(error)
        return False
    return True


def run_requests(engine: LLMEngine, requests: Any, texts: Outcome, patience_s: float) -> None:
    """Run requests together; give them up after STEPS steps and some seconds."""
    for request in requests:
        add(engine, request, texts)
        if any(text.startswith(DEAD) for text in texts.values()):
            return
    end, steps = time.monotonic() + patience_s, 0
    try:
        while engine.has_unfinished_requests():
            for output in engine.step():
                note(output, texts)
            steps += 1
            if steps > STEPS and time.monotonic() > end:
                texts["engine"] = "the requests do not end"
                return
    except Exception as error:
        texts["engine"] = text_of(error)


def add(engine: LLMEngine, request: Request, texts: Outcome) -> None:
    try:
        engine.add_request(*request)
    except RequestError as error:
        texts[f"refused {request[0]}"] = text_of(error)
    except Exception as error:
        texts[f"add {request[0]}"] = text_of(error)


def note(output: Any, texts: Outcome) -> None:
    for completion in output.outputs:
        if completion.error is not None:
            texts[f"request {output.request_id}"] = completion.error
        if completion.warning is not None:
            texts[f"warning {output.request_id}"] = completion.warning


def text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def normalised(text: str, folder: Path) -> str:
    """Return a message without parts that differ between runs: paths, addresses, versions."""
    text = text.replace(str(folder), "<folder>")
    text = text.replace(f"hardpoint {version('hardpoint')}", "hardpoint <version>")
    text = re.sub(r"'([a-z0-9-]+)-[0-9a-f]{8}'", r"'\1-<id>'", text)
    text = re.sub(r"\bstep \d+ failed", "step <n> failed", text)
    text = re.sub(r"supported: .*", "supported: <list>", text)
    text = re.sub(r"0x[0-9a-f]{6,}", "0x<address>", text)
    text = re.sub(r"/[^\s'\",:]*/(?=[\w.-]+)", "<path>/", text)
    return re.sub(r"\b\d+(\.\d+)? s\b", "<seconds> s", text)


def write_models(folder: Path) -> Path:
    """Write the checkpoints that the cases need."""
    write_scripted_model(folder / "scripted", {"say abc": " abc abc abc"})
    llama = write_scripted_model(folder / "llama")
    config = json.loads((llama / "config.json").read_text()) | LLAMA
    (llama / "config.json").write_text(json.dumps(config))
    return folder


def use_wheel(wheel: Path) -> None:
    """Import from a wheel of pure Python where it is."""
    if str(wheel) not in sys.path:
        sys.path.append(str(wheel))


def as_toml(table: Mapping[tuple[str, str, str], Outcome]) -> str:
    """Return outcomes as TOML: a table per method, with a line per misbehaviour."""
    tables: dict[str, list[str]] = {}
    for (kind, method, misbehaviour), texts in table.items():
        outcome = ", ".join(
            f"{json.dumps(name)} = {json.dumps(text, ensure_ascii=False)}"
            for name, text in texts.items()
        )
        lines = tables.setdefault(f"[{json.dumps(kind)}.{json.dumps(method)}]", [])
        lines.append(f"{json.dumps(misbehaviour)} = {{ {outcome} }}\n")
    return "\n".join(f"{header}\n{''.join(lines)}" for header, lines in tables.items())
