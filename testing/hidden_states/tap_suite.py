"""The conformance suite for activation taps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import strategies as st

from hardpoint.plugins import ActivationTap, ActivationTapContext, TapRows, TapSite
from hardpoint.plugins.component import Component
from hardpoint.plugins.sampling.activation_tap import is_site
from hardpoint.testing.component_suite import ComponentSuite
from hardpoint.testing.suite import Rule, Violation, checks, short_repr

SITES = Rule(
    "sites: sites() gives the same TapSites for the same arguments, in every process",
    "return a list of TapSite(layer, place), each once, which depends on the arguments alone",
)
SHAPE = Rule(
    "shape: read() gives a row per token, change() hidden states of the same shape",
    "return a tensor [tokens, ...] of numbers, or [tokens, hidden_size] without NaN and infinity",
)
ALONE = Rule(
    "alone: a token comes to the same in other chunks, and next to other requests",
    "compute each row from its own hidden state, arguments and position",
)
AGAIN = Rule(
    "again: calls change no state",
    "keep nothing of a call: drafts and preempted requests are computed again",
)
IN_PLACE = Rule(
    "in_place: the hidden states that it gets stay as they are",
    "return a new tensor, such as values + x, and no values.add_(x)",
)
CACHE_KEY = Rule(
    "cache_key: requests with one key have one effect",
    "give all arguments that change() depends on a part in cache_key()",
)

_TOLERANCE = {"rtol": 1e-3, "atol": 1e-4}


@dataclass
class _TapRequest:
    """A request of a test.

    Attributes:
        first_position: position of its first token of the step.
        num_tokens: tokens of the step.
        prompt_len: tokens of its prompt.
        seed: seed of its hidden states.
        cuts: tokens of each chunk; the last one has the rest.
    """

    first_position: int
    num_tokens: int
    prompt_len: int
    seed: int
    cuts: list[int]

    def spans(self) -> list[tuple[int, int]]:
        """Return the chunks of its tokens, first and end."""
        ends = sorted({min(sum(self.cuts[:count]), self.num_tokens) for count in range(4)})
        return [span for span in itertools.pairwise([*ends, self.num_tokens]) if span[0] < span[1]]


class ActivationTapSuite(ComponentSuite):
    """Base class of a test class, which sets `tap`, and `options` if it has some.

    Attributes:
        tap: the class under test.
        hidden_size: hidden size of the model.
        vocab_size: vocabulary size of the model, for `prepare`.
        device: device of the model.
        dtype: dtype of the hidden states.
    """

    kind = "activation_taps"
    tap: ClassVar[type[ActivationTap]]
    hidden_size: ClassVar[int] = 16
    vocab_size: ClassVar[int] = 131
    device: ClassVar[str] = "cpu"
    dtype: ClassVar[torch.dtype] = torch.float32

    def _component(self) -> type[Component]:
        return self.tap

    def _make(self) -> ActivationTap:
        tap: ActivationTap = self._build(
            ActivationTapContext, device=torch.device(self.device), hidden_size=self.hidden_size
        )
        return tap

    @checks("overrides: a tap reads, changes, or does both")
    def test_overrides(self) -> None:
        """It overrides `read`, `change`, or both."""
        if not self._methods():
            raise Violation(
                "it overrides neither read() nor change()", "override read(), change() or both"
            )

    def test_sites(self) -> None:
        """The sites of arguments are places in a model, each once, and the same if asked again."""

        def check(arguments: Any) -> None:
            sites = self.tap.sites(arguments)
            is_list = isinstance(sites, Sequence) and len(sites) > 0
            if not is_list or not all(map(is_site, sites)) or len(set(sites)) < len(sites):
                raise SITES.violation(f"sites() gave {short_repr(sites)}")
            if list(self.tap.sites(arguments)) != list(sites):
                raise SITES.violation("sites() gave others when it was called again")

        self._search(SITES.text, 30, check, arguments=self._drawn_arguments(self.vocab_size))

    def test_shape(self) -> None:
        """Results have a row per token; changed hidden states are finite."""

        def check(call: Callable[..., Any], method: str, requests: list[_TapRequest]) -> None:
            values = self._hidden(requests)
            found = call(values, requests)
            if found is None:
                return
            is_tensor = isinstance(found, torch.Tensor)
            shape = list(found.shape) if is_tensor else short_repr(found)
            if method == "read" and not (is_tensor and found.dim() and len(found) == len(values)):
                raise SHAPE.violation(f"read() gave {shape}, expected [{len(values)}, ...]")
            if method == "change" and not (is_tensor and found.shape == values.shape):
                raise SHAPE.violation(f"change() gave {shape}, expected {list(values.shape)}")
            if method == "change" and not found.isfinite().all():
                raise SHAPE.violation("change() gave numbers that are not finite")

        self._search_calls(SHAPE, 40, check)

    def test_alone(self) -> None:
        """A token comes to the same in chunks of its request, and next to other requests."""

        def check(call: Callable[..., Any], method: str, requests: list[_TapRequest]) -> None:
            together = call(self._hidden(requests), requests)
            alone = [
                call(self._hidden([request], span), [request], span)
                for request in requests
                for span in request.spans()
            ]
            if (together is None) != any(part is None for part in alone):
                raise ALONE.violation(f"{method}() gave None in some calls for the same tokens")
            if together is None:
                return
            parts = torch.cat(alone)
            is_same = parts.shape == together.shape and torch.allclose(
                parts.double(), together.double(), equal_nan=True, **_TOLERANCE
            )
            if not is_same:
                raise ALONE.violation(
                    f"{method}() gave other numbers for {len(requests)} requests than for their "
                    f"chunks alone"
                )

        self._search_calls(ALONE, 40, check)

    def test_again(self) -> None:
        """The same call gives the same, whatever was called between."""

        def check(call: Callable[..., Any], method: str, requests: list[_TapRequest]) -> None:
            first = call(self._hidden(requests), requests)
            for request in requests:
                call(self._hidden([request]), [request])
            again = call(self._hidden(requests), requests)
            if (first is None) != (again is None):
                raise AGAIN.violation(f"{method}() gave None in one of two equal calls")
            if first is not None and not torch.equal(first.nan_to_num(), again.nan_to_num()):
                raise AGAIN.violation(f"{method}() gave other numbers when it was called again")

        self._search_calls(AGAIN, 30, check)

    def test_in_place(self) -> None:
        """It does not change the hidden states that it gets."""

        def check(call: Callable[..., Any], method: str, requests: list[_TapRequest]) -> None:
            values = self._hidden(requests)
            before = values.clone()
            call(values, requests)
            if not torch.equal(before, values):
                raise IN_PLACE.violation(f"{method}() changed its values in place")

        self._search_calls(IN_PLACE, 20, check)

    def test_cache_key(self) -> None:
        """Arguments with one cache key change hidden states alike."""
        if "change" not in self._methods():
            pytest.skip("it does not override change()")

        def check(first: Any, second: Any, requests: list[_TapRequest]) -> None:
            keys = [self.tap.cache_key(arguments) for arguments in (first, second)]
            for key in keys:
                if not isinstance(key, bytes):
                    raise CACHE_KEY.violation(f"cache_key() gave {short_repr(key)}, expected bytes")
            if keys[0] != keys[1]:
                return
            effects = [self._effect(arguments, requests) for arguments in (first, second)]
            if effects[0].keys() != effects[1].keys() or not all(
                torch.equal(effects[0][site], effects[1][site]) for site in effects[0]
            ):
                raise CACHE_KEY.violation(
                    f"{short_repr(first)} and {short_repr(second)} have one key and two effects"
                )

        drawn = self._drawn_arguments(self.vocab_size)
        self._search(
            CACHE_KEY.text, 40, check, first=drawn, second=drawn, requests=self._requests()
        )

    def _methods(self) -> list[str]:
        """Return the methods that the class overrides."""
        names = ("read", "change")
        return [name for name in names if getattr(self.tap, name) != getattr(ActivationTap, name)]

    def _search_calls(
        self, rule: Rule, examples: int, check: Callable[[Callable[..., Any], str, Any], None]
    ) -> None:
        """Check calls of each method at each site of drawn arguments."""

        def check_calls(arguments: Any, requests: list[_TapRequest]) -> None:
            tap = self._make()
            for site in self.tap.sites(arguments):
                for method in self._methods():
                    check(self._caller(tap, method, site, arguments), method, requests)
            tap.close()

        self._search(
            rule.text,
            examples,
            check_calls,
            arguments=self._drawn_arguments(self.vocab_size),
            requests=self._requests(),
        )

    def _caller(
        self, tap: ActivationTap, method: str, site: TapSite, arguments: Any
    ) -> Callable[..., Any]:
        def call(
            values: torch.Tensor, requests: list[_TapRequest], span: tuple[int, int] | None = None
        ) -> Any:
            sizes = [request.num_tokens for request in requests]
            if span is not None:
                sizes = [span[1] - span[0]]
            shift = 0 if span is None else span[0]
            rows = TapRows(
                arguments=[arguments] * len(requests),
                starts=[0, *itertools.accumulate(sizes)],
                first_positions=[request.first_position + shift for request in requests],
                prompt_lens=[request.prompt_len for request in requests],
                device=torch.device(self.device),
            )
            return getattr(tap, method)(site, values, rows)

        return call

    def _effect(self, arguments: Any, requests: list[_TapRequest]) -> dict[TapSite, torch.Tensor]:
        """Return the hidden states of each site as they are changed."""
        tap, found = self._make(), {}
        for site in self.tap.sites(arguments):
            values = self._hidden(requests)
            changed = self._caller(tap, "change", site, arguments)(values.clone(), requests)
            found[site] = values if changed is None else changed
        tap.close()
        return found

    def _requests(self) -> st.SearchStrategy[list[_TapRequest]]:
        request = st.builds(
            _TapRequest,
            first_position=st.integers(0, 40),
            num_tokens=st.integers(1, 9),
            prompt_len=st.integers(1, 50),
            seed=st.integers(0, 5),
            cuts=st.lists(st.integers(1, 5), min_size=3, max_size=3),
        )
        return st.lists(request, min_size=1, max_size=3)

    def _hidden(
        self, requests: list[_TapRequest], span: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """Return hidden states of requests, or of a span of one, which depend on the place."""
        parts = []
        for request in requests:
            first, end = span or (0, request.num_tokens)
            generator = torch.Generator().manual_seed(request.seed)
            states = torch.randn(request.num_tokens, self.hidden_size, generator=generator)
            parts.append(states[first:end])
        return torch.cat(parts).to(self.device, self.dtype)
