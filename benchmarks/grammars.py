"""Measures the cost of grammars: microseconds per mask, share of a step, compile times.

    python benchmarks/grammars.py [--parts masks compile step] [--json FILE]
    python benchmarks/grammars.py --backend xgrammar    # examples/hardpoint_xgrammar, installed
    python benchmarks/grammars.py --loads regex --batches 1 --rounds 2 --parts masks compile

masks: requests follow texts that fit a grammar, each at another place, as the demo model's
tokenizer divides them. Per row: the backend's mask and the token that follows; the engine's bitmask
as a whole, in which both are contained; and what the worker does to the logits with it, with the
kernels and with torch. The larger vocabulary has made-up tokens after the demo's. Printed are
medians over the steps of processor time on one thread, and the slowest step in parentheses.

compile: from a new request until its first mask is ready, and the same of a grammar that is cached.

step: the demo model writes a long JSON array in one engine and as many free tokens in another one,
step by step in turns. Timers in the first measure what of a step is due to grammars. In one array,
strings have any length; in the other some have a `maxLength`, near which masks take longer.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from breakdown import Timers
from grammar_load import LOADS, OBJECTS, schemas
from options import options_of, save, show_table

from hardpoint import LLM, SamplingParams
from hardpoint.builtin_plugins.step_parts.structured.grammars import GrammarManager
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.core.worker.sampling.grammar_mask import GrammarMask
from hardpoint.host.boundary.activity import Activity, PluginCalls
from hardpoint.host.boundary.parts.components import Components, describe_fault
from hardpoint.host.registry.model_files import find_files
from hardpoint.host.registry.plugin_set import PluginSet, resolve_plugins
from hardpoint.plugins import (
    EngineConfig,
    EngineCoreRequest,
    ModelRunnerOutput,
    Request,
    RequestError,
    SchedulerOutput,
    TokenizerContext,
)
from hardpoint.plugins.config_tables import GrammarConfig, PluginsConfig, PluginUse
from hardpoint.plugins.grammars import GrammarContext, GrammarState, Vocabulary
from hardpoint.plugins.structured import StructuredOutputs
from hardpoint.testing import load_ops

MICROSECONDS = 1e6
WARM_UP = 40  # steps until those of a size are recorded


def timed(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the microseconds that a call takes."""
    start = clock()
    call()
    return (clock() - start) * MICROSECONDS


def enlarged(vocabulary: Vocabulary, size: int) -> Vocabulary:
    """Return a vocabulary with more tokens: the known ones with an ending each."""
    rng = random.Random(0)
    special = set(vocabulary.special)
    plain = [token for index, token in enumerate(vocabulary.tokens) if index not in special]
    endings = [token for token in plain if token.isalpha()]
    tokens = dict.fromkeys(vocabulary.tokens)
    more: list[bytes] = []
    while len(vocabulary.tokens) + len(more) < size:
        token = rng.choice(plain) + rng.choice(endings)
        if len(token) <= 12 and token not in tokens:
            tokens[token] = None
            more.append(token)
    return Vocabulary((*vocabulary.tokens, *more), vocabulary.special)


@dataclass(frozen=True)
class Setup:
    """The plugins that are measured, their configuration, and a vocabulary."""

    plugins: PluginSet
    config: EngineConfig
    vocabulary: Vocabulary

    @property
    def size(self) -> int:
        """The number of tokens."""
        return len(self.vocabulary.tokens)

    def manager(self) -> GrammarManager:
        """Return a manager of grammars."""
        return GrammarManager(
            Components(self.plugins, functools.partial(PluginCalls, Activity())),
            self.config,
            self.vocabulary,
            self.size,
            describe_fault=describe_fault,
        )

    def backend(self) -> Any:
        """Return a backend."""
        plugin = self.plugins.get("grammars", self.config.grammar.use)
        sizes = {"vocabulary": self.vocabulary, "vocab_size": self.size}
        return self.plugins.create(plugin, GrammarContext, **sizes)


