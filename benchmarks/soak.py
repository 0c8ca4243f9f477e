"""A server under load for minutes, with clients that go away and a plugin that fails.

    python benchmarks/soak.py
    python benchmarks/soak.py --model smollm2 --seconds 60 --json result.json
    python benchmarks/soak.py --url http://127.0.0.1:8000 --pid 4711 --faulty 0

Without `--url` it starts `hardpoint serve`, by default on the scripted model, with a logits
processor that fails on demand. Streams send seeded requests; some of them go away, before the head
of the answer, at its first token, mid stream, half-closed or within their own body, and some use
the processor that fails. Every whole answer is compared with the one that the same request got
alone, before the load: neighbours of failing requests get the same tokens. A model whose results
depend on the batch may differ in near ties, which `--different` allows for.

When the load has ended and the server is idle, nothing of it may be left: no request, no block of
the KV cache, no process, descriptor or thread, and not more memory than `--memory` allows. The last
line is the verdict; exit code: 1 if something was left or an answer was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import math
import os
import random
import string
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from http_streams import (
    Client,
    Timeline,
    allow_descriptors,
    run_on_uvloop,
    running_server,
)
from soak_parts.disconnects import Point, disconnect
from soak_parts.ends import percentiles
from soak_parts.holdings import Holdings
from soak_parts.metrics import IDLE, OPTIONAL, read_metrics

SETTINGS = {
    "plugins.quarantine_after": "0",  # the processor keeps failing, until the end
    "stats.sinks": '["prometheus"]',
}
SCRIPTED = {
    "dtype": "float32",
    "load.use": "dummy",
    "attention.use": "hardpoint.testing:HistoryAttention",
}
SCRIPTED_MODEL = '{use="hardpoint.testing:ScriptedModel", name="ScriptedForCausalLM"}'
FAILING = "soak_parts.faulty:FailsAt"
_REQUEST_S = 120.0
_IDLE_S = 60.0
_IDLE_PERIOD_S = 0.2
_REST_S = 15.0
_REST_PERIOD_S = 0.5
_QUESTIONS = 40
_SIGMA = 0.4
"""Of the logarithm of lengths: 95 % are from 0.46 to 2.2 times the median."""
_CHECKED_AFTER = 8
_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass
class Counts:
    """The results of the load.

    Attributes:
        whole: timelines of the requests that were read to their end.
        compared: answers that were compared.
        wrong: requests with another answer than alone, by number of the question.
        failed: failures of the requests that use the failing processor, by kind.
        survived: such requests that ended well, since they were shorter.
        left: clients that went away, by where.
        refused_connections: number of refused connections of clients that wanted to go away.
    """

    whole: list[Timeline] = field(default_factory=list)
    compared: int = 0
    wrong: Counter[int] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    survived: int = 0
    left: Counter[str] = field(default_factory=Counter)
    refused_connections: int = 0


class Soak:
    """A load on a server, and its checks."""

    def __init__(self, url: str, model: str, options: argparse.Namespace) -> None:
        """Make one.

        Args:
            url: address of the server.
            model: its model, as the server knows it.
            options: options of the command line.
        """
        self._url, self._path = url, _PATHS[options.endpoint]
        self._options = options
        rng = random.Random(options.seed)

        def length(median: int) -> int:
            return max(1, round(median * math.exp(rng.gauss(0, _SIGMA))))

        self._questions: list[dict[str, Any]] = []
        self._answers: list[str] = []
        for number in range(_QUESTIONS):
            text = " ".join(rng.choices(string.ascii_lowercase, k=length(options.input_tokens)))
            is_chat = options.endpoint == "chat"
            self._questions.append(
                {
                    "model": model,
                    "max_tokens": length(options.output_tokens),
                    "stream": True,
                    "temperature": 1.0,
                    "seed": number,
                    **({"messages": [{"role": "user", "content": text}]} if is_chat else {}),
                    **({} if is_chat else {"prompt": text}),
                }
            )

    async def ask_alone(self, client: Client, numbers: range) -> list[str]:
        """Return the answers to questions that are asked one after the other.

        Raises:
            SystemExit: one failed.
        """
        texts = []
        for number in numbers:
            timeline = await client.send(self._path, self._questions[number], _REQUEST_S)
            if timeline.error:
                raise SystemExit(f"soak.py: a request without any load failed: {timeline.error}")
            texts.append(timeline.text)
        return texts

    async def prepare(self) -> None:
        """Keep the answers that are right."""
        client = Client(self._url)
        self._answers = await self.ask_alone(client, range(_QUESTIONS))
        client.close()

    async def load(self, seconds: float, seed: int) -> tuple[Counts, float]:
        """Send the load; return its counts and the share of a core that it took here."""
        counts, client = Counts(), Client(self._url)
        end, cpu, start = time.monotonic() + seconds, time.process_time(), time.perf_counter()

        async def stream(index: int) -> None:
            rng = random.Random(f"{seed}, {index}")
            while time.monotonic() < end:
                await self._one(client, rng, counts)

        await asyncio.gather(*(stream(index) for index in range(self._options.streams)))
        client.close()
        return counts, (time.process_time() - cpu) / (time.perf_counter() - start)

    async def _one(self, client: Client, rng: random.Random, counts: Counts) -> None:
        number = rng.randrange(_QUESTIONS)
        drawn = rng.random()
        if drawn < self._options.disconnects:
            point = rng.choice(list(Point))
            chunks = int(self._questions[number]["max_tokens"])
            try:
                request = client.request("POST", self._path, self._questions[number])
                await disconnect(client, request, point, rng, chunks)
                counts.left[point.value] += 1
            except OSError:
                counts.refused_connections += 1
        elif drawn < self._options.disconnects + self._options.faulty:
            at = rng.randrange(2 * int(self._questions[number]["max_tokens"]))
            extra = {"plugin_args": {"fails_at": {"tokens": at}}}
            body = {**self._questions[number], **extra}
            timeline = await client.send(self._path, body, _REQUEST_S)
            if timeline.error:
                counts.failed[timeline.error] += 1
            else:
                counts.survived += 1
                self._compare(number, timeline, counts)
        else:
            timeline = await client.send(self._path, self._questions[number], _REQUEST_S)
            counts.whole.append(timeline)
            if not timeline.error:
                self._compare(number, timeline, counts)

    def _compare(self, number: int, timeline: Timeline, counts: Counts) -> None:
        counts.compared += 1
        counts.wrong[number] += timeline.text != self._answers[number]

    async def wait_until_idle(self) -> tuple[dict[str, float], list[str]]:
        """Wait until no request and no block is in use; return the metrics, and what is left."""
        deadline = time.monotonic() + _IDLE_S
        while True:
            client = Client(self._url)
            found = await read_metrics(client)
            client.close()
            left = [
                f"{name}: not in /metrics" if name not in found else f"{name}: {found[name]:g}"
                for name in IDLE
                if found.get(name, -1.0) != 0
            ]
            if not left or time.monotonic() > deadline:
                return found, left
            await asyncio.sleep(_IDLE_PERIOD_S)

    async def check_again(self) -> list[str]:
        """Return which questions get another answer than before the load."""
        client = Client(self._url)
        numbers = range(_CHECKED_AFTER)
        again = await self.ask_alone(client, numbers)
        client.close()
        different = [number for number in numbers if again[number] != self._answers[number]]
        return [f"question {number} has another answer after the load" for number in different]


async def holdings_at_rest(pid: int, is_done: Callable[[Holdings, Holdings], bool]) -> Holdings:
    """Return the server's resources, as soon as it is at rest, or after a while.

    Args:
        pid: process id of the server.
        is_done: a predicate of what it held just before, and what it holds.
    """
    deadline = time.monotonic() + _REST_S
    last = Holdings.of(pid)
    while True:
        await asyncio.sleep(_REST_PERIOD_S)
        found = Holdings.of(pid)
        if is_done(last, found) or time.monotonic() > deadline:
            return found
        last = found


async def find_model(url: str) -> str:
    """Return the first model that a server lists."""
    client = Client(url)
    status, content = await client.ask(client.request("GET", "/v1/models"))
    client.close()
    if status != 200:
        raise SystemExit(f"soak.py: GET /v1/models: {status} {content.decode()}")
    return str(json.loads(content)["data"][0]["id"])


async def run(url: str, pid: int | None, options: argparse.Namespace) -> dict[str, Any]:
    """Run all phases; return the figures and what is wrong."""
    model = options.model if options.url and options.model else await find_model(url)
    soak = Soak(url, model, options)
    await soak.prepare()
    before = None
    warm_up = min(60.0, 0.2 * options.seconds)
    print(f"warm-up of {warm_up:g} s, then {options.seconds:g} s", flush=True)
    await soak.load(warm_up, options.seed)
    first_metrics, left = await soak.wait_until_idle()
    problems = [f"left after the warm-up: {what}" for what in left]
    if pid is not None:
        before = await holdings_at_rest(pid, lambda old, new: not old.leaks(new, 1.0))
    start = time.perf_counter()
    counts, cpu_share = await soak.load(options.seconds, options.seed + 1)
    metrics, left = await soak.wait_until_idle()
    problems += [f"left after the load: {what}" for what in left]
    after = None
    if pid is not None and before is not None:
        reference = before
        after = await holdings_at_rest(pid, lambda _, new: not new.leaks(reference, options.memory))
        problems += after.leaks(before, options.memory)
    for name in OPTIONAL:
        if metrics.get(name, 0.0) > first_metrics.get(name, metrics.get(name, 0.0)):
            problems.append(f"{name}: {first_metrics[name]:g} before, {metrics[name]:g} after")
    problems += await soak.check_again()
    problems += wrong(counts, options.different)
    return {
        **figures(counts.whole, time.perf_counter() - start),
        "client_cpu_share": cpu_share,
        "compared": counts.compared,
        "different": counts.wrong.total(),
        "left": dict(counts.left),
        "faulty": {"failed": dict(counts.failed), "ended_well": counts.survived},
        "metrics": metrics,
        "before": before and dataclasses.asdict(before),
        "after": after and dataclasses.asdict(after),
        "problems": problems,
    }


def figures(timelines: Sequence[Timeline], seconds: float) -> dict[str, Any]:
    """Return numbers of requests, and percentiles in seconds of the times of whole answers."""
    good = [timeline for timeline in timelines if not timeline.error]
    times = {
        "ttft": [one.first - one.sent for one in good if one.chunks],
        "tpot": [(one.last - one.first) / (one.chunks - 1) for one in good if one.chunks > 1],
        "itl": [gap for one in good for gap in one.gaps],
        "e2e": [one.ended - one.sent for one in good],
    }
    return {
        "requests": len(timelines),
        "finished": len(good),
        "failed": len(timelines) - len(good),
        "errors": dict(Counter(one.error for one in timelines if one.error)),
        "request_rate": len(good) / seconds,
        **{name: percentiles(values) for name, values in times.items()},
    }


def wrong(counts: Counts, allowed: float) -> list[str]:
    """Return the problems that the load's answers show."""
    problems = []
    if failed := sum(bool(timeline.error) for timeline in counts.whole):
        problems.append(f"{failed} requests without a fault of their own failed")
    if counts.refused_connections:
        problems.append(f"{counts.refused_connections} connections were refused")
    different = counts.wrong.total()
    if different > allowed * counts.compared:
        problems.append(f"{different} of {counts.compared} answers differ from those without load")
    if not counts.compared:
        problems.append("no answer was compared")
    return problems


