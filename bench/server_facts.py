"""Asks a server which model it has, and how many tokens text has."""

from __future__ import annotations

import msgspec

from hardpoint.plugins import ConfigError

from .answers import Document, message_of
from .connection import Pool
from .prompts import VOCABULARY, Costs


async def find_model(pool: Pool) -> str:
    """Return the first model that the server lists.

    Raises:
        ConfigError: it lists none, or refuses to.
        OSError: there is no server.
    """
    document = Document()
    await pool.ask(pool.request("GET", "/v1/models"), document)
    try:
        return str(document.json()["data"][0]["id"])
    except (TypeError, KeyError, IndexError):
        raise ConfigError(
            "model: expected its name as the server knows it, for GET /v1/models lists none: "
            f"{document.status} {message_of(document.content)}"
        ) from None


async def measure_costs(pool: Pool, model: str, *, chat: bool) -> Costs:
    """Return the tokens of the vocabulary, as the server's /tokenize counts them.

    Without that route, an entry counts as a token.
    """
    first = VOCABULARY[0]
    alone = await _count(pool, model, {"prompt": first})
    if alone is None:
        return Costs()
    costs = {}
    for entry in VOCABULARY:
        count = await _count(pool, model, {"prompt": f"{first} {entry}"})
        if count is None:
            return Costs()
        costs[entry] = max(1, count - alone)
    overhead = alone - costs[first]
    if chat:
        message = {"role": "user", "content": first}
        whole = await _count(pool, model, {"messages": [message], "add_generation_prompt": True})
        overhead = overhead if whole is None else whole - costs[first]
    return Costs(costs, overhead, measured=True)


async def _count(pool: Pool, model: str, fields: dict[str, object]) -> int | None:
    """Return the tokens of a text or of messages, or None if the server does not count them."""
    document = Document()
    body = msgspec.json.encode({"model": model, **fields})
    await pool.ask(pool.request("POST", "/tokenize", body), document)
    answer = document.json()
    count = answer.get("count") if isinstance(answer, dict) else None
    return count if isinstance(count, int) else None
