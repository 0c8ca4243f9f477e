"""Engine-side validation of an EngineCoreRequest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sized
from types import MappingProxyType

from hardpoint.plugins import EngineCoreRequest, ReasoningMarkers, RequestError
from hardpoint.plugins.sampling import RequestStates
from hardpoint.plugins.step_part.engine import REQUEST_FIELDS
from hardpoint.toolkit.requests.groups import check_members
from hardpoint.toolkit.requests.resumed_states import SAMPLER, check_logprobs, check_states

_LONGEST_MARKER = 64
_OUTPUTS = "resumed.output_token_ids"


class RequestCheck:
    """Rejects requests that the engine cannot run, or with fields that it would ignore.

    Args:
        vocab_size: one more than the largest token id.
        used: optional fields that step parts make use of, and check.
        processors: classes of the enabled logits processors and of the sampler, by name.
    """

    def __init__(
        self,
        vocab_size: int,
        engine_index: int = 0,
        used: Collection[str] = (),
        processors: Mapping[str, type[RequestStates]] = MappingProxyType({}),
    ) -> None:
        self._vocab_size = vocab_size
        self._engine_index = engine_index
        self._used = used
        self.processors = processors

    def __call__(self, request: EngineCoreRequest) -> None:
        """Check a request.

        Raises:
            RequestError: the engine cannot run it; names the field.
        """
        self._check_fields(request)
        if request.reasoning_markers is not None:
            self._check_markers(request.reasoning_markers)
        if request.timeout is not None and not request.timeout > 0:
            raise RequestError(f"timeout: expected seconds > 0 or none, got {request.timeout}")
        ids = request.prompt_token_ids
        if not ids:
            raise RequestError("prompt_token_ids: expected at least one token, got none")
        self._check_ids("prompt_token_ids", (min(ids), max(ids)))
        self.check_resumed(request)
        check_members(request, self)

    def check_resumed(self, request: EngineCoreRequest) -> None:
        """Check that a request may go on after the outputs that it has; one without any passes.

        Raises:
            RequestError: it may not; names the field.
        """
        if (resumed := request.resumed) is None:
            return
        if request.pooling_params is not None:
            raise RequestError(
                "resumed: expected none with pooling_params, for such a request generates no tokens"
            )
        tokens, params = resumed.output_token_ids, request.params
        if params.max_tokens is not None and len(tokens) >= params.max_tokens:
            raise RequestError(
                f"{_OUTPUTS}: expected fewer than max_tokens, {params.max_tokens}, because one "
                f"has to follow, got {len(tokens)}"
            )
        ends = frozenset(request.stop_token_ids)
        for index, token in enumerate(tokens):
            if not 0 <= token < self._vocab_size:
                raise RequestError(
                    f"{_OUTPUTS}[{index}]: expected a token id from 0 to {self._vocab_size - 1}, "
                    f"got {token}"
                )
            if token in ends and index >= params.min_tokens:
                raise RequestError(
                    f"{_OUTPUTS}[{index}]: expected no token that ends the request, got {token}"
                )
        for name in {SAMPLER, *request.plugin_args} & self.processors.keys():
            plugin = f"logits processor {name!r}" if name else "the sampler"
            check_states(plugin, self.processors[name], request)
        check_logprobs(resumed.observed_logprobs, len(tokens))
        positions = len(request.prompt_token_ids)
        for field, limit in (
            ("num_prompt_logprobs", positions),
            ("num_routed_positions", positions + len(tokens)),
        ):
            if (count := getattr(resumed, field)) > limit:
                raise RequestError(f"resumed.{field}: expected at most {limit}, got {count}")

    def _check_markers(self, markers: ReasoningMarkers) -> None:
        prefixes = (markers.message_prefix, markers.content_prefix)
        for ids in (*markers.start, *markers.end, markers.calls, *prefixes):
            if len(ids) > _LONGEST_MARKER:
                raise RequestError(
                    f"reasoning_markers: expected at most {_LONGEST_MARKER} tokens each, "
                    f"got {len(ids)}"
                )
            self._check_ids("reasoning_markers", ids)

    def _check_ids(self, field: str, ids: Iterable[int]) -> None:
        for token in ids:
            if not 0 <= token < self._vocab_size:
                raise RequestError(
                    f"{field}: expected token ids from 0 to {self._vocab_size - 1}, got {token}"
                )

    def _check_fields(self, request: EngineCoreRequest) -> None:
        for name, reason in REQUEST_FIELDS.items():
            value = getattr(request, name)
            if value is None or name in self._used:
                continue
            count = len(value) if isinstance(value, Sized) else 1
            if count:
                raise RequestError(f"{name}: {reason.format(value=value, count=count)}")
        if request.resumable:
            raise RequestError(
                "resumable: expected false, for each turn of a conversation is a request with all "
                "tokens before it, got true"
            )
        if (value := request.reasoning_parser_kwargs) is not None:
            raise RequestError(
                "reasoning_parser_kwargs: expected none, because plugin_args has the "
                f"arguments of parsers, got {value!r}"
            )
        if request.params.plugin_args:
            raise RequestError(
                "params.plugin_args: expected none, because plugin_args of the request has "
                f"them checked, got {request.params.plugin_args!r}"
            )
        rank = request.data_parallel_rank
        if rank is not None and rank != self._engine_index:
            raise RequestError(
                f"data_parallel_rank: expected {self._engine_index}, the rank of this engine, or "
                f"none, got {rank}"
            )