def print_report(result: dict[str, Any], seconds: float) -> None:
    """Print the figures and the verdict."""
    times = ", ".join(
        f"{name.upper()} {1e3 * result[name]['p50']:.1f} / {1e3 * result[name]['p99']:.1f}"
        for name in ("ttft", "tpot", "itl", "e2e")
    )
    print(
        f"soak of {seconds:g} s: {result['finished']} whole requests, "
        f"{result['request_rate']:.1f} per second; p50 / p99 in ms: {times}"
    )
    for kind, count in result["errors"].items():
        print(f"{count} failed: {kind}")
    print(f"this client took {result['client_cpu_share']:.0%} of a core")
    gone = ", ".join(f"{count} {where}" for where, count in sorted(result["left"].items()))
    print(f"clients that went away: {gone or 'none'}")
    faulty = result["faulty"]
    for kind, count in faulty["failed"].items():
        print(f"failing processor: {count} {kind}")
    print(f"failing processor: {faulty['ended_well']} ended before it failed")
    share = result["different"] / result["compared"] if result["compared"] else 0.0
    print(f"answers that differ from those without load: {share:.2%} of {result['compared']}")
    if result["before"]:
        for name, value in result["before"].items():
            print(f"{name}: {value:.0f} before, {result['after'][name]:.0f} after")
    for problem in result["problems"]:
        print(f"PROBLEM: {problem}")
    verdict = "FAILED" if result["problems"] else "PASSED: nothing is left, no answer is wrong"
    print(f"soak: {verdict}")


