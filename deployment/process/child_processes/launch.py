"""The launch message of a child process, and the Python interpreter to start.

The message goes over an anonymous socket that only the child inherits; nothing of it is in the
command line, in the environment or on disk.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from hardpoint.errors import PluginLoadError
from hardpoint.plugins import HardpointError

from .main_module.main_pickle import dumps

LAUNCH_PROTOCOL = 1


class ChildLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that every child process needs; each kind of process adds more.

    Attributes:
        main_objects: objects of the parent's `__main__`, from `main_objects`.
        folder: folder of the parent's sockets; the child removes it if the parent has ended without
            doing so. Empty for none.
        protocol: version of this message.
    """

    main_objects: bytes = b""
    folder: str = ""
    protocol: int = LAUNCH_PROTOCOL

    def encode(self) -> bytes:
        """Return the encoded message, for `decode_launch`."""
        return msgspec.msgpack.encode(self)


L = TypeVar("L", bound=ChildLaunch)


class Interpreter(msgspec.Struct, frozen=True, kw_only=True):
    """How to start a Python interpreter like this one.

    The environment is inherited. Import hooks and warning filters that the program installed at
    run time are not carried over.

    Attributes:
        executable: the program.
        flags: its options, such as `-X dev`.
        path: `sys.path`.
        argv: `sys.argv`.
        directory: the working directory; None if it was removed, then "/" is used.
    """

    executable: str
    flags: list[str]
    path: list[str]
    argv: list[str]
    directory: str | None

    @classmethod
    def current(cls) -> Interpreter:
        """Return the interpreter of this process.

        Raises:
            HardpointError: `sys.executable` is empty.
        """
        if not sys.executable:
            raise HardpointError(
                "sys.executable: expected the path of a Python interpreter to start the engine "
                "process with, got nothing, as in some embedded programs; set it, or run the "
                "engine in this process"
            )
        try:
            directory = os.getcwd()
        except FileNotFoundError:
            directory = None
        return cls(
            executable=sys.executable,
            flags=_flags(),
            path=[entry for entry in sys.path if isinstance(entry, str)],
            argv=[str(argument) for argument in getattr(sys, "argv", [])],
            directory=directory,
        )

    @property
    def command(self) -> list[str]:
        """The command line up to the program; `-P` keeps the program's folder off the path."""
        return [self.executable, *self.flags, "-P"]

    def encode(self, launch_seconds: float = 0.0) -> bytes:
        """Return the message that the child reads while it can import only the standard library.

        Args:
            launch_seconds: time limit of the launch, if it is longer than the default.
        """
        message = {"path": self.path, "argv": self.argv, "pid": os.getpid()}
        # JSON in ASCII, because a path need not be valid Unicode.
        return json.dumps({**message, "launch_seconds": launch_seconds}).encode()


def decode_launch(data: bytes, type_: type[L]) -> L:
    """Return the launch of an encoded message.

    Args:
        data: the message.
        type_: type of the launch.

    Raises:
        HardpointError: it is malformed, or of another version of the protocol.
    """
    try:
        protocol = msgspec.msgpack.decode(data, type=_Versioned).protocol
        if protocol == LAUNCH_PROTOCOL:
            return msgspec.msgpack.decode(data, type=type_)
    except msgspec.MsgspecError as cause:
        raise HardpointError(f"launch: the message cannot be read: {cause}") from None
    raise HardpointError(
        f"launch: its protocol is version {protocol}, this Hardpoint speaks version "
        f"{LAUNCH_PROTOCOL}; was Hardpoint changed while the program ran?"
    )


def main_objects(references: Iterable[str]) -> bytes:
    """Return the pickled objects of this program's `__main__` that the references name.

    Args:
        references: FQCNs; those of other modules are skipped.

    Raises:
        PluginLoadError: an object cannot be pickled, or is not there.
    """
    module = sys.modules["__main__"]
    split = (reference.partition(":") for reference in references)
    names = {qualname.split(".")[0] for name, _, qualname in split if name == "__main__"}
    if missing := sorted(name for name in names if not hasattr(module, name)):
        raise PluginLoadError(
            f"__main__:{missing[0]}: process {os.getpid()} does not have it, so that its child "
            f"processes cannot get it: an engine process has only the program's plugins, with "
            f"their dependencies; move it into a module, or make it a method of the plugin"
        )
    objects = {name: getattr(module, name) for name in sorted(names)}
    return dumps(objects) if objects else b""


class _Versioned(msgspec.Struct):
    protocol: int


_FLAG_LETTERS = {
    "debug": "d",
    "optimize": "O",
    "dont_write_bytecode": "B",
    "no_user_site": "s",
    "no_site": "S",
    "ignore_environment": "E",
    "verbose": "v",
    "bytes_warning": "b",
    "isolated": "I",
}


def _flags() -> list[str]:
    counts = {letter: int(getattr(sys.flags, flag)) for flag, letter in _FLAG_LETTERS.items()}
    flags = [f"-{letter * count}" for letter, count in counts.items() if count > 0]
    for name, value in sys._xoptions.items():
        flags += ["-X", name if value is True else f"{name}={value}"]
    return flags + [f"-W{option}" for option in sys.warnoptions]
