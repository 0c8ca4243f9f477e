"""The engine's half of prompt embeddings: checks, keys of blocks, and which steps have some."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from hardpoint.errors import RequestError, shown
from hardpoint.plugins import EngineCoreRequest, SchedulerOutput
from hardpoint.plugins.step_part import BlockKey, PlanData, RequestFilter, RequestLifecycle
from hardpoint.toolkit.half_floats import FLOATS, float32_of

from .requests import check_together
from .rows import Positions, check_mask, check_shape, positions_of


class EmbeddedPrompts(RequestFilter, RequestLifecycle, BlockKey, PlanData):
    """Knows where the prompts of requests have embeddings."""

    for_fields = ("prompt_embeds", "prompt_is_token_ids")

    def __init__(
        self,
        width: int | None,
        max_bytes: int,
        call_workers: Callable[[bytes], Sequence[bytes]],
    ) -> None:
        """Serve a model.

        Args:
            width: its hidden size; None asks the workers when the first request comes.
            max_bytes: bytes of the rows of a prompt, at most.
            call_workers: see `EngineHalfContext`.
        """
        self._width, self._max_bytes, self._call_workers = width, max_bytes, call_workers
        self._ends: dict[str, int] = {}  # position after the last embedding, by request
        self._latest: tuple[list[bool], Positions] | None = None

    def check(self, request: EngineCoreRequest) -> None:
        """Check a request that another frontend may have made.

        Raises:
            RequestError: a value is wrong; whether numbers are finite is not looked at.
        """
        check_together(request)
        rows, name = request.prompt_embeds, "prompt_embeds"
        if type(rows) is not np.ndarray or rows.dtype not in FLOATS:
            is_array = isinstance(rows, np.ndarray)
            actual = f"{rows.dtype} {list(rows.shape)}" if is_array else shown(rows)
            raise RequestError(
                f"{name}: expected an array of float32, float16 or, for bfloat16, uint16, got "
                f"{actual}"
            )
        if self._width is None:
            self._width = next(map(int, self._call_workers(b"")), None)
        check_shape(rows, name, self._width, self._max_bytes)
        check_mask(request.prompt_token_ids, request.prompt_is_token_ids, len(rows))
        self._ends[request.request_id] = int(positions_of(request)[-1]) + 1

    def refused(self, request_id: str) -> None:
        """Forget a request."""
        self._ends.pop(request_id, None)

    def ended(self, request_id: str) -> None:
        """Forget a request."""
        self._ends.pop(request_id, None)

    def block_key(self, request: EngineCoreRequest, span: range) -> bytes | None:
        """Return the positions of embeddings in a span, and a hash of their numbers."""
        rows = request.prompt_embeds
        if type(rows) is not np.ndarray or rows.ndim != 2 or rows.dtype not in FLOATS:
            return None  # `check`, which comes later, refuses it
        if span.start >= len(request.prompt_token_ids):
            return None
        positions = self._positions(request)
        first, end = np.searchsorted(positions, (span.start, span.stop))
        if first == end:
            return None
        content = float32_of(rows[first:end]).tobytes()
        places = (positions[first:end] - span.start).tolist()
        return msgspec.msgpack.encode((places, hashlib.sha256(content).digest()))

    def _positions(self, request: EngineCoreRequest) -> Positions:
        """Return the positions of embeddings; the latest mixed prompt is cached."""
        mask, latest = request.prompt_is_token_ids, self._latest
        if mask is None:
            return positions_of(request)
        if latest is None or latest[0] is not mask:
            self._latest = latest = mask, positions_of(request)
        return latest[1]

    def begin(self, plan: SchedulerOutput) -> bytes | None:
        """Return data, though empty, for plans with new requests or embeddings to come.

        The plan itself has the rows, in its new requests.
        """
        if any(new.source.request_id in self._ends for new in plan.new_requests):
            return b""
        computed = plan.num_computed_tokens()
        names = plan.num_scheduled_tokens.keys() & self._ends.keys()
        return b"" if any(computed[name] < self._ends[name] for name in names) else None
