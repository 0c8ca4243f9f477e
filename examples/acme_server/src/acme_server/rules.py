"""A transform that puts the house rule before every conversation, and counts answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hardpoint.plugins.server import Call, Transform

RULE = "Answer briefly."


def house_rule(count: Callable[[str, int], None]) -> Transform:
    """Return the transform.

    Args:
        count: called with the client's name and the tokens of each whole answer.
    """

    async def request(call: Call, body: dict[str, Any]) -> dict[str, Any]:
        tags = {**body.get("tags", {}), "team": call.headers.get("x-acme-team", "none")}
        changed = {**body, "tags": tags}
        if call.path == "/v1/chat/completions" and isinstance(body.get("messages"), list):
            changed["messages"] = [{"role": "system", "content": RULE}, *body["messages"]]
        return changed

    async def response(call: Call, body: dict[str, Any]) -> dict[str, Any]:
        count(call.client.name, body.get("usage", {}).get("total_tokens", 0))
        return body

    return Transform(request=request, response=response)
