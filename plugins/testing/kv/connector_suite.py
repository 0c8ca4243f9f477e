"""The conformance suite for KV connectors; the built-in one passes it too."""

from __future__ import annotations

import functools
import logging
import random
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hardpoint.plugins import HardpointError, KVConnector
from hardpoint.plugins.component import Component
from hardpoint.testing.component_suite import ComponentSuite, class_under_test
from hardpoint.testing.snapshots import count_elements
from hardpoint.testing.suite import Rule, Violation, checks

from .connector_session import (
    BLOCK_SIZE,
    DISTURBED,
    FAULTLESS,
    HISTORIES,
    MAX_TOKENS,
    SLOTS,
    TOKENS,
    Add,
    ConnectorSession,
    Do,
    Live,
    Operation,
    scenarios,
    session_config,
    write_model,
)
from .slots import WITNESS
from .storage import FAULTS, RELIABLE, damage_files, forget_storage, temporary_folder

LOADS = Rule(
    "loads: computed blocks are loaded later",
    "save each block that a step completes, and return from get_num_new_matched_tokens how many "
    "tokens of whole blocks can be loaded",
)
FOREIGN = Rule(
    "foreign: blocks of another model, or of another layout of blocks, are not loaded",
    "key blocks by `block_key(context.identity.digest(), block_hash)`: the identity covers "
    "all inputs of blocks besides their tokens",
)
TIME = Rule(
    "time: no call of a connector holds a step, however slow its storage is",
    "let the scheduler half read no storage, or only storage without latency; load and save in "
    "threads, and let saves copy blocks in wait_for_save and store them later",
)
RANKS = Rule(
    "ranks: halves in different processes, one worker half per rank, load their saved blocks",
    "pass everything in the metadata, in messages and in the handshake; share no attributes of "
    "classes or modules; let each rank have its own blocks, by its identity",
)
RELEASE = Rule(
    "release: after close no thread is left",
    "join all threads in close(), also if storage does not answer",
)
MEMORY = Rule(
    "memory: nothing grows with the number of requests",
    "drop a request in request_finished, also without a prior admission, and limit the data "
    "about blocks",
)

_HEALING = 8
_WAVE = 24
_PROMPT = 37
_ATTEMPTS = 3
_STORE_SECONDS = 1.0
_CLOSE_SECONDS = 10.0
_THREAD_SECONDS = 2.0


