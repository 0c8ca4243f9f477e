"""The report of a worker on prompts that were pooled, as msgpack."""

from __future__ import annotations

import msgspec


class PooledPrompt(msgspec.Struct, array_like=True):
    """The result of a prompt.

    Attributes:
        shape: shape of the values.
        values: float32, little-endian.
    """

    shape: list[int]
    values: bytes


class PoolingReport(msgspec.Struct, array_like=True):
    """The results of a step.

    Attributes:
        pooled: by request, of complete prompts.
        failed: why a request ends with an error: the message, and the name of the pooler.
    """

    pooled: dict[str, PooledPrompt] = {}
    failed: dict[str, tuple[str, str]] = {}
