"""Several engines behind one server that are killed and scaled, while one key floods it.

    python benchmarks/soak_engines.py --minutes 10
    python benchmarks/soak_engines.py --minutes 1 --without-flood
    python benchmarks/soak_engines.py --minutes 10 --json result.json --log server.log

Starts `hardpoint serve` on the scripted model with three engines and two keys. All answers are
known from a run without disturbance. Then the quiet key sends requests on a few streams for M
minutes, some with a deadline (`timeout`), while an engine is killed (SIGKILL) every 20 seconds,
and the number of engines changes between 2 and 4 every 30 seconds (`/engines/scale`). The other key
sends as many requests as it can; admission limits (`requests_per_minute`, `scheduler.max_waiting`,
`scheduler.max_waiting_tokens`) refuse most of them.

Two runs are made: with the flood, and without it, each with a server of its own;
`--with-flood` and `--without-flood` choose one of them. Counted are

lost: requests that ended with an error, or not within two minutes. The end by a request's own
    deadline is not an error, and neither is the refusal of a request of the flooding key.
wrong: answers with other tokens than without disturbance. After a deadline, an answer is a
    prefix of them. Each token is one letter, so that texts are compared.
late: ends by a deadline, more than a second after it.

The report has p50 and p99 of the quiet key's first tokens and of the gaps between tokens, and the
ratios of the p99 with and without the flood (bound: 3). Exit code: 1 if a request was lost, wrong
or late, or if a ratio is above `--ratio`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import string
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
from http_streams import Client, RunningServer, Timeline, run_on_uvloop, running_server
from soak_parts.ends import Counts, print_run

from hardpoint.testing import write_scripted_model

KEYS = {"quiet": "q" * 32, "flood": "f" * 32}
_SETTINGS = {
    "dtype": "float32",
    "load.use": "dummy",
    "attention.use": "hardpoint.testing:HistoryAttention",
    "plugins.enable": '[{use="hardpoint.testing:ScriptedModel", name="ScriptedForCausalLM"}]',
    "parallel.data": "3",
    "executor.threads": "1",
    "engine.max_restarts_per_minute": "30",
    "engine.max_resumes": "10",
    "scheduler.policy": "fair",
    "scheduler.max_num_seqs": "16",
    "scheduler.max_waiting": "64",
    "scheduler.max_waiting_tokens": "8192",
    "kv_cache.num_blocks": "2000",
}
_FLOOD_PER_MINUTE = 600
_NUM_QUESTIONS = 60
_DEADLINES_S = (0.1, 0.3, 1.0)
_SHARE_OF_DEADLINES = 0.2
_REQUEST_S = 120.0
_KILL_S, _SCALE_S = 20.0, 30.0
_QUIET_PAUSE_S, _FLOOD_PAUSE_S = 0.05, 0.2


class Disturbed:
    """A load on a server whose engines are killed and scaled."""

    def __init__(self, server: RunningServer, admin: str, options: argparse.Namespace) -> None:
        """Make one for a server, with the path of its admin socket."""
        self._pid, self._options = server.pid, options
        self._clients = {
            key: Client(server.url, {"Authorization": f"Bearer {secret}"})
            for key, secret in KEYS.items()
        }
        self._admin = Client(admin)
        rng = random.Random(options.seed)
        letters = string.ascii_lowercase
        self._questions: list[dict[str, Any]] = [
            {
                "prompt": "".join(rng.choices(letters, k=rng.randint(10, 80))),
                "max_tokens": rng.randint(8, 64),
                "temperature": 1.0,
                "seed": number,
                "ignore_eos": True,
                "stream": True,
            }
            for number in range(_NUM_QUESTIONS)
        ]
        self._answers: list[str] = []

    async def run(self, *, has_flood: bool) -> Counts:
        """Return the counts of the load, after a run without disturbance."""
        for number in range(_NUM_QUESTIONS):
            timeline = await self._ask("quiet", number, None)
            if timeline.error:
                raise SystemExit(f"soak_engines.py: without disturbance: {timeline.error}")
            self._answers.append(timeline.text)
        counts, options = Counts(), self._options
        end = time.monotonic() + 60 * options.minutes
        streams = {"quiet": options.quiet_streams, "flood": has_flood * options.flood_streams}
        disturbances = [
            asyncio.create_task(_repeat(_KILL_S, lambda: self._kill(counts))),
            asyncio.create_task(_repeat(_SCALE_S, lambda: self._scale(counts))),
        ]
        loads = (
            self._stream(key, random.Random(f"{key} {index}"), end, counts)
            for key, number in streams.items()
            for index in range(number)
        )
        await asyncio.gather(*loads)
        for task in disturbances:
            task.cancel()
        await asyncio.gather(*disturbances, return_exceptions=True)
        for client in (*self._clients.values(), self._admin):
            client.close()
        return counts

    async def _stream(self, key: str, rng: random.Random, end: float, counts: Counts) -> None:
        pause = _QUIET_PAUSE_S if key == "quiet" else _FLOOD_PAUSE_S
        while time.monotonic() < end:
            number = rng.randrange(_NUM_QUESTIONS)
            has_deadline = rng.random() < _SHARE_OF_DEADLINES
            timeout = rng.choice(_DEADLINES_S) if has_deadline else None
            timeline = await self._ask(key, number, timeout)
            counts.record(key, number, self._answers[number], timeout, timeline)
            if key == "quiet" or timeline.error:
                await asyncio.sleep(rng.uniform(0.5, 1.5) * pause)

    async def _ask(self, key: str, number: int, timeout: float | None) -> Timeline:
        body = {**self._questions[number]} | ({"timeout": timeout} if timeout else {})
        return await self._clients[key].send("/v1/completions", body, _REQUEST_S)

    async def _kill(self, counts: Counts) -> None:
        engines = []
        for child in psutil.Process(self._pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name().startswith("EngineCore"):
                    engines.append(child.pid)
        if engines:
            with contextlib.suppress(ProcessLookupError):
                os.kill(random.choice(engines), signal.SIGKILL)
                counts.events["kills"] += 1

    async def _scale(self, counts: Counts) -> None:
        number = next(self._numbers)
        body = {"engines": number, "drain_seconds": 1.0}
        status, content = await self._admin.ask(self._admin.request("POST", "/engines/scale", body))
        error = "" if status == 200 else f": {content.decode()[:200]}"
        counts.events[f"scale({number}): {status}{error}"] += 1

    _numbers = itertools.cycle((4, 2, 3))


async def _repeat(seconds: float, act: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(seconds)
        await act()


def soak(options: argparse.Namespace, *, has_flood: bool) -> dict[str, Any]:
    """Run a server and the load on it; return the figures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_scripted_model(folder / "scripted", likely=string.ascii_letters)
        keys = folder / "keys.toml"
        keys.write_text(
            "".join(
                f'[[key]]\nname = "{key}"\nkey = "{secret}"\ntags = {{ tenant = "{key}" }}\n'
                + (f"requests_per_minute = {_FLOOD_PER_MINUTE}\n" if key == "flood" else "")
                for key, secret in KEYS.items()
            )
        )
        keys.chmod(0o600)
        admin = folder / "admin.sock"
        settings = {**_SETTINGS, "server.keys_file": str(keys), "server.admin": f"unix:{admin}"}
        settings |= dict(setting.split("=", 1) for setting in options.set)
        chosen = [f"{name}={value}" for name, value in settings.items()]
        with running_server(str(model), chosen) as server:
            try:
                load = Disturbed(server, str(admin), options)
                counts = run_on_uvloop(load.run(has_flood=has_flood))
            finally:
                if options.log:
                    output = Path(f"/proc/{server.pid}/fd/2").read_bytes()
                    options.log.with_suffix(f".{has_flood:d}.log").write_bytes(output)
    return {"flood": has_flood, **counts.figures()}


