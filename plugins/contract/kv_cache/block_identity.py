"""Identity of the KV blocks of a rank: all that their bytes depend on besides the tokens."""

from __future__ import annotations

import hashlib

import msgspec

__all__: list[str] = []


class BlockIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """All that the bytes of the blocks of one rank depend on, besides the tokens.

    Attributes:
        weights: hash of the weights' content.
        config: hash of the model's configuration, its RoPE parameters for example.
        quantization: quantization of the weights; "none".
        architecture: architecture of the model.
        dtype: dtype of keys and values; "int8 of torch.bfloat16" for codes of such.
        kv_layout, kv_layout_version: layout of a block in the attention backend.
        block_size: tokens per block.
        layer_bytes: bytes of a block of each layer of this rank; its stage determines the layers.
        tensor_rank, tensor_size: which part of the heads it has.
        stage, num_stages: which part of the layers.
        hash_algorithm: algorithm of the chain of token hashes.
    """

    weights: str
    config: str
    architecture: str
    dtype: str
    kv_layout: str
    kv_layout_version: int
    block_size: int
    layer_bytes: tuple[int, ...]
    hash_algorithm: str
    quantization: str = "none"
    tensor_rank: int = 0
    tensor_size: int = 1
    stage: int = 0
    num_stages: int = 1

    def digest(self) -> bytes:
        """Return 32 bytes that differ whenever a field does."""
        return hashlib.sha256(
            msgspec.json.encode(msgspec.to_builtins(self), order="deterministic")
        ).digest()
