"""Validation of what another engine has sent of a request."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hardpoint.plugins import EngineCoreRequest, RequestError
from hardpoint.plugins.logits import LogitsPlugin

_OUTPUTS = "resumed.output_token_ids"
_LOGPROBS = "resumed.observed_logprobs"


def check_resumed(
    request: EngineCoreRequest, vocab_size: int, processors: Mapping[str, type[LogitsPlugin]]
) -> None:
    """Check that a request may go on after the outputs that it has; one without any passes.

    Args:
        request: with the names of the logits processors that it uses in `plugin_args`.
        vocab_size: one more than the largest token id.
        processors: classes of the enabled logits processors, by name.

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
            f"{_OUTPUTS}: expected fewer than max_tokens, {params.max_tokens}, for one is to come, "
            f"got {len(tokens)}"
        )
    ends = frozenset(request.stop_token_ids)
    for index, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{_OUTPUTS}[{index}]: expected a token id from 0 to {vocab_size - 1}, got {token}"
            )
        if token in ends and index >= params.min_tokens:
            raise RequestError(
                f"{_OUTPUTS}[{index}]: expected no token that ends the request, got {token}"
            )
    for name in request.plugin_args.keys() & processors.keys():
        _check_processor(name, processors[name], request)
    _check_logprobs(resumed.observed_logprobs, len(tokens))
    positions = len(request.prompt_token_ids)
    for field, limit in (
        ("num_prompt_logprobs", positions),
        ("num_routed_positions", positions + len(tokens)),
    ):
        if (count := getattr(resumed, field)) > limit:
            raise RequestError(f"resumed.{field}: expected at most {limit}, got {count}")


def _check_processor(name: str, cls: type[LogitsPlugin], request: EngineCoreRequest) -> None:
    """Reject a request with a processor whose state cannot be built again."""
    if not cls.supports_resume:
        raise RequestError(
            f"resumed: expected none: logits processor {name!r} does not declare supports_resume"
        )
    resumed = request.resumed
    if resumed is None or cls.observe is LogitsPlugin.observe:
        return
    if resumed.output_token_ids and resumed.observed_logprobs is None:
        raise RequestError(
            f"{_LOGPROBS}: expected that of each token, which logits processor {name!r} observes, "
            "got none"
        )


def _check_logprobs(logprobs: list[float] | None, num_tokens: int) -> None:
    if logprobs is None:
        return
    if len(logprobs) != num_tokens:
        raise RequestError(
            f"{_LOGPROBS}: expected one for each of the {num_tokens} tokens, got {len(logprobs)}"
        )
    for index, logprob in enumerate(logprobs):
        if not math.isfinite(logprob):
            raise RequestError(f"{_LOGPROBS}[{index}]: expected a finite number, got {logprob}")