class KVConnectorSuite(ComponentSuite):
    """Base class of a test class, which sets `connector`, and `options` if it has some.

    Its tests run engines with the scripted model. Its attention stores with each token the
    history that it was computed from, so that it detects wrong contents.

    Attributes:
        connector: the class under test, which must be importable.
        config: further tables of the configuration, `kv_connector` for example. In texts of
            `options` and `config`, "{folder}" is replaced by a folder, which is empty at first.
        keeps: whether blocks stay when an engine is closed.
        parallel: numbers of tensor ranks and of stages to try, in processes.
        call_seconds: maximum time of a call of the scheduler half, and of `wait_for_save`.
    """

    kind = "kv_connectors"
    connector: ClassVar[type[KVConnector]]
    config: ClassVar[Mapping[str, Any]] = {}
    keeps: ClassVar[bool] = True
    parallel: ClassVar[Sequence[tuple[int, int]]] = ((2, 1),)
    call_seconds: ClassVar[float] = 0.1

    _expected: ClassVar[dict[tuple[int, int], Sequence[int]]] = {}
    """Tokens of requests without a connector, by family and length."""

    def disturb(self, folder: Path, fault: str) -> None:
        """Let the storage fail, or work again; by default it is files in the folder.

        Args:
            folder: the folder that replaces "{folder}".
            fault: one of `hardpoint.testing.kv.storage.FAULTS`, or "reliable". Faults that the
                storage does not have are ignored.
        """
        damage_files(folder, fault, random.Random(fault))

    def _component(self) -> type[Component]:
        return class_under_test(self, "connector", KVConnector)

    def _check_construction(self) -> None:
        with self._folder() as folder:
            try:
                with self._session(folder) as session:
                    self._check_results(session, is_quiet=True)
            except HardpointError as error:
                raise Violation(
                    f"no engine can be opened with it: {error}",
                    "put the class into a module that can be imported, and set `options` and "
                    "`config` as an operator would",
                ) from error

    @checks(LOADS)
    def test_loads(self) -> None:
        """Computed blocks are loaded after a reset of the prefix cache, and after a restart."""
        whole = (_PROMPT - 1) // BLOCK_SIZE * BLOCK_SIZE
        with self._folder() as folder:
            with self._session(folder) as session:
                session.play([Add(0, _PROMPT, MAX_TOKENS)])
                self._expect_loaded(
                    session, Add(0, _PROMPT, 2), whole, "the prefix cache was reset"
                )
                shorter = Add(0, _PROMPT - BLOCK_SIZE, MAX_TOKENS)
                case = "a longer prompt was computed"
                self._expect_loaded(session, shorter, whole - BLOCK_SIZE, case)
            if self.keeps:
                with self._session(folder) as session:
                    again = Add(0, _PROMPT, MAX_TOKENS)
                    self._expect_loaded(session, again, whole, "the engine was opened again")

    def test_tokens(self) -> None:
        """Any requests get the tokens that they get without a connector."""
        histories = scenarios(5 if self.examples >= 1 else 2).values()
        checks = [functools.partial(self._check_history, history) for history in histories]
        self._run_checks(TOKENS.text, *checks)
        self._search(TOKENS.text, 40, self._check_history, history=HISTORIES)

    def test_storage(self) -> None:
        """The same, over storage that fails."""
        checks = [functools.partial(self._check_fault, fault) for fault in FAULTS]
        self._run_checks(TOKENS.text, self._check_disturb, *checks)
        self._search(TOKENS.text, 40, self._check_disturbed, history=DISTURBED)

    @checks(FOREIGN)
    def test_foreign(self) -> None:
        """Blocks of other models stay where they are."""
        with self._folder() as folder:
            with self._session(folder) as session:
                session.play([Add(0, _PROMPT, MAX_TOKENS)])
                self._check_results(session, is_quiet=True)
            write_model(folder.parent / "other", seed=2)
            others = {
                "with another configuration": (None, "other"),
                "with blocks of another size": ({"kv_cache": {"block_size": 8}}, "model"),
            }
            for difference, (extra, model) in others.items():
                with self._session(folder, extra, model) as session:
                    session.play([Add(0, _PROMPT, MAX_TOKENS)])
                    if WITNESS.mismatches:
                        raise FOREIGN.violation(
                            f"in an engine {difference}, {WITNESS.mismatches[0]}"
                        )
                    if count := session.requests["r0"].cached:
                        raise FOREIGN.violation(f"an engine {difference} loaded {count} tokens")

    @checks(TIME)
    def test_time(self) -> None:
        """Calls return soon, though the storage does not."""
        for fault in ("slow", "dead"):
            for attempt in range(_ATTEMPTS):
                slow = self._slow_calls(fault)
                if not slow:
                    break
                if attempt == _ATTEMPTS - 1:  # else the machine may have been busy
                    method, seconds = slow.popitem()
                    raise TIME.violation(
                        f"over storage that {_DOES[fault]}, a call of {method}() took "
                        f"{seconds:.2f} s, at most {self.call_seconds:g} s is accepted"
                    )

    def test_ranks(self) -> None:
        """The halves work in processes of their own."""
        if not self.parallel:
            pytest.skip("`parallel` is empty")
        checks = [functools.partial(self._check_ranks, size) for size in self.parallel]
        self._run_checks(RANKS.text, *checks)

    @checks(RELEASE)
    def test_release(self) -> None:
        """A closed connector leaves no thread."""
        for fault in (RELIABLE, "dead"):
            with self._folder() as folder:
                before = set(threading.enumerate())
                with self._session(folder, is_quiet=False) as session:
                    session.play([Add(0, _PROMPT, 1)])
                    self.disturb(folder, fault)
                    session.play([Do("reset"), Add(0, _PROMPT, 1)])
                    began = time.monotonic()
                if (seconds := time.monotonic() - began) > _CLOSE_SECONDS:
                    raise RELEASE.violation(
                        f"over storage that {_DOES[fault]}, close took {seconds:.1f} s"
                    )
                self.disturb(folder, RELIABLE)
                if left := _left(before):
                    names = ", ".join(sorted(thread.name for thread in left))
                    raise RELEASE.violation(f"these threads are left: {names}")

    @checks(MEMORY)
    def test_memory(self) -> None:
        """Halves forget requests."""
        sizes = []
        with self._folder() as folder, self._session(folder) as session:
            assert session.watch is not None
            for wave in range(3):
                for number in range(_WAVE):
                    session.play([Add(number % 3, 13, 1), Add(1, 21, 2), Do("abort", number)])
                    if number % 3 == 0:
                        session.play([Do("reset"), Add(0, 17, 1), Do("step"), Do("abort", 0)])
                if wave:
                    sizes.append([count_elements(vars(half)) for half in session.watch.halves])
        for half, before, after in zip(session.watch.halves, *sizes, strict=True):
            if after - before >= _WAVE:
                raise MEMORY.violation(
                    f"objects referenced by a {type(half).__name__} grew from {before} to {after} "
                    f"elements by {2 * _WAVE} requests of prompts that it knew"
                )

    # Engines.

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        """Make a folder for one engine after another, which is deleted afterwards."""
        with temporary_folder() as whole:
            folder = whole / "kept"
            folder.mkdir(mode=0o700)
            write_model(whole / "model")
            try:
                yield folder
            finally:
                forget_storage(str(folder))

    @contextmanager
    def _session(
        self,
        folder: Path,
        extra: Mapping[str, Any] | None = None,
        model: str = "model",
        *,
        is_quiet: bool = True,
    ) -> Iterator[ConnectorSession]:
        config = session_config(self._engine_config(folder), is_quiet=is_quiet) | dict(extra or {})
        disturb = functools.partial(self.disturb, folder)
        logger = logging.getLogger("hardpoint")
        level = logger.level
        logger.setLevel(logging.CRITICAL)  # what the storage does is logged for operators
        try:
            session = ConnectorSession(self.connector, config, folder.parent / model, disturb)
            try:
                yield session
            finally:
                session.close()
        finally:
            logger.setLevel(level)

    def _engine_config(self, folder: Path) -> dict[str, Any]:
        cls = self._component()
        config = {
            "kv_connector": {"use": f"{cls.__module__}:{cls.__qualname__}"},
            "plugin": {self._name(): dict(self.options)},
        }
        for table, values in self.config.items():
            config[table] = config.get(table, {}) | values
        options: dict[str, Any] = _filled_in(config, str(folder))
        return options

    def _expect(self, live: Live) -> None:
        """Check the tokens of a request: all, or up to the abort."""
        name = f"a request of {live.add.length} tokens, {live.cached} of them not computed,"
        if live.error is not None:
            raise TOKENS.violation(f"{name} ended with an error: {live.error}")
        expected = self._tokens_without(live.add)
        count = len(live.tokens) if live.is_aborted else live.add.max_tokens
        if list(live.tokens) != list(expected[:count]):
            raise TOKENS.violation(
                f"{name} got {list(live.tokens)}, without a connector {list(expected[:count])}"
            )

    def _tokens_without(self, add: Add) -> Sequence[int]:
        key = add.family, add.length
        if key not in self._expected:
            with tempfile.TemporaryDirectory() as folder:
                session = ConnectorSession(None, session_config({}), write_model(Path(folder)))
                live = session.add(Add(*key, MAX_TOKENS))
                session.finish()
                session.close()
                self._expected[key] = list(live.tokens)
        return self._expected[key]

    def _check_results(self, session: ConnectorSession, *, is_quiet: bool) -> None:
        """Check all that a session has seen.

        Args:
            is_quiet: whether there must not be any fault.
        """
        assert session.watch is not None
        if session.watch.violations:
            raise session.watch.violations[0]
        if WITNESS.mismatches:
            raise SLOTS.violation(WITNESS.mismatches[0])
        for live in session.requests.values():
            self._expect(live)
        if is_quiet and (faults := session.faults()):
            raise FAULTLESS.violation("; ".join(f"{k}: {v}" for k, v in faults.items()))

    # Checks.

    def _expect_loaded(
        self, session: ConnectorSession, add: Add, expected: int, after: str
    ) -> None:
        """Add a request until its blocks are loaded, which may be stored in the background."""
        limit = time.monotonic() + _STORE_SECONDS
        while True:
            session.play([Do("reset"), add])
            live = list(session.requests.values())[-1]
            self._check_results(session, is_quiet=True)
            if live.cached == expected:
                return
            if time.monotonic() > limit:
                raise LOADS.violation(
                    f"after {after}, {live.cached} tokens of a prompt of {add.length} were loaded, "
                    f"expected {expected}"
                )
            time.sleep(0.02)

    def _check_history(self, history: Sequence[Operation]) -> None:
        with self._folder() as folder, self._session(folder) as session:
            session.play(history)
            self._check_results(session, is_quiet=True)

    def _check_disturbed(self, history: Sequence[Operation]) -> None:
        with self._folder() as folder, self._session(folder, is_quiet=False) as session:
            session.play(history)
            self._check_results(session, is_quiet=False)

    def _check_disturb(self) -> None:
        if type(self).disturb is not KVConnectorSuite.disturb:
            return
        with self._folder() as folder, self._session(folder) as session:
            session.play([Add(0, _PROMPT, 2)])
            limit = time.monotonic() + _STORE_SECONDS
            while not any(path.is_file() for path in folder.rglob("*")):
                if time.monotonic() > limit:
                    raise Violation(
                        "the storage was never disturbed: no files are in {folder}, which is all "
                        "that `disturb` changes by default",
                        "override disturb to let the storage fail, or have its files in {folder}",
                    )
                time.sleep(0.02)

    def _check_fault(self, fault: str) -> None:
        first = [Add(0, 21, 2), Add(1, _PROMPT, 2), Add(2, BLOCK_SIZE + 1, 1)]
        later = [Add(0, _PROMPT, 2), Add(1, _PROMPT, 2), Add(2, 2 * BLOCK_SIZE + 1, 2)]
        # The second one shares what the first one loads, and completes a block by itself.
        twins = [Add(2, 2 * BLOCK_SIZE, 2)] * 2
        with self._folder() as folder, self._session(folder, is_quiet=False) as session:
            session.play(first)
            try:
                self.disturb(folder, fault)
                for adds in (twins, later, later):
                    session.play([Do("reset"), *adds])
                    self._check_results(session, is_quiet=False)
                self.disturb(folder, RELIABLE)
                for _ in range(_HEALING):  # damage may be found one block at a time
                    session.play([Do("reset"), *later])
                self._check_results(session, is_quiet=False)
            except Violation as violation:
                raise Violation(
                    f"over storage that {_DOES[fault]}: {violation.observed}",
                    violation.fix,
                    violation.rule,
                ) from violation

    def _slow_calls(self, fault: str) -> dict[str, float]:
        """Return the seconds of calls that took too long, by method."""
        adds = [Add(family, length, 2) for family in range(2) for length in (_PROMPT, 21)]
        with self._folder() as folder, self._session(folder, is_quiet=False) as session:
            self.disturb(folder, fault)
            session.play(adds)
            session.play([Do("reset"), *adds])
            self.disturb(folder, RELIABLE)
            assert session.watch is not None
            slowest = session.watch.slowest.items()
            return {m: s for m, s in slowest if m in _QUICK and s > self.call_seconds}

    def _check_ranks(self, size: tuple[int, int]) -> None:
        tensor, pipeline = size
        extra = {
            "executor": {"use": "multiproc"},
            "parallel": {"tensor": tensor, "pipeline": pipeline},
        }
        division = f"with parallel.tensor = {tensor} and parallel.pipeline = {pipeline}"
        with self._folder() as folder, self._session(folder, extra) as session:
            try:
                session.play(
                    [Add(0, _PROMPT, MAX_TOKENS), Do("step", 3), Add(1, _PROMPT, MAX_TOKENS)]
                )
                for family in range(2):
                    whole = (_PROMPT - 1) // BLOCK_SIZE * BLOCK_SIZE
                    add = Add(family, _PROMPT, MAX_TOKENS)
                    self._expect_loaded(session, add, whole, "the prefix cache was reset")
            except Violation as violation:
                raise RANKS.violation(f"{division}, {violation.observed}") from violation


_QUICK = (
    "check_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "request_finished",
    "load_ended",
    "receive",
    "wait_for_save",
    "get_finished",
    "take_message",
)
_DOES = {
    RELIABLE: "works",
    "slow": "is slow",
    "forgets": "forgets blocks",
    "lies": "returns wrong results",
    "damaged": "returns damaged blocks",
    "foreign": "returns blocks of other keys",
    "cut": "returns parts of blocks",
    "raises": "raises in each call",
    "dead": "does not answer",
}


def _filled_in(value: Any, folder: str) -> Any:
    if isinstance(value, str):
        return value.replace("{folder}", folder)
    if isinstance(value, Mapping):
        return {key: _filled_in(part, folder) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_filled_in(part, folder) for part in value]
    return value


def _left(before: set[threading.Thread]) -> list[threading.Thread]:
    """Return the threads that were started since, and do not end soon."""
    limit = time.monotonic() + _THREAD_SECONDS
    while left := [t for t in threading.enumerate() if t not in before and t.is_alive()]:
        if time.monotonic() > limit:
            break
        time.sleep(0.02)
    return left
