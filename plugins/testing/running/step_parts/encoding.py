"""The calls of a step part's encoder cache by a scheduler, and the checks of its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hardpoint.plugins import EngineCoreRequest, EngineHalf, Request, SchedulerOutput, WorkerHalf
from hardpoint.testing.reporting.calls import call
from hardpoint.testing.suite import Rule, short_repr

__all__ = ["ENCODER_CACHE", "FeaturePlans", "check_encoder_cache"]

ENCODER_CACHE = Rule(
    "encoder cache: allocated features are held until they are freed, when no request holds them",
    "count the requests that hold each identifier, drop unused ones where room is needed, "
    "and report these in take_freed; EncoderCacheManager of hardpoint.toolkit.encoder_cache does",
)

_METHODS = ("holds", "can_allocate", "allocate", "cancel", "free_input", "free", "take_freed")


def check_encoder_cache(half: EngineHalf, worker: WorkerHalf | None) -> None:
    """Check a half's declarations about features.

    Raises:
        Violation: it is wrong.
    """
    cache, limit = half.encoder_cache, half.max_encoder_tokens
    if type(limit) is not int or limit < 0 or bool(limit) != (cache is not None):
        expected = "0, as encoder_cache is None" if cache is None else "a number of tokens above 0"
        raise ENCODER_CACHE.violation(
            f"max_encoder_tokens is {short_repr(limit)}, expected {expected}"
        )
    if cache is None:
        return
    if missing := [name for name in _METHODS if not callable(getattr(cache, name, None))]:
        raise ENCODER_CACHE.violation(
            f"encoder_cache is {short_repr(cache)}, which has no {missing[0]}()"
        )
    if worker is None or not worker.encodes:
        raise ENCODER_CACHE.violation(
            "the engine half has an encoder_cache, and no worker half has `encodes = True`"
        )


class FeaturePlans:
    """Chooses the features that steps encode, as a scheduler does, and frees them."""

    def __init__(self, half: EngineHalf) -> None:
        self._cache, self._limit = half.encoder_cache, half.max_encoder_tokens
        self._kept: dict[str, set[tuple[str, int]]] = {}  # holders of what was allocated
        self._encoding: set[str] = set()
        self._left = self._limit
        self._freed: list[str] = []  # of lost plans

    def refuses(self, request: EngineCoreRequest) -> bool:
        """Return whether no step could encode the features of a request, which has come whole."""
        lengths = {feature.identifier: feature.length for feature in request.features}
        return sum(lengths.values()) > self._limit

    def begin(self) -> None:
        """Begin a step."""
        self._encoding, self._left = set(), self._limit

    def choose(self, request: Request, positions: range) -> list[int] | None:
        """Return the features that a step encodes for a request; None if it has to wait.

        Raises:
            Violation: the cache answers wrong.
        """
        chosen: list[int] = []
        new: set[str] = set()
        reserved = 0
        for index, feature in enumerate(request.source.features):
            name = feature.identifier
            if feature.offset >= positions.stop or feature.end <= positions.start:
                continue
            if name in new or self._holds(request, index):
                if name in new or name in self._encoding:
                    chosen.append(index)
                continue
            fits = self._can_allocate(request, index, reserved)
            if feature.length > self._left - reserved or not fits:
                self.left(request)
                return None
            reserved += feature.length
            new.add(name)
            chosen.append(index)
        for index in chosen:
            self._schedule(request, index)
        return chosen

    def _schedule(self, request: Request, index: int) -> None:
        feature = request.source.features[index]
        if feature.identifier in self._encoding:
            self._holds(request, index)
            return
        call(ENCODER_CACHE, self._cache.allocate, request, index)
        self._encoding.add(feature.identifier)
        self._left -= feature.length
        self._kept.setdefault(feature.identifier, set()).add((request.request_id, index))

    def _holds(self, request: Request, index: int) -> bool:
        name = request.source.features[index].identifier
        is_held = call(ENCODER_CACHE, self._cache.holds, request, index)
        if type(is_held) is not bool:
            raise ENCODER_CACHE.violation(
                f"holds() returned {short_repr(is_held)}, expected a bool"
            )
        if is_held and name not in self._kept:
            raise ENCODER_CACHE.violation(
                f"holds() returned True for {name!r}, which was not allocated, or was freed"
            )
        if not is_held and self._kept.get(name):
            raise ENCODER_CACHE.violation(
                f"holds() returned False for {name!r}, which {self._holder(name)!r} holds"
            )
        if is_held:
            self._kept[name].add((request.request_id, index))
        return is_held

    def _holder(self, name: str) -> str:
        return min(self._kept[name])[0]

    def _can_allocate(self, request: Request, index: int, reserved: int) -> bool:
        is_allocatable = call(ENCODER_CACHE, self._cache.can_allocate, request, index, reserved)
        if type(is_allocatable) is not bool:
            raise ENCODER_CACHE.violation(
                f"can_allocate() returned {short_repr(is_allocatable)}, expected a bool"
            )
        feature = request.source.features[index]
        is_free = not reserved and not any(self._kept.values())
        if not is_allocatable and is_free and feature.length <= self._limit:
            raise ENCODER_CACHE.violation(
                f"can_allocate() returned False for a feature of {feature.length} tokens, of "
                f"max_encoder_tokens {self._limit}, and no request holds any"
            )
        return is_allocatable

    def take_freed(self) -> Sequence[str]:
        """Return the identifiers that the plan of the step reports as freed.

        Raises:
            Violation: a request holds one, or it was not allocated.
        """
        if self._cache is None:
            return ()
        freed = call(ENCODER_CACHE, self._cache.take_freed)
        if isinstance(freed, str) or not isinstance(freed, Sequence):
            raise ENCODER_CACHE.violation(
                f"take_freed() returned {short_repr(freed)}, expected identifiers"
            )
        for name in freed:
            if self._kept.get(name):
                raise ENCODER_CACHE.violation(
                    f"take_freed() returned {name!r}, which {self._holder(name)!r} holds"
                )
            if name not in self._kept:
                raise ENCODER_CACHE.violation(
                    f"take_freed() returned {short_repr(name)}, which was not allocated, or was "
                    f"freed before"
                )
            del self._kept[name]
        released, self._freed = [*self._freed, *freed], []
        return released

    def computed(self, request: Request, tokens: int) -> None:
        """Free the features of a request that are computed completely."""
        for index, feature in enumerate(request.source.features):
            if feature.end <= tokens:
                call(ENCODER_CACHE, self._cache.free_input, request, index)
                self._kept.get(feature.identifier, set()).discard((request.request_id, index))

    def lost(self, plan: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        """Undo the encoding and freeing of features in a lost plan."""
        self._freed += plan.freed_encoder_inputs
        for name, indices in plan.encoder_inputs.items():
            for index in indices:
                call(ENCODER_CACHE, self._cache.cancel, requests[name], index)
                self._kept[requests[name].source.features[index].identifier] = set()

    def left(self, request: Request) -> None:
        """Free the features of a request that has ended or is preempted."""
        if request.source.features:
            call(ENCODER_CACHE, self._cache.free, request)
            for index, feature in enumerate(request.source.features):
                self._kept.get(feature.identifier, set()).discard((request.request_id, index))
