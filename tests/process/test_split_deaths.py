"""Engines that share the work are killed: every answer is right, or a clear error, in time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time

import pytest
from support.builtins.split import DECODE, PREFILL, REMOTE, params, split_config, tokens

from hardpoint import LLM, AsyncLLM, EngineDeadError
from hardpoint.testing import scripted_config, write_scripted_model

pytestmark = pytest.mark.timing  # of leases, of connections, and of a peer that hangs

NUM_REQUESTS, NUM_AT_ONCE = 200, 8
LIMIT_S = 20.0  # of a request: load_seconds, and the start of an engine on a busy machine
LEASE_S = 2.0
TEXT = "The quick brown fox jumps over the lazy dog. " * 8


def prompt(number: int) -> str:
    return f"{number} {TEXT[: 60 + 31 * number % 260]}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_scripted_model(tmp_path_factory.mktemp("deaths"), seed=5)


@pytest.fixture(scope="module")
def base(model):
    return {**scripted_config(model), "kv_cache": {"num_blocks": 160}}


@pytest.fixture(scope="module")
def wanted(base):
    llm = LLM(config=base)
    answers = [
        list(tokens(output))
        for output in llm.generate([prompt(n) for n in range(NUM_REQUESTS)], params())
    ]
    llm.close()
    return answers


class Pair:
    """Two engines in processes of their own, which are restarted when they die."""

    def __init__(self, base, sockets, **connector):
        connector.setdefault("kv_connector", {}).setdefault("lease_seconds", LEASE_S)
        connector["kv_connector"].setdefault("load_seconds", 4.0)
        base = {**base, "engine": {"max_restarts_per_minute": 10}}
        connector["p2p"] = {"connect_seconds": 0.5, **connector.get("p2p", {})}
        self.num_loaded = 0  # answers that did not compute their prompt
        self.prefill, self.decode = (
            AsyncLLM(
                config=split_config(base, sockets, name, **{**connector}), restart="on_failure"
            )
            for name in (PREFILL, DECODE)
        )

    async def answer(self, number):
        """Return the tokens of an answer, or the error that ended it."""
        transfer = None
        with contextlib.suppress(EngineDeadError):
            output = await self.last(self.prefill, number, params(1), REMOTE)
            transfer = output.kv_transfer_params
        try:
            output = await self.last(self.decode, number, params(), transfer)
            self.num_loaded += bool(output.num_cached_tokens)
        except EngineDeadError as error:
            return error
        return list(tokens(output))

    async def last(self, engine, number, params, transfer):
        async for output in engine.generate(prompt(number), params, kv_transfer_params=transfer):
            last = output
        return last

    async def close(self):
        await self.prefill.aclose()
        await self.decode.aclose()


async def answers_while_killed(pair, seed):
    """Return the answers of all requests, with each engine killed twice; and the longest time."""
    chance = random.Random(seed)
    waiting, answers, longest = list(range(NUM_REQUESTS)), {}, 0.0
    victims = [pair.prefill, pair.decode, pair.prefill, pair.decode]
    when = sorted(chance.sample(range(10, NUM_REQUESTS - 30), len(victims)))

    async def work():
        nonlocal longest
        while waiting:
            number = waiting.pop(0)
            began = time.monotonic()
            answers[number] = await pair.answer(number)
            longest = max(longest, time.monotonic() - began)

    async def kill():
        for victim, count in zip(victims, when, strict=True):
            while len(answers) < count:
                await asyncio.sleep(0.001)
            await asyncio.sleep(chance.uniform(0, 0.03))
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim.engines.pid, signal.SIGKILL)

    await asyncio.gather(kill(), *(work() for _ in range(NUM_AT_ONCE)))
    return answers, longest


@pytest.mark.parametrize("in_step", [False, True], ids=["before", "in the step"])
def test_each_engine_is_killed_and_restarted_twice(base, wanted, tmp_path, in_step):
    async def main():
        pair = Pair(base, tmp_path / "s", load_in_step=in_step)
        try:
            answers, longest = await answers_while_killed(pair, seed=in_step)
            stats = [
                await engine.engines.scheduler_stats() for engine in (pair.prefill, pair.decode)
            ]
            num_loaded = pair.num_loaded
            again = [await pair.answer(number) for number in range(5)]
        finally:
            await pair.close()
        return answers, longest, stats, again, num_loaded

    answers, longest, stats, again, num_loaded = asyncio.run(main())
    errors = {n: answer for n, answer in answers.items() if isinstance(answer, EngineDeadError)}
    right = {n for n, answer in answers.items() if answer == wanted[n]}
    assert set(answers) == set(range(NUM_REQUESTS)) == right | set(errors)
    assert len(errors) <= 4 * NUM_AT_ONCE
    assert num_loaded > NUM_REQUESTS // 3
    assert longest < LIMIT_S
    for engine_stats in stats:
        assert (
            engine_stats.num_running,
            engine_stats.num_waiting,
            engine_stats.kv_cache_usage,
        ) == (0, 0, 0.0)
    assert again == wanted[:5]


def test_a_prefill_engine_that_hangs_delays_no_other_for_long(base, wanted, tmp_path):
    async def main():
        pair = Pair(base, tmp_path / "s")
        try:
            output = await pair.last(pair.prefill, 100, params(1), REMOTE)
            os.kill(pair.prefill.engines.pid, signal.SIGSTOP)
            try:
                began = time.monotonic()
                # One that needs the peer, and one that does not.
                needs, other = await asyncio.gather(
                    pair.last(pair.decode, 100, params(), output.kv_transfer_params),
                    pair.last(pair.decode, 101, params(), None),
                )
                seconds = time.monotonic() - began
            finally:
                os.kill(pair.prefill.engines.pid, signal.SIGCONT)
            back = await pair.answer(102)
        finally:
            await pair.close()
        return seconds, [list(tokens(needs)), list(tokens(other)), back]

    seconds, answers = asyncio.run(main())
    assert answers == wanted[100:103]
    assert seconds < 8


def test_a_decode_engine_that_dies_while_it_waits_frees_the_blocks_of_the_other(
    base, wanted, tmp_path
):
    room = {"size_bytes": 1 << 16}

    async def main():
        pair = Pair(base, tmp_path / "s", p2p=room, kv_connector={"lease_seconds": 1.0})
        try:
            for number in range(40):  # more than there is room for
                await pair.last(pair.prefill, number, params(1), REMOTE)
            os.kill(pair.decode.engines.pid, signal.SIGKILL)
            await asyncio.sleep(1.5)
            while isinstance(await pair.answer(0), EngineDeadError):
                await asyncio.sleep(0.05)
            output = await pair.last(pair.prefill, 150, params(1), REMOTE)
            return await pair.last(pair.decode, 150, params(), output.kv_transfer_params)
        finally:
            await pair.close()

    output = asyncio.run(main())
    assert list(tokens(output)) == wanted[150]
    assert output.num_cached_tokens == len(prompt(150)) // 16 * 16
