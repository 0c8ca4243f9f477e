"""The conformance suite for step parts; the built-in ones pass it too."""

from __future__ import annotations

import functools
import itertools
import statistics
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, assume, find, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample
from msgspec import structs

from hardpoint.host.boundary.parts.hooks import FRONTEND_HOOKS, WORKER_HOOKS
from hardpoint.plugins import (
    EngineCoreRequest,
    ReasoningMarkers,
    SamplingParams,
    StepPart,
)
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.step_part.engine import REQUEST_FIELDS
from hardpoint.testing.engine_access import engine_config
from hardpoint.testing.general.growth import RESOURCES
from hardpoint.testing.general.suite import InUse
from hardpoint.testing.pace import EVIDENCE
from hardpoint.testing.reporting.calls import CLOSE, MEMORY, call, check_growth
from hardpoint.testing.running.request_scripts import RequestScript, with_id, without_features
from hardpoint.testing.suite import (
    NOTHING_DRAWN,
    Rule,
    Violation,
    reject_replaced_tests,
    short_repr,
)
from hardpoint.testing.timing.call_times import CallTimes

from . import rules
from .amounts import AMOUNTS, check_amounts
from .building import END, StepPartHalves
from .compared import Halves, PlainHalf, compare
from .draft_rows import DRAFT_ROWS, check_draft_rows
from .effect import EFFECT, check_overrides, completes, not_observed, overridden
from .encoding import check_encoder_cache
from .forks import FORKS, check_fork
from .formats import FORMATS, check_format
from .frontend import (
    ANSWERS,
    FRONTEND,
    PROMPTS,
    check_answer,
    check_prepare,
    check_prompt,
)
from .groups import OPENED, check_group
from .media import PLACED, MediaPrompt, check_media, check_taken, prompt_of
from .session import StepPartSession

USED = "requests: some use the part, and run"
SPEED = Rule(
    "speed: the calls of a step take no longer than a multiple of a plain part's",
    "follow each request from where it was in the last step, and fill only its own rows; or set "
    "`times_plain`",
)

