"""An engine with a KV connector; drawn histories drive its requests and storage."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st

from hardpoint.plugins import KVConnector, RequestOutput, SamplingParams
from hardpoint.testing.engine_access import interrupted_executor
from hardpoint.testing.scripted import scripted_engine, write_scripted_model
from hardpoint.testing.suite import Rule

from .slots import WITNESS
from .storage import FAULTS, RELIABLE
from .watch import Watch

BLOCK_SIZE = 4
MAX_TOKENS = 8
_CONTEXT = 64
_NUM_BLOCKS = 26
_QUIET_SECONDS = 5.0
_DISTURBED_SECONDS = 0.4
_PATIENCE_SECONDS = 20.0

TOKENS = Rule(
    "tokens: requests get the tokens that they get without a connector",
    "load into a block only KV of exactly its tokens and all before them, by this "
    "model; name every block that was not loaded in load_errors; save a block once its step has "
    "computed it, and not if a load of that step failed",
)
SLOTS = Rule(
    "slots: the KV that a request reads was computed from its own tokens",
    "load into `block_ids` the contents of the request's block at that position, before its step "
    "(or its layer) reads it, and write to no other block",
)
ENDS = Rule(
    "ends: every request ends, and no block is kept after it",
    "answer each lookup, name each load and each kept request in get_finished, in time",
)
FAULTLESS = Rule(
    "faultless: with storage that works, nothing is counted as a fault",
    "answer each lookup and load within kv_connector.load_seconds, name each request for which "
    "request_finished returned True in get_finished().saved (or return False), and report "
    "faults only",
)


class Add(NamedTuple):
    """Add a request; prompts of one family begin with the same tokens."""

    family: int
    length: int
    max_tokens: int


class Do(NamedTuple):
    """Do something that needs no more than a number: see `ConnectorSession.play`."""

    action: str
    number: int = 1


class Disturb(NamedTuple):
    """Let the storage do something from now on."""

    fault: str


Operation = Add | Do | Disturb

_ADDS = st.builds(
    Add, st.integers(0, 2), st.sampled_from((5, 8, 9, 13, 17, 30, 41)), st.integers(1, MAX_TOKENS)
)
_STEPS = st.builds(Do, st.just("step"), st.integers(1, 8))
_OTHERS = st.builds(
    Do,
    st.sampled_from(("reset", "recompute", "abort", "pause", "sleep", "interrupt", "reopen")),
    st.integers(0, 3),
)
_QUIET = st.lists(st.one_of(_ADDS, _ADDS, _STEPS, _STEPS, _OTHERS), min_size=6, max_size=24)
HISTORIES = _QUIET
"""Of requests and the engine."""
DISTURBED = st.lists(
    st.one_of(
        _ADDS,
        _ADDS,
        _STEPS,
        _STEPS,
        _OTHERS,
        st.builds(Disturb, st.sampled_from((*FAULTS, RELIABLE))),
    ),
    min_size=6,
    max_size=24,
)
"""The same, over storage that fails."""


def scenarios(num_states: int) -> dict[str, list[Operation]]:
    """Return histories in which things happen in some states of requests that are loaded."""
    whole, run = Add(0, 41, 4), Do("step", 24)
    histories: dict[str, list[Operation]] = {
        "part": [whole, run, Do("reset"), Add(0, 13, 2), run, whole, run, Add(0, 17, 8)]
    }
    crowd: list[Operation] = [Add(number % 3, 30, 8) for number in range(12)]
    histories["crowd"] = [*crowd, run, run, Do("reset"), *crowd]
    for event in ("abort", "interrupt", "recompute", "reset", "pause", "sleep"):
        history = histories[event] = [whole, Add(1, 30, 2), run]
        for steps in range(num_states):
            history += [Do("reset"), Add(0, 30, 4), whole, Do("step", steps), Do(event, steps)]
            history += [Add(1, 41, 4), Do("step"), Add(0, 41, 2), run]
    return histories


def prompt(family: int, length: int) -> list[int]:
    """Return the prompt of a request."""
    return [(29 * family + 7 * place + 1) % 250 for place in range(length)]


@dataclass
class Live:
    """A request.

    Attributes:
        internal_id: id of the request in the engine.
        tokens: tokens that it got.
        cached: number of tokens of its prompt that were not computed.
        is_aborted: whether it was ended before its time.
        error: with which it ended.
    """

    add: Add
    internal_id: str
    tokens: Sequence[int] = ()
    cached: int = 0
    is_done: bool = False
    is_aborted: bool = False
    error: str | None = None


class ConnectorSession:
    """An engine on the scripted model, with the connector under test.

    Attributes:
        watch: watch of the connector's halves.
        requests: by id.
    """

    def __init__(
        self,
        connector: type[KVConnector] | None,
        config: Mapping[str, Any],
        model: Path,
        disturb: Callable[[str], None] = lambda _fault: None,
    ) -> None:
        """Open an engine.

        Args:
            connector: under test; None is an engine without.
            config: config of the engine, see `session_config`.
            model: folder of the scripted model.
            disturb: lets the storage do something.
        """
        self._config, self._model = config, model
        self._disturb = disturb
        self.watch: Watch | None = None
        self.requests: dict[str, Live] = {}
        with ExitStack() as stack:
            if connector is not None:
                WITNESS.reset()
                self.watch = Watch(connector)
                stack.enter_context(self.watch.installed())  # engines make halves when they wake
            self._open()
            self._stack = stack.pop_all()

    def _open(self) -> None:
        self._engine = scripted_engine(self._model, self._config, clock=time.monotonic)

    def play(self, history: Sequence[Operation]) -> None:
        """Play a history, and let all requests end."""
        for operation in history:
            if isinstance(operation, Add):
                self.add(operation)
            elif isinstance(operation, Disturb):
                self._disturb(operation.fault)
            else:
                self._do(operation)
        self.finish()

    def _do(self, operation: Do) -> None:
        engine = self._engine
        live = [request for request in self.requests.values() if not request.is_done]
        match operation.action:
            case "step":
                for _ in range(operation.number):
                    self.step()
            case "reset":
                engine.call_utility("reset_prefix_cache")
            case "recompute":
                engine.call_utility("reset_prefix_cache", True)
            case "abort" if live:
                chosen = live[operation.number % len(live)]
                engine.abort_requests(chosen.internal_id)
                chosen.is_done = chosen.is_aborted = True
            case "pause":
                engine.call_utility("pause", "keep", operation.number % 2 == 0)
                self.step()
                engine.call_utility("resume")
            case "sleep":
                engine.call_utility("sleep", 1 + operation.number % 2, "keep")
                engine.call_utility("wake_up")
            case "interrupt":
                method = ("execute_model", "sample_tokens")[operation.number % 2]
                with interrupted_executor(method):
                    self.step()
            case "reopen":
                self.finish()
                self._engine.close()
                self._open()

    def add(self, add: Add) -> Live:
        """Add a request."""
        request_id = f"r{len(self.requests)}"
        params = SamplingParams(temperature=0.0, max_tokens=add.max_tokens, ignore_eos=True)
        tokens = prompt(add.family, add.length)
        live = Live(add, self._engine.add_request(request_id, tokens, params))
        self.requests[request_id] = live
        return live

    def step(self) -> None:
        """Run a step; if it is interrupted, all requests end."""
        try:
            outputs = self._engine.step()
        except KeyboardInterrupt:
            WITNESS.drop_step()
            for live in self.requests.values():
                live.is_aborted = live.is_aborted or not live.is_done
                live.is_done = True
            return
        for output in outputs:
            assert isinstance(output, RequestOutput)
            live, completion = self.requests[output.request_id], output.outputs[0]
            live.tokens, live.error = completion.token_ids, completion.error
            live.is_done = output.finished
            live.cached = output.num_cached_tokens or 0

    def finish(self) -> None:
        """Run steps until all requests have ended and no block is kept.

        Raises:
            Violation: it takes too long.
        """
        limit = time.monotonic() + _PATIENCE_SECONDS
        while self._engine.has_unfinished_requests():
            if time.monotonic() > limit:
                left = [name for name, live in self.requests.items() if not live.is_done]
                raise ENDS.violation(
                    f"after {_PATIENCE_SECONDS:g} s without other requests {', '.join(left)} have "
                    f"not ended"
                )
            self.step()
        limit = time.monotonic() + _PATIENCE_SECONDS
        while usage := self._engine.call_utility("scheduler_stats").kv_cache_usage:
            if time.monotonic() > limit:
                raise ENDS.violation(
                    f"{_PATIENCE_SECONDS:g} s after the last request, {usage:.0%} of the KV "
                    f"cache's blocks are in use"
                )
            self._engine.step()

    def faults(self) -> dict[str, str]:
        """Return the faults that the engine has counted, by component."""
        health = self._engine.health()
        return {name: str(fault) for name, fault in health.fallbacks.items()}

    def close(self) -> None:
        """Close the engine."""
        with self._stack:
            self._engine.close()


def session_config(extra: Mapping[str, Any], *, is_quiet: bool = True) -> dict[str, Any]:
    """Return the configuration of an engine with chunked and preempted requests.

    Args:
        extra: further configuration, which has the connector; empty for an engine without.
        is_quiet: whether all storage works, so that nothing is late.
    """
    config = {
        **extra,
        "attention": {"use": "hardpoint.testing.kv.slots:WitnessAttention"},
        "kv_cache": {"block_size": BLOCK_SIZE, "num_blocks": _NUM_BLOCKS},
        "scheduler": {"max_num_batched_tokens": 16},
    }
    if "kv_connector" in extra:
        seconds = _QUIET_SECONDS if is_quiet else _DISTURBED_SECONDS
        limits = {"load_seconds": seconds, "lease_seconds": seconds}
        config["kv_connector"] = limits | dict(extra["kv_connector"])
    return config


def write_model(folder: Path, seed: int = 1) -> Path:
    """Write the scripted model."""
    return write_scripted_model(folder, seed=seed, max_position_embeddings=_CONTEXT)
