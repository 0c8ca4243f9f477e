"""Who makes a request: asked of the authenticators in order, or anybody where there are none."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from starlette.types import Scope

from hardpoint.plugins.server import Authenticator, Client

from .errors import AnswerError
from .faults import BrokenContractError, Owned, ServerFaults
from .service import ANYBODY

ADMINISTRATOR = Client(name="administrator", admin=True)
"""The client of the admin address where no key is needed: the owner of its Unix socket."""


class AdminAuthentication:
    """Finds the client of each request to the admin address, who has to be an administrator."""

    def __init__(
        self, authenticators: Sequence[Owned], faults: ServerFaults, open_routes: Collection[str]
    ) -> None:
        """Ask authenticators in order; none is for a Unix socket, which is its owner's alone.

        Args:
            open_routes: paths that need no administrator: files without data.
        """
        self._open = frozenset(open_routes)
        self._keys = Authentication(authenticators, faults, ()) if authenticators else None

    async def client(self, scope: Scope) -> Client:
        """Return who makes a request.

        Raises:
            AnswerError: it is no administrator, or an authenticator failed.
        """
        if self._keys is None:
            return ADMINISTRATOR
        if scope["path"] in self._open:
            return ANYBODY
        client = await self._keys.client(scope)
        if not client.admin:
            raise AnswerError(
                403, "authorization: expected the key of an administrator", code="not_an_admin"
            )
        return client


class Authentication:
    """Finds the client of each request."""

    def __init__(
        self, authenticators: Sequence[Owned], faults: ServerFaults, open_routes: Collection[str]
    ) -> None:
        """Ask authenticators in order; none leaves every route open.

        Args:
            open_routes: paths that need no client.
        """
        self._authenticators, self._faults = authenticators, faults
        self._open = frozenset(open_routes)

    async def client(self, scope: Scope) -> Client:
        """Return who makes a request.

        Raises:
            AnswerError: no client is known, or an authenticator failed.
        """
        if not self._authenticators:
            return ANYBODY
        headers = {n.decode("latin-1"): v.decode("latin-1") for n, v in scope["headers"]}
        path = scope["path"]
        for owned in self._authenticators:
            client = await self._faults.run(
                owned, "authenticator", _asked, owned.part, headers, path, may_refuse=True
            )
            if client is not None:
                return client
        if path in self._open:
            return ANYBODY
        raise AnswerError(
            401,
            "authorization: expected a valid key as `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )


async def _asked(
    authenticator: Authenticator, headers: Mapping[str, str], path: str
) -> Client | None:
    client: object = await authenticator.authenticate(headers, path)
    if client is not None and not isinstance(client, Client):
        raise BrokenContractError(
            f"it returned a {type(client).__name__}, expected a Client or None"
        )
    return client
