"""Adapter resolvers: find the files of an adapter that a request names and that is not loaded."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardpoint.errors import RequestError
from hardpoint.plugins.component.base import Component, Context
from hardpoint.plugins.component.behaviour import LONG, Returned, returns, unusable
from hardpoint.plugins.requests.lora import LoRARequest

__all__ = ["AdapterResolver", "AdapterResolverContext"]


@dataclass(frozen=True, kw_only=True)
class AdapterResolverContext(Context["AdapterResolver"]):
    """Context of an adapter resolver.

    Attributes:
        model: the base model, as configured.
    """

    model: str


def _found(value: Any, args: Sequence[Any], originals: Sequence[Any]) -> Path | LoRARequest | None:  # noqa: ARG001
    if value is None:
        return None
    if isinstance(value, LoRARequest):
        if value.name != originals[0]:
            raise unusable(value.name, f", expected the adapter {originals[0]!r}", LONG)
        if not Path(value.path).is_absolute():
            raise unusable(value.path, " as its path, expected an absolute one", LONG)
        return value
    if not isinstance(value, Path):
        raise unusable(value, ", expected a Path, a LoRARequest or None", LONG)
    if not value.is_absolute():
        raise unusable(str(value), ", expected an absolute path", LONG)
    return value


ADAPTER = Returned("an absolute `Path`, a `LoRARequest` of that name or None", _found)


class AdapterResolver(Component):
    """Finds the adapter of a name that a request has and that nothing is loaded under.

    Resolvers are asked in the order of `adapters.resolvers`, until one returns something; the
    adapter is loaded then, and stays. A name is the text of any client: it must never lead to a
    file that the operator has not offered, nor to a download.
    """

    context: AdapterResolverContext

    @returns(ADAPTER, raises=(RequestError,))
    @abstractmethod
    def resolve(self, name: str) -> Path | LoRARequest | None:
        """Return where the files of an adapter are; None if this resolver does not know the name.

        Called in threads, also in several at once. After `adapters.resolve_seconds` the request
        ends with an error.

        Args:
            name: any text that is not empty.

        Returns:
            The folder, as an absolute path, or a request of that name with the folder as its
            `path`; its `id` is not used.

        Raises:
            RequestError: the name is known, and must not be used.
        """
