"""LoRA adapters of requests."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = ["AdapterScale", "LoRARequest"]


AdapterScale = Annotated[float, Meta(ge=-100.0, le=100.0)]
"""A factor of what an adapter changes."""


class LoRARequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The LoRA adapter of a request.

    Attributes:
        name: name of the adapter, as users know it.
        id: 1 or more; identifies the adapter in workers.
        path: folder of its files, as PEFT writes them; empty for one that was added by that name.
        content_hash: hash of the adapter's weights and configuration, part of the keys of cached
            blocks; without one, name and id are, which another adapter may have later.
        scale: factor of what the adapter changes, for this request: 0.0 gives what the model gives
            without it; also part of those keys, unless it is 1.0.
    """

    name: str
    id: int
    path: str = ""
    content_hash: str = ""
    scale: AdapterScale = 1.0
