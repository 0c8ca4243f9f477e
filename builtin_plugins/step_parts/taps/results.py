"""The engine's half of activation taps: collects readings, each position once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from hardpoint.plugins import EngineCoreRequest, ModelRunnerOutput, RequestFault, SchedulerOutput
from hardpoint.plugins.requests import PartArray
from hardpoint.plugins.step_part import (
    BlockKey,
    PlanData,
    RequestFilter,
    RequestLifecycle,
    StepObserver,
)

from .messages import TapReport, TapValues
from .requests import KIND, Taps


@dataclass
class _Reading:
    """Numbers that taps have read of a request.

    Attributes:
        next_position: after the last position of each key.
        parts: readings not handed out yet, by key: first position, and values.
        num_bytes: bytes of all that was read.
        num_draft_bytes: bytes of them for accepted drafts of the last step, before which the output
            may end.
    """

    next_position: dict[str, int] = field(default_factory=dict)
    parts: dict[str, list[tuple[int, np.ndarray]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    num_bytes: int = 0
    num_draft_bytes: int = 0


class TapResults(RequestFilter, RequestLifecycle, BlockKey, PlanData, StepObserver):
    """Gives workers the positions of a step, and returns the readings of taps there."""

    def __init__(self, name: str, taps: Taps, max_bytes: int) -> None:
        """Read nothing yet.

        Args:
            taps: finds the taps of requests.
            max_bytes: numbers of a request, in bytes.
        """
        self._name, self._taps, self._max_bytes = name, taps, max_bytes
        self._readings: dict[str, _Reading] = {}

    def uses(self, request: EngineCoreRequest) -> bool:
        """Return whether a request gives a tap arguments."""
        return self._taps.are_used(request)

    def check(self, request: EngineCoreRequest) -> None:
        """Check a request that another frontend may have made.

        Raises:
            RequestError: the model has no layer of one of its sites.
        """
        self._taps.of(request)
        self._readings[request.request_id] = _Reading()

    def refused(self, request_id: str) -> None:
        """Forget a request that was not added."""
        self._readings.pop(request_id, None)

    def block_key(self, request: EngineCoreRequest, span: range) -> bytes | None:
        """Return the keys of the changes that taps make to a request; they change its KV."""
        if span.start or not self._taps.are_used(request):
            return None
        components = self._taps.components
        keys = [
            (
                components.source(KIND, tap.name),
                components.options(KIND, tap.name),
                components.call(KIND, tap.name, "cache_key", tap.arguments),
            )
            for tap in self._taps.of(request)
            if tap.writes
        ]
        return msgspec.msgpack.encode(keys) if keys else None

    def begin(self, plan: SchedulerOutput) -> bytes | None:
        """Return the position of the first token of each request that uses taps."""
        if not (users := self._readings.keys() & plan.num_scheduled_tokens.keys()):
            return None
        computed = plan.num_computed_tokens()
        return msgspec.msgpack.encode({name: computed[name] for name in users})

    def result(
        self, plan: SchedulerOutput, result: ModelRunnerOutput
    ) -> Mapping[str, RequestFault]:
        """Keep the readings of taps, without readings of rejected drafts."""
        ended: dict[str, RequestFault] = {}
        reports = result.part_reports.get(self._name, {})
        computed = plan.num_computed_tokens() if reports else {}
        for data in reports.values():
            report = msgspec.msgpack.decode(data, type=TapReport)
            for name, (message, tap) in report.failed.items():
                ended[name] = RequestFault(message, tap or None)
            for name, values in report.values.items():
                reading = self._readings.get(name)
                if reading is None or name in ended or name not in computed:
                    continue
                certain = count = plan.num_scheduled_tokens[name]
                if drafts := plan.draft_token_ids.get(name):
                    sampled = result.sampled_token_ids.get(name, ())
                    count -= len(drafts) + 1 - len(sampled)
                    certain -= len(drafts)
                _keep(reading, values, computed[name], count, certain)
                if reading.num_bytes - reading.num_draft_bytes > self._max_bytes:
                    ended[name] = self._too_much(name)
        return ended

    def _too_much(self, name: str) -> RequestFault:
        tap = next(iter(self._readings[name].next_position)).split("/")[0]
        return RequestFault(
            f"{self._taps.components.source(KIND, tap)}: it read more than {self._max_bytes} bytes "
            f"of the request (plugin.{self._name}.max_bytes); read fewer layers or fewer numbers",
            tap,
        )

    def arrays(self, request_id: str) -> Mapping[str, PartArray]:
        """Return the numbers that taps have read of a request since the last call."""
        if (reading := self._readings.get(request_id)) is None or not reading.parts:
            return {}
        parts, reading.parts = reading.parts, defaultdict(list)
        return {
            key: PartArray(
                np.concatenate([np.arange(first, first + len(rows)) for first, rows in chunks]),
                np.concatenate([rows for _, rows in chunks]),
            )
            for key, chunks in parts.items()
        }

    def ended(self, request_id: str) -> None:
        """Forget a request."""
        self._readings.pop(request_id, None)


def _keep(
    reading: _Reading, values_read: list[TapValues], first: int, count: int, certain: int
) -> None:
    """Keep the values of positions that were not read before.

    Args:
        reading: earlier readings.
        first: position of the first token of the step.
        count: tokens of the step that verification keeps.
        certain: tokens of the step before the first draft.
    """
    reading.num_draft_bytes = 0
    for values in values_read:
        rows = np.frombuffer(values.data, values.dtype).reshape(values.shape)[:count]
        start = max(reading.next_position.get(values.key, 0), first)
        rows = rows[start - first :]
        if len(rows):
            reading.parts[values.key].append((start, rows))
            reading.next_position[values.key] = start + len(rows)
            reading.num_bytes += rows.nbytes
            reading.num_draft_bytes += rows[max(first + certain - start, 0) :].nbytes