def open_request(manager: GrammarManager, name: str, structured: StructuredOutputs) -> Request[Any]:
    """Return a new request with a compiled grammar."""
    params = SamplingParams(structured=structured)
    fields = {"prompt_token_ids": [5, 6, 7], "params": params, "eos_token_ids": [2]}
    request: Request[Any] = Request(EngineCoreRequest(request_id=name, **fields))
    while manager.gate(request) is not None:
        manager.wait()
    return request


def start_of(row: int, text: Sequence[int]) -> int:
    """Return the place in a text at which a row begins, another one for each row."""
    return row * 7 % len(text)


def tokens_after(row: int, text: Sequence[int]) -> Iterator[int | None]:
    """Yield a text from the start of a row on, again and again, with None at its end."""
    yield from text[start_of(row, text) :]
    while True:
        yield None
        yield from text


class Followers:
    """Requests in the middle of texts, as the engine's grammars see them.

    Attributes:
        requests: a request per row.
    """

    def __init__(
        self,
        manager: GrammarManager,
        structured: StructuredOutputs,
        texts: Sequence[list[int]],
        rows: int,
    ) -> None:
        """Open requests, each at another place of a text, given as tokens."""
        self._manager, self._structured = manager, structured
        self._numbers = itertools.count()
        rows_texts = [texts[row % len(texts)] for row in range(rows)]
        self._tokens = [tokens_after(row, text) for row, text in enumerate(rows_texts)]
        self.requests = [self._open() for _ in range(rows)]
        for row, text in enumerate(rows_texts):
            for token in text[: start_of(row, text)]:
                self.requests[row].append(token)

    def step(self) -> SchedulerOutput:
        """Append the next token of each text, or begin it again, and return the plan of a step."""
        for row, tokens in enumerate(self._tokens):
            token = next(tokens)
            if token is None:
                self._manager.ended(self.requests[row].request_id)
                self.requests[row] = self._open()
            else:
                self.requests[row].append(token)
        names = [request.request_id for request in self.requests]
        return SchedulerOutput(
            step=1,
            num_scheduled_tokens=dict.fromkeys(names, 1),
            total_num_scheduled_tokens=len(names),
        )

    def _open(self) -> Request[Any]:
        return open_request(self._manager, f"{id(self)}, {next(self._numbers)}", self._structured)


