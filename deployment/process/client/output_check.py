"""Checks of an engine's outputs against the requests that it was sent.

An engine in another process, or on another machine, may be broken or hostile. An output that does
not belong to its request ends that engine before anything else reads it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
import numpy as np

from hardpoint.host.system.encoding import WireError
from hardpoint.plugins import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from hardpoint.plugins.requests import PartArray, TokenLogprobs
from hardpoint.plugins.requests.engine_state import BLOCK_KEY_BYTES, KVCacheChanges

from .output_decoder import RARE_FIELDS, OutputDecoder

T = TypeVar("T")

_MOST_NAMES, _MOST_NAME = 10_000, 1024  # names in a report, and characters of one
_MOST_TEXT, _MOST_PATH = 1 << 20, 200  # characters
_MOST_LOGPROB = 0.01  # because of rounding
_MOST_UNKNOWN = 1 << 16  # outputs of requests that were aborted in the meantime
_OUTPUTS_PER_REQUEST = 4  # of one message, because messages that wait are merged

_REPORT_BYTES, _ANSWER_BYTES, _POOLING_BYTES = 16 << 20, 64 << 20, 16 << 20
_OUTPUT_BYTES = 1 << 18  # of a request, besides tokens and log-probabilities
_TOKEN_BYTES, _ENTRY_BYTES = 64, 24
"""Sizes in a message, without the tensors that are frames of their own."""
_LATE_BYTES, _LATE_S = 1 << 20, 60.0
"""Outputs of a request that was aborted may be on their way for so long."""


class _Expected:
    """Limits of the outputs of a request.

    Attributes:
        include: step parts whose figures and arrays come with its outputs.
        tokens_left: tokens that may still come.
        num_bytes: largest size of all outputs.
        num_positions: positions of the prompt and of all tokens.
        num_logprobs: largest number of log-probabilities at a position; 0 for none.
        num_prompt_logprobs: the same of positions of the prompt.
    """

    __slots__ = (
        "has_pooling",
        "include",
        "num_bytes",
        "num_logprobs",
        "num_positions",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "shapes",
        "tokens_left",
    )

    def __init__(self, request: EngineCoreRequest, vocab_size: int, max_model_len: int) -> None:
        params, resumed = request.params, request.resumed
        before = 0 if resumed is None else len(resumed.output_token_ids)
        self.num_prompt_tokens = len(request.prompt_token_ids)
        room = max_model_len - self.num_prompt_tokens
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        self.include = params.include
        self.has_pooling = request.pooling_params is not None
        self.tokens_left = 0 if self.has_pooling else max(limit - before, 1)
        self.num_positions = self.num_prompt_tokens + max(limit, 1)
        self.num_logprobs = _num_entries(params.logprobs, params.logprob_token_ids)
        self.num_prompt_logprobs = _num_entries(params.prompt_logprobs, None)
        self.shapes: dict[tuple[str, ...], tuple[Any, ...]] = {}
        entries = self.num_positions * min(self.num_logprobs, vocab_size)
        entries += self.num_prompt_tokens * min(self.num_prompt_logprobs, vocab_size)
        tokens = _TOKEN_BYTES * self.num_positions
        self.num_bytes = _OUTPUT_BYTES + tokens + _ENTRY_BYTES * entries
        self.num_bytes += _POOLING_BYTES if self.has_pooling else 0


def _num_entries(likeliest: int | None, named: Sequence[int] | None) -> int:
    if likeliest is None and named is None:
        return 0
    if likeliest is not None and likeliest < 0:  # all of the vocabulary
        return 1 << 62
    return 1 + (likeliest or 0) + len(named or ())


class OutputCheck:
    """Checks the outputs of one engine. Requests are added in any thread; outputs come in one.

    Attributes:
        decoder: decoder of its messages.
    """

    def __init__(self, vocab_size: int, max_model_len: int, *, is_remote: bool = False) -> None:
        """Begin without a request.

        Args:
            vocab_size: tokens of the model.
            max_model_len: positions of the model.
            is_remote: whether others run the engine, so that a plugin that it blames for an error
                is not quarantined here.
        """
        self.decoder = OutputDecoder(vocab_size)
        self._vocab_size, self._max_model_len = vocab_size, max_model_len
        self._is_remote = is_remote
        self._requests: dict[str, _Expected] = {}
        self._late: deque[tuple[float, int]] = deque()  # times and sizes of what was aborted

    def add(self, requests: Iterable[EngineCoreRequest]) -> None:
        """Expect outputs of requests, before they are sent."""
        for request in requests:
            self._requests[request.request_id] = _Expected(
                request, self._vocab_size, self._max_model_len
            )

    def expect(self, requests: Sequence[EngineCoreRequest], send: Callable[[], T]) -> T:
        """Send requests and expect their outputs from then on; return the result of `send`.

        None is expected if `send` raises or returns False: then they were not sent.
        """
        self.add(requests)
        is_sent = False
        try:
            sent = send()
            is_sent = sent is not False
        finally:
            if not is_sent:
                self.forget([request.request_id for request in requests])
        return sent

    @property
    def num_requests(self) -> int:
        """Number of requests with expected outputs."""
        return len(self._requests)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Expect no more outputs of requests that were aborted."""
        now = time.monotonic()
        for request_id in request_ids:
            expected = self._requests.pop(request_id, None)
            if expected is not None and expected.num_bytes > _LATE_BYTES:
                self._late.append((now, expected.num_bytes))
        while self._late and now - self._late[0][0] > _LATE_S:
            self._late.popleft()

    def forget_all(self) -> list[str]:
        """Return the ids of unfinished requests, and expect no more outputs."""
        request_ids = list(self._requests)
        self.forget(request_ids)
        return request_ids

    def check_size(self, num_bytes: int, num_calls: int) -> None:
        """Check the size of a message before it is decoded, which takes many times its memory.

        Args:
            num_bytes: its size without the tensors that are frames of their own.
            num_calls: control calls that are not answered yet.

        Raises:
            WireError: it is larger than all outputs and answers that may be in it.
        """
        if num_bytes <= _REPORT_BYTES:
            return
        limit = _REPORT_BYTES + (_ANSWER_BYTES if num_calls else 0)
        limit += sum(expected.num_bytes for expected in list(self._requests.values()))
        limit += sum(size for _, size in list(self._late))
        if num_bytes > limit:
            raise WireError(
                f"a message of {num_bytes} bytes, expected at most {limit} for its requests"
            )

    def check(self, batch: EngineCoreOutputs, rare_fields: Collection[str] | None = None) -> None:
        """Check a message; outputs of requests that the engine does not have are removed.

        Args:
            rare_fields: rare fields of its outputs, as `decoder` reports them; None checks all
                fields, and the token ids, which the decoder checks otherwise.

        Raises:
            WireError: it has something that does not belong to its request.
        """
        limit = _MOST_UNKNOWN + _OUTPUTS_PER_REQUEST * len(self._requests)
        if len(batch.outputs) > limit:
            raise WireError(f"outputs: expected at most {limit}, got {len(batch.outputs)}")
        unknown = self._count(batch.outputs)
        if fields := RARE_FIELDS.keys() if rare_fields is None else rare_fields:
            self._check_rare(batch.outputs, fields, unknown)
        if rare_fields is None:
            for output in batch.outputs:
                if id(output) not in unknown:
                    _check_tokens(output, self._vocab_size)
        if unknown:
            batch.outputs = [output for output in batch.outputs if id(output) not in unknown]
        if batch.finished_requests:
            self.forget(batch.finished_requests)
        _check_reports(batch)

    def _count(self, outputs: Iterable[EngineCoreOutput]) -> set[int]:
        """Count new tokens, check log-probabilities; return the object ids of unknown outputs.

        Nearly every output has tokens alone, and each line here takes a hundredth of its time.
        """
        unknown: set[int] = set()
        requests = self._requests
        for output in outputs:
            try:
                expected = requests[output.request_id]
            except KeyError:
                unknown.add(id(output))
                continue
            left = expected.tokens_left = expected.tokens_left - len(output.new_token_ids)
            if left < 0:
                raise _wrong(output, "new_token_ids", "at most max_tokens tokens")
            if (
                output.logprobs is not None
                or output.prompt_logprobs is not None
                or output.observed_logprobs is not None
            ):
                _check_all_logprobs(output, expected, self._vocab_size)
        return unknown

    def _check_rare(
        self, outputs: Iterable[EngineCoreOutput], fields: Collection[str], unknown: set[int]
    ) -> None:
        """Check rare fields; add outputs after the last one of their request to `unknown`."""
        with_fields, ended = _ids_with(outputs, fields), set[str]()
        for output in outputs:
            if ended and output.request_id in ended:
                unknown.add(id(output))
            if id(output) not in with_fields or id(output) in unknown:
                continue
            expected = self._requests.get(output.request_id)
            if expected is None:  # another thread has aborted it since `_count`
                unknown.add(id(output))
                continue
            _check_fields(output, expected, fields)
            if output.finish_reason is not None:
                ended.add(output.request_id)
            if self._is_remote:
                output.faulty_plugin = None
        for request_id in ended:
            self._requests.pop(request_id, None)


