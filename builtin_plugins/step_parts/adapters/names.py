"""The adapters of an engine by name, and the numbers of removed ones."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from hardpoint.plugins import LoRARequest, RequestError

_MOST_REMOVED = 1024
"""Numbers of removed adapters that are remembered."""


class AdapterNames:
    """The adapter of each name, the content that it had before, and removed numbers."""

    def __init__(self) -> None:
        """Begin without a name."""
        self._loaded: dict[str, LoRARequest] = {}
        self._replaced: dict[str, str] = {}
        self._removed: dict[int, None] = {}  # longest ago first

    def __iter__(self) -> Iterator[LoRARequest]:
        """Iterate over the adapters."""
        return iter(self._loaded.values())

    @property
    def removed(self) -> list[int]:
        """The numbers that programs removed."""
        return list(self._removed)

    def with_number(self, number: int) -> LoRARequest | None:
        """Return the adapter of a number; None if there is none."""
        return next((lora for lora in self if lora.id == number), None)

    def has_content(self, content: str) -> bool:
        """Return whether an adapter has a content."""
        return any(lora.content_hash == content for lora in self)

    def set(self, lora: LoRARequest) -> Sequence[str]:
        """Add an adapter, or replace one; return the contents before the replaced one."""
        before = self._loaded.get(lora.name, lora)
        self._loaded[lora.name] = lora
        self._removed.pop(lora.id, None)
        if before.content_hash == lora.content_hash:
            return ()
        earlier = self._replaced.get(lora.name)
        self._replaced[lora.name] = before.content_hash
        return () if earlier is None else (earlier,)

    def remove(self, name: str) -> Sequence[str]:
        """Remove a name, if there is one; return the contents that it has replaced."""
        self._loaded.pop(name, None)
        replaced = self._replaced.pop(name, None)
        return () if replaced is None else (replaced,)

    def note_removed(self, number: int) -> None:
        """Remember that a program removed a number."""
        self._removed.pop(number, None)
        self._removed[number] = None
        if len(self._removed) > _MOST_REMOVED:
            del self._removed[next(iter(self._removed))]

    def is_lost(self, lora: LoRARequest) -> bool:
        """Return whether an adapter of a request has neither a name here nor been removed."""
        return lora.name not in self._loaded and lora.id not in self._removed

    def check_number(self, new: LoRARequest) -> None:
        """Check that the number of a new adapter is free.

        Raises:
            RequestError: it is not.
        """
        for name, lora in self._loaded.items():
            if lora.id == new.id and name != new.name:
                raise RequestError(
                    f"lora.id: {new.id} belongs to {name!r}, got it for {new.name!r}"
                )

    def check_request(
        self, lora: LoRARequest, paths: Mapping[str, str], *, is_admitted: bool
    ) -> None:
        """Check that a request may have its adapter.

        Args:
            paths: folder of each content that the engine knows.
            is_admitted: whether another engine has admitted the request.

        Raises:
            RequestError: it was removed, or its files cannot be found.
        """
        is_removed = lora.id in self._removed and not is_admitted
        if is_removed or not (lora.content_hash in paths or lora.path):
            known = ", ".join(map(repr, self._loaded)) or "a loaded adapter (there is none)"
            raise RequestError(
                f"lora: expected one of {known}, got {lora.name!r} with content "
                f"{lora.content_hash[:16]}; it was removed, replaced or never added"
            )
        if lora.content_hash not in paths and not os.path.isdir(lora.path):
            raise RequestError(
                f"lora: the engine that had {lora.name!r} with content {lora.content_hash[:16]} "
                f"ended, and its folder {lora.path!r} is gone; add the adapter again"
            )

    def find(self, lora: LoRARequest, paths: Mapping[str, str]) -> LoRARequest | None:
        """Return an adapter as it was loaded; None if its name has none.

        Args:
            paths: folder of each content that the engine knows.

        Raises:
            RequestError: it has another path or content.
        """
        loaded = self._loaded.get(lora.name)
        if loaded is None:
            return None
        if lora.content_hash == loaded.content_hash:  # wherever: tensors have a folder per engine
            return loaded
        if lora.content_hash:
            if (path := paths.get(lora.content_hash)) is not None:
                return msgspec.structs.replace(loaded, path=path, content_hash=lora.content_hash)
            raise RequestError(
                f"lora_request.content_hash: {lora.name!r} has content {loaded.content_hash[:16]}, "
                f"got {lora.content_hash[:16]}"
            )
        if lora.path and lora.path != loaded.path:
            raise RequestError(
                f"lora_request.path: {lora.name!r} was loaded from {loaded.path!r}, got "
                f"{lora.path!r}; add_lora replaces it"
            )
        return loaded
