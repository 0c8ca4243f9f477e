"""The arguments of calls of weight updates, and the messages between the halves, as msgpack."""

from __future__ import annotations

import msgspec


class PrepareArguments(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of the call that begins to read weights.

    Attributes:
        ticket: a number that the caller chooses, for the calls that follow.
        updates: as `load.updates`.
        version: as `load.version`.
        mode: as the call that uses them is going to have it.
        recompute: the same.
    """

    ticket: int
    updates: list[str]
    version: str
    mode: str
    recompute: bool


class PollArguments(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of the call that asks whether the weights are read."""

    ticket: int


class UseArguments(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of the call that lets workers use the weights.

    Attributes:
        ticket: ticket of the call that began to read them.
        mode: treatment of requests in flight, as in `LLM.pause`.
        recompute: whether requests that have begun compute their keys and values again.
    """

    ticket: int
    mode: str
    recompute: bool


class DropArguments(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of the call that forgets the weights: none."""


class ReadWeights(msgspec.Struct, tag=True):
    """Begin to read weights, which replace prepared ones.

    Attributes:
        ticket: ticket of the call; so messages of several updates differ, also in a journal.
        updates: as `load.updates`.
    """

    ticket: int
    updates: list[str]


class AskWeights(msgspec.Struct, tag=True):
    """Report whether the weights are read: a msgpack bool."""

    ticket: int


class UseWeights(msgspec.Struct, tag=True):
    """Run with the weights that are read, from the next step on."""

    ticket: int


class DropWeights(msgspec.Struct, tag=True):
    """Forget the weights that are prepared."""

    ticket: int


Call = ReadWeights | AskWeights | UseWeights | DropWeights
"""A request of the engine's half to the worker halves."""