def measure_backend(
    state: GrammarState, texts: Sequence[list[int]], rows: int, rounds: int, size: int
) -> dict[str, list[float]]:
    """Return the microseconds of a row's mask in each step, and of the token that follows."""
    states = [state.fork() for _ in range(rows)]
    rows_texts = [texts[row % len(texts)] for row in range(rows)]
    for row, text in enumerate(rows_texts):
        for token in text[: start_of(row, text)]:
            states[row].advance(token)
    tokens = [tokens_after(row, text) for row, text in enumerate(rows_texts)]
    masks = np.zeros((rows, -(-size // 32)), dtype=np.int32)
    figures: dict[str, list[float]] = {"fill": [], "advance": []}
    for _ in range(rounds):
        masks[:] = 0
        pairs = list(zip(states, masks, strict=True))
        spent = timed(lambda: [s.fill_bitmask(mask) for s, mask in pairs], time.thread_time)  # noqa: B023
        figures["fill"].append(spent / rows)
        following = []
        for row, listed in enumerate(tokens):
            if (token := next(listed)) is None:
                states[row], token = state.fork(), next(listed)
            following.append((states[row], token))
        spent = timed(lambda: [s.advance(token) for s, token in following], time.thread_time)  # noqa: B023
        figures["advance"].append(spent / rows)
    return figures


def measure_masks(
    setup: Setup, structured: StructuredOutputs, texts: list[list[int]], rows: int, rounds: int
) -> dict[str, Any]:
    """Return the microseconds of a row in each part and step."""
    manager, backend = setup.manager(), setup.backend()
    figures = measure_backend(backend.compile(structured), texts, rows, rounds, setup.size)
    figures |= {"bitmask": [], "native": [], "torch": []}
    ops = {
        name: load_ops(torch.float32, torch.device("cpu"), use)
        for name, use in (("native", "auto"), ("torch", "torch"))
    }
    followers = Followers(manager, structured, texts, rows)
    logits = torch.zeros(rows, setup.size)
    manager.mask(followers.step())
    for number in range(rounds):
        plan = followers.step()
        start = time.thread_time()
        bitmask = manager.mask(plan)
        figures["bitmask"].append((time.thread_time() - start) * MICROSECONDS / rows)
        assert bitmask is not None
        assert not manager.result(plan, ModelRunnerOutput())
        requests: Any = [SimpleNamespace(request_id=name) for name in bitmask.request_ids]
        for name, operations in ops.items():
            if name == "native" or number < max(3, rounds // 10):
                call = functools.partial(apply, bitmask, requests, operations, logits)
                figures[name].append(timed(call, time.thread_time) / rows)
    manager.close()
    backend.close()
    return {"rows": rows, **figures}


def apply(bitmask: Any, requests: Any, ops: Any, logits: torch.Tensor) -> None:
    """Apply a bitmask to logits as a worker does."""
    rows = GrammarMask(bitmask, requests, ops)
    rows.apply(logits)
    rows.forbidden([0] * len(logits))


def measure_compiling(setup: Setup) -> dict[str, Any]:
    """Return the milliseconds until schemas are ready, the first time and from the cache."""
    manager = setup.manager()
    tag = StructuredOutputs.checked({"choice": ["yes", "no"]})
    figures: dict[str, Any] = {"vocabulary": timed(lambda: open_request(manager, "a", tag)) / 1e3}
    for when in ("first", "cached"):
        figures[when] = []
        for number, schema in enumerate(schemas()):
            structured = StructuredOutputs.checked({"json": schema})
            with contextlib.suppress(RequestError):  # too large for a backend; the count shows it
                call = functools.partial(open_request, manager, f"{when}{number}", structured)
                figures[when].append(timed(call) / 1e3)
    manager.close()
    return figures


def watched() -> Timers:
    """Return timers of grammars' time in a step, inactive; for engines made afterwards."""
    timers = Timers()
    for owner, methods, part in (
        (GrammarManager, ("mask", "result"), "bitmask"),
        (GrammarMask, ("__init__", "apply", "forbidden"), "apply"),
        (LLMEngine, ("step",), "step"),
    ):
        for method in methods:
            timers.watch(owner, method, part)
    return timers


def enabled_for(backend: str) -> list[str | PluginUse]:
    """Return `plugins.enable` for a backend, which is a package of its own unless the default."""
    return [] if backend == GrammarConfig().use else [backend]


def measure_step(
    timers: Timers, structured: dict[str, Any], running: int, steps: int, model: str
) -> dict[str, float]:
    """Return the milliseconds of a step with and without grammars, and the share of their parts."""
    sides: dict[str, dict[str, Any]] = {
        "free": {"ignore_eos": True},
        "structured": {"structured": structured},
    }
    config = {"plugins": {"enable": enabled_for(structured["backend"])}}
    spent: dict[str, list[float]] = {name: [] for name in sides}
    with contextlib.ExitStack() as stack:
        engines = {}
        for name, fields in sides.items():
            llm = stack.enter_context(LLM(model, config=config, progress=False))
            engine = engines[name] = llm.llm_engine
            limit = WARM_UP + 3 * steps + 50
            params = SamplingParams(temperature=1.0, seed=1, max_tokens=limit, **fields)
            for index in range(running):
                prompt = random.Random(index).choices(range(100, 40_000), k=64)
                engine.add_request(str(index), prompt, params)
            while len(engine.step()) < running:
                pass
            for _ in range(WARM_UP):
                engine.step()
        for _ in range(2 * steps):
            for name, engine in engines.items():
                spent[name].append(timed(engine.step) / 1e3)
        timers.seconds.clear()
        timers.active = True
        for _ in range(steps):
            assert len(engines["structured"].step()) == running
        timers.active = False
    whole = sum(timers.seconds.values())
    ratios = (a / b - 1 for a, b in zip(spent["structured"], spent["free"], strict=True))
    return {
        **{name: statistics.median(times) for name, times in spent.items()},
        "difference": statistics.median(ratios),
        **{part: timers.seconds[part] / whole for part in ("bitmask", "apply")},
    }


def all_masks(
    setups: dict[str, Setup], tokenizer: Any, options: argparse.Namespace
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Measure and show masks on one thread, and return the figures by vocabulary and grammar."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    results: dict[str, dict[str, list[dict[str, Any]]]] = {size: {} for size in setups}
    for size, setup in setups.items():
        for name in options.loads:
            load = LOADS[name]
            structured = StructuredOutputs.checked(load.structured)
            texts = [tokenizer.encode(text, add_special_tokens=False) for text in load.texts()]
            results[size][name] = [
                measure_masks(setup, structured, texts, rows, options.rounds)
                for rows in options.batches
            ]
    torch.set_num_threads(threads)
    parts = ("fill", "advance", "bitmask", "native", "torch")
    rows = [
        [f"{size} {name}", figures["rows"]]
        + [f"{statistics.median(figures[part]):.1f} ({max(figures[part]):.0f})" for part in parts]
        for size, loads in results.items()
        for name, listed in loads.items()
        for figures in listed
    ]
    heads = ("vocabulary, grammar", "rows", "mask", "token", "bitmask", "kernels", "torch")
    show_table("microseconds per row: median of the steps (the slowest step)", heads, rows)
    return results


def all_compiling(
    setups: dict[str, Setup], _: Any, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Measure, show and return compile times by vocabulary."""
    results = {size: measure_compiling(setup) for size, setup in setups.items()}
    for size, figures in results.items():
        start = f"{options.backend}, {size} tokens"
        for when in ("first", "cached"):
            times = figures[when]
            print(
                f"{start}, {len(times)} schemas, {when}: "
                f"p50 {statistics.median(times):.2f} ms, max {max(times):.2f} ms"
            )
        print(f"{start}: once, for the vocabulary {figures['vocabulary']:.0f} ms")
    return results


def all_steps(
    _setups: dict[str, Setup], _: Any, options: argparse.Namespace
) -> dict[str, dict[str, dict[str, float]]]:
    """Measure and show steps, and return the figures by schema and number of requests."""
    timers = watched()
    results: dict[str, dict[str, dict[str, float]]] = {name: {} for name in OBJECTS}
    for name, items in OBJECTS.items():
        array = {"type": "array", "items": items, "minItems": 1000}
        structured = {"json": array, "backend": options.backend}
        for running in options.running:
            step = measure_step(timers, structured, running, options.rounds, options.model)
            results[name][str(running)] = step
            print(
                f"{name}, {running} running: a step takes {step['free']:.2f} ms without grammars, "
                f"{step['structured']:.2f} ms with ({step['difference']:+.1%}); the bitmask is "
                f"{step['bitmask']:.2%} of it, its application {step['apply']:.2%} "
                "(aim: 2% together)"
            )
    return results


PARTS: dict[str, Callable[[dict[str, Setup], Any, argparse.Namespace], Any]] = {
    "masks": all_masks,
    "compile": all_compiling,
    "step": all_steps,
}


def main() -> None:
    """Parse arguments and run."""
    options = options_of(
        __doc__,
        rounds=100,
        parts=PARTS,
        loads=LOADS,
        batches=[1, 32, 256],
        sizes=[49_152, 128_256],
        running=([1, 32], "in the part step"),
        backend=GrammarConfig().use,
        model=("smollm2", "of the part step"),
    )
    enabled = PluginsConfig(enable=enabled_for(options.backend))
    config = EngineConfig(grammar=GrammarConfig(use=options.backend), plugins=enabled)
    plugins = resolve_plugins(config)
    files = find_files("smollm2")
    tokenizer: Any = plugins.create(plugins.one("tokenizers"), TokenizerContext, files=files)
    known = tokenizer.vocabulary()
    setups = {str(size): Setup(plugins, config, enlarged(known, size)) for size in options.sizes}
    result: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "backend": options.backend}
    for part in options.parts:
        result[part] = PARTS[part](setups, tokenizer, options)
    save(options.json, result)


if __name__ == "__main__":
    main()
