"""Memory and time of grammar backends."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from hardpoint.plugins import GrammarBackend
from hardpoint.plugins.grammars import GrammarState
from hardpoint.testing.pace import cost_of, own_seconds
from hardpoint.testing.snapshots import without_growth
from hardpoint.testing.suite import Violation

from .grammar_samples import GrammarSample, described
from .grammar_session import BEYOND, MAX_DRAFTS, GrammarSession, compiled_by
from .grammar_vocabulary import Mask, SampleTokens, large_vocabulary

_LARGE = 32_000  # tokens of the vocabulary on which masks are measured
_FORKS = 1000
_SLACK_KIB = 4096  # of the process, by which its memory grows anyway
_STATM = Path("/proc/self/statm")


def check_growth(session: GrammarSession) -> None:
    """Check that a backend keeps nothing of a grammar."""
    description = f"the backend: while {20 * len(session.samples)} grammars were compiled"
    fix = "keep nothing of a grammar: the engine has a cache of them"
    for _ in without_growth(session.backend, 20, description, fix):
        for sample in session.samples:
            state = compiled_by(session.backend, sample.checked).fork()
            session.mask(state)


def check_forks(session: GrammarSession, budget: float | None) -> None:
    """Check that a fork has no more than its budget of KiB; None does not measure."""
    if budget is None or not _STATM.exists():
        return
    for sample, root in session.compiled:
        path = next(session.paths(sample), [])
        session.masks(path, root.fork(), described(sample.checked))
        _return_free_memory()
        before, states = _memory_kib(), []
        for _ in range(_FORKS):
            state = root.fork()
            for token in path[:MAX_DRAFTS]:
                state.advance(token)
            session.mask(state)
            states.append(state)
        used = (_memory_kib() - before - _SLACK_KIB) / _FORKS
        if used > budget:
            raise Violation(
                f"{described(sample.checked)}: {_FORKS} forks, with a few tokens each, have "
                f"{used:.0f} KiB each; the budget is {budget:g}",
                "share immutable data between forks, such as tables of the vocabulary; "
                "budget_kib_per_fork in the suite is the limit",
            )


def check_speed(
    session: GrammarSession, make: Callable[[SampleTokens], GrammarBackend], budget: float
) -> None:
    """Check that a mask of a large vocabulary costs no more than its budget of milliseconds.

    Args:
        session: has the samples.
        make: returns a backend for tokens.
        budget: limit of the median.
    """
    texts = [text for sample in session.samples for text in sample.texts]
    tokens = SampleTokens(large_vocabulary(texts, _LARGE))
    backend = make(tokens)
    for sample in session.samples:
        root = compiled_by(backend, sample.checked)

        def measure(sample: GrammarSample = sample, root: GrammarState = root) -> float:
            return statistics.median(_times(sample, root, tokens))

        cost = cost_of(measure, budget / 1e3, rounds=6) * 1e3
        if cost > budget:
            raise Violation(
                f"{described(sample.checked)}: a mask of {_LARGE} tokens costs "
                f"{cost:.1f} ms (median); the budget is {budget:g}",
                "walk a tree of the vocabulary's bytes rather than all tokens; "
                "budget_ms_per_mask in the suite is the limit",
            )
    backend.close()


def _times(sample: GrammarSample, root: GrammarState, tokens: SampleTokens) -> Iterator[float]:
    """Yield the seconds of each mask in valid texts."""
    for text in sample.texts[:4]:
        text = tokens.text(text, special=sample.has_special)
        path, *_ = tokens.tokenizations(text)
        state = root.fork()
        for token in [*path[:20], None]:
            started = own_seconds()
            Mask.of(state, len(tokens.texts) + BEYOND)
            yield own_seconds() - started
            if token is not None:
                state.advance(token)


def _return_free_memory() -> None:
    gc.collect()
    with suppress(AttributeError, OSError):  # another C library than GNU's
        ctypes.CDLL(None).malloc_trim(0)


def _memory_kib() -> float:
    pages = int(_STATM.read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024
