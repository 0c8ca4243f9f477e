"""`/v1/responses/compact`: conversation compaction by a summary that the model writes."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from hardpoint.builtin_plugins.server.errors import AnswerError
from hardpoint.builtin_plugins.server.routes.answers import new_id

from .input import InputItem, MessageItem
from .objects import OutputMessage, ResponseObject, ResponseUsage
from .request import ResponsesRequest
from .store import complete_record

INSTRUCTION = (
    "Summarize this conversation for an assistant that continues it without seeing it. State the "
    "task and its constraints, the decisions, the results of tool calls, the files and values that "
    "matter, and the next steps. Write only the summary."
)


class CompactRequest(ResponsesRequest):
    """A conversation to compact.

    Attributes:
        max_output_tokens: maximum length of the summary with its reasoning.
    """


class OutputCompaction(msgspec.Struct, tag_field="type", tag="compaction", kw_only=True):
    """The summary of a conversation.

    Attributes:
        encrypted_content: the summary in base64; it is not encrypted.
    """

    id: str
    encrypted_content: str


class CompactedResponse(msgspec.Struct, kw_only=True):
    """A compacted conversation, to be sent as input.

    Attributes:
        output: the user messages, and one item with the summary.
        usage: tokens of the request that wrote the summary.
    """

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[dict[str, Any]]
    usage: ResponseUsage | None


def with_instruction(body: ResponsesRequest) -> ResponsesRequest:
    """Return a request for the summary of a conversation, without tool calls."""
    items = [*body.items(), MessageItem(role="user", content=INSTRUCTION)]
    return msgspec.structs.replace(body, input=items, tool_choice="none")


def compacted(summary: ResponseObject, items: Sequence[InputItem]) -> CompactedResponse:
    """Return a conversation with the summary of the model.

    Args:
        summary: the response to `with_instruction`.
        items: items of the conversation, without the instruction.

    Raises:
        AnswerError: the model wrote no summary, or not all of it.
    """
    texts = [
        part.text
        for item in summary.output
        if isinstance(item, OutputMessage)
        for part in item.content
    ]
    text = "".join(texts).strip()
    if summary.status != "completed" or not text:
        raise AnswerError(
            400,
            "input: the model wrote no complete summary; send more max_output_tokens or a shorter "
            "conversation",
            param="input",
            code="compaction_failed",
        )
    messages = [
        complete_record(item)
        for item in items
        if isinstance(item, MessageItem) and item.role == "user"
    ]
    content = base64.b64encode(text.encode()).decode()
    compaction = OutputCompaction(id=new_id("cmp_"), encrypted_content=content)
    return CompactedResponse(
        id=summary.id,
        created_at=int(time.time()),
        output=[*messages, msgspec.to_builtins(compaction)],
        usage=summary.usage,
    )
