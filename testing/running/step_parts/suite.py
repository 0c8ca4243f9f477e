"""The conformance suite for step parts; the built-in ones pass it too."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, find, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample
from msgspec import structs

from hardpoint.plugins import (
    EngineCoreRequest,
    EngineHalf,
    FrontendHalf,
    ModelConfig,
    ReasoningMarkers,
    SamplingParams,
    StepPart,
    StepPartContext,
    WorkerHalf,
)
from hardpoint.plugins.component import Component
from hardpoint.plugins.grammars import Vocabulary
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.step_part import EngineHalfContext
from hardpoint.plugins.step_part.engine import REQUEST_FIELDS
from hardpoint.plugins.step_part.part import FrontendHalfContext
from hardpoint.plugins.worker_half import WorkerHalfContext
from hardpoint.testing.component_suite import LiveComponentSuite
from hardpoint.testing.engine_access import describe_fault, engine_config, fault_counter
from hardpoint.testing.reporting.calls import CLOSE, MEMORY, call, check_growth, releasing_all
from hardpoint.testing.suite import (
    NOTHING_DRAWN,
    Rule,
    Violation,
    reject_replaced_tests,
    short_repr,
)

from . import rules
from .compared import Halves, PlainHalf, block_hashes, compare
from .encoding import check_encoder_cache
from .forks import FORKS, check_fork
from .frontend import (
    ANSWERS,
    FRONTEND,
    PROMPTS,
    ScriptedComponents,
    check_answer,
    check_prepare,
    check_prompt,
)
from .media import PLACED, MediaPrompt, check_media, check_taken, prompt_of
from .session import RequestScript, StepPartSession, with_id, without_features
from .worker import HIDDEN_SIZE, WorkerSteps, overrides

USED = "requests: some use the part, and run"
SPEED = Rule(
    "speed: the calls of a step take no longer than a multiple of those of a plain part",
    "follow each request from where it was in the last step, and fill only its own rows; or set "
    "`times_plain`",
)

_REQUESTS = 500  # after which sizes are compared with those after twice as many
_RUNNING = 8
_TIMED_STEPS = 15
_LOOK = settings(
    max_examples=200,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
_END = 256  # the token that ends a text in the vocabulary of bytes
_BYTES = Vocabulary(tokens=(*(bytes([byte]) for byte in range(256)), b"<eos>"), special=(_END,))


class StepPartSuite(LiveComponentSuite):
    """Base class of a test class, which sets `part`, and overrides `requests`.

    Attributes:
        part: the class under test.
        config: tables of the engine's configuration, as an operator writes them.
        components: what the part's factory builds instead of installed components: classes by
            kind and name.
        vocabulary: vocabulary of the tokenizer; None for an engine without one.
        vocab_size: vocabulary size of the model.
        calls: calls of programs that the part answers: method and arguments.
        prompts: prompts of the part's own forms, which it reads.
        prompt_pooling: parameters of their requests, if these pool.
        media: prompts with media, which it reads, too: token ids with placeholders, and items by
            modality.
        model_config: configuration of the model, `StepPartContext.model_config`.
        shares: whether the part divides something among requests, so that what one gets depends
            on the others.
        ready_steps: calls of a gate after which, and
        ready_seconds: seconds after which, it has to have ended.
        times_plain: maximum time of a step's calls, as a multiple of those of a part that allows
            every token; None does not measure.
    """

    kind = "step_parts"
    part: ClassVar[type[StepPart]]
    config: ClassVar[Mapping[str, Any]] = {}
    components: ClassVar[Mapping[str, Mapping[str, type[Component]]]] = {}
    vocabulary: ClassVar[Vocabulary | None] = _BYTES
    vocab_size: ClassVar[int] = 300
    calls: ClassVar[Sequence[tuple[str, Mapping[str, Any]]]] = ()
    prompts: ClassVar[Sequence[Mapping[str, Any]]] = ()
    media: ClassVar[Sequence[MediaPrompt]] = ()
    model_config: ClassVar[ModelConfig | None] = None
    prompt_pooling: ClassVar[PoolingParams | None] = None
    shares: ClassVar[bool] = False
    ready_steps: ClassVar[int] = 100
    ready_seconds: ClassVar[float] = 10.0
    times_plain: ClassVar[float | None] = 100.0

    def requests(self) -> st.SearchStrategy[EngineCoreRequest]:
        """Return a strategy for requests, of which most use the part; their ids are replaced."""
        return st.builds(
            lambda prompt, temperature, tags: EngineCoreRequest(
                request_id="",
                prompt_token_ids=prompt,
                params=SamplingParams(temperature=temperature),
                eos_token_ids=[_END],
                tags=tags,
            ),
            st.lists(st.integers(0, 255), min_size=1, max_size=6),
            st.sampled_from([0.0, 1.0]),
            st.sampled_from([{}, {"tenant": "acme"}]),
        )

    def loaded(self) -> Any:
        """Return the model that the worker half gets, `WorkerHalfContext.loaded`."""
        return None

    def change_weights(self, loaded: Any) -> None:
        """Give a model that `loaded` returned other weights."""

    def _component(self) -> type[Component]:
        return self.part

    def test_contract(self) -> None:
        """The loader can check and build the class and its halves; its options survive pickling.

        `capacity` has an amount by name, `num_draft_tokens` is a number.
        """
        self._run_checks(
            rules.HALVES.text,
            lambda: reject_replaced_tests(type(self), StepPartSuite),
            self._check_contract,
            self._check_halves,
        )

    def test_steps(self) -> None:
        """Requests that live alone or together are treated as the contract states.

        `uses` returns a bool, `check` and `gate` raise nothing but RequestError, and every gate
        ends. `cost` gives the same amounts each time, of resources in `capacity`. `begin` returns
        bytes, and None for a plan without its requests. A mask is int32
        `[rows, ceil(vocab_size / 32)]`, with 1 + drafts rows, each of which allows a token, of
        planned requests that use the part. `result` ends only these, `updated` raises nothing.
        `drafts` gives at most `num_draft_tokens` tokens of the vocabulary for each of these,
        `limit_drafts` numbers from 0 to that of the drafts that it got. `figures` gives numbers,
        lists of them, or texts.

        Methods of the worker half raise nothing. `embedded`, `linear`, `hidden` and `logits` give
        None or a finite tensor of the shape that they got, logits perhaps -inf, and write to no
        tensor that they do not return. `around_layers` gives a function that calls the attention
        of its layer, `report` bytes or None.
        """

        def check(scripts: list[RequestScript]) -> None:
            with self._opened() as session:
                session.play(scripts)

        self._search_played(rules.MASKS.text, 60, check, scripts=self._scripts(4))

    def test_frontend(self) -> None:
        """The frontend half completes or refuses requests, and reads their answers.

        `prepare` raises nothing but RequestError, treats equal requests alike, keeps id and prompt,
        and changes nothing of a request that it has completed before. `reads_answer` returns a
        bool, `validate` text or None.
        """
        if self.part.frontend_half is StepPart.frontend_half:
            pytest.skip("the part has no half in the frontend")

        def check(
            request: EngineCoreRequest, reasoning: ReasoningMarkers | None, answer: str
        ) -> None:
            part, half = self._build_frontend_half()
            if half is not None:
                prepared = check_prepare(half, request, reasoning)
                if prepared is not None:
                    check_answer(half, prepared, answer)
            for closed in (half, half, part):
                if closed is not None:
                    call(CLOSE, closed.close)

        markers = st.sampled_from([None, ReasoningMarkers(((1,),), ((2,),))])
        requests = self.requests().map(lambda drawn: structs.replace(drawn, request_id="r0"))
        text = f"{FRONTEND.text}; {ANSWERS.text}"
        answers = st.text(max_size=8) | st.sampled_from(["{}", "[1", '"a"', "null"])
        self._search(text, 60, check, request=requests, reasoning=markers, answer=answers)

    def test_prompts(self) -> None:
        """`read_prompt` gives ids and fields of each of `prompts` and `media`, of which `prepare`
        takes all. `cut` gives no more tokens than it is asked for.
        """
        if self.part.frontend_half is StepPart.frontend_half:
            pytest.skip("the part has no half in the frontend")
        self._run_checks(PROMPTS.text, self._check_prompts)

    def test_media(self) -> None:
        """`read_prompt` gives tokens of each of `media`, the same each time, and features that
        cover them in order, with an identifier for each content, which `prepare` and the engine
        half take. It refuses other numbers of items, other modalities, and what is no media.
        """
        if self.part.frontend_half is StepPart.frontend_half:
            pytest.skip("the part has no half in the frontend")
        self._run_checks(PLACED.text, self._check_media)

    def _check_media(self) -> None:
        part, half = self._build_frontend_half()
        requests = [] if half is None else check_media(half, self.media, self.vocab_size)
        if half is not None and requests:
            halves = self._make()
            assert halves.engine is not None, "_make() gives one"
            for request in requests:
                check_taken(request, half, halves.engine)
            halves.close()
        for closed in (half, part):
            if closed is not None:
                call(CLOSE, closed.close)

    def _check_prompts(self) -> None:
        part, half = self._build_frontend_half()
        prompts = [*self.prompts, *map(prompt_of, self.media)]
        if half is not None and bool(half.prompt_keys) != bool(prompts):
            keys, given = short_repr(half.prompt_keys), len(prompts)
            seen = f"prompt_keys are {keys}, and the suite has {given} prompts"
            raise PROMPTS.violation(seen if given else f"{NOTHING_DRAWN}: {seen}")
        fields = type(part).request_fields(engine_config(self.config))
        if half is not None:
            for prompt in prompts:
                check_prompt(half, prompt, fields, self.vocab_size, self.prompt_pooling)
        for closed in (half, part):
            if closed is not None:
                call(CLOSE, closed.close)

    def test_calls(self) -> None:
        """`call` answers each of `calls` with plain data, and refuses others by a RequestError."""
        if self.part.engine_half is StepPart.engine_half:
            pytest.skip("the part has no half in the engine")
        self._run_checks(rules.CALLS.text, self._check_calls)

    def _check_calls(self) -> None:
        halves = self._make()
        assert halves.engine is not None, "_make() gives one"
        try:
            for method, arguments in self.calls:
                rules.check_call(halves.engine, method, arguments, refuses=False)
            rules.check_call(halves.engine, "no such method", {}, refuses=True)
        finally:
            halves.close()

    def test_lost_plans(self) -> None:
        """A plan that is lost and planned again has the same masks; `lost` raises nothing."""

        def check(scripts: list[RequestScript], lost: list[int]) -> None:
            with self._opened(lost=lost) as session:
                session.play(scripts)

        steps = st.lists(st.integers(0, 8), min_size=1, max_size=4)
        self._search_played(rules.LOST.text, 40, check, scripts=self._scripts(3), lost=steps)

    def test_alone_as_together(self) -> None:
        """A request gets the same alone and among others.

        That is its gate, costs and masks, and the rows that the worker half changes.
        """
        if self.shares:
            pytest.skip("shares is True: what a request gets depends on the others")

        def check(scripts: list[RequestScript]) -> None:
            with self._opened() as session:
                together = session.play(scripts)
            for script in scripts:
                name = script.request.request_id
                with self._opened() as session:
                    alone = session.play([with_id(script, name, arrives=0)])[name]
                compare(script, alone, together[name], rules.ALONE, "alone", "among others")

        self._search_played(rules.ALONE.text, 30, check, scripts=self._scripts(4, min_size=2))

    def test_ids_used_again(self) -> None:
        """A request with the id of one that has ended gets what it gets in a new part.

        The other one ended, was refused or aborted.
        """

        def check(scripts: list[RequestScript], ends: str) -> None:
            first, second = (with_id(script, "again", arrives=0) for script in scripts[:2])
            second = with_id(second, "again", ends="finish")
            with self._opened() as session:
                session.play([with_id(first, "again", ends=ends)])
                again = session.play([second])["again"]
            with self._opened() as session:
                fresh = session.play([second])["again"]
            compare(second, fresh, again, rules.ENDED, "in a new part", "after one of its id")

        self._search_played(
            rules.ENDED.text,
            30,
            check,
            scripts=self._scripts(2, min_size=2),
            ends=st.sampled_from(["finish", "refused", "aborted"]),
        )

    def test_forks(self) -> None:
        """A fork, which comes with outputs while its source runs, gets what a request gets that has
        sampled them itself, or is refused. Its source gets the same as without it.
        """
        check = functools.partial(check_fork, self._opened, shares=self.shares)
        begun = st.integers(1, 4)
        self._search_played(FORKS.text, 30, check, script=self._script(), begun=begun)

    def test_weights_changed(self) -> None:
        """After `weights_changed` of both halves, requests get what they do in new halves, which
        had these weights from the start. Skipped if neither half overrides it.
        """
        halves = self._make()
        halves.close()
        if not halves.overrides("weights_changed"):
            pytest.skip("neither half overrides weights_changed")

        def check(scripts: list[RequestScript]) -> None:
            earlier = [with_id(script, f"e{n}") for n, script in enumerate(scripts)]
            with self._opened() as session:
                session.play(earlier)
                session.change_weights(notify=True)
                after = session.play(scripts)
            with self._opened() as session:
                session.change_weights(notify=False)
                fresh = session.play(scripts)
            for script in scripts:
                name = script.request.request_id
                where = "in new halves", "after other weights"
                compare(script, fresh[name], after[name], rules.WEIGHTS, *where)

        self._search_played(rules.WEIGHTS.text, 30, check, scripts=self._scripts(3))

    def test_reads_only(self) -> None:
        """The part changes no plan, no request and no result, in the engine or in a worker."""

        def check(scripts: list[RequestScript], lost: list[int]) -> None:
            with self._opened(lost=lost, watch=True) as session:
                session.play(scripts)

        steps = st.lists(st.integers(0, 6), max_size=2)
        self._search_played(rules.READS_ONLY.text, 15, check, scripts=self._scripts(2), lost=steps)

    def test_memory(self) -> None:
        """Nothing grows with the number of requests, in neither half."""
        self._search_played(
            MEMORY.text,
            1,
            self._check_memory,
            scripts=st.lists(self._script(), min_size=3, max_size=3),
        )

    def test_close(self) -> None:
        """Close releases everything, of both halves; a second close does no harm."""
        self._search_played(CLOSE.text, 2, self._check_close, scripts=self._scripts(3))

    def test_speed(self) -> None:
        """The engine's calls of a step take no longer than `times_plain` allows."""
        if self.times_plain is None:
            pytest.skip("times_plain is None")
        scripts = st.lists(self._script(), min_size=3, max_size=3)
        self._search_played(SPEED.text, 1, self._check_speed, scripts=scripts)

    def _search_played(
        self, rule: str, examples: int, check: Callable[..., None], **drawn: st.SearchStrategy[Any]
    ) -> None:
        """Search with sessions; fail the test if no request that is drawn uses the part."""
        if not self._has_users():
            self._fail(USED, _nothing_drawn("uses the part"))
        self._search(rule, examples, check, **drawn)

    def _has_users(self) -> bool:
        """Return whether a request can be drawn for which `uses` returns anything but False."""

        def is_user(request: EngineCoreRequest) -> bool:
            assert halves.engine is not None, "_make() gives one"
            return halves.engine.uses(request) is not False

        with suppress(Exception):  # the sessions of the search report it
            halves = self._make()
            try:
                find(self.requests(), is_user, settings=_LOOK)
            except NoSuchExample:
                return False
            finally:
                halves.close()
        return True

    def _nothing_drawn(self) -> Violation:
        return _nothing_drawn("that uses the part was ready to run: check or gate refused all")

    def _script(self) -> st.SearchStrategy[RequestScript]:
        return st.builds(
            RequestScript,
            request=self.requests(),
            arrives=st.integers(0, 3),
            steps=st.integers(1, 6),
            seed=st.integers(0, 1 << 16),
            preempted_after=st.integers(0, 3),
            ends=st.sampled_from(["finish"] * 6 + ["refused", "aborted"]),
        )

    def _scripts(self, max_size: int, min_size: int = 1) -> st.SearchStrategy[list[RequestScript]]:
        """Return a strategy for scripts with ids of their own."""
        scripts = st.lists(self._script(), min_size=min_size, max_size=max_size)
        return scripts.map(lambda drawn: [with_id(x, f"r{n}") for n, x in enumerate(drawn)])

    def _make(self) -> Halves:
        """Return the halves of new parts; skip the test if there is none in the engine."""
        loaded = self.loaded()
        worker_part, worker = self._build_worker_half(loaded)
        halves = Halves(*self._build_engine_half(worker), worker_part, worker, loaded)
        if halves.engine is None:
            halves.close()
            pytest.skip("the part has no half in the engine")
        worker, moves_blocks = halves.worker, halves.worker_part.moves_blocks is not None
        if worker is not None and moves_blocks and overrides(worker, "start"):
            call(rules.WORKER, worker.start, None)  # the suite has no blocks
        return halves

    def _build_half(self, method: str, context: type, **fields: Any) -> tuple[StepPart, Any]:
        """Return a part of its own, as each process has one, and what it gives as its half.

        Args:
            method: name of the part's method that returns the half.
            context: class of the half's context.
            fields: fields of it besides `components` and `vocab_size`.
        """
        config = engine_config(self.config)
        part: StepPart = self._build(StepPartContext, config=config, model_config=self.model_config)
        components = ScriptedComponents(self.components, config)
        given = context(components=components, vocab_size=self.vocab_size, **fields)
        return part, call(rules.HALVES, getattr(part, method), given)

    def _build_frontend_half(self) -> tuple[StepPart, FrontendHalf | None]:
        part, half = self._build_half(
            "frontend_half",
            FrontendHalfContext,
            vocabulary=self._vocabulary_or_none,
            encode=lambda text: list(text.encode()),
        )
        if half is not None and not isinstance(half, FrontendHalf):
            raise rules.HALVES.violation(
                f"frontend_half() returned {short_repr(half)}, expected a FrontendHalf or None"
            )
        return part, half

    def _vocabulary_or_none(self) -> Vocabulary:
        if self.vocabulary is None:
            raise NotImplementedError("this tokenizer has no vocabulary")
        return self.vocabulary

    def _build_engine_half(
        self, worker: WorkerHalf | None = None
    ) -> tuple[StepPart, EngineHalf | None]:
        """Return a part and its half, whose calls of workers `worker` answers."""
        part, half = self._build_half(
            "engine_half",
            EngineHalfContext,
            describe_fault=describe_fault,
            faults=fault_counter(engine_config(self.config)),
            clock=time.monotonic,
            scheduler="the scheduler",
            vocabulary=self.vocabulary,
            block_size=16,
            world_size=1,
            block_hashes=block_hashes,
            publish=lambda _events: None,
            call_workers=lambda message: [] if worker is None else [worker.call(message)],
        )
        is_in_workers = type(part).worker_half is not StepPart.worker_half
        if not isinstance(half, EngineHalf) and not (half is None and is_in_workers):
            raise rules.HALVES.violation(
                f"engine_half() returned {short_repr(half)}, expected an EngineHalf"
            )
        return part, half

    def _build_worker_half(self, loaded: Any) -> tuple[StepPart, WorkerHalf | None]:
        part, half = self._build_half(
            "worker_half",
            WorkerHalfContext,
            device=torch.device("cpu"),
            rank=0,
            world_size=1,
            hidden_size=HIDDEN_SIZE,
            describe_fault=describe_fault,
            host_memory=lambda: 1 << 30,
            loaded=loaded,
        )
        if half is not None and not isinstance(half, WorkerHalf):
            raise rules.HALVES.violation(
                f"worker_half() returned {short_repr(half)}, expected a WorkerHalf or None"
            )
        return part, half

    def _opened(self, **named: Any) -> _Opened:
        return _Opened(self, named)

    def _session(self, halves: Halves, *, watch: bool = False, **named: Any) -> StepPartSession:
        worker = None
        if halves.worker is not None:
            name = halves.worker_part.name
            worker = WorkerSteps(halves.worker, name, self.vocab_size, watch=watch)
        assert halves.engine is not None, "_make() gives one"
        named["change_weights"] = functools.partial(self.change_weights, halves.loaded)
        return self._engine_session(halves.engine, worker=worker, watch=watch, **named)

    def _engine_session(self, half: EngineHalf, **named: Any) -> StepPartSession:
        limits = rules.GateLimits(self.ready_steps, self.ready_seconds)
        return StepPartSession(half, self.vocab_size, limits, **named)

    def _check_halves(self) -> None:
        part, half = self._build_engine_half()
        worker_part, worker = self._build_worker_half(self.loaded())
        if half is not None:
            rules.check_declared(half)
            check_encoder_cache(half, worker)
        Halves(part, half, worker_part, worker).close()
        fields = type(part).request_fields(engine_config(self.config))
        if isinstance(fields, str) or not set(fields) <= REQUEST_FIELDS.keys():
            raise rules.HALVES.violation(
                f"request_fields() returned {short_repr(fields)}, expected some of "
                f"{', '.join(sorted(REQUEST_FIELDS))}"
            )

    def _ready(self, scripts: Sequence[RequestScript]) -> list[RequestScript]:
        """Return the scripts that run in the part; another case is drawn if there are none."""
        found = []
        for number, script in enumerate(scripts):
            tried = with_id(script, f"t{number}", arrives=0, ends="finish")
            with self._opened() as session:
                if session.play([tried])[f"t{number}"].gate == "ready":
                    found.append(tried)
        assume(found)
        return found

    def _check_memory(self, scripts: list[RequestScript]) -> None:
        scripts = self._ready(scripts)
        halves = self._make()
        session = self._session(halves)

        def use(number: int) -> list[weakref.ref[Any]]:
            script = scripts[number % len(scripts)]
            session.play([with_id(script, f"m{number}", arrives=0, steps=min(script.steps, 2))])
            return []

        try:
            check_growth(SimpleNamespace(**vars(halves)), use, _REQUESTS)
        finally:
            halves.close()

    def _check_close(self, scripts: list[RequestScript]) -> None:
        with releasing_all():
            halves = self._make()
            self._session(halves).play(scripts)
            halves.close()
        halves.close()

    def _check_speed(self, scripts: list[RequestScript]) -> None:
        scripts = [
            with_id(script, f"s{n}", steps=_TIMED_STEPS, preempted_after=0)
            for n, script in zip(range(_RUNNING), itertools.cycle(self._ready(scripts)))
        ]
        plain, limit = PlainHalf(self.vocab_size), self.times_plain or 0.0
        least = float("inf")
        for _ in range(3):  # on a machine that others use, the best of some
            seconds = _step_seconds(self._engine_session(plain), map(without_features, scripts))
            halves = self._make()
            try:
                least = min(least, _step_seconds(self._session(halves), scripts) / seconds)
            finally:
                halves.close()
            if least <= limit:
                return
        raise SPEED.violation(
            f"they take {least:.0f} times as long for {len(scripts)} requests, times_plain is "
            f"{limit:g}"
        )


class _Opened:
    """A session with new halves, which are closed with it."""

    def __init__(self, suite: StepPartSuite, named: Mapping[str, Any]) -> None:
        self._suite, self._named = suite, named

    def __enter__(self) -> StepPartSession:
        self._halves = self._suite._make()
        return self._suite._session(self._halves, **self._named)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._halves.close()
        else:
            with suppress(Exception):  # the violation is the finding
                self._halves.close()


def _nothing_drawn(what: str) -> Violation:
    return Violation(
        f"{NOTHING_DRAWN}: no request of `requests` {what}",
        "override requests() with a strategy for requests that use the part and may run",
        USED,
    )


def _step_seconds(session: StepPartSession, scripts: Iterable[RequestScript]) -> float:
    session.play(list(scripts))
    return statistics.median(session.call_seconds or [0.0])
