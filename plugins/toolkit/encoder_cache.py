"""Which embeddings of images and the like workers keep, and for whom.

An `EncoderCache` of the contract, for the scheduler of a model with an encoder.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from hardpoint.plugins import Request

__all__ = ["EncoderCacheManager", "encoder_budget"]


def encoder_budget(max_num_batched_tokens: int, longest_feature: int) -> int:
    """Return the encoder token budget of a step, which is also the capacity of the cache.

    A feature is encoded whole, so the longest one always fits.

    Args:
        max_num_batched_tokens: limit of the tokens of a step.
        longest_feature: tokens of the longest feature that the model accepts; 0 for a model that
            accepts none, which gets 0.
    """
    return max(max_num_batched_tokens, longest_feature) if longest_feature else 0


@dataclass(slots=True)
class _Entry:
    """An embedding; its holders are request ids with the index of a feature."""

    length: int
    holders: set[tuple[str, int]] = field(default_factory=set)


class EncoderCacheManager:
    """Tracks the embeddings that workers keep, one per feature identifier, counted in tokens.

    An embedding that no request holds stays cached until its room is needed; the first released
    one is evicted first. Workers drop the result of `take_freed` before they encode the features of
    the same plan.

    Attributes:
        num_tokens: capacity.
    """

    def __init__(self, num_tokens: int) -> None:
        """Start empty, with room for `num_tokens` tokens; 0 for a model without an encoder."""
        self.num_tokens = num_tokens
        self._entries: dict[str, _Entry] = {}
        self._idle: OrderedDict[str, None] = (
            OrderedDict()
        )  # held by no request; released first comes first
        self._held_tokens = 0
        self._idle_tokens = 0
        self._promised_tokens = 0
        self._held_by: dict[str, set[int]] = {}
        self._freed: dict[str, None] = {}

    @property
    def num_free_tokens(self) -> int:
        """Free capacity, including cached embeddings that no request holds."""
        return self.num_tokens - self._held_tokens

    def holds(self, request: Request, index: int) -> bool:
        """Return whether a feature is cached; if so, the request holds it from now on.

        A cached feature does not count if its room is needed for a promise of `can_allocate`.
        """
        feature = request.source.features[index]
        entry = self._entries.get(feature.identifier)
        if entry is None:
            return False
        if not entry.holders and self.num_free_tokens - entry.length < self._promised_tokens:
            return False
        self._hold(entry, request, index)
        return True

    def can_allocate(self, request: Request, index: int, reserved: int) -> bool:
        """Return whether a feature fits next to `reserved` promised tokens; if so, promise it.

        The promise holds until `take_freed` ends the step. No cached feature is evicted yet.
        """
        feature = request.source.features[index]
        entry = self._entries.get(feature.identifier)
        needed = 0 if entry is not None and entry.holders else feature.length
        fits = reserved + needed <= self.num_free_tokens
        self._promised_tokens = reserved + needed * fits
        return fits

    def allocate(self, request: Request, index: int) -> None:
        """Allocate room for a feature, which the request holds; evict cached ones where needed.

        Raises:
            ValueError: there is no room; `can_allocate` would have returned False.
        """
        feature = request.source.features[index]
        entry = self._entries.get(feature.identifier)
        if entry is None:
            self._make_room(feature.identifier, feature.length)
            entry = self._entries[feature.identifier] = _Entry(feature.length)
            self._idle[feature.identifier] = None
            self._idle_tokens += feature.length
            self._freed.pop(feature.identifier, None)  # workers replace their embedding
        self._promised_tokens = max(0, self._promised_tokens - feature.length)
        self._hold(entry, request, index)

    def cancel(self, request: Request, index: int) -> None:
        """Undo `allocate` for a feature that is not encoded in this step, for all of its holders.

        Counts as freed, because workers may have the feature from this plan or an earlier one.
        """
        identifier = request.source.features[index].identifier
        entry = self._entries.pop(identifier, None)
        if entry is None:
            return
        if not entry.holders:
            del self._idle[identifier]
            self._idle_tokens -= entry.length
        else:
            self._held_tokens -= entry.length
        for request_id, held in entry.holders:
            self._forget(request_id, held)
        self._freed[identifier] = None

    def free_input(self, request: Request, index: int) -> None:
        """Release a feature that a request no longer needs."""
        if index not in self._held_by.get(request.request_id, ()):
            return
        self._forget(request.request_id, index)
        identifier = request.source.features[index].identifier
        entry = self._entries[identifier]
        entry.holders.remove((request.request_id, index))
        if not entry.holders:
            self._idle[identifier] = None
            self._idle_tokens += entry.length
            self._held_tokens -= entry.length

    def free(self, request: Request) -> None:
        """Release all features of a request."""
        for index in sorted(self._held_by.get(request.request_id, ())):
            self.free_input(request, index)

    def take_freed(self) -> Sequence[str]:
        """Return the identifiers that were freed since the last call; ends the step."""
        self._promised_tokens = 0
        freed, self._freed = list(self._freed), {}
        return freed

    def _hold(self, entry: _Entry, request: Request, index: int) -> None:
        if not entry.holders:
            self._idle.pop(request.source.features[index].identifier)
            self._idle_tokens -= entry.length
            self._held_tokens += entry.length
        entry.holders.add((request.request_id, index))
        self._held_by.setdefault(request.request_id, set()).add(index)

    def _forget(self, request_id: str, index: int) -> None:
        indices = self._held_by[request_id]
        indices.remove(index)
        if not indices:
            del self._held_by[request_id]

    def _make_room(self, identifier: str, length: int) -> None:
        if length > self.num_free_tokens:
            raise ValueError(
                f"no room for {identifier!r} in the encoder cache: it needs {length} tokens, "
                f"and of {self.num_tokens} only {self.num_free_tokens} are not held"
            )
        while self._held_tokens + self._idle_tokens + length > self.num_tokens:
            dropped, _ = self._idle.popitem(last=False)
            self._idle_tokens -= self._entries.pop(dropped).length
            self._freed[dropped] = None
