"""Options of the connector "stores"."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from hardpoint import plugins

_Count = Annotated[int, Meta(ge=1, le=1024)]
_Seconds = Annotated[float, Meta(gt=0, le=1e6)]


class StoresOptions(plugins.Options):
    """Options, in `[plugin.stores]`.

    Attributes:
        threads: number of threads that load, and as many for each other engine whose blocks are
            fetched.
        save_threads: number of threads that store, and as many that offer blocks to other engines.
        save_bytes: bytes of host memory for blocks that are about to be stored, and as many for
            those that are about to be offered; when it is full, blocks are not stored.
        save_wait_seconds: maximum time for which a step waits for room there.
        offer_wait_seconds: the same, for blocks that are to be offered.
        write: blocks are stored in all stores at once ("through"), or in those after the nearest
            when there is nothing else to store ("behind").
        layer_groups: parts that the layers are stored in, so that a step may begin before all of
            them are loaded; a divisor of the number of layers.
        load_in_step: load blocks of another engine within the step that needs them, a group of
            layers after the other, instead of before.
        timeout_seconds: time limit of each call of a store; at most half of
            `kv_connector.load_seconds`.
        breaker_failures: failed calls in a row, after which a store is left out.
        breaker_seconds: for how long.
        mac_key_file: file with the secret of an authentication code of each block, the same for all
            engines that share stores; at least 32 bytes, owned by the user or root, and with mode
            0600 or 0640. Blocks without the code are not used.
        required: names of stores that must answer at start: the engine does not start without them.
            `plugins.on_error = {NAME = "engine"}` ends it at a later fault of one.
    """

    threads: _Count = 4
    save_threads: _Count = 2
    save_bytes: Annotated[int, Meta(ge=1)] = 256 << 20
    save_wait_seconds: Annotated[float, Meta(ge=0, le=10)] = 0.0
    offer_wait_seconds: Annotated[float, Meta(ge=0, le=10)] = 1.0
    write: Literal["through", "behind"] = "through"
    layer_groups: _Count = 1
    load_in_step: bool = False
    timeout_seconds: _Seconds = 5.0
    breaker_failures: _Count = 5
    breaker_seconds: _Seconds = 10.0
    mac_key_file: str | None = None
    required: list[str] = []
