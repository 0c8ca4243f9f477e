"""The conformance suite for samplers; the built-in one passes it too."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import strategies as st

from hardpoint.plugins import (
    Finish,
    LogitsRequest,
    Sampler,
    SamplerContext,
    SamplingParams,
    SamplingRows,
)
from hardpoint.plugins.component import Component
from hardpoint.toolkit.logits_calls.states import distributions_of, observer_of

from .component_suite import GeneralComponentSuite
from .engine_access import logits_ops
from .pace import TENSORS, cpu_cost
from .snapshots import snapshot, without_growth
from .suite import Rule, Violation, checks, short_repr

_KINDS = ("plain", "peaked", "flat", "ties", "few", "one")
_BROKEN = {"NaN": math.nan, "+inf": math.inf, "nothing but -inf": -math.inf}
_SURVIVORS = 5
_LEAST_EXPECTED = 5  # draws in a bin of a chi-square test; rarer tokens share one
_SEEDS = st.integers(0, 9) | st.integers(-(2**63), 2**63 - 1)

RESULT = Rule(
    "result: token ids of the vocabulary, int64 [rows], on the logits' device",
    "return argmax(-1) over the vocabulary, one id per row",
)
ROWS = Rule(
    "rows: a row's token depends only on its logits, seed and position",
    "compute the noise of a row from (seed, position, token id) alone, and use nothing of the "
    "other rows, of the row's index or of earlier calls",
)
SEEDS = Rule(
    "seeds: the same seed and position draw the same token, others draw independently",
    "compute the noise as a hash of seed, position and token id, or seed one generator per row by "
    "a hash of both",
)
FREQUENCIES = Rule(
    "frequencies: tokens are drawn with the probabilities of the logits",
    "draw token i with probability softmax(logits)[i], for example as the argmax of logits plus "
    "Gumbel noise; override probabilities() of the suite if another distribution is meant",
)


STATES = Rule(
    "states: states belong to one request, and a fork shares nothing with its original",
    "keep the result of start in the state alone, and nothing in the sampler; let fork copy "
    "everything that advance changes (the default is copy.deepcopy)",
)


@dataclass(frozen=True)
class Row:
    """A row of a drawn batch.

    Attributes:
        content: seeds the logits.
        kind: one of `_KINDS` or of the keys of `_BROKEN`.
        arguments: for the sampler; None is the defaults.
    """

    content: int
    kind: str
    seed: int
    position: int
    greedy: bool
    arguments: Any = None

    def logits(self, vocab_size: int) -> torch.Tensor:
        """Return float32 [vocab]."""
        generator = torch.Generator().manual_seed(self.content)
        logits = torch.randn(vocab_size, generator=generator) * 2
        order = torch.randperm(vocab_size, generator=generator)
        if self.kind == "peaked":
            logits[order[0]] += 30
        elif self.kind == "flat":
            logits.zero_()
        elif self.kind == "ties":
            logits.round_()
        elif self.kind in ("few", "one"):
            logits[order[1 if self.kind == "one" else _SURVIVORS :]] = -math.inf
        elif self.kind == "nothing but -inf":
            logits.fill_(-math.inf)
        elif self.kind in _BROKEN:
            logits[order[0]] = _BROKEN[self.kind]
        return logits


def _rows(
    arguments: st.SearchStrategy[Any], kinds: Sequence[str] = _KINDS
) -> st.SearchStrategy[Row]:
    return st.builds(
        Row,
        content=st.integers(0, 2**31),
        kind=st.sampled_from(kinds),
        seed=_SEEDS,
        position=st.integers(0, 9) | st.integers(0, 100_000),
        greedy=st.booleans(),
        arguments=arguments,
    )


class SamplerSuite(GeneralComponentSuite):
    """Base class of a test class, which sets `sampler`, and `options` if it has some.

    Attributes:
        sampler: the class under test.
        vocab_size: width of the logits, at least 16.
        device: device of the logits.
        budget_us_per_row: maximum microseconds per row of `budget_vocab_size` logits; None does
            not measure.
    """

    kind = "samplers"
    sampler: ClassVar[type[Sampler]]
    vocab_size: ClassVar[int] = 131
    device: ClassVar[str] = "cpu"
    budget_us_per_row: ClassVar[float | None] = 5000.0
    budget_vocab_size: ClassVar[int] = 32_000

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the distribution of a row's token, float64 [vocab]; override if it is another.

        It is checked for rows with the default arguments.

        Args:
            logits: float64 [vocab], -inf for tokens that must not be drawn.
        """
        return logits.softmax(-1)

    def _component(self) -> type[Component]:
        return self.sampler

    def test_result(self) -> None:
        """It returns token ids of the vocabulary: int64 [rows], on the logits' device."""

        def check(batch: Sequence[Row]) -> None:
            self._batch(batch)

        self._search(RESULT.text, 50, check, batch=self._batches())

    def test_greedy(self) -> None:
        """A greedy row gets the likeliest token, of equals the lowest id."""

        def check(batch: Sequence[Row]) -> None:
            logits, tokens = self._batch(batch)
            for row, (row_case, token) in enumerate(zip(batch, tokens, strict=True)):
                best = int(logits[row].argmax())
                if row_case.greedy and token != best:
                    raise Violation(
                        f"greedy row {row} got token {token} with logit {logits[row, token]:.4g}, "
                        f"the likeliest is token {best} with {logits[row, best]:.4g}",
                        "return logits.argmax(-1) for the rows in rows.greedy; of equal logits the "
                        "lowest id wins",
                    )

        self._search(
            "greedy: greedy rows get the likeliest token", 100, check, batch=self._batches()
        )

    def test_masked(self) -> None:
        """A token with a logit of -inf is never chosen."""

        def check(content: int) -> None:
            batch = [
                Row(content, kind, seed, seed % 7, greedy=seed % 5 == 0)
                for seed in range(64)
                for kind in ("few", "one")
            ]
            logits, tokens = self._batch(batch)
            for row, token in enumerate(tokens):
                if logits[row, token] == -math.inf:
                    left = int((logits[row] > -math.inf).sum())
                    raise Violation(
                        f"row {row} got token {token} with logit -inf; {left} of "
                        f"{self.vocab_size} tokens are left in it",
                        "give probability 0 to the tokens at -inf: processors have forbidden them",
                    )

        self._search(
            "masked: a token at -inf is never chosen", 10, check, content=st.integers(0, 2**31)
        )

    def test_rows(self) -> None:
        """A row gets the same token alone and in any batch, in any row."""

        def check(batch: Sequence[Row], turns: int) -> None:
            sampler = self._make()
            _, tokens = self._batch(batch, sampler)
            shift = turns % len(batch)
            _, turned = self._batch([*batch[shift:], *batch[:shift]], sampler)
            for row, token in enumerate(tokens):
                _, alone = self._batch([batch[row]], sampler)
                other = turned[(row - shift) % len(batch)]
                if not token == alone[0] == other:
                    raise ROWS.violation(
                        f"the same row got token {alone[0]} alone, {token} as row {row} of "
                        f"{len(batch)}, and {other} as row {(row - shift) % len(batch)}"
                    )

        self._search(ROWS.text, 150, check, batch=self._batches(), turns=st.integers(0, 5))

    def test_seeds(self) -> None:
        """The same logits, seed and position give the same token, in a new instance too; other
        seeds and positions give others.
        """

        def check(batch: Sequence[Row]) -> None:
            sampler = self._make()
            _, tokens = self._batch(batch, sampler)
            for label, again in (("called again", sampler), ("a new instance", self._make())):
                _, repeated = self._batch(batch, again)
                if repeated != tokens:
                    raise SEEDS.violation(
                        f"for the same logits, seeds and positions it chose {tokens}, {label} "
                        f"{repeated}"
                    )

        self._search(SEEDS.text, 50, check, batch=self._batches())
        self._run_checks(SEEDS.text, self._check_seeds_matter)

    def test_frequencies(self) -> None:
        """Over thousands of seeds, and of positions, the tokens fit `probabilities` (chi-square
        test). The seeds are always the same, so a sampler passes always or never.
        """
        # The seeds are fixed, so a sampler that repeats its draws passes always or never.
        self._run_checks(FREQUENCIES.text, *self._frequency_checks())

    @checks(SEEDS)
    def test_independence(self) -> None:
        """Pairs of draws of neighboring seeds and positions are independent, so seed + 1 does not
        repeat the draws of seed one token later.
        """
        if self._has_states:
            pytest.skip("it has start: its draws at other positions depend on its states")
        side = 64
        logits = torch.full((self.vocab_size,), -math.inf)
        logits[:4] = 0.0
        share = self.probabilities(logits.double())[:4]
        grid = [(seed, position) for seed in range(side) for position in range(side)]
        rows = self._draws([seed for seed, _ in grid], [position for _, position in grid])
        repeated = logits.to(self.device).repeat(len(grid), 1)
        table = torch.tensor(self._sample(self._make(), repeated, rows)).view(side, side)
        for first, second, label in (
            (table[:-1, 1:], table[1:, :-1], "seed s at p + 1 and seed s + 1 at p"),
            (table[:, :-1], table[:, 1:], "seed s at positions p and p + 1"),
            (table[:-1], table[1:], "seeds s and s + 1 at position p"),
            (table[:-1, :-1], table[1:, 1:], "seed s at p and seed s + 1 at p + 1"),
        ):
            pairs = torch.bincount((first * 4 + second).flatten(), minlength=16).double()
            expected = (share[:, None] * share[None, :]).flatten() * pairs.sum()
            if (excess := _chi_square(pairs, expected)) is not None:
                equal = float((first == second).double().mean())
                raise SEEDS.violation(
                    f"among four equally likely tokens, {label} drew the same one in {equal:.0%} "
                    f"of {int(pairs.sum())} cases, expected {float((share**2).sum()):.0%} "
                    f"({excess})"
                )

    def test_states(self) -> None:
        """If it has `start`: a request that runs alone gets the tokens that it gets in a batch, and
        a fork of its state leaves the state as it is.
        """
        if not self._has_states:
            pytest.skip("it has no start: it keeps no states of requests")

        def check(batch: Sequence[Row], steps: int) -> None:
            sampler, alone = self._make(), [self._make() for _ in batch]
            together = self._states(sampler, batch)
            apart = [
                self._states(single, [row])[0] for single, row in zip(alone, batch, strict=True)
            ]
            for step in range(steps):
                rows = [replace(row, content=row.content + step, position=step) for row in batch]
                logits = self._logits(rows)
                tokens = self._sample(sampler, logits, self._settings(rows, together))
                singles = [
                    self._sample(single, logits[[at]], self._settings([row], [state]))[0]
                    for at, (single, row, state) in enumerate(zip(alone, rows, apart, strict=True))
                ]
                if tokens != singles:
                    raise STATES.violation(
                        f"in step {step} the rows got the tokens {tokens} in a batch, and "
                        f"{singles} alone"
                    )
                before = snapshot(together)
                forks = [sampler.fork(state) for state in together]
                self._carry_on(sampler, forks, logits, tokens)
                if snapshot(together) != before:
                    raise STATES.violation(f"a fork that went on changed the states in step {step}")
                together = self._carry_on(sampler, together, logits, tokens)
                apart = self._carry_on(sampler, apart, logits, tokens)
                if any(isinstance(state, Finish) for state in together):
                    return

        batch = st.lists(_rows(self._drawn_arguments(self.vocab_size)), min_size=1, max_size=3)
        self._search(STATES.text, 40, check, batch=batch, steps=st.integers(1, 8))

    def test_unusable_rows(self) -> None:
        """A row of NaN, +inf or nothing but -inf raises nothing and changes no other row; NaN and
        +inf win, so that the engine finds the plugin that made them.
        """

        def check(batch: Sequence[Row], broken: Row, at: int) -> None:
            sampler = self._make()
            at = min(at, len(batch))
            logits, tokens = self._batch([*batch[:at], broken, *batch[at:]], sampler)
            chosen = float(logits[at, tokens[at]])
            if broken.kind != "nothing but -inf" and math.isfinite(chosen):
                raise Violation(
                    f"in a row that contains {broken.kind} it chose token {tokens[at]} with logit "
                    f"{chosen:.4g}",
                    "let NaN and +inf win, as argmax does: by the chosen logit the engine finds "
                    "the plugin that damaged the row",
                )
            _, expected = self._batch(batch, sampler) if batch else (logits, [])
            if tokens[:at] + tokens[at + 1 :] != expected:
                raise ROWS.violation(
                    f"next to a row that contains {broken.kind} the others got "
                    f"{tokens[:at] + tokens[at + 1 :]}, without it {expected}"
                )

        arguments = self._drawn_arguments(self.vocab_size)
        self._search(
            "unusable rows: the fault of one row's processors ends no other request",
            60,
            check,
            batch=st.lists(_rows(arguments), max_size=3),
            broken=_rows(arguments, tuple(_BROKEN)),
            at=st.integers(0, 3),
        )

    def test_reads_only(self) -> None:
        """It changes neither the logits and rows nor torch's global random state."""

        def check(batch: Sequence[Row]) -> None:
            logits, rows = self._logits(batch), self._settings(batch)
            parts = {
                "the logits": lambda: logits,
                "the rows": lambda: dataclasses.replace(rows, columns={}),  # a cache
                "torch's global random state": torch.get_rng_state,
            }
            before = {name: snapshot(part()) for name, part in parts.items()}
            self._sample(self._make(), logits, rows)
            after = {name: snapshot(part()) for name, part in parts.items()}
            if changed := [name for name in parts if before[name] != after[name]]:
                raise Violation(
                    f"sample changed {' and '.join(changed)}",
                    "work on copies: log-probabilities are computed from the same logits; and "
                    "take noise from no global generator",
                )

        self._search("reads only: sample changes nothing", 30, check, batch=self._batches())

    @checks("memory: nothing grows with the number of steps")
    def test_memory(self) -> None:
        """Nothing grows with the number of calls."""
        sampler = self._make()
        logits = torch.zeros(4, self.vocab_size, device=self.device)
        fix = "keep nothing per seed or per step: all that a draw needs is in the rows"
        for wave in without_growth(sampler, 100, "the sampler: in 100 steps", fix):
            seeds = list(range(4 * wave, 4 * wave + 4))
            self._sample(sampler, logits, self._draws(seeds, seeds))

    def test_speed(self) -> None:
        """The cost of a row stays within the budget."""
        if self.budget_us_per_row is None:
            pytest.skip("budget_us_per_row is None")
        self._run_checks("speed: a row costs no more than its budget", self._check_speed)

    def _batches(self) -> st.SearchStrategy[list[Row]]:
        return st.lists(_rows(self._drawn_arguments(self.vocab_size)), min_size=1, max_size=6)

    def _use_once(self, component: Any, number: int) -> object:
        draws = list(range(4 * number, 4 * number + 4))
        logits = torch.zeros(4, self.vocab_size, device=self.device)
        return self._sample(component, logits, self._draws(draws, draws))

    def _make(self, vocab_size: int | None = None) -> Sampler:
        sampler: Sampler = self._build(
            SamplerContext,
            device=torch.device(self.device),
            vocab_size=vocab_size or self.vocab_size,
            ops=logits_ops(torch.device(self.device)),
        )
        return sampler

    def _logits(self, batch: Sequence[Row]) -> torch.Tensor:
        return torch.stack([row.logits(self.vocab_size) for row in batch]).to(self.device)

    @property
    def _has_states(self) -> bool:
        return self.sampler.start is not Sampler.start

    def _states(self, sampler: Sampler, batch: Sequence[Row]) -> list[Any]:
        """Return the states of requests without outputs."""
        defaults = self._prepared({}, self.vocab_size)
        states = []
        for number, row in enumerate(batch):
            request = LogitsRequest(
                request_id=f"r{number}",
                prompt_token_ids=[row.content % self.vocab_size],
                output_token_ids=[],
                params=SamplingParams(seed=row.seed, temperature=0.0 if row.greedy else 1.0),
                stop_token_ids=[],
                sampler_arguments=defaults if row.arguments is None else row.arguments,
            )
            states.append(sampler.start(request))
        return states

    def _carry_on(
        self, sampler: Sampler, states: Sequence[Any], logits: torch.Tensor, tokens: Sequence[int]
    ) -> list[Any]:
        """Return the states after a token of each."""
        if type(sampler).observe is Sampler.observe:
            pairs = zip(states, tokens, strict=True)
            return [sampler.advance(state, token) for state, token in pairs]
        observe, distributions = observer_of(sampler), distributions_of(logits.cpu(), tokens)
        rows = zip(states, tokens, distributions, strict=True)
        return [observe(state, token, distribution) for state, token, distribution in rows]

    def _settings(self, batch: Sequence[Row], states: Sequence[Any] | None = None) -> SamplingRows:
        return self._draws([r.seed for r in batch], [r.position for r in batch], batch, states)

    def _draws(
        self,
        seeds: Sequence[int],
        positions: Sequence[int],
        batch: Sequence[Row] = (),
        states: Sequence[Any] | None = None,
    ) -> SamplingRows:
        """Return rows, by default with the states of new requests."""
        if states is None and self._has_states:
            fresh = [Row(0, "plain", seed, 0, greedy=False) for seed in seeds]
            states = self._states(self._make(), list(batch) or fresh)
        greedy = [row.greedy for row in batch] or [False] * len(seeds)
        defaults = self._prepared({}, self.vocab_size)
        arguments = [row.arguments for row in batch] or [None] * len(seeds)
        return SamplingRows(
            torch.tensor(greedy, device=self.device),
            all(greedy),
            any(greedy),
            torch.tensor(seeds, device=self.device),
            torch.tensor(positions, device=self.device),
            [defaults if row_arguments is None else row_arguments for row_arguments in arguments],
            {},
            states or (),
        )

    def _batch(
        self, batch: Sequence[Row], sampler: Sampler | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        logits = self._logits(batch)
        tokens = self._sample(sampler or self._make(), logits.clone(), self._settings(batch))
        return logits, tokens

    def _sample(self, sampler: Sampler, logits: torch.Tensor, rows: SamplingRows) -> list[int]:
        """Return the sampled tokens; raise a Violation if they are not tokens."""
        chosen = sampler.sample(logits, rows)
        if not isinstance(chosen, torch.Tensor):
            raise RESULT.violation(f"sample returned {short_repr(chosen)}, no tensor")
        expected = (torch.int64, (len(logits),), logits.device)
        got = (chosen.dtype, tuple(chosen.shape), chosen.device)
        if got != expected:
            raise RESULT.violation(
                f"sample returned {got[0]} {list(got[1])} on {got[2]} for {len(logits)} rows of "
                f"logits on {logits.device}, expected {expected[0]} {list(expected[1])}"
            )
        tokens: list[int] = chosen.tolist()
        if outside := [token for token in tokens if not 0 <= token < logits.shape[1]]:
            raise RESULT.violation(
                f"sample returned token {outside[0]}, the vocabulary is 0 to {logits.shape[1] - 1}"
            )
        return tokens

    def _check_seeds_matter(self) -> None:
        logits = torch.zeros(64, self.vocab_size, device=self.device)
        if self.probabilities(logits[0].double().cpu()).max() > 0.5:
            return
        same, other = [3] * 64, list(range(64))
        for label, seeds, positions in (
            ("64 seeds at one position", other, same),
            ("one seed at 64 positions", same, other),
        )[: 1 if self._has_states else 2]:
            tokens = set(self._sample(self._make(), logits, self._draws(seeds, positions)))
            if len(tokens) == 1:
                raise SEEDS.violation(
                    f"from {self.vocab_size} equally likely tokens, {label} all drew token "
                    f"{tokens.pop()}"
                )

    def _frequency_checks(self) -> Iterator[Callable[[], None]]:
        wide = max(self.vocab_size, 5000)
        for kind, vocab_size, draws in (
            ("flat", self.vocab_size, 2048),
            ("plain", self.vocab_size, 4096),
            ("few", self.vocab_size, 1024),
            ("plain", wide, 512),
        ):
            logits = Row(7, kind, 0, 0, greedy=False).logits(vocab_size)
            for varied in ("seeds",) if self._has_states else ("seeds", "positions"):
                yield functools.partial(self._check_frequencies, varied, logits, draws)

    def _check_frequencies(self, varied: str, logits: torch.Tensor, draws: int) -> None:
        sampler, vocab_size = self._make(len(logits)), len(logits)
        counts = torch.zeros(vocab_size, dtype=torch.float64)
        for start in range(0, draws, 512):
            numbers, same = list(range(start, start + 512)), [11] * 512
            rows = self._draws(*((numbers, same) if varied == "seeds" else (same, numbers)))
            tokens = self._sample(sampler, logits.to(self.device).repeat(512, 1), rows)
            counts += torch.bincount(torch.tensor(tokens), minlength=vocab_size)
        expected = self.probabilities(logits.double()) * draws
        if (excess := _chi_square(counts, expected)) is not None:
            worst = int((counts - expected).abs().argmax())
            raise FREQUENCIES.violation(
                f"{draws} draws with {varied} 0 to {draws - 1} gave token {worst} "
                f"{counts[worst]:.0f} times, {expected[worst]:.1f} times expected ({excess})"
            )

    def _check_speed(self) -> None:
        count, vocab_size = 8, self.budget_vocab_size
        sampler = self._make(vocab_size)
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(count, vocab_size, generator=generator).to(self.device)
        rows = self._draws(list(range(count)), [3] * count)

        def work() -> None:
            sampler.sample(logits, rows).tolist()  # which waits for the device

        budget = self.budget_us_per_row or 0.0
        cost = cpu_cost(work, budget * count / 1e6, reference=TENSORS) * 1e6 / count
        if cost > budget:
            raise Violation(
                f"a row of {vocab_size} logits cost {cost:.0f} microseconds, the budget is "
                f"{budget:.0f}",
                "work on all rows at once, without a loop over them; or set budget_us_per_row",
            )


def _chi_square(counts: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Return how far counts are from the expected ones; None if they fit.

    They do not if chance gives a larger chi-square once in 10**9 (six standard deviations, by the
    approximation of Wilson and Hilferty, 1931), or if something happened that cannot.
    """
    if counts[expected <= 0].any():
        return "which is impossible"
    bins: list[list[float]] = [[0.0, 0.0]]
    for count, mean in zip(counts.tolist(), expected.tolist(), strict=True):
        if bins[-1][1] >= _LEAST_EXPECTED:
            bins.append([0.0, 0.0])
        bins[-1][0] += count
        bins[-1][1] += mean
    if len(bins) > 1 and bins[-1][1] < _LEAST_EXPECTED:
        count, mean = bins.pop()
        bins[-1][0] += count
        bins[-1][1] += mean
    freedom = len(bins) - 1
    if not freedom:
        return None
    value = sum((count - mean) ** 2 / mean for count, mean in bins)
    part = 2 / (9 * freedom)
    limit = freedom * (1 - part + 6 * math.sqrt(part)) ** 3
    if value <= limit:
        return None
    return f"chi-square {value:.0f} with {freedom} degrees of freedom, at most {limit:.0f} fits"
