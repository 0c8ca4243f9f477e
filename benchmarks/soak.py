"""A server under load for minutes, with clients that go away, plugins that fail, engines that die.

    python benchmarks/soak.py
    python benchmarks/soak.py --model smollm2 --seconds 60 --json result.json
    python benchmarks/soak.py --url http://127.0.0.1:8000 --pid 4711 --faulty 0
    python benchmarks/soak.py engines --seconds 600
    python benchmarks/soak.py engines --seconds 60 --floods without --log server.log

Without `--url` it starts `hardpoint serve`, by default on the scripted model. Streams send seeded
requests. Every whole answer is compared with the one that the same request got alone, before the
load. A model whose results depend on the batch may differ in near ties, which `--different` allows
for. The last line is the verdict; exit code: 1 if there is a problem.

leaks: a logits processor fails on demand. Some streams go away, before the head of the answer, at
    its first token, mid stream, half-closed or within their own body, and some use the processor
    that fails: neighbors of failing requests get the same tokens. When the load has ended and the
    server is idle, nothing of it may be left: no request, no block of the KV cache, no process,
    descriptor or thread, and not more memory than `--memory` allows.
engines: a server with three engines and two keys. The quiet key sends requests on a few streams,
    some with a deadline (`timeout`), while an engine is killed (SIGKILL) every 20 seconds, and the
    number of engines changes between 2 and 4 every 30 seconds (`/engines/scale`). The other key
    sends as many requests as it can; admission limits (`requests_per_minute`,
    `scheduler.max_waiting`, `scheduler.max_waiting_tokens`) reject most of them. Two runs are made,
    with the flood and without it, each with a server of its own. Wrong are answers with other
    tokens than without disturbance; after a deadline, an answer is a prefix of them (each token is
    one letter). Lost are requests that ended with an error, or not within two minutes, and late
    are ends more than a second after a deadline. The p99 of the quiet key's first tokens and of
    the gaps between tokens may be `--ratio` times as long with the flood as without it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import signal
import string
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from engines import SCRIPTED
from http_streams import Client, allow_descriptors, run_on_uvloop, running_server
from options import options_of, save
from server_state import TASKS, holdings_at_rest, leaks, metrics_when_idle
from soak_load import DEADLINES_S, REQUEST_S, Counts, Point, Traffic, disconnect

FAILING = "failing_processor:FailsAt"
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_QUESTIONS = 40
_SIGMA = 0.4
"""Of the logarithm of lengths: 95 % are from 0.46 to 2.2 times the median."""
_CHECKED_AFTER = 8
_WARM_UP_S, _KILL_S, _SCALE_S = 60.0, 20.0, 30.0
_SHOWN = 10


@dataclass(frozen=True)
class Scenario:
    """A server and the load on it.

    Attributes:
        settings: settings of the server.
        traffic: traffic by key, from the options.
        likely: characters of the scripted model's texts; "" for all.
        has_engines: whether engines are killed, their number changes, and keys are checked;
            otherwise, whatever is left in the server is a problem.
    """

    settings: Mapping[str, str]
    traffic: Callable[[argparse.Namespace], dict[str, Traffic]]
    likely: str = ""
    has_engines: bool = False


SCENARIOS = {
    "leaks": Scenario(
        {"plugins.quarantine_after": "0", "stats.sinks": '["prometheus"]'},
        lambda options: {
            "all": Traffic(
                options.streams or 64, leaving=options.disconnects, failing=options.faulty
            )
        },
    ),
    "engines": Scenario(
        {
            "parallel.data": "3",
            "executor.threads": "1",
            "engine.max_restarts_per_minute": "30",
            "engine.max_resumes": "10",
            "scheduler.policy": "fair",
            "scheduler.max_num_seqs": "16",
            "scheduler.max_waiting": "64",
            "scheduler.max_waiting_tokens": "8192",
            "kv_cache.num_blocks": "2000",
        },
        lambda options: {
            "quiet": Traffic(options.streams or 4, timed=0.2, pause_s=0.05, retry_s=0.05),
            "flood": Traffic(32, timed=0.2, retry_s=0.2, per_minute=600),
        },
        likely=string.ascii_letters,
        has_engines=True,
    ),
}


@dataclass(frozen=True)
class Target:
    """A server that runs; the process and the admin socket are known if it was started here."""

    url: str
    pid: int | None = None
    admin: str = ""

    def client(self, key: str) -> Client:
        """Return a client with a key."""
        return Client(self.url, {"Authorization": f"Bearer {secret_of(key)}"})


def secret_of(key: str) -> str:
    """Return the secret of a key."""
    return key[0] * 32


class Soak:
    """A load on a server, and its checks."""

    def __init__(
        self, target: Target, traffic: dict[str, Traffic], options: argparse.Namespace
    ) -> None:
        """Make one for a server, with traffic by key."""
        self._target, self._traffic, self._options = target, traffic, options
        self._path, self._numbers = PATHS[options.endpoint], itertools.cycle((4, 2, 3))
        self._questions: list[dict[str, Any]] = []
        self._answers: list[str] = []

    async def run(self, scenario: Scenario) -> dict[str, Any]:
        """Run all phases; return the figures and the problems."""
        options, pid, problems = self._options, self._target.pid, []
        client = self._target.client(next(iter(self._traffic)))
        self._questions = self._draw(await self._model(client))
        self._answers = await self._ask_alone(client, _QUESTIONS)
        if scenario.has_engines:
            counts, figures = await self._load(options.seconds, options.seed, scenario)
            await client.close()
            return {**figures, "problems": counts.problems(options.different)}
        await self._load(min(_WARM_UP_S, 0.2 * options.seconds), options.seed, scenario)
        first_metrics, left = await metrics_when_idle(client)
        problems += [f"left after the warm-up: {leftover}" for leftover in left]
        before = after = None
        if pid is not None:
            before = await holdings_at_rest(pid, lambda old, new: not leaks(old, new, 1.0))
        counts, figures = await self._load(options.seconds, options.seed + 1, scenario)
        metrics, left = await metrics_when_idle(client)
        problems += [f"left after the load: {leftover}" for leftover in left]
        if pid is not None and before is not None:
            base, limit = before, options.memory
            after = await holdings_at_rest(pid, lambda _, new: not leaks(base, new, limit))
            problems += leaks(base, after, limit)
        tasks = [values.get(TASKS, 0.0) for values in (first_metrics, metrics)]
        if TASKS in first_metrics and tasks[1] > tasks[0]:
            problems.append(f"{TASKS}: {tasks[0]:g} before, {tasks[1]:g} after")
        for number, text in enumerate(await self._ask_alone(client, _CHECKED_AFTER)):
            if text != self._answers[number]:
                problems.append(f"question {number} has another answer after the load")
        await client.close()
        problems += counts.problems(options.different)
        outcome = {"metrics": metrics, "before": before, "after": after, "problems": problems}
        return figures | outcome

    async def _model(self, client: Client) -> str:
        """Return the model that the options name for a server that runs, or that it lists first."""
        if self._options.url and self._options.model:
            return str(self._options.model)
        status, text = await client.ask("GET", "/v1/models")
        if status != 200:
            raise SystemExit(f"soak.py: GET /v1/models: {status} {text}")
        return str(json.loads(text)["data"][0]["id"])

    def _draw(self, model: str) -> list[dict[str, Any]]:
        rng, options = random.Random(self._options.seed), self._options

        def length(median: int) -> int:
            return max(1, round(median * math.exp(rng.gauss(0, _SIGMA))))

        questions: list[dict[str, Any]] = []
        for number in range(_QUESTIONS):
            text = " ".join(rng.choices(string.ascii_lowercase, k=length(options.input_tokens)))
            message = {"messages": [{"role": "user", "content": text}]}
            prompt = message if options.endpoint == "chat" else {"prompt": text}
            body = {"model": model, "max_tokens": length(options.output_tokens), "stream": True}
            questions.append({**body, **prompt, "temperature": 1.0, "seed": number})
        return questions

    async def _ask_alone(self, client: Client, count: int) -> list[str]:
        """Return the answers to the first questions, asked one after the other."""
        texts = []
        for question in self._questions[:count]:
            timeline = await client.send(self._path, question, REQUEST_S)
            if timeline.error:
                raise SystemExit(f"soak.py: a request without any load failed: {timeline.error}")
            texts.append(timeline.text)
        return texts

    async def _load(
        self, seconds: float, seed: int, scenario: Scenario
    ) -> tuple[Counts, dict[str, Any]]:
        """Send the load; return its counts and figures."""
        counts, clients = Counts(), {key: self._target.client(key) for key in self._traffic}
        end, cpu, start = time.monotonic() + seconds, time.process_time(), time.perf_counter()

        async def stream(key: str, index: int) -> None:
            rng = random.Random(f"{seed}, {key}, {index}")
            while time.monotonic() < end:
                await self._send(clients[key], key, rng, counts)

        async def repeat(period: float, act: Callable[[Counter[str]], Awaitable[None]]) -> None:
            while True:
                await asyncio.sleep(period)
                await act(counts.events)

        disturbances = {_KILL_S: self._kill, _SCALE_S: self._scale} if scenario.has_engines else {}
        tasks = [asyncio.create_task(repeat(*pair)) for pair in disturbances.items()]
        numbers = {key: range(traffic.streams) for key, traffic in self._traffic.items()}
        await asyncio.gather(*(stream(key, index) for key in numbers for index in numbers[key]))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in clients.values():
            await client.close()
        taken = time.perf_counter() - start
        share = (time.process_time() - cpu) / taken
        return counts, {**counts.figures(taken), "client_cpu_share": share}

    async def _send(self, client: Client, key: str, rng: random.Random, counts: Counts) -> None:
        """Send a request of a kind that is drawn, and wait for the pause after it."""
        traffic, number, drawn = self._traffic[key], rng.randrange(_QUESTIONS), rng.random()
        body, is_failing, timeout = self._questions[number], False, None
        if drawn < traffic.leaving:
            point = rng.choice(list(Point))
            try:
                await disconnect(client, self._path, body, point, rng)
                counts.left[point.value] += 1
            except OSError:
                counts.lost[f"{key}: a refused connection"] += 1
            return
        if drawn < traffic.leaving + traffic.failing:
            is_failing, at = True, rng.randrange(2 * int(body["max_tokens"]))
            body = {**body, "plugin_args": {"fails_at": {"tokens": at}}}
        elif drawn < traffic.leaving + traffic.failing + traffic.timed:
            timeout = rng.choice(DEADLINES_S)
            body = {**body, "timeout": timeout}
        timeline = await client.send(self._path, body, REQUEST_S)
        kind = {"is_limited": bool(traffic.per_minute), "is_failing": is_failing}
        counts.record(key, number, self._answers[number], timeline, timeout=timeout, **kind)
        if pause := traffic.retry_s if timeline.error else traffic.pause_s:
            await asyncio.sleep(rng.uniform(0.5, 1.5) * pause)

    async def _kill(self, events: Counter[str]) -> None:
        engines = []
        for child in psutil.Process(self._target.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name().startswith("EngineCore"):
                    engines.append(child.pid)
        if engines:
            with contextlib.suppress(ProcessLookupError):
                os.kill(random.choice(engines), signal.SIGKILL)
                events["kills"] += 1

    async def _scale(self, events: Counter[str]) -> None:
        number, client = next(self._numbers), Client(self._target.admin)
        body = {"engines": number, "drain_seconds": 1.0}
        status, text = await client.ask("POST", "/engines/scale", body)
        await client.close()
        events[f"scale({number}): {status}{'' if status == 200 else f': {text[:200]}'}"] += 1


@contextlib.contextmanager
def server(
    scenario: Scenario, traffic: Mapping[str, Traffic], options: argparse.Namespace
) -> Iterator[Target]:
    """Give the server, which is started if the options have no URL."""
    if options.url:
        yield Target(options.url, options.pid)
        return
    from hardpoint.testing import write_scripted_model

    with tempfile.TemporaryDirectory() as name:
        folder, settings, model = Path(name), dict(scenario.settings), options.model
        admin = str(folder / "admin.sock")
        if not model:
            sizes = {"max_position_embeddings": 2048, "likely": scenario.likely}
            model = str(write_scripted_model(folder / "scripted", **sizes))
            settings |= SCRIPTED
        enabled = settings.get("plugins.enable", "[]")[1:-1]
        settings["plugins.enable"] = f'["{FAILING}", {enabled}]'
        if scenario.has_engines:
            lines = []
            for key, key_traffic in traffic.items():
                lines += ["[[key]]", f'name = "{key}"', f'key = "{secret_of(key)}"']
                lines += [f"requests_per_minute = {key_traffic.per_minute}"] * bool(
                    key_traffic.per_minute
                )
            keys = folder / "keys.toml"
            keys.touch(0o600)
            keys.write_text("\n".join(lines) + "\n")
            settings |= {"server.keys_file": str(keys), "server.admin": f"unix:{admin}"}
        settings |= dict(setting.split("=", 1) for setting in options.set or ())
        here = str(Path(__file__).parent)  # the failing plugin is imported from it
        path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path}
        chosen = [f"{setting}={value}" for setting, value in settings.items()]
        with running_server(model, chosen, environment=environment) as started:
            try:
                yield Target(started.url, started.pid, admin)
            finally:
                if options.log:
                    output = Path(f"/proc/{started.pid}/fd/2").read_bytes()
                    options.log.with_suffix(f".{len(traffic)}.log").write_bytes(output)


def print_report(result: dict[str, Any]) -> None:
    """Print the figures and the problems of a run."""
    for kind in ("ends", "lost", "failed", "left", "events"):
        for name, count in sorted(result[kind].items()):
            print(f"  {kind}: {name}: {count}")
    for kind in ("wrong", "late"):
        for description in result[kind][:_SHOWN]:
            print(f"  {kind}: {description}")
    for key, times in result["times"].items():
        cells = (f"{name.upper()} {t['p50']:.1f} / {t['p99']:.1f}" for name, t in times.items())
        print(
            f"  {key}: {result['rates'][key]:.1f} per second; p50 / p99 in ms: {', '.join(cells)}"
        )
    print(f"  {result['different']} wrong of {result['compared']} answers")
    print(f"  this client took {result['client_cpu_share']:.0%} of a core")
    for name, value in (result.get("before") or {}).items():
        print(f"  {name}: {value:.0f} before, {result['after'][name]:.0f} after")
    for problem in result["problems"]:
        print(f"PROBLEM: {problem}")


def slowed(runs: Mapping[str, dict[str, Any]], ratio: float) -> list[str]:
    """Print the ratios of the quiet key's times with and without the flood; return the problems."""
    problems = []
    for name in ("ttft", "itl") * (len(runs) == 2):
        flooded, plain = (run["times"]["quiet"][name]["p99"] for run in runs.values())
        slowdown = flooded / max(plain, 1e-6)
        print(f"quiet key, {name.upper()}: p99 with the flood / without: {slowdown:.2f}")
        if slowdown > ratio:
            problems.append(f"{name.upper()} of the quiet key: {slowdown:.2f} times as long")
    return problems