_GETTERS = {field: attrgetter(field) for field in RARE_FIELDS}


def _ids_with(outputs: Iterable[EngineCoreOutput], fields: Iterable[str]) -> Set[int]:
    """Return the object ids of outputs with one of the fields."""
    with_fields: set[int] = set()
    for field in fields:
        get, default = _GETTERS[field], RARE_FIELDS[field]
        with_fields.update([id(output) for output in outputs if get(output) is not default])
    return with_fields


def _wrong(output: EngineCoreOutput, field: str, expected: str) -> WireError:
    return WireError(f"output of {output.request_id!r}: {field}: expected {expected}")


def _check_fields(output: EngineCoreOutput, expected: _Expected, fields: Iterable[str]) -> None:
    """Check the fields among some that an output has.

    Raises:
        WireError: one does not belong to the request.
    """
    for field in fields:
        check = _CHECKS.get(field)
        if check is not None and _GETTERS[field](output) is not RARE_FIELDS[field]:
            check(output, expected)


def _check_cached(output: EngineCoreOutput, expected: _Expected) -> None:
    if not 0 <= (output.num_cached_tokens or 0) <= expected.num_positions:
        raise _wrong(output, "num_cached_tokens", f"0 to {expected.num_positions}")


def _check_weight_runs(output: EngineCoreOutput, _: _Expected) -> None:
    starts = [run.start for run in output.weight_runs or ()]
    if starts and not (starts[0] >= 0 and starts == sorted(set(starts))):
        raise _wrong(output, "weight_runs", "ascending starts")