def main() -> None:
    """Parse arguments, run, and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="of each run (default: 10)")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--with-flood", action="store_true", help="only this run")
    chosen.add_argument("--without-flood", action="store_true", help="only this run")
    parser.add_argument("--quiet-streams", type=int, default=4)
    parser.add_argument("--flood-streams", type=int, default=32)
    parser.add_argument("--ratio", type=float, default=3.0, help="bound of the ratios of p99")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--log", type=Path, help="write the servers' logs here, with .0 and .1")
    options = parser.parse_args()
    is_chosen = {False: not options.with_flood, True: not options.without_flood}
    runs = []
    for has_flood in (True, False):
        if is_chosen[has_flood]:
            runs.append(soak(options, has_flood=has_flood))
            print_run(runs[-1], options.minutes)
    is_wrong = any(run["lost"] or run["wrong"] or run["late"] for run in runs)
    if len(runs) == 2:
        for name in ("first_token_ms", "gap_ms"):
            ratio = runs[0][name]["p99"] / max(runs[1][name]["p99"], 1e-9)
            print(f"quiet key, {name}: p99 with the flood / without: {ratio:.2f}")
            is_wrong |= ratio > options.ratio
    print(f"soak: {'FAILED' if is_wrong else 'PASSED'}")
    if options.json:
        options.json.write_text(json.dumps(runs, indent=1))
    if is_wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