def main() -> None:
    """Parse arguments, run, and report."""
    options = options_of(
        __doc__,
        scenarios=SCENARIOS,
        url=(str, "of a server that runs; otherwise one is started"),
        pid=(int, "its process, to look at its resources"),
        model=(str, "to start a server with; default: the scripted model"),
        set=(list[str], "PATH=VALUE: a setting of the server"),
        endpoint=("completions", "or chat"),
        seconds=(300.0, "duration of each load"),
        streams=(int, "default: 64; of engines: 4"),
        disconnects=(0.1, "share of the requests"),
        faulty=(0.05, "share of the requests"),
        different=(0.0, "share of the answers that may be wrong"),
        memory=(32.0, "MiB of growth that are allowed"),
        input_tokens=(60, "median"),
        output_tokens=(40, "median"),
        seed=0,
        floods=(["with", "without"], "runs of engines"),
        ratio=(3.0, "bound of the ratios of p99"),
        log=(Path, "write the servers' logs here, with the number of keys"),
    )
    scenario = SCENARIOS[options.scenario]
    runs: dict[str, dict[str, Any]] = {}
    for flood in options.floods if scenario.has_engines else ["without"]:
        traffic = scenario.traffic(options)
        if flood == "without":
            traffic.pop("flood", None)
        allow_descriptors(2 * sum(key_traffic.streams for key_traffic in traffic.values()) + 256)
        with server(scenario, traffic, options) as target:
            runs[flood] = run_on_uvloop(Soak(target, traffic, options).run(scenario))
        print(f"{options.scenario}, {flood} a flood, {options.seconds:g} s")
        print_report(runs[flood])
    problems = [problem for run in runs.values() for problem in run["problems"]]
    problems += slowed(runs, options.ratio)
    print(f"soak: {'FAILED' if problems else 'PASSED: nothing is left, no answer is wrong'}")
    save(options.json, runs)
    if problems:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
