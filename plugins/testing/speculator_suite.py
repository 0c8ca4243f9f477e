"""The conformance suite for speculators; the built-in ones pass it too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import index
from typing import Any, ClassVar, NoReturn
from weakref import WeakKeyDictionary

import pytest
import torch
from hypothesis import strategies as st

from hardpoint.plugins import (
    ConfigError,
    DraftRequest,
    SamplingParams,
    Speculator,
    SpeculatorContext,
)
from hardpoint.plugins.component import Component
from hardpoint.typed import ReadOnlyList

from .component_suite import GeneralComponentSuite
from .hidden_states.drafting_model import ModelOfTests
from .hidden_states.head_cache import BLOCK_SIZE, HeadCache, blocks_of
from .pace import PYTHON, cpu_cost
from .snapshots import without_growth
from .suite import Rule, Violation, checks, short_repr

_SHORT, _LONG = 500, 16_000  # tokens of texts whose drafts are timed
_SLOWER = 4.0  # times a draft of a long text may take that of a short one
_IN_TURN = 400  # drafts that are timed together

DRAFTS = Rule(
    "drafts: one sequence of token ids for each request, at most `limit` of the vocabulary",
    "return a list for each request, in their order, cut to request.limit; none is []",
)
ALONE = Rule(
    "alone: the drafts of requests of one scope do not depend on another scope",
    "keep learned data by request.scope, and let no request see another's state; a cache that all "
    "requests share needs room for those of the suite",
)
FORGETS = Rule(
    "forgets: a speculator with `learns = False` keeps nothing of ended requests",
    "keep the data of a request in its state; or set learns = True if learning is intended",
)
RESUMED = Rule(
    "resumed: a request that starts with outputs gets the same drafts as any other",
    "read request.output_token_ids from the beginning in the first propose()",
)
BLOCKS = Rule(
    "blocks: a head writes keys and values for each hidden state, in the blocks of its request",
    "write the slots of positions from hidden_start on, as block_ids has them, and drafts after",
)
READS_ONLY = Rule(
    "reads only: a speculator changes nothing of a request",
    "work on copies: the lists are the engine's",
)


@dataclass
class _Text:
    """A request of a test, and the tokens that it is going to have.

    Attributes:
        pieces: tokens that the request gets between two drafts.
    """

    prompt: list[int]
    pieces: list[list[int]]
    limit: int
    arguments: Any = None
    output: list[int] = field(default_factory=list)
    request: Any = None


class SpeculatorSuite(GeneralComponentSuite):
    """Base class of a test class, which sets `speculator`, and `options` if it has some.

    Attributes:
        speculator: the class under test.
        learns: whether what a request writes shows in the drafts of later ones of its scope.
        vocab_size: vocabulary size, at least 16.
        hidden_size: hidden size of the model.
        hidden_parts: hidden states of a row of `DraftRequest.hidden`; several with `needs_layers`.
        device: device of the model.
        num_draft_tokens: drafts of a request and a step, at most.
        num_layers: layers of the model, as `SpeculatorContext.num_layers`.
        budget_us_per_request: maximum microseconds to draft for a request whose text has 500
            tokens, and got one more; None does not measure, as for drafts that a model computes.
    """

    kind = "speculators"
    speculator: ClassVar[type[Speculator]]
    learns: ClassVar[bool] = False
    vocab_size: ClassVar[int] = 131
    hidden_size: ClassVar[int] = 16
    hidden_parts: ClassVar[int] = 1
    device: ClassVar[str] = "cpu"
    num_draft_tokens: ClassVar[int] = 5
    num_layers: ClassVar[int] = 4
    budget_us_per_request: ClassVar[float | None] = 200.0
    _caches: ClassVar[WeakKeyDictionary[Speculator, HeadCache]] = WeakKeyDictionary()

    def context(self) -> Mapping[str, Any]:
        """Return further fields of the context, such as `open_head`; override it for some.

        Without it, `open_model` returns sequences of a random model, under any name.
        """
        return {}

    def _component(self) -> type[Component]:
        return self.speculator

    @contextmanager
    def _exception_guard(self) -> Iterator[None]:
        with torch.inference_mode(), super()._exception_guard():  # as the engine calls it
            yield

    def _use_once(self, component: Any, number: int) -> object:
        generator = torch.Generator().manual_seed(number)
        drawn = torch.randint(0, self.vocab_size, (40,), generator=generator).tolist()
        text = _Text(drawn[:20], [drawn[20:30], drawn[30:]], self.num_draft_tokens)
        return self._drafts_of(component, [text], scope=str(number % 2), first=number)

    def _make(self) -> Speculator:
        fields: dict[str, Any] = {
            "device": torch.device(self.device),
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_layers": self.num_layers,
            "max_num_seqs": 64,
            "max_model_len": 4 * _LONG,
            "num_draft_tokens": self.num_draft_tokens,
            "open_head": _no_head,
            **self.context(),
        }
        if "open_model" not in fields:
            names = ("vocab_size", "max_model_len", "num_layers", "device")
            fields["open_model"] = ModelOfTests(**{name: fields[name] for name in names}).open
        speculator: Speculator = self._build(SpeculatorContext, **fields)
        if self.speculator.has_kv_cache:
            self._caches[speculator] = HeadCache()
            speculator.cache_allocated(self._caches[speculator].allocated(4 * _LONG))
        return speculator

    def test_drafts(self) -> None:
        """It drafts token ids of the vocabulary for each request, within limits and budget."""

        def check(texts: list[_Text], budget: int) -> None:
            speculator = self._make()
            for number, text in enumerate(texts):
                self._start(speculator, text, f"r{number}", str(number))
            for turn in range(max((len(text.pieces) for text in texts), default=0)):
                running = [text for text in texts if turn < len(text.pieces)]
                self._step(speculator, running, turn, budget)

        self._search(DRAFTS.text, 60, check, texts=self._texts(), budget=st.integers(1, 40))

    def test_alone(self) -> None:
        """A request is drafted alike alone, and next to requests of other scopes."""

        def check(texts: list[_Text]) -> None:
            together = self._drafts_of(self._make(), texts)
            for number, text in enumerate(texts):
                (alone,) = self._drafts_of(self._make(), [text], first=number)
                if together[number] != alone:
                    turn = next(
                        i for i, pair in enumerate(zip(together[number], alone, strict=True))
                        if pair[0] != pair[1]
                    )  # fmt: skip
                    raise ALONE.violation(
                        f"request r{number} of {len(texts)}, each of a scope of its own, got the "
                        f"drafts {together[number][turn]} after {turn + 1} steps, and "
                        f"{alone[turn]} alone"
                    )

        self._search(ALONE.text, 60, check, texts=self._texts(at_least=1))

    def test_forgets(self) -> None:
        """Without `learns`, a request is drafted alike whatever was served before it."""
        if self.learns:
            pytest.skip("learns is True")

        def check(texts: list[_Text]) -> None:
            speculator = self._make()
            for number, text in enumerate(texts):
                (drafts,) = self._drafts_of(speculator, [text], scope="one", first=number)
                (new,) = self._drafts_of(self._make(), [text], scope="one", first=number)
                if drafts != new:
                    raise FORGETS.violation(
                        f"request r{number} got the drafts {drafts} after {number} others had "
                        f"ended, and {new} from a new instance"
                    )

        self._search(FORGETS.text, 40, check, texts=self._texts(at_least=1))

    def test_resumed(self) -> None:
        """A request that starts with outputs gets the same drafts as any other."""

        def check(text: _Text) -> None:
            (expected,) = self._drafts_of(self._make(), [text])
            speculator = self._make()
            begun = [token for piece in text.pieces for token in piece]
            resumed = _Text(text.prompt, [[]], text.limit, text.arguments, begun)
            self._start(speculator, resumed, "r0", "0")
            (drafts,) = self._step(speculator, [resumed], 0)
            if drafts != expected[-1]:
                raise RESUMED.violation(
                    f"after {len(begun)} tokens of output it drafted {expected[-1]}, and {drafts} "
                    f"when it was started with them"
                )

        self._search(RESUMED.text, 60, check, text=self._text())

    def test_blocks(self) -> None:
        """A head writes keys and values of its requests in their blocks, and in no others."""
        if not self.speculator.has_kv_cache:
            pytest.skip("has_kv_cache is False")

        def check(texts: list[_Text]) -> None:
            speculator = self._make()
            for number, text in enumerate(texts):
                self._start(speculator, text, f"r{number}", str(number))
            for turn in range(max(len(text.pieces) for text in texts)):
                written = self._caches[speculator].written
                written.clear()
                running = [text for text in texts if turn < len(text.pieces)]
                self._step(speculator, running, turn)
                self._check_slots([text.request for text in running], written)

        self._search(BLOCKS.text, 40, check, texts=self._texts(at_least=1))

    def _check_slots(self, requests: Sequence[DraftRequest], written: set[int]) -> None:
        allowed: set[int] = set()
        for request in requests:
            assert request.hidden is not None
            start, end = request.hidden_start, request.hidden_start + len(request.hidden)
            slots = [
                request.block_ids[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
                for place in range(start, end + self.num_draft_tokens)
            ]
            allowed.update(slots)
            if missing := [n for n, slot in enumerate(slots[: end - start], start)
                           if slot not in written]:  # fmt: skip
                raise BLOCKS.violation(
                    f"it wrote no keys at position {missing[0]} of request {request.request_id}, "
                    f"expected them at {start} to {end - 1}"
                )
        if outside := sorted(written - allowed):
            raise BLOCKS.violation(
                f"it wrote slot {outside[0]} of block {outside[0] // BLOCK_SIZE}, which is not of "
                f"a request at a position from its hidden_start on"
            )

    @checks(READS_ONLY)
    def test_reads_only(self) -> None:
        """It changes neither the lists of a request nor its fields."""
        speculator = self._make()
        text = _Text([1, 2, 3] * 8, [[1], [2, 3], [1]], self.num_draft_tokens)
        self._start(speculator, text, "r0", "0")
        for turn in range(len(text.pieces)):
            before = _fields(text.request)
            tokens = [*text.output, *text.pieces[turn]]
            self._step(speculator, [text], turn)
            for name, value in _fields(text.request).items():
                if value is not before[name]:
                    raise READS_ONLY.violation(f"it set {name} of a request")
            if list(text.request.output_token_ids) != tokens:
                raise READS_ONLY.violation("it changed the output of a request")

    @checks("memory: nothing grows with the number of requests")
    def test_memory(self) -> None:
        """Nothing grows with the number of requests that have ended."""
        speculator = self._make()
        fix = "drop the data of a request in ended(), and bound all data that is kept beyond it"
        description = "the speculator: while 60 requests ran and ended"
        for wave in without_growth(speculator, 60, description, fix, limit=60):
            generator = torch.Generator().manual_seed(wave)
            drawn = torch.randint(0, self.vocab_size, (300,), generator=generator).tolist()
            pieces = [drawn[at : at + 10] for at in range(100, 300, 10)]
            text = _Text(drawn[:100], pieces, self.num_draft_tokens)
            self._drafts_of(speculator, [text], scope=str(wave % 2), first=wave)

    def test_speed(self) -> None:
        """The cost of drafts stays within the budget, and does not grow with the text."""
        if self.budget_us_per_request is None:
            pytest.skip("budget_us_per_request is None")
        self._run_checks("speed: drafts cost no more than their budget", self._check_speed)

    def _check_speed(self) -> None:
        budget = self.budget_us_per_request or 0.0
        short = self._cost(_SHORT, budget)
        if short > budget:
            raise Violation(
                f"drafts of a request of {_SHORT} tokens cost {short:.0f} microseconds, the budget "
                f"is {budget:.0f}",
                "keep an index that each new token extends; or set budget_us_per_request",
            )
        long, limit = self._cost(_LONG, budget), _SLOWER * max(short, budget / 10)
        if long > limit:
            raise Violation(
                f"drafts of a request of {_LONG} tokens cost {long:.0f} microseconds, of one of "
                f"{_SHORT} {short:.0f}; at most {limit:.0f} would not grow with the text",
                "search an index, and not the text",
            )

    def _cost(self, length: int, budget: float) -> float:
        speculator = self._make()
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(0, self.vocab_size, (length + 4096,), generator=generator).tolist()
        text = _Text(drawn[: length - 1], [drawn[length - 1 : length]], self.num_draft_tokens)
        self._start(speculator, text, "r0", "0")
        self._step(speculator, [text], 0)
        if text.request.hidden is not None:
            text.request.hidden = text.request.hidden[-1:]
        following = iter(drawn[length:])

        def work() -> None:
            for _ in range(_IN_TURN):
                list.append(text.request.output_token_ids, next(following, 0))
                speculator.propose([text.request], self.num_draft_tokens)

        seconds = cpu_cost(work, budget * _IN_TURN / 1e6, reference=PYTHON)
        return seconds * 1e6 / _IN_TURN

    def _hidden(self, tokens: Sequence[int], count: int) -> torch.Tensor:
        table = torch.randn(997, self.hidden_size, generator=torch.Generator().manual_seed(0))
        rows = [(31 * place + token) % 997 for place, token in enumerate(tokens)][-count:]
        return table[rows].repeat(1, self.hidden_parts).to(self.device)

    def _text(self) -> st.SearchStrategy[_Text]:
        tokens = st.integers(0, 3) | st.integers(0, self.vocab_size - 1)
        piece = st.lists(tokens, min_size=1, max_size=4)
        return st.builds(
            _Text,
            prompt=st.lists(tokens, min_size=1, max_size=20),
            pieces=st.lists(piece, min_size=1, max_size=6),
            limit=st.integers(1, self.num_draft_tokens),
            arguments=self._drawn_arguments(self.vocab_size),
        )

    def _texts(self, at_least: int = 0) -> st.SearchStrategy[list[_Text]]:
        return st.lists(self._text(), min_size=at_least, max_size=4)

    def _drafts_of(
        self,
        speculator: Speculator,
        texts: Sequence[_Text],
        scope: str | None = None,
        first: int = 0,
    ) -> list[list[list[int]]]:
        """Run requests to their ends; return the drafts of each after each of its steps.

        Args:
            scope: scope of all of them; None is one of its own for each.
        """
        drafts_by_text: list[list[list[int]]] = [[] for _ in texts]
        for number, text in enumerate(texts, first):
            text.output = []
            self._start(speculator, text, f"r{number}", scope or str(number))
        for turn in range(max(len(text.pieces) for text in texts)):
            running = [i for i, text in enumerate(texts) if turn < len(text.pieces)]
            drafts = self._step(speculator, [texts[i] for i in running], turn)
            for i, tokens in zip(running, drafts, strict=True):
                drafts_by_text[i].append(tokens)
        for text in texts:
            speculator.ended(text.request)
            if self.speculator.has_kv_cache:
                self._caches[speculator].forget(text.request.request_id)
            text.request = None
        return drafts_by_text

    def _start(self, speculator: Speculator, text: _Text, request_id: str, scope: str) -> None:
        arguments = text.arguments
        request = DraftRequest[Any, Any](
            request_id,
            ReadOnlyList(text.prompt),
            ReadOnlyList(text.output),
            SamplingParams(),
            self._prepared({}, self.vocab_size) if arguments is None else arguments,
            scope,
        )
        request.state = speculator.start(request)
        text.request = request

    def _step(
        self, speculator: Speculator, texts: Sequence[_Text], turn: int, budget: int | None = None
    ) -> list[list[int]]:
        for text in texts:
            request = text.request
            list.extend(request.output_token_ids, text.pieces[turn])
            request.limit = text.limit
            text.output = list(request.output_token_ids)
            if self.speculator.needs_hidden:
                new = len(text.pieces[turn]) if turn else len(text.prompt) + len(text.output) - 1
                request.hidden = self._hidden([*text.prompt, *text.output][:-1], new)
                request.hidden_start = len(text.prompt) + len(text.output) - 1 - new
            if self.speculator.has_kv_cache:
                request.block_ids = blocks_of(request.request_id)
        requests = [text.request for text in texts]
        proposed = speculator.propose(
            requests, sum(request.limit for request in requests) if budget is None else budget
        )
        try:
            drafts = [[index(token) for token in tokens] for tokens in proposed]
        except TypeError:
            raise DRAFTS.violation(
                f"propose returned {short_repr(proposed)} for {len(requests)} requests"
            ) from None
        if len(drafts) != len(requests):
            raise DRAFTS.violation(
                f"propose returned {len(drafts)} sequences for {len(requests)} requests"
            )
        for request, tokens in zip(requests, drafts, strict=True):
            if len(tokens) > request.limit:
                raise DRAFTS.violation(
                    f"propose returned {len(tokens)} drafts of a request, its limit is "
                    f"{request.limit}"
                )
            if outside := [token for token in tokens if not 0 <= token < self.vocab_size]:
                raise DRAFTS.violation(
                    f"propose returned token {outside[0]}, the vocabulary is 0 to "
                    f"{self.vocab_size - 1}"
                )
            if tokens:
                speculator.verified(request, tokens[:1], 0)
        return drafts


def _no_head(*_: Any) -> NoReturn:
    raise ConfigError(
        "context(): expected the field open_head, which the speculator calls; override context() "
        "of the suite"
    )


def _fields(request: DraftRequest) -> dict[str, Any]:
    """Return the fields that a speculator must not change."""
    names = ("prompt_token_ids", "output_token_ids", "params", "arguments", "scope", "state")
    return {name: getattr(request, name) for name in names}
