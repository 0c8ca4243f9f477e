"""Where a server is, which model it has, and how many tokens text has for it."""

from __future__ import annotations

import msgspec

from hardpoint.plugins import ConfigError, HardpointError
from hardpoint.typed import Strict

from .answers import Document, message_of
from .connection import Pool
from .processes import run_on_uvloop
from .prompts import VOCABULARY, Costs, RequestFields
from .target import Target


class ServerAddress(Strict):
    """Where a server is, and what it asks of clients.

    Attributes:
        url: http://HOST:PORT, https://HOST:PORT or http+unix:///PATH.
        uds: path of a Unix socket by which the URL's host is reached.
        verify: whether the certificate is checked.
        api_key: key of requests.
    """

    url: str
    uds: str = ""
    verify: bool = True
    api_key: str = ""

    @property
    def target(self) -> Target:
        """The parsed address."""
        return Target.parse(self.url, uds=self.uds, verify=self.verify)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of each request.

        Raises:
            ConfigError: the key cannot be in a header.
        """
        if not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("api_key: expected printable ASCII, got other characters")
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def ask_server(server: ServerAddress, fields: RequestFields) -> tuple[RequestFields, Costs]:
    """Return the fields with the server's model, and how many tokens text has.

    Raises:
        ConfigError: no model is named, and the server lists none.
        HardpointError: there is no server.
    """
    target = server.target

    async def ask() -> tuple[RequestFields, Costs]:
        pool = Pool(target, server.headers)
        try:
            listed = fields.model or await find_model(pool)
            known = msgspec.structs.replace(fields, model=listed)
            return known, await measure_costs(pool, listed, chat=fields.endpoint == "chat")
        finally:
            pool.close()

    try:
        return run_on_uvloop(ask())
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise HardpointError(f"no server at {target.address}: {reason}") from None


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