def _check_events(output: EngineCoreOutput, _: _Expected) -> None:
    if not all(math.isfinite(event.timestamp) for event in output.events):
        raise _wrong(output, "events", "finite timestamps")


def _check_prefill_stats(output: EngineCoreOutput, _: _Expected) -> None:
    _check_counts(output.prefill_stats, f"output of {output.request_id!r}: prefill_stats")


def _check_nans(output: EngineCoreOutput, _: _Expected) -> None:
    if output.num_nans_in_logits < 0:
        raise _wrong(output, "num_nans_in_logits", "a number that is not negative")


def _check_resumes(output: EngineCoreOutput, _: _Expected) -> None:
    if output.num_resumes:
        raise _wrong(output, "num_resumes", "0, because the client of several engines sets it")


def _check_text(field: str, output: EngineCoreOutput, _: _Expected) -> None:
    text = getattr(output, field)
    if isinstance(text, str) and len(text) > _MOST_TEXT:
        raise _wrong(output, field, f"at most {_MOST_TEXT} characters")


def _check_tokens(output: EngineCoreOutput, vocab_size: int) -> None:
    tokens = output.new_token_ids
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        raise _wrong(output, "new_token_ids", f"token ids below {vocab_size}")


_END_KEYS = {"plugin", "reason", "stop_reason"}


