"""LoRA adapters of requests."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = ["AdapterScale", "LoRARequest"]


AdapterScale = Annotated[float, Meta(ge=-100.0, le=100.0)]
"""A factor of an adapter's low-rank change."""


class LoRARequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The LoRA adapter of a request.

    Attributes:
        name: name of the adapter, as users know it.
        id: 1 or more; identifies the adapter in workers.
        path: folder of its files, as PEFT writes them; empty for an adapter that was added by name.
        content_hash: hash of the adapter's weights and configuration, part of the keys of cached
            blocks; without one, name and id are, which another adapter may have later.
        scale: factor of the adapter's change, for this request: 0.0 gives the model's results
            without it; also part of these keys, unless it is 1.0.
    """

    name: str
    id: int
    path: str = ""
    content_hash: str = ""
    scale: AdapterScale = 1.0
