"""Engine-side validation of an EngineCoreRequest."""

from __future__ import annotations

from collections.abc import Collection, Sized

from hardpoint.plugins import EngineCoreRequest, ReasoningMarkers, RequestError
from hardpoint.plugins.step_part import REQUEST_FIELDS

_LONGEST_MARKER = 64


class RequestCheck:
    """Rejects requests that the engine cannot run, or of which it would ignore a field."""

    def __init__(self, vocab_size: int, engine_index: int = 0, used: Collection[str] = ()) -> None:
        """Create the check of one engine.

        Args:
            vocab_size: one more than the largest token id.
            engine_index: index of the engine that the requests are for.
            used: optional fields that step parts make use of, and check.
        """
        self._vocab_size = vocab_size
        self._engine_index = engine_index
        self._used = used

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
        for token in (min(ids), max(ids)):
            if not 0 <= token < self._vocab_size:
                raise RequestError(
                    f"prompt_token_ids: expected token ids from 0 to {self._vocab_size - 1}, "
                    f"got {token}"
                )

    def _check_markers(self, markers: ReasoningMarkers) -> None:
        """Reject markers that are too long to look for, or of no tokens of the model."""
        prefixes = (markers.message_prefix, markers.content_prefix)
        for ids in (*markers.start, *markers.end, *prefixes):
            if len(ids) > _LONGEST_MARKER:
                raise RequestError(
                    f"reasoning_markers: expected at most {_LONGEST_MARKER} tokens each, "
                    f"got {len(ids)}"
                )
            for token in ids:
                if not 0 <= token < self._vocab_size:
                    raise RequestError(
                        f"reasoning_markers: expected token ids from 0 to {self._vocab_size - 1}, "
                        f"got {token}"
                    )

    def _check_fields(self, request: EngineCoreRequest) -> None:
        """Reject a request with a field that nothing in this engine makes use of."""
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
                "reasoning_parser_kwargs: expected none, this engine has no use for it, got "
                f"{value!r}"
            )
        if request.params.plugin_args:
            raise RequestError(
                "params.plugin_args: expected none, for plugin_args of the request has them "
                f"checked, got {request.params.plugin_args!r}"
            )
        rank = request.data_parallel_rank
        if rank is not None and rank != self._engine_index:
            raise RequestError(
                f"data_parallel_rank: expected {self._engine_index}, the rank of this engine, or "
                f"none, got {rank}"
            )
