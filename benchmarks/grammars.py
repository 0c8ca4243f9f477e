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
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from breakdown import Timers
from engines import parser_of, save
from grammar_load import LOADS, OBJECTS, Load, schemas
from tables import show_table

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
    Tokenizer,
    TokenizerContext,
)
from hardpoint.plugins.config_tables import GrammarConfig, PluginsConfig, PluginUse
from hardpoint.plugins.grammars import GrammarContext, GrammarState, Vocabulary
from hardpoint.plugins.structured import StructuredOutputs
from hardpoint.testing import load_ops

PARTS = ("masks", "compile", "step")
LARGE = 128_256
PROMPT = [5, 6, 7]
MICROSECONDS = 1e6
Clock = Callable[[], float]
CPU = torch.device("cpu")
WARM_UP = 40  # steps until those of a size are recorded


def timed(call: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    """Return the microseconds that a call takes."""
    start = clock()
    call()
    return (clock() - start) * MICROSECONDS


def demo_tokenizer(plugins: PluginSet) -> Tokenizer:
    """Return the demo model's tokenizer."""
    files = find_files("smollm2")
    tokenizer = plugins.create(plugins.one("tokenizers"), TokenizerContext, files=files)
    assert isinstance(tokenizer, Tokenizer)
    return tokenizer


def enlarged(vocabulary: Vocabulary, size: int) -> Vocabulary:
    """Return a vocabulary with more tokens: those that there are, with an ending each."""
    rng = random.Random(0)
    special = set(vocabulary.special)
    plain = [token for index, token in enumerate(vocabulary.tokens) if index not in special]
    endings = [token for token in plain if token.isalpha()]
    known = set(vocabulary.tokens)
    more: list[bytes] = []
    while len(vocabulary.tokens) + len(more) < size:
        token = rng.choice(plain) + rng.choice(endings)
        if len(token) <= 12 and token not in known:
            known.add(token)
            more.append(token)
    return Vocabulary((*vocabulary.tokens, *more), vocabulary.special)


class Followers:
    """Requests in the middle of texts, as the engine's grammars see them.

    Attributes:
        manager: has their grammars.
        requests: a request per row.
    """

    def __init__(
        self, manager: GrammarManager, structured: StructuredOutputs, texts: Sequence[list[int]]
    ) -> None:
        """Follow the texts, given as tokens, with no request yet."""
        self.manager, self._structured, self._texts = manager, structured, texts
        self._numbers = itertools.count()
        self._left: list[Iterator[int]] = []
        self.requests: list[Request[Any]] = []

    def add(self, count: int) -> None:
        """Add requests, each at another place of a text."""
        for row in range(count):
            self.requests.append(self._open())
            self._left.append(iter(()))
            self._restart(row)
            text = self._texts[row % len(self._texts)]
            for _ in range(row * 7 % len(text)):
                self._advance(row)

    def step(self) -> None:
        """Append the next token of each text; begin again where it has ended."""
        for row in range(len(self.requests)):
            if not self._advance(row):
                self._restart(row)

    @property
    def plan(self) -> SchedulerOutput:
        """A step of all requests."""
        names = [request.request_id for request in self.requests]
        return SchedulerOutput(
            step=1,
            num_scheduled_tokens=dict.fromkeys(names, 1),
            total_num_scheduled_tokens=len(names),
        )

    def _advance(self, row: int) -> bool:
        token = next(self._left[row], None)
        if token is None:
            return False
        self.requests[row].append(token)
        return True

    def _restart(self, row: int) -> None:
        self.manager.ended(self.requests[row].request_id)
        self.requests[row] = self._open()
        self._left[row] = iter(self._texts[row % len(self._texts)])

    def _open(self) -> Request[Any]:
        return opened(self.manager, str(next(self._numbers)), self._structured)


def opened(manager: GrammarManager, name: str, structured: StructuredOutputs) -> Request[Any]:
    """Return a new request whose grammar is compiled."""
    params = SamplingParams(structured=structured)
    request: Request[Any] = Request(EngineCoreRequest(
        request_id=name, prompt_token_ids=PROMPT, params=params, eos_token_ids=[2]
    ))  # fmt: skip
    while manager.gate(request) is not None:
        manager.wait()
    return request


def measure_backend(
    state: GrammarState, texts: Sequence[list[int]], rows: int, rounds: int, vocab_size: int
) -> tuple[list[float], list[float]]:
    """Return the microseconds of a row's mask in each step, and of following a token."""
    states = [state.fork() for _ in range(rows)]
    left = [iter(texts[row % len(texts)]) for row in range(rows)]
    masks = np.zeros((rows, -(-vocab_size // 32)), dtype=np.int32)
    for row in range(rows):
        for _ in range(row * 7 % len(texts[row % len(texts)])):
            states[row].advance(next(left[row]))
    fills, advances, tokens = [], [], [0] * rows
    for _ in range(rounds):
        masks[:] = 0
        lines = list(masks)
        fills.append(timed(functools.partial(fill, states, lines), time.thread_time))
        for row in range(rows):
            if (token := next(left[row], None)) is None:
                states[row] = state.fork()
                left[row] = iter(texts[row % len(texts)])
                token = next(left[row])
            tokens[row] = token
        advances.append(timed(lambda: advance(states, tokens), time.thread_time))
    return [value / rows for value in fills], [value / rows for value in advances]


def fill(states: Sequence[GrammarState], masks: Sequence[np.ndarray]) -> None:
    """Make the masks of a step."""
    for state, mask in zip(states, masks, strict=True):
        state.fill_bitmask(mask)


def advance(states: Sequence[GrammarState], tokens: Sequence[int]) -> None:
    """Follow the tokens of a step."""
    for state, token in zip(states, tokens, strict=True):
        assert state.advance(token)


def measure_masks(
    plugins: PluginSet,
    vocabulary: Vocabulary,
    load: Load,
    tokenizer: Tokenizer,
    config: EngineConfig,
    batches: Sequence[int],
    rounds: int,
) -> list[dict[str, Any]]:
    """Return the cost of a row in each part, by size of the batch."""
    size = len(vocabulary.tokens)
    structured = StructuredOutputs.checked(load.structured)
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in load.texts()]
    manager = GrammarManager(
        Components(plugins, functools.partial(PluginCalls, Activity())),
        config,
        vocabulary,
        size,
        describe_fault=describe_fault,
    )
    backend = plugins.create(
        plugins.get("grammars", config.grammar.use),
        GrammarContext,
        vocabulary=vocabulary,
        vocab_size=size,
    )
    state = backend.compile(structured)
    ops = {use: load_ops(torch.float32, CPU, use) for use in ("auto", "torch")}
    found = []
    for rows in batches:
        fills, advances = measure_backend(state, texts, rows, rounds, size)
        followers = Followers(manager, structured, texts)
        followers.add(rows)
        logits = torch.zeros(rows, size)
        bitmasks: list[float] = []
        applied: dict[str, list[float]] = {use: [] for use in ops}
        manager.mask(followers.plan)
        for number in range(rounds):
            followers.step()
            plan = followers.plan
            start = time.thread_time()
            bitmask = manager.mask(plan)
            bitmasks.append((time.thread_time() - start) * MICROSECONDS / rows)
            assert bitmask is not None
            assert not manager.result(plan, ModelRunnerOutput())
            requests: Any = [SimpleNamespace(request_id=name) for name in bitmask.request_ids]
            for use, one in ops.items():
                if use == "torch" and number >= max(3, rounds // 10):
                    continue
                spent = timed(lambda: mask(bitmask, requests, one, logits), time.thread_time)  # noqa: B023
                applied[use].append(spent / rows)
        found.append({
            "rows": rows, "fill": fills, "advance": advances, "bitmask": bitmasks,
            "native": applied["auto"], "torch": applied["torch"],
        })  # fmt: skip
    manager.close()
    backend.close()
    return found


def mask(bitmask: Any, requests: Any, ops: Any, logits: torch.Tensor) -> None:
    """Do what a worker does with a bitmask."""
    rows = GrammarMask(bitmask, requests, ops)
    rows.apply(logits)
    rows.forbidden([0] * len(logits))


def measure_compiling(
    plugins: PluginSet, vocabulary: Vocabulary, config: EngineConfig
) -> dict[str, Any]:
    """Return the milliseconds until schemas are ready, the first time and from the cache."""
    manager = GrammarManager(
        Components(plugins, functools.partial(PluginCalls, Activity())),
        config,
        vocabulary,
        len(vocabulary.tokens),
        describe_fault=describe_fault,
    )
    given = [StructuredOutputs.checked({"json": schema}) for schema in schemas()]
    tag = StructuredOutputs.checked({"choice": ["yes", "no"]})
    found: dict[str, Any] = {"vocabulary": timed(lambda: opened(manager, "a", tag)) / 1e3}
    for when in ("first", "cached"):
        found[when] = []
        for number, one in enumerate(given):
            with contextlib.suppress(RequestError):  # too large for a backend; the count shows it
                call = functools.partial(opened, manager, f"{when}{number}", one)
                found[when].append(timed(call) / 1e3)
    manager.close()
    return found


def watched() -> Timers:
    """Return timers of what grammars add to a step, inactive; for engines made afterwards."""
    timers = Timers()
    for owner, method, part in (
        (GrammarManager, "mask", "bitmask"),
        (GrammarManager, "result", "bitmask"),
        (GrammarMask, "__init__", "apply"),
        (GrammarMask, "apply", "apply"),
        (GrammarMask, "forbidden", "apply"),
        (LLMEngine, "step", "step"),
    ):
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
    engines = {name: LLM(model, config=config, progress=False) for name in sides}
    for name, llm in engines.items():
        limit = WARM_UP + 3 * steps + 50
        params = SamplingParams(temperature=1.0, seed=1, max_tokens=limit, **sides[name])
        for index in range(running):
            prompt = random.Random(index).choices(range(100, 40_000), k=64)
            llm.llm_engine.add_request(str(index), prompt, params)
        while len(llm.llm_engine.step()) < running:
            pass
        for _ in range(WARM_UP):
            llm.llm_engine.step()
    spent: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(2 * steps):
        for name, llm in engines.items():
            spent[name].append(timed(llm.llm_engine.step) / 1e3)
    timers.seconds.clear()
    timers.active = True
    for _ in range(steps):
        assert len(engines["structured"].llm_engine.step()) == running
    timers.active = False
    for llm in engines.values():
        llm.close()
    whole = sum(timers.seconds.values())
    ratios = (a / b - 1 for a, b in zip(spent["structured"], spent["free"], strict=True))
    return {
        **{name: statistics.median(times) for name, times in spent.items()},
        "difference": statistics.median(ratios),
        **{part: timers.seconds[part] / whole for part in ("bitmask", "apply")},
    }


def show_masks(results: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    """Print what masks cost."""
    parts = ("fill", "advance", "bitmask", "native", "torch")
    rows = [
        [f"{vocabulary} {name}", str(result["rows"]), *(short(result[part]) for part in parts)]
        for vocabulary, loads in results.items()
        for name, listed in loads.items()
        for result in listed
    ]
    heads = ("vocabulary, grammar", "rows", "mask", "token", "bitmask", "kernels", "torch")
    show_table("microseconds per row: median of the steps (the slowest step)", heads, rows)


def short(values: list[float]) -> str:
    """Return median and maximum."""
    return f"{statistics.median(values):.1f} ({max(values):.0f})"


def show_compiling(found: dict[str, Any], backend: str) -> None:
    """Print compile times."""
    for vocabulary, result in found.items():
        for when in ("first", "cached"):
            times = result[when]
            print(
                f"{backend}, {vocabulary} tokens, {len(times)} schemas, {when}: "
                f"p50 {statistics.median(times):.2f} ms, max {max(times):.2f} ms"
            )
        once = result["vocabulary"]
        print(f"{backend}, {vocabulary} tokens: once, for the vocabulary {once:.0f} ms")


def show_step(name: str, running: str, found: dict[str, float]) -> None:
    """Print the share of grammars."""
    print(
        f"{name}, {running} running: a step takes {found['free']:.2f} ms without grammars, "
        f"{found['structured']:.2f} ms with ({found['difference']:+.1%}); the bitmask is "
        f"{found['bitmask']:.2%} of it, its application {found['apply']:.2%} (aim: 2% together)"
    )


def all_masks(
    plugins: PluginSet,
    vocabularies: dict[str, Vocabulary],
    tokenizer: Tokenizer,
    config: EngineConfig,
    options: argparse.Namespace,
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Measure the part masks, on one thread; return it by vocabulary and grammar."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {
            size: {
                name: measure_masks(
                    plugins, vocabulary, LOADS[name], tokenizer, config, options.batches,
                    options.rounds,
                )
                for name in options.loads
            }
            for size, vocabulary in vocabularies.items()
        }  # fmt: skip
    finally:
        torch.set_num_threads(threads)


def all_steps(options: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    """Measure and show the part step; return it by schema and number of requests."""
    timers = watched()
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name, items in OBJECTS.items():
        array = {"type": "array", "items": items, "minItems": 1000}
        structured = {"json": array, "backend": options.backend}
        for running in options.running:
            found = measure_step(timers, structured, running, options.rounds, options.model)
            results.setdefault(name, {})[str(running)] = found
            show_step(name, str(running), found)
    return results


def main() -> None:
    """Parse arguments and run."""
    parser = parser_of(__doc__, rounds=100, peers=False)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--sizes", nargs="+", type=int, default=[49_152, 128_256])
    parser.add_argument("--running", nargs="+", type=int, default=[1, 32], help="in the part step")
    parser.add_argument("--backend", default=GrammarConfig().use)
    parser.add_argument("--model", default="smollm2", help="of the part step")
    options = parser.parse_args()
    result: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "backend": options.backend}
    enabled = PluginsConfig(enable=enabled_for(options.backend))
    config = EngineConfig(grammar=GrammarConfig(use=options.backend), plugins=enabled)
    plugins = resolve_plugins(config)
    tokenizer = demo_tokenizer(plugins)
    vocabularies = {str(size): enlarged(tokenizer.vocabulary(), size) for size in options.sizes}
    if "masks" in options.parts:
        result["masks"] = all_masks(plugins, vocabularies, tokenizer, config, options)
        show_masks(result["masks"])
    if "compile" in options.parts:
        result["compile"] = {
            size: measure_compiling(plugins, vocabulary, config)
            for size, vocabulary in vocabularies.items()
        }
        show_compiling(result["compile"], options.backend)
    if "step" in options.parts:
        result["step"] = all_steps(options)
    save(options.json, result)


if __name__ == "__main__":
    main()
