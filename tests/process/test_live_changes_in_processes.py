"""Live changes while many requests run: each has the tokens of its own generation, in all modes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading

import pytest
from support.plugins import changing_parts
from support.plugins.changing import token_of
from support.process.harness import process_config
from support.waiting import until

from hardpoint import LLM, AsyncLLM, SamplingParams
from hardpoint.errors import HardpointError, PluginLoadError, RequestError
from hardpoint.testing import scripted_config

MODULE = "support.plugins.changing"
PICK, TWICE, ROWS = (f"{MODULE}:{name}" for name in ("Pick", "Twice", "Rows"))
MARK = f"{changing_parts.__name__}:Mark"
POLICIES = ("fcfs", "fair", "priority", "shortest_first", f"{MODULE}:Keeper")
TIGHT = {  # requests are preempted
    "max_model_len": 128,
    "kv_cache": {"block_size": 8, "num_blocks": 60},
    "scheduler": {"max_num_batched_tokens": 48},
}
NUM_STREAMS = 32
TOKENS = 16
CHANGES = [
    pytest.param(10, id="10"),
    pytest.param(40, id="40", marks=pytest.mark.nightly),
    pytest.param(500, id="500", marks=pytest.mark.nightly),
]
NAMES = ("pick", "rows", "mark", None)
"""Of the component that a request uses."""
PLAIN = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


class Changing:
    """The states that random changes give two processors and a step part; tokens show which one was
    in use.
    """

    def __init__(self, seed):
        self._random = random.Random(seed)
        self.num_changes = 0
        self.on = {"pick": (0, 1), "rows": (0, 1)}
        """Option and factor of each that is on."""
        self.was = {name: [state] for name, state in self.on.items()}
        """All that they have been, by name; None is off, of the part."""
        self.was["mark"] = [None]

    def next(self):
        """Return the arguments of the next call of `set_plugins`, and its result."""
        name = self._random.choice(NAMES[:3])
        delta = self._random.randrange(40)
        after = dict(self.on)
        if name not in self.on:
            after[name] = (delta, 1)
            change = {"enable": [{"pick": PICK, "rows": ROWS, "mark": MARK}[name]]}
            change["options"] = {name: {OPTION[name]: delta}}
        elif self._random.random() < 0.2:
            change = {"disable": [name]}
            del after[name]
        elif name == "pick" and self._random.random() < 0.5:
            factor = 3 - self.on["pick"][1]
            after[name] = (delta, factor)
            use = PICK if factor == 1 else TWICE
            change = {"replace": {"pick": use}, "options": {"pick": {"delta": delta}}}
        else:
            after[name] = (delta, self.on[name][1])
            change = {"options": {name: {OPTION[name]: delta}}}
        config = {
            "scheduler.policy": self._random.choice(POLICIES),
            "scheduler.max_waiting": self._random.choice((None, 1000)),
            "engine.stream_interval": self._random.choice((1, 4)),
        }
        chosen = self._random.sample(sorted(config), self._random.randrange(3))
        return change | {"config": {path: config[path] for path in chosen}}, after

    def about_to_be(self, after):
        """Note the possible processors from now on."""
        for name in self.was:
            if name in after or name == "mark":
                self.was[name].append(after.get(name))

    def done(self, after):
        """Note the present processors."""
        self.on = after
        self.num_changes += 1

    def count(self, name):
        """Return how many states the processor of a name has had, the next one included."""
        return len(self.was.get(name, ()))

    def check(self, name, step, tokens, first, last, plain):
        """Check that all tokens of a request come from one state of its processor.

        Args:
            first, last: `count` before it was sent, and once it was admitted.
            plain: its tokens where nothing changes them.
        """
        assert len(tokens) == TOKENS
        states = self.was[name][max(first - 2, 0) : last]
        assert tokens in [forced(name, step, state, plain) for state in states], (name, tokens)

    def check_or_plain(self, name, step, tokens, first, plain):
        """Check the tokens of a request that has ended; `first` has counts by name."""
        if name is None:
            assert tokens == plain
        else:
            self.check(name, step, tokens, first[name], self.count(name), plain)


OPTION = {"pick": "delta", "rows": "delta", "mark": "mark"}
TAGS = {"mark": {"marked": "yes"}}


def forced(name, step, state, plain):
    """Return the tokens of a request for a state of its component."""
    if state is None:
        return plain
    if name == "mark":
        return [changing_parts.FIRST + state[0]] * TOKENS
    return [token_of(state[0], step, at, state[1]) for at in range(TOKENS)]


def params_of(name, step):
    if name in TAGS:  # it asks by a tag
        return PLAIN
    return SamplingParams(
        temperature=0.0, max_tokens=TOKENS, ignore_eos=True, plugin_args={name: {"step": step}}
    )


def config_of(folder, extra=None, has_process=True):
    tables = TIGHT | {"plugins": {"enable": [PICK, ROWS]}} | (extra or {})
    return process_config(folder, tables) if has_process else scripted_config(folder, tables)


async def stream(llm, changing, index, ended, expected):
    """Send one request after the other, until all changes are made; return how many were sent."""
    count = refused = 0
    while not ended.is_set() or count < 2:
        name, step = (NAMES[(index + count) % 4], index % 7)
        params = PLAIN if name is None else params_of(name, step)
        tokens, first, admitted = None, changing.count(name), 0
        try:
            async for output in llm.generate(f"{index} is", params, tags=TAGS.get(name)):
                tokens = output.outputs[0].token_ids
                admitted = admitted or changing.count(name)
        except RequestError as error:
            if f"the logits processor {name!r} was switched off" not in str(error):
                raise
            refused += 1
            await asyncio.sleep(0.005)
            continue
        count += 1
        if name is None:
            assert tokens == expected[index]
        else:
            changing.check(name, step, tokens, first, admitted, expected[index])
    return count, refused


@pytest.mark.nightly
@pytest.mark.parametrize("num_changes", CHANGES)
@pytest.mark.parametrize("extra", [{}, {"parallel": {"data": 2}}], ids=["one", "two engines"])
def test_random_changes_disturb_no_request(scripted, num_changes, extra):
    async def run():
        llm = AsyncLLM(config=config_of(scripted, extra))
        changing, ended = Changing(num_changes), asyncio.Event()
        try:
            expected = [await last(llm, f"{index} is", PLAIN) for index in range(NUM_STREAMS)]
            streams = [
                asyncio.ensure_future(stream(llm, changing, index, ended, expected))
                for index in range(NUM_STREAMS)
            ]
            for _ in range(num_changes):
                change, after = changing.next()
                changing.about_to_be(after)
                await llm.plugins.change(**change)
                changing.done(after)
                await asyncio.sleep(0.01)
            ended.set()
            counts = await asyncio.gather(*streams)
            assert llm.plugins.manifest.generation == num_changes + 1
            return counts
        finally:
            await llm.aclose()

    counts = asyncio.run(run())
    assert all(count > 1 for count, _ in counts)


async def last(llm, prompt, params):
    tokens = None
    async for output in llm.generate(prompt, params):
        tokens = output.outputs[0].token_ids
    return tokens


@pytest.mark.nightly
@pytest.mark.parametrize("num_changes", CHANGES)
def test_random_changes_in_this_process(scripted, num_changes):
    with LLM(config=config_of(scripted, has_process=False)) as llm:
        changing = Changing(num_changes + 1)
        failures = []
        ended = threading.Event()
        prompts = [f"{index} is" for index in range(NUM_STREAMS)]
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, PLAIN)]

        def change_all():
            try:
                for _ in range(num_changes):
                    change, after = changing.next()
                    changing.about_to_be(after)
                    llm.plugins.change(**change)
                    changing.done(after)
            except BaseException as error:
                failures.append(error)
            finally:
                ended.set()

        thread = threading.Thread(target=change_all)
        thread.start()
        rounds = 0
        while not ended.is_set() or not rounds:
            tags = [{}, TAGS["mark"]][rounds % 2]  # of all prompts
            names = [("pick", "rows", None)[(index + rounds) % 3] for index in range(NUM_STREAMS)]
            names = [name if name in changing.on and not tags else None for name in names]
            params = [
                PLAIN if name is None else params_of(name, index % 7)
                for index, name in enumerate(names)
            ]
            first = {name: changing.count(name) for name in NAMES}
            try:
                outputs = llm.generate(prompts, params, tags=tags)
            except RequestError as error:
                assert "was switched off" in str(error)  # noqa: PT017 - between the two lines
                continue
            rounds += 1
            for index, (name, output) in enumerate(zip(names, outputs, strict=True)):
                used, token_ids = "mark" if tags else name, output.outputs[0].token_ids
                changing.check_or_plain(used, index % 7, token_ids, first, expected[index])
        thread.join()
        assert not failures, failures
        assert llm.plugins.manifest.generation == num_changes + 1


FAILING = {
    "one": {},
    "two engines": {"parallel": {"data": 2}},
    "two ranks": {"executor": {"use": "multiproc"}, "parallel": {"tensor": 2}},
}


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(FAILING["one"], id="one"),
        pytest.param(FAILING["two engines"], id="two engines"),
        pytest.param(FAILING["two ranks"], id="two ranks", marks=pytest.mark.nightly),
    ],
)
async def test_a_change_that_a_process_cannot_prepare_or_commit_is_undone(scripted, extra):
    llm = AsyncLLM(config=config_of(scripted, extra))
    try:
        await llm.plugins.set_policy(f"{MODULE}:Keeper")
        before = llm.engines.settings()
        running = asyncio.ensure_future(last(llm, "a", params_of("pick", 1)))
        with pytest.raises(PluginLoadError, match="'breaks' .*it breaks"):
            await llm.plugins.change(enable=[f"{MODULE}:Breaks"], options={"pick": {"delta": 3}})
        with pytest.raises(HardpointError, match="'refusing' .*it takes no state"):
            await llm.plugins.change(
                options={"pick": {"delta": 3}},
                config={"scheduler.policy": f"{MODULE}:Refusing"},
            )
        assert llm.engines.settings() == before
        expected = [token_of(0, 1, at) for at in range(TOKENS)]
        assert await running == expected
        outputs = await asyncio.gather(*[last(llm, "a", params_of("pick", 1)) for _ in range(4)])
        assert outputs == [expected] * 4
        await llm.plugins.change(options={"pick": {"delta": 3}})
        assert await last(llm, "a", params_of("pick", 1)) == [
            token_of(3, 1, at) for at in range(TOKENS)
        ]
    finally:
        await llm.aclose()


@pytest.mark.parametrize("action", ["prepare", "state", "commit"])
def test_workers_of_an_engine_process_that_fail(scripted, action):
    extra = {
        "executor": {"use": f"{MODULE}:FailingCalls"},
        "plugin": {"failing_calls": {"action": action}},
    }
    with LLM(config=config_of(scripted, extra)) as llm:
        before = llm.engines.settings()
        with pytest.raises(HardpointError, match=f"the workers fail to {action}"):
            llm.plugins.change(options={"pick": {"delta": 2}}, config={"scheduler.policy": "fair"})
        assert llm.engines.settings() == before
        (output,) = llm.generate("a", params_of("pick", 1))
        assert output.outputs[0].token_ids == [token_of(0, 1, at) for at in range(TOKENS)]


async def test_an_engine_that_is_started_again_has_the_latest_generation(scripted):
    llm = AsyncLLM(config=config_of(scripted), restart="on_failure")
    try:
        await llm.plugins.change(
            options={"pick": {"delta": 5}}, config={"scheduler.policy": "fair"}
        )
        pid = llm.engines.pid
        os.kill(pid, signal.SIGKILL)
        await until(lambda: llm.engines.pid not in (pid, 0) and llm.is_running, "another engine")
        assert await last(llm, "a", params_of("pick", 1)) == [
            token_of(5, 1, at) for at in range(TOKENS)
        ]
        await llm.plugins.change(options={"pick": {"delta": 6}})
        assert await last(llm, "a", params_of("pick", 1)) == [
            token_of(6, 1, at) for at in range(TOKENS)
        ]
    finally:
        await llm.aclose()
