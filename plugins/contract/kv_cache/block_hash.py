"""The identity of a block of the KV cache: one formula, for the prefix cache and stored blocks.

The engine hashes the blocks of each request with `extra_keys` and `hash_block`
(core/kv_cache/block_hashes.py); KV connectors store blocks under `block_key`, which hashes the same
way. Blocks outlive engines: raise HASH_VERSION with every change of a hash. Blocks that
were stored before are then not found, rather than read as others.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from hardpoint.plugins.requests.lora import LoRARequest
from hardpoint.plugins.requests.params import EngineCoreRequest

__all__ = ["block_key", "sharing_key"]


HASH_VERSION = 2
"""Raised with every change of the formula; part of each hash and of each key."""

NO_PARENT = HASH_VERSION.to_bytes(32, "little")
"""The parent hash of a request's first block: the version of the formula."""

_SHA256 = hashlib.sha256()
_ATTENTION = "attention_backends/"


def hash_block(parent: bytes, tokens: bytes, extra: bytes = b"", fresh: Any = _SHA256) -> bytes:
    """Return the hash of a block, 32 bytes: H(parent + tokens + extra).

    Args:
        parent: hash of the block before it, NO_PARENT for the first.
        tokens: its token ids as little-endian uint32.
        extra: the value of `extra_keys`, if the block has any.
        fresh: hash object of the algorithm, without data; by default SHA-256.
    """
    # Copying a fresh hash object costs half as much as creating it.
    state = fresh.copy()
    state.update(parent + tokens + extra)
    digest: bytes = state.digest()
    return digest


def extra_keys(
    request: EngineCoreRequest, first: int, end: int, block_size: int
) -> dict[int, bytes]:
    """Return the values besides tokens that blocks `first` up to `end` depend on, if any.

    It is a msgpack array: the adapter, the cache salt (first block only, the others inherit it;
    with the request's arguments for the attention backend if it has some),
    and the features that the block overlaps with their offsets in the block. Where tokens of type 1
    begin in it, their offset follows.
    """
    types = _second_type_start(request)
    first_salt = None
    if first == 0:
        first_salt = _salt(request) if request.plugin_args else request.cache_salt
    is_plain = request.lora is None and first_salt is None and types is None
    if is_plain and not request.features:
        return {}
    adapter = None if request.lora is None else adapter_key(request.lora)
    features: dict[int, list[tuple[str, int]]] = {}
    for feature in request.features:
        last = (feature.offset + feature.length - 1) // block_size
        for index in range(max(first, feature.offset // block_size), min(end, last + 1)):
            part = (feature.identifier, feature.offset - index * block_size)
            features.setdefault(index, []).append(part)
    extras = {}
    for index in range(first, end):
        salt = first_salt if index == 0 else None
        if adapter is not None or salt is not None or index in features:
            extras[index] = msgspec.msgpack.encode((adapter, salt, features.get(index, [])))
    if types is not None and first <= (index := types // block_size) < end:
        salt = first_salt if index == 0 else None
        key = (adapter, salt, features.get(index, []), types % block_size)
        extras[index] = msgspec.msgpack.encode(key)
    return extras


def _second_type_start(request: EngineCoreRequest) -> int | None:
    """Return the position of the first token of type 1; None if there is none."""
    start = request.second_type_start
    return start if start is not None and start < len(request.prompt_token_ids) else None


def _salt(request: EngineCoreRequest) -> str | tuple[str | None, bytes] | None:
    """Return the salt of a request, with its arguments for the attention backend if it has some."""
    arguments = {k: v for k, v in request.plugin_args.items() if k.startswith(_ATTENTION)}
    if not arguments:
        return request.cache_salt
    return request.cache_salt, msgspec.json.encode(arguments, order="deterministic")


def sharing_key(request: EngineCoreRequest) -> str:
    """Return a text that is equal for requests which may share blocks of the same tokens."""
    adapter = request.lora and adapter_key(request.lora)
    return repr((_salt(request), adapter, _second_type_start(request)))


def with_part_keys(extra: bytes, keys: bytes) -> bytes:
    """Return the extra keys of a block, combined with the keys of step parts.

    Args:
        extra: the block's entry of `extra_keys`; empty if it has none.
        keys: keys of the parts, msgpack.
    """
    return msgspec.msgpack.encode((extra, keys))


def block_key(
    identity: bytes,
    block_hash: bytes,
    *,
    layers: tuple[int, int] | None = None,
    secret: bytes = b"",
) -> bytes:
    """Return the key of a stored block, 32 bytes: SHA-256 of all that its bytes depend on.

    Args:
        identity: `BlockIdentity.digest`.
        block_hash: hash of the block's tokens and all before them, the request's adapter, salt,
            features and types of tokens: made by `hash_block`.
        layers: the first and the one after the last, if the block is kept in parts; as indices of
            this rank's layers.
        secret: secret of a transfer; only its receiver may ask for these blocks.
    """
    parts = msgspec.msgpack.encode((HASH_VERSION, block_hash, layers, secret))
    return hash_block(identity, b"", parts)


def adapter_key(lora: LoRARequest) -> tuple[str | int, ...]:
    """Return the identity of an adapter: its content, or without a hash of it, name and id.

    A scale other than 1.0 is part of it.
    """
    scale = () if lora.scale == 1.0 else (str(float(lora.scale)),)
    if lora.content_hash:
        return ("content", lora.content_hash, *scale)
    return ("name", lora.name, lora.id, *scale)