def _check_end(output: EngineCoreOutput, expected: _Expected) -> None:
    """Check the reason of an end, which a plugin may have given."""
    _check_text("stop_reason", output, expected)
    if not isinstance(end := output.stop_reason, dict):
        return
    texts = [text for text in end.values() if isinstance(text, str)]
    are_plain = all(isinstance(value, str | int) for value in end.values())
    if not (end.keys() <= _END_KEYS and are_plain and sum(map(len, texts)) <= _MOST_TEXT):
        raise _wrong(output, "stop_reason", "plugin, reason and stop_reason of a plugin")


def _check_all_logprobs(output: EngineCoreOutput, expected: _Expected, vocab_size: int) -> None:
    num_tokens = len(output.new_token_ids)
    if output.logprobs and len(output.logprobs) != num_tokens:
        raise _wrong(output, "logprobs", f"entries for {num_tokens} tokens")
    for entry in output.logprobs or ():
        _check_logprobs(output, "logprobs", entry, expected.num_logprobs, vocab_size)
    observed = output.observed_logprobs
    if observed is not None and len(observed) != num_tokens:
        raise _wrong(output, "observed_logprobs", f"entries for {num_tokens} tokens")
    if observed and not all(logprob <= _MOST_LOGPROB for logprob in observed):  # NaN neither
        raise _wrong(output, "observed_logprobs", f"numbers of at most {_MOST_LOGPROB}")
    expected.num_prompt_tokens -= len(output.prompt_logprobs or ())
    if expected.num_prompt_tokens < 0:
        raise _wrong(output, "prompt_logprobs", "at most an entry for each prompt token")
    for prompt_entry in output.prompt_logprobs or ():
        if prompt_entry is not None:
            limit = expected.num_prompt_logprobs
            _check_logprobs(output, "prompt_logprobs", prompt_entry, limit, vocab_size)


def _check_pooled(output: EngineCoreOutput, expected: _Expected) -> None:
    if not expected.has_pooling:
        raise _wrong(output, "pooling_output", "none, because it generates tokens")


def _check_experts(output: EngineCoreOutput, expected: _Expected) -> None:
    _check_array(output, expected, ("routed_experts",), output.routed_experts)
    if output.routed_experts.ndim != 3 or output.routed_experts.dtype.kind not in "iu":
        raise _wrong(output, "routed_experts", "integers in three dimensions")


def _check_part_arrays(output: EngineCoreOutput, expected: _Expected) -> None:
    for part, arrays in (output.part_arrays or {}).items():
        _check_included(output, expected, "part_arrays", part)
        for name, pieces in arrays.items():
            for piece in pieces:
                _check_part_array(output, expected, (part, name), piece)


def _check_included(output: EngineCoreOutput, expected: _Expected, field: str, part: str) -> None:
    if part not in expected.include:
        raise _wrong(
            output, field, f"parts that it includes, {expected.include}, not {part!r:.100}"
        )


def _check_figures(output: EngineCoreOutput, expected: _Expected) -> None:
    """Check the figures of step parts, which another engine gets if it resumes the request."""
    for part, figures in (output.part_figures or {}).items():
        _check_included(output, expected, "part_figures", part)
        _check_names(figures, f"output of {output.request_id!r}: part_figures.{part}")
        for name, value in figures.items():
            values = value if isinstance(value, list) else [value]
            is_number = all(isinstance(number, int | float) for number in values)
            if len(values) > _MOST_NAMES or not (is_number or isinstance(value, str)):
                field = f"part_figures.{part}.{name}"[:_MOST_PATH]
                raise _wrong(output, field, f"a number, at most {_MOST_NAMES} numbers, or a text")


def _check_logprobs(
    output: EngineCoreOutput, field: str, entry: TokenLogprobs, limit: int, vocab_size: int
) -> None:
    ids = entry.token_ids
    if not 1 <= len(ids) == len(entry.logprobs) <= limit:
        raise _wrong(output, field, f"1 to {limit} tokens, with as many log-probabilities")
    if not (min(ids) >= 0 and max(ids) < vocab_size):
        raise _wrong(output, field, f"token ids below {vocab_size}")


