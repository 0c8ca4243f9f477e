"""Positions with several axes of requests with images, for rotary embeddings (M-RoPE)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from hardpoint.plugins import SchedulerOutput
from hardpoint.plugins.device import to_device
from hardpoint.plugins.step_part import ForwardWrapper, WorkerStep

from .messages import EncoderStep, PlacedItem

if TYPE_CHECKING:
    from hardpoint.plugins.model.forward import Forward, ForwardStep

IntArray = np.ndarray[Any, np.dtype[np.int64]]


class PromptPositions:
    """Positions of one request: of its prompt up to the last image, and an offset after it.

    Attributes:
        known: [axes, tokens] up to the last token of an image.
        offset: difference of the position of a later token from its index.
    """

    def __init__(self, items: Sequence[PlacedItem]) -> None:
        axes, index, following = len(items[0].positions), 0, 0
        spans: list[IntArray] = []
        for item in items:
            text = np.arange(following, following + item.offset - index)
            image = np.array(item.positions, np.int64) + following + len(text)
            spans += [np.broadcast_to(text, (axes, len(text))), image]
            index, following = item.offset + image.shape[1], int(image.max()) + 1
        self.known: IntArray = np.concatenate(spans, 1)
        self.offset = following - index

    def at(self, first: int, count: int) -> IntArray:
        """Return the positions of `count` tokens from the index `first` on, [axes, count]."""
        head = self.known[:, first : first + count]
        rest = np.arange(first + head.shape[1], first + count) + self.offset
        return np.concatenate([head, np.broadcast_to(rest, (len(head), len(rest)))], 1)


class RequestPositions:
    """Replaces the positions of tokens in steps of requests with images."""

    def __init__(self, axes: int) -> None:
        self._axes = axes
        self._by_request: dict[str, PromptPositions] = {}

    def add(self, placed: Mapping[str, Sequence[PlacedItem]]) -> None:
        """Add requests by their images."""
        for request_id, items in placed.items():
            self._by_request[request_id] = PromptPositions(items)

    def remove(self, request_ids: Collection[str]) -> None:
        """Remove requests that have ended."""
        if self._by_request:
            for request_id in request_ids:
                self._by_request.pop(request_id, None)

    def around(self, forward: Forward) -> Forward:
        """Return `forward` with the positions replaced before it."""
        return lambda step: forward(self._placed(step))

    def _placed(self, step: ForwardStep) -> ForwardStep:
        layout = step.layout
        if layout is None or not self._by_request:
            return step
        known = [self._by_request.get(request.request_id) for request in layout.requests]
        if not any(known):
            return step
        spans = []
        counts = np.diff(layout.query_starts).tolist()
        for prompt, first, count in zip(known, layout.starts.tolist(), counts, strict=True):
            if prompt is None:
                spans.append(np.broadcast_to(np.arange(first, first + count), (self._axes, count)))
            else:
                spans.append(prompt.at(first, count))
        positions = np.concatenate(spans, 1)
        if (positions == positions[0]).all():
            # Steps without tokens of images, as decode steps are, may be recorded and repeated.
            target = step.batch.positions if step.packed is None else step.packed.positions
            target.copy_(to_device(positions[0].copy(), target.device))
            return step
        device = (step.packed or step.batch).positions.device
        return step.with_positions(to_device(positions, device))


class PositionsWorker(WorkerStep, ForwardWrapper):
    """Replaces positions in the ranks that do not embed tokens."""

    changes_inputs = True

    def __init__(self, axes: int) -> None:
        self._positions = RequestPositions(axes)

    def begin(self, plan: SchedulerOutput, data: bytes) -> None:  # noqa: ARG002
        """Add the requests that workers do not have."""
        self._positions.add(msgspec.msgpack.decode(data, type=EncoderStep).placed)

    def finished(self, request_ids: Collection[str]) -> None:
        """Remove requests that have ended."""
        self._positions.remove(request_ids)

    def around_model(self, forward: Forward) -> Forward:
        """Return `forward` with the positions replaced before it."""
        return self._positions.around(forward)
