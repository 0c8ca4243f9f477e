"""The `kv_transfer_params` of disaggregated prefill: one engine computes the prompt for another."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

import msgspec

from hardpoint.plugins import EngineCoreRequest, RequestError
from hardpoint.typed import convert

from .jobs import TransferSource

_TOKEN_BYTES = 16


class TransferParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields, under the names that other engines use.

    Attributes:
        do_remote_decode: this engine computes the prompt, and offers its blocks to another one. Its
            last output has the parameters for that one.
        do_remote_prefill: another engine has computed the prompt.
        remote_engine_id: id of that engine.
        transfer_token: the token that it gave.
        num_tokens: length of the prompt with the offered blocks.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: str | None = None
    transfer_token: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")] | None = None
    num_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None

    @property
    def transfer(self) -> TransferSource:
        """Where the blocks come from."""
        assert self.remote_engine_id is not None
        assert self.transfer_token is not None
        return TransferSource(self.remote_engine_id, bytes.fromhex(self.transfer_token))


def read_params(
    request: EngineCoreRequest, peers: list[str] | None, engine_id: str
) -> TransferParams:
    """Return the parameters of a request, checked.

    Args:
        request: a request with such parameters.
        peers: engines that the configuration knows; None if no store exchanges blocks.
        engine_id: id of this engine; "" if it has none.

    Raises:
        RequestError: they are wrong.
    """
    path = "kv_transfer_params"
    given_params = dict(request.kv_transfer_params or {})
    read: TransferParams = convert(given_params, TransferParams, path=path, error=RequestError)
    num_prompt_tokens = len(request.prompt_token_ids)
    if peers is None:
        raise RequestError(
            f"{path}: no store of kv_connector.stores exchanges blocks with other engines, as "
            f"'p2p' does; the stores in a chain do not"
        )
    if read.do_remote_decode == read.do_remote_prefill:
        raise RequestError(
            f"{path}: expected one of do_remote_decode and do_remote_prefill to be true"
        )
    if request.params.n != 1:
        raise RequestError(
            f"{path}: expected n = 1 with it, because blocks are fetched once, "
            f"got {request.params.n}"
        )
    source = {"remote_engine_id", "transfer_token", "num_tokens"}
    fields = {name for name in source if getattr(read, name) is not None}
    if read.do_remote_decode:
        if fields:
            raise RequestError(f"{path}.{min(fields)}: not expected together with do_remote_decode")
        if not engine_id:
            raise RequestError(
                f"{path}.do_remote_decode: this engine has no kv_connector.engine_id, by which the "
                f"other one could name it"
            )
        return read
    if missing := source - fields:
        raise RequestError(f"{path}.{min(missing)}: expected together with do_remote_prefill")
    if read.remote_engine_id not in peers:
        raise RequestError(
            f"{path}.remote_engine_id: expected one of the configured peers "
            f"({', '.join(sorted(peers)) or 'none'}), got {read.remote_engine_id!r}"
        )
    assert read.num_tokens is not None
    if read.num_tokens > num_prompt_tokens:
        raise RequestError(
            f"{path}.num_tokens: expected at most {num_prompt_tokens}, the length of the prompt, "
            f"got {read.num_tokens}"
        )
    return read


def new_secret() -> bytes:
    """Return a secret that cannot be guessed."""
    return secrets.token_bytes(_TOKEN_BYTES)


def offered_params(engine_id: str, secret: bytes, num_tokens: int) -> dict[str, Any]:
    """Return the parameters for the request of the engine that is to go on."""
    params = TransferParams(
        do_remote_prefill=True,
        remote_engine_id=engine_id,
        transfer_token=secret.hex(),
        num_tokens=num_tokens,
    )
    fields: dict[str, Any] = msgspec.to_builtins(params)
    del fields["do_remote_decode"]
    return fields
