"""Many requests to one engine, with random ends, for a program of its own.

A test process has a heap of thousands of other tests: what a garbage collection or the allocator
does there is no measure of this engine.
"""

from __future__ import annotations

import json
import os
import random
import threading
from collections import Counter
from pathlib import Path

import psutil

from hardpoint import RequestError, RequestOutputKind, SamplingParams
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from support.internals import keeps_nothing, output_processor_of
from support.process.harness import (
    PATIENCE_S,
    gone,
    holdings,
    nothing_left,
    open_engine,
    wait_until,
)

MIB = 1 << 20
SETTINGS = {
    "max_model_len": 256,
    "kv_cache": {"block_size": 8, "num_blocks": 120},
    "scheduler": {"max_num_seqs": 24, "max_num_batched_tokens": 512, "policy": "priority"},
    "plugins": {
        "enable": ["support.plugins.faulty:Dense", "support.plugins.slow:Slow"],
        "quarantine_after": 0,
    },
}


def params(rng: random.Random) -> SamplingParams:
    args = {}
    if rng.random() < 0.1:
        args["dense"] = {"how": rng.choice(["raise", "nan", "start", ""])}
    if rng.random() < 0.01:
        args["slow"] = {"seconds": 0.01}
    return SamplingParams(
        n=rng.choice([1, 1, 1, 1, 3]),
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randrange(1000),
        max_tokens=rng.randint(1, 24),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice([None, None, None, 2]),
        stop=rng.choice([[], [], ["7"], ["ab", "\n"]]),
        output_kind=rng.choice(list(RequestOutputKind)),
        plugin_args=args,
    )


def soak(engine, rng: random.Random, count: int) -> dict[str, int]:
    """Run random requests to their ends, and return the number of each kind of end.

    Some are wrong, and many are aborted or run out of time.
    """
    ends: dict[str, int] = {}
    live: set[str] = set()
    sent = 0
    while sent < count or engine.has_unfinished_requests():
        for _ in range(min(rng.randint(0, 12), count - sent, 60 - len(live))):
            name = f"{count}-{sent}"
            prompt = [rng.randrange(256) for _ in range(rng.randint(0, 60))]
            timeout = rng.choice([None, None, None, 5.0, 0.0, rng.random() * 0.05])
            extras = RequestExtras(priority=rng.randrange(3), timeout=timeout)
            sent += 1
            try:
                engine.add_request(name, prompt, params(rng), extras)
                live.add(name)
            except RequestError:  # an empty prompt, or no time at all
                ends["refused"] = ends.get("refused", 0) + 1
        if live and rng.random() < 0.3:
            chosen = rng.sample(sorted(live), min(len(live), rng.randint(1, 3)))
            engine.abort_requests([*chosen, "unknown"])
            live.difference_update(chosen)
            ends["aborted"] = ends.get("aborted", 0) + len(chosen)
        if not engine.has_unfinished_requests():
            continue
        for output in engine.step():
            if output.finished:
                live.discard(output.request_id)
                reason = output.outputs[0].finish_reason
                ends[reason] = ends.get(reason, 0) + 1
    assert not live
    return ends


def resident(pid: int) -> int:
    return psutil.Process(pid).memory_info().rss


def of_engine(pid: int) -> Counter[str]:
    """Descriptors and threads of the engine process."""
    process = psutil.Process(pid)
    return Counter(descriptors=process.num_fds(), threads=process.num_threads())


def main(folder: str, *, in_process: bool, count: int) -> None:
    """Check that an engine keeps nothing of random requests.

    Print the number of each kind of end, and the growth of memory in MiB.
    """
    rng = random.Random(11)
    engine = open_engine(Path(folder), SETTINGS | {"engine": {"in_process": in_process}})
    pid = os.getpid() if in_process else engine.parts.client.pid
    soak(engine, rng, 400)  # what grows once is not counted
    before, threads = holdings(), threading.active_count()
    ours, theirs, of_theirs = resident(os.getpid()), resident(pid), of_engine(pid)
    ends = soak(engine, rng, count)

    def stands_still() -> bool:
        stats = engine.call_utility("scheduler_stats")
        return (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)

    wait_until(stands_still, PATIENCE_S, "the last aborts")
    assert keeps_nothing(output_processor_of(engine))
    nothing_left(before)
    wait_until(lambda: threading.active_count() <= threads, PATIENCE_S, "threads")
    if not in_process:  # else they are among the holdings of this program
        wait_until(lambda: not of_engine(pid) - of_theirs, PATIENCE_S, "descriptors and threads")
    grown = [(resident(os.getpid()) - ours) / MIB, (resident(pid) - theirs) / MIB]
    print(json.dumps({"ends": ends, "grown": grown}))
    engine.close()
    if not in_process:
        gone(pid)
