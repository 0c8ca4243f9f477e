"""What a child said before it ended, as an error that the parent can raise."""

from __future__ import annotations

import json

import msgspec

from hardpoint.plugins import EngineDeadError, HardpointError, errors

from .__main__ import LENGTH

__all__ = ["Failure"]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An exception of another process.

    Attributes:
        types: its class and that class's bases, nearest first, as `module:name`.
        message: its text.
        notes: what was added to it.
        traceback: with causes, without its last lines, which are class and message.
    """

    types: list[str]
    message: str
    notes: list[str]
    traceback: str

    @classmethod
    def of(cls, frame: bytes) -> Failure | None:
        """Return what a frame of the launch socket says, None if it is not complete."""
        if len(frame) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(frame)
        body = frame[LENGTH.size : LENGTH.size + length]
        return msgspec.convert(json.loads(body), cls) if len(body) == length else None

    def error(self, pid: int) -> HardpointError:
        """Return it as the same class of Hardpoint's tree; its traceback is a note.

        Classes that a plugin made are taken as the class of the tree that they derive from, and
        all others as EngineDeadError.
        """
        known = {f"{errors.__name__}:{name}": getattr(errors, name) for name in errors.__all__}
        own = next((known[name] for name in self.types if name in known), None)
        if own is not None:
            error: HardpointError = own(self.message)
        else:
            name = self.types[0].removeprefix("builtins:").replace(":", ".")
            error = EngineDeadError(
                f"the engine process (pid {pid}) failed: {name}: {self.message}"
            )
        for note in self.notes:
            error.add_note(note)
        error.add_note(f"In the engine process (pid {pid}):\n{self.traceback.rstrip()}")
        return error