@contextlib.contextmanager
def server(options: argparse.Namespace) -> Iterator[tuple[str, int | None]]:
    """Give the URL and the process of a server, which is started if none is given."""
    if options.url:
        yield options.url, options.pid
        return
    with tempfile.TemporaryDirectory() as folder:
        enabled = [json.dumps(FAILING)]
        settings = {**SETTINGS}
        model = options.model
        if not model:
            from hardpoint.testing import write_scripted_model

            model = str(write_scripted_model(Path(folder), max_position_embeddings=2048))
            settings |= SCRIPTED
            enabled.append(SCRIPTED_MODEL)
        settings["plugins.enable"] = f"[{', '.join(enabled)}]"
        settings |= dict(setting.split("=", 1) for setting in options.set)
        chosen = [f"{name}={value}" for name, value in settings.items()]
        here = str(Path(__file__).parent)  # the failing plugin is imported from it
        path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path}
        with running_server(model, chosen, environment=environment) as started:
            yield started.url, started.pid


def main() -> None:
    """Parse arguments, run, and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="of a server that runs; otherwise one is started")
    parser.add_argument("--pid", type=int, help="its process, to look at what it holds")
    parser.add_argument("--model", help="to start a server with; default: the scripted model")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    parser.add_argument("--endpoint", choices=["chat", "completions"], default="completions")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--streams", type=int, default=64)
    share: Callable[[str], float] = float
    parser.add_argument("--disconnects", type=share, default=0.1, help="share of the requests")
    parser.add_argument("--faulty", type=share, default=0.05, help="share of the requests")
    parser.add_argument("--different", type=share, default=0.0, help="share of answers, allowed")
    parser.add_argument("--memory", type=float, default=32.0, help="MiB of growth, allowed")
    parser.add_argument("--input-tokens", type=int, default=60, help="median")
    parser.add_argument("--output-tokens", type=int, default=40, help="median")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    allow_descriptors(2 * options.streams + 256)
    with server(options) as (url, pid):
        result = run_on_uvloop(run(url, pid, options))
    print_report(result, options.seconds)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    if result["problems"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
