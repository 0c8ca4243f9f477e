"""`/v1/chat/completions/render`: the request to `/inference/v1/generate` for a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from hardpoint.builtin_plugins.server.dialects.tokens import OUTSIDE, GenerateRequest, TokenSampling
from hardpoint.plugins import RequestError

from .request import ChatCompletionRequest

_SAMPLING = tuple(name for name in TokenSampling.__struct_fields__ if name not in OUTSIDE)


def rendered_request(
    body: ChatCompletionRequest,
    token_ids: Sequence[int],
    model: str,
    request_id: str,
    max_tokens: int | None,
) -> GenerateRequest:
    """Return the request that generates from the tokens of a conversation.

    Args:
        token_ids: tokens of the conversation by the chat template.
        model: name of the model or adapter.
        max_tokens: default maximum length of the answer: the rest of the context.

    Raises:
        RequestError: the request constrains its tool calls, which sampling parameters cannot hold.
    """
    _, choice = body.tools_and_choice()
    if choice not in ("auto", "none"):
        raise RequestError(
            'tool_choice: expected "auto" or "none", because the rendered request holds no tools'
        )
    fields: dict[str, Any] = {}
    for name in _SAMPLING:
        value = getattr(body, name, msgspec.UNSET)
        if value is not msgspec.UNSET:
            fields[name] = value
    fields["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    limit = body.max_completion_tokens or body.max_tokens or max_tokens
    if limit is not None:
        fields["max_tokens"] = limit
    names = set(GenerateRequest.__struct_fields__) & set(OUTSIDE) - {"model", "request_id"}
    return GenerateRequest(
        token_ids=list(token_ids),
        sampling_params=TokenSampling(**fields),
        model=model,
        request_id=request_id,
        **{name: getattr(body, name) for name in sorted(names)},
    )