def _check_array(
    output: EngineCoreOutput, expected: _Expected, name: tuple[str, ...], array: Any
) -> None:
    field = ".".join(name)
    if not isinstance(array, np.ndarray) or array.ndim < 1:
        raise _wrong(output, field, "an array of positions")
    if len(array) > expected.num_positions:
        raise _wrong(output, field, f"at most {expected.num_positions} positions")
    shape = (*array.shape[1:], array.dtype)
    if expected.shapes.setdefault(name, shape) != shape:
        raise _wrong(output, field, "the shape and type of the outputs before")


def _check_part_array(
    output: EngineCoreOutput, expected: _Expected, name: tuple[str, ...], piece: PartArray
) -> None:
    _check_array(output, expected, ("part_arrays", *name), piece.values)
    positions, field = piece.positions, ".".join(("part_arrays", *name))
    if not isinstance(positions, np.ndarray) or positions.dtype.kind not in "iu":
        raise _wrong(output, field, "positions in an array of integers")
    if positions.shape != piece.values.shape[:1]:
        raise _wrong(output, field, "as many positions as values")
    if len(positions) and not (positions.min() >= 0 and positions.max() < expected.num_positions):
        raise _wrong(output, field, f"positions below {expected.num_positions}")


_CHECKS: Mapping[str, Callable[[EngineCoreOutput, _Expected], None]] = {
    "error": partial(_check_text, "error"),
    "error_kind": partial(_check_text, "error_kind"),
    "events": _check_events,
    "num_cached_tokens": _check_cached,
    "num_nans_in_logits": _check_nans,
    "num_resumes": _check_resumes,
    "part_arrays": _check_part_arrays,
    "part_figures": _check_figures,
    "pooling_output": _check_pooled,
    "prefill_stats": _check_prefill_stats,
    "routed_experts": _check_experts,
    "stop_reason": _check_end,
    "weight_runs": _check_weight_runs,
}
"""Checks of rare fields that an output has."""


def _check_reports(batch: EngineCoreOutputs) -> None:
    """Check the reports of an engine: finite numbers, none of them negative."""
    if not math.isfinite(batch.timestamp):
        raise WireError("timestamp: expected a finite number")
    if batch.scheduler_stats is not None:
        if batch.scheduler_stats.engines:
            raise WireError("scheduler_stats.engines: expected none, because it is one engine")
        _check_counts(batch.scheduler_stats, "scheduler_stats")
    if (load := batch.load) is not None:
        _check_counts(load, "load")
        _check_names(load.adapters, "load.adapters")
    if batch.cache_changes is not None:
        _check_cache_changes(batch.cache_changes)


def _check_counts(value: Any, path: str) -> None:
    if isinstance(value, int | float):
        if not 0 <= value < math.inf:  # NaN neither
            raise WireError(f"{path}: expected a finite number that is not negative, got {value}")
    elif isinstance(value, dict):
        _check_names(value, path)
        for key, count in value.items():
            _check_counts(count, f"{path}.{key}"[:_MOST_PATH])
    elif isinstance(value, list) and len(value) > _MOST_NAMES:
        raise WireError(f"{path}: expected at most {_MOST_NAMES} numbers")
    elif isinstance(value, list):
        for index, count in enumerate(value):
            _check_counts(count, f"{path}[{index}]")
    elif isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            _check_counts(getattr(value, field), f"{path}.{field}")


def _check_names(names: Collection[Any], path: str) -> None:
    if len(names) > _MOST_NAMES or any(len(str(name)) > _MOST_NAME for name in names):
        raise WireError(
            f"{path}: expected at most {_MOST_NAMES} names, each of {_MOST_NAME} characters"
        )


def _check_cache_changes(changes: KVCacheChanges) -> None:
    if not (changes.first >= 0 and changes.last >= changes.first - 1):
        raise WireError("cache_changes: expected numbers of steps in order")
    for keys in (changes.stored, changes.removed):
        if any(len(key) != BLOCK_KEY_BYTES for key in keys):
            raise WireError(f"cache_changes: expected names of {BLOCK_KEY_BYTES} bytes")