_REQUESTS = 100  # sizes are compared with the sizes after twice as many
_RUNNING = 8
_TIMED_STEPS = 15
_LOOK = settings(
    max_examples=200,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class StepPartSuite(StepPartHalves):
    """Base class of a test class, which sets `part`, and overrides `requests` or sets `arguments`.

    Attributes:
        calls: calls of programs that the part answers: method and arguments.
        prompts: prompts of the part's own forms, which it reads.
        prompt_pooling: parameters of their requests, if these pool.
        media: prompts with media, which it reads, too: token ids with placeholders, and items by
            modality.
        shares: whether the part divides something among requests, so that the results of one depend
            on the others.
        times_plain: maximum time of a step's calls, as a multiple of a part that allows
            every token; None reports the time only.
    """

    calls: ClassVar[Sequence[tuple[str, Mapping[str, Any]]]] = ()
    prompts: ClassVar[Sequence[Mapping[str, Any]]] = ()
    media: ClassVar[Sequence[MediaPrompt]] = ()
    prompt_pooling: ClassVar[PoolingParams | None] = None
    shares: ClassVar[bool] = False
    times_plain: ClassVar[float | None] = None

    def requests(self) -> st.SearchStrategy[EngineCoreRequest]:
        """Return a strategy for requests, mostly with the part; their ids are replaced.

        By default they have `arguments`, if the suite has some; all of them if the part has
        `named_only`.
        """
        return st.builds(
            lambda prompt, temperature, tags, plugin_args: EngineCoreRequest(
                request_id="",
                prompt_token_ids=prompt,
                params=SamplingParams(temperature=temperature),
                eos_token_ids=[END],
                tags=tags,
                plugin_args=plugin_args,
            ),
            st.lists(st.integers(0, 255), min_size=1, max_size=6),
            st.sampled_from([0.0, 1.0]),
            st.sampled_from([{}, {"tenant": "acme"}]),
            self._plugin_args(),
        )

    def _plugin_args(self) -> st.SearchStrategy[dict[str, Any]]:
        if self.arguments is None:
            return st.just({})
        prepared = self._drawn_arguments(self.vocab_size)
        key = f"step_parts/{self._name()}"
        drawn = prepared.map(
            lambda arguments: {key: msgspec.to_builtins(arguments, str_keys=False)}
        )
        return drawn if self.part.named_only else drawn | st.just({})

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
        `limit_drafts` numbers from 0 to the number of drafts that it got. `figures` gives numbers,
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
        """The frontend half completes or refuses requests, and reads their outputs and answers.

        `prepare` raises nothing but RequestError, treats equal requests alike, keeps id and prompt,
        and changes nothing of a request that it has completed before. `reads_answer` returns a
        bool, `validate` text or None. `output_format` gives an OutputFormat or None; its readers
        take any output.
        """
        if self.part.frontend_half is StepPart.frontend_half:
            pytest.skip("the part has no half in the frontend")

        def check(
            request: EngineCoreRequest, reasoning: ReasoningMarkers | None, answer: str
        ) -> None:
            part, half = self._build_frontend_half()
            if half is not None:
                check_format(half, request, answer)
                prepared = check_prepare(half, request, reasoning)
                if prepared is not None:
                    check_answer(half, prepared, answer)
            for closed in (half, half, part):
                if closed is not None:
                    call(CLOSE, closed.close)

        markers = st.sampled_from([None, ReasoningMarkers(((1,),), ((2,),))])
        requests = self.requests().map(lambda drawn: structs.replace(drawn, request_id="r0"))
        text = f"{FRONTEND.text}; {FORMATS.text}; {ANSWERS.text}"
        answers = st.text(max_size=8) | st.sampled_from(["{}", "[1", '"a"', "null"])
        self._search(text, 60, check, request=requests, reasoning=markers, answer=answers)

    def test_groups(self) -> None:
        """`members` gives prompts, the same for equal requests, and `combine` of the worker half
        the logits of one row from theirs. Skipped if the frontend half has no `members`.
        """
        part, frontend = self._build_frontend_half()
        worker_part, worker = self._build_worker_half(self.loaded())
        try:
            if frontend is None or not FRONTEND_HOOKS.implemented(frontend) & {"members"}:
                pytest.skip("the frontend half has no members")
            combines = worker is not None and "combine" in WORKER_HOOKS.implemented(worker)
            key = f"step_parts/{self._name()}"

            def check(request: EngineCoreRequest) -> None:
                arguments = request.plugin_args.get(key)
                if arguments is not None or not self.part.named_only:
                    halves = frontend, worker if combines else None
                    check_group(halves, request, arguments or {}, self.vocab_size)

            requests = self.requests().map(lambda drawn: structs.replace(drawn, request_id="r0"))
            self._search(OPENED.text, 40, check, request=requests)
        finally:
            for closed in (frontend, worker, worker_part, part):
                if closed is not None:
                    call(CLOSE, closed.close)

    def test_prompts(self) -> None:
        """`read_prompt` returns ids and fields of each of `prompts` and `media`, and `prepare`
        accepts all. `cut` returns at most the requested number of tokens.
        """
        if self.part.frontend_half is StepPart.frontend_half:
            pytest.skip("the part has no half in the frontend")
        self._run_checks(PROMPTS.text, self._check_prompts)

    def test_media(self) -> None:
        """`read_prompt` gives tokens of each of `media`, the same each time, and features that
        cover them in order, with an identifier for each content, which `prepare` and the engine
        half take. It refuses other numbers of items, other modalities, and items that are not
        media.
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
            keys, num_prompts = short_repr(half.prompt_keys), len(prompts)
            seen = f"prompt_keys are {keys}, and the suite has {num_prompts} prompts"
            raise PROMPTS.violation(seen if num_prompts else f"{NOTHING_DRAWN}: {seen}")
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

    def test_amounts(self) -> None:
        """Lost plans change no amount that the part counts, and preemptions return none.

        Requests run undisturbed, with lost plans, and with preemptions. Figures, arrays,
        statistics, answers to `calls`, masks, changed rows, and how many further requests pass the
        gate are the same where plans are lost. Where requests are preempted, masks and rows are the
        same, and no amount is further from its first value without preemptions than with them.
        """
        self._search_seen(
            AMOUNTS.text,
            8,
            lambda scripts, seen: check_amounts(self._opened, scripts, self.calls, seen=seen),
            self._scripts(3),
        )

    def test_drafts(self) -> None:
        """The row of a draft gets the same mask and changes as the same row without drafts.

        This holds for accepted drafts; rejected ones leave no trace.
        """
        self._search_seen(
            DRAFT_ROWS.text,
            20,
            lambda scripts, seen: check_draft_rows(
                self._opened, scripts, shares=self.shares, seen=seen
            ),
            self._scripts(3),
        )

    def test_effect(self) -> None:
        """The part does something: a method of one of its halves returns something, completes a
        request, refuses one, or changes rows. Effects elsewhere are not proved.
        """
        self._run_checks(EFFECT.text, self._check_effect)

    def _check_effect(self) -> None:
        part, frontend = self._build_frontend_half()
        worker_part, worker = self._build_worker_half(self.loaded())
        halves = Halves(*self._build_engine_half(worker), worker_part, worker)
        methods = overridden(frontend, halves.engine, worker)
        try:
            if any((frontend, halves.engine, worker)):
                check_overrides(type(part), methods)
            has_effect = bool(self.prompts or self.media or self.calls)
            if not has_effect and frontend is not None:
                drawn = self._sampled(EFFECT, self.requests(), 20)
                requests = [structs.replace(request, request_id="r0") for request in drawn]
                has_effect = completes(frontend, requests)
        finally:
            halves.close()
            for closed in (frontend, part):
                if closed is not None:
                    call(CLOSE, closed.close)
        if not has_effect and (halves.engine is None or not self._has_engine_effect()):
            pytest.skip(not_observed(methods))

    def _has_engine_effect(self) -> bool:
        effects: set[str] = set()

        def check(scripts: list[RequestScript]) -> None:
            if not effects:
                with self._opened() as session:
                    session.play(scripts)
                    effects.update(session.effects)

        self._search_played(EFFECT.text, 20, check, scripts=self._scripts(4))
        return bool(effects)

    def test_alone_as_together(self) -> None:
        """A request gets the same alone and among others.

        That is its gate, costs and masks, and the rows that the worker half changes.
        """
        if self.shares:
            pytest.skip("shares is True: the results of a request depend on the others")

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
        """A reused request id gives the same results as in a new part.

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
        """A fork, which starts with outputs while its source runs, gets the same results as a
        request that sampled the outputs itself, or is rejected. Its source gets the same as without
        it.
        """
        check = functools.partial(check_fork, self._opened, shares=self.shares)
        begun = st.integers(1, 4)
        self._search_played(FORKS.text, 30, check, script=self._script(), begun=begun)

    def test_weights_changed(self) -> None:
        """After `weights_changed` of both halves, requests get the same results as in new halves
        that had these weights from the start. Skipped if neither half overrides it.
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

    def test_speed(self) -> None:
        """The 99th percentile of the time of the engine's calls of a step is reported. They take no
        longer than `times_plain` allows, if it is set.
        """
        scripts = st.lists(self._script(), min_size=3, max_size=3)
        self._search_played(SPEED.text, 1, self._check_speed, scripts=scripts)

    def _search_played(
        self, rule: str, examples: int, check: Callable[..., None], **drawn: st.SearchStrategy[Any]
    ) -> None:
        """Search with sessions; fail the test if no request that is drawn uses the part."""
        if not self._has_users():
            self._fail(USED, _nothing_drawn("uses the part"))
        self._search(rule, examples, check, **drawn)

    def _search_seen(
        self,
        rule: str,
        examples: int,
        check: Callable[[list[RequestScript], Callable[[], None]], None],
        scripts: st.SearchStrategy[list[RequestScript]],
    ) -> None:
        """Search as `_search_played`; skip the test if no case exercised the rule."""
        seen: list[bool] = []

        def run(scripts: list[RequestScript]) -> None:
            check(scripts, lambda: seen.append(True))

        self._search_played(rule, examples, run, scripts=scripts)
        if not seen:
            pytest.skip("undecidable with these requests: none ran for long enough")

    def _has_users(self) -> bool:
        with suppress(Exception), self._opened() as session:  # the sessions of the search report it
            try:
                find(self.requests(), session.is_used_by, settings=_LOOK)
            except NoSuchExample:
                return False
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
        scripts = st.lists(self._script(), min_size=min_size, max_size=max_size)
        return scripts.map(lambda drawn: [with_id(x, f"r{n}") for n, x in enumerate(drawn)])

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

    @contextmanager
    def _in_use(self) -> Iterator[InUse]:
        for count in (8, 100):  # of some strategies, most are refused
            scripts = self._running(self._sampled(RESOURCES, self._script(), count))[:3]
            if scripts:
                break
        else:
            self._fail(USED, self._nothing_drawn())
        halves = self._make()
        session = self._session(halves)

        def use(number: int) -> None:
            script = scripts[number % len(scripts)]
            session.play([with_id(script, f"m{number}", steps=min(script.steps, 2))])
            session.traces.clear()
            session.call_seconds.clear()

        yield InUse(halves, use)

    def _ready(self, scripts: Sequence[RequestScript]) -> list[RequestScript]:
        """Return the scripts that run in the part; another case is drawn if there are none."""
        running = self._running(scripts)
        assume(running)
        return running

    def _running(self, scripts: Sequence[RequestScript]) -> list[RequestScript]:
        running = []
        for number, script in enumerate(scripts):
            tried = with_id(script, f"t{number}", arrives=0, ends="finish")
            with self._opened() as session:
                if session.play([tried])[f"t{number}"].gate == "ready":
                    running.append(tried)
        return running

    def _check_memory(self, scripts: list[RequestScript]) -> None:
        scripts, known = self._ready(scripts), set(threading.enumerate())
        halves = self._make()
        session = self._session(halves)

        def use(number: int) -> list[weakref.ref[Any]]:
            script = scripts[number % len(scripts)]
            session.play([with_id(script, f"m{number}", arrives=0, steps=min(script.steps, 2))])
            return []

        try:
            check_growth(SimpleNamespace(**vars(halves)), use, _REQUESTS, known)
        finally:
            halves.close()

    def _check_speed(self, scripts: list[RequestScript]) -> None:
        scripts = [
            with_id(script, f"s{n}", steps=_TIMED_STEPS, preempted_after=0)
            for n, script in zip(range(_RUNNING), itertools.cycle(self._ready(scripts)))
        ]
        plain, limit, times = PlainHalf(self.vocab_size), self.times_plain, CallTimes(None)
        least = float("inf")
        for _ in range(3 if limit else 1):  # on a machine that others use, the best of some
            seconds = _step_seconds(self._engine_session(plain), map(without_features, scripts))
            halves = self._make()
            try:
                session = self._session(halves)
                least = min(least, _step_seconds(session, scripts) / seconds)
            finally:
                halves.close()
            times.seconds = session.call_seconds
            EVIDENCE.p99_seconds = times.p99()
            if limit is None or least <= limit:
                return
        raise SPEED.violation(
            f"they take {least:.0f} times as long for {len(scripts)} requests, times_plain is "
            f"{limit:g}"
        )


def _nothing_drawn(problem: str) -> Violation:
    return Violation(
        f"{NOTHING_DRAWN}: no request of `requests` {problem}",
        "override requests() with a strategy for requests that use the part and may run, or set "
        "`arguments` if it is used by requests that give some",
        USED,
    )


def _step_seconds(session: StepPartSession, scripts: Iterable[RequestScript]) -> float:
    session.play(list(scripts))
    return statistics.median(session.call_seconds or [0.0])
