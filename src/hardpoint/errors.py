"""Every error that Hardpoint raises on purpose, in one tree.

HardpointError
├── ConfigError             a value of the configuration is wrong
├── PluginError             a plugin is wrong or failed
│   ├── PluginNotFoundError     no component has that name, or the FQCN does not resolve
│   ├── PluginLoadError         it exists but cannot be imported or built
│   ├── PluginContractError     it loads but does not keep its kind's contract
│   ├── PluginConflictError     two components claim one name, or their order cannot be met
│   └── PluginFaultError        it failed while running
│       └── EngineFaultError        its failure ended the engine; also an EngineDeadError
├── ModelError              a model cannot be found, read or supported
├── RequestError            a request is wrong; nothing else is disturbed
│   ├── ConversationEndedError  an open conversation has ended; the message has the reason
│   ├── OverloadedError         too many requests wait; try again later
│   │   └── QueueFullError          the prompts that wait have too many tokens; it has the seconds
│   └── PromptTooLongError      the prompt has more tokens than the model reads
├── BusyError               another live change is under way; try again once it is done
├── RequestEndedError       it ended without a result, by its timeout for example
├── EngineClosedError       the engine was closed before the call
├── EnginePausedError       the call would wait for ever, since the engine is paused
├── EngineTimeoutError      the engine did not answer a utility call in time; it may be busy
├── CommunicationAbortedError  ranks that share a model no longer exchange tensors
└── EngineDeadError         the engine has ended; requests in flight may be sent again
    └── EngineFaultError        a plugin's failure ended it; also a PluginFaultError
"""

from __future__ import annotations

import os
import sys
import traceback

__all__ = [
    "BusyError",
    "CommunicationAbortedError",
    "ConfigError",
    "ConversationEndedError",
    "EngineClosedError",
    "EngineDeadError",
    "EngineFaultError",
    "EnginePausedError",
    "EngineTimeoutError",
    "HardpointError",
    "ModelError",
    "OverloadedError",
    "PluginConflictError",
    "PluginContractError",
    "PluginError",
    "PluginFaultError",
    "PluginLoadError",
    "PluginNotFoundError",
    "PromptTooLongError",
    "QueueFullError",
    "RequestEndedError",
    "RequestError",
    "install_command",
    "reason_of",
    "shown",
    "size_text",
]


_MAX_MESSAGE, _MAX_VALUE = 2000, 500
_MOST_NOTE_LINES = 10  # that a notebook shows; the traceback of another process is a note
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


PIP_NAME = "/path/to/hardpoint"
"""What `pip install` takes for Hardpoint: the folder of its source, which is not on a package index
yet. On release it becomes "hardpoint", and `scripts/install-commands` writes it into all pages.
"""


def install_command(extra: str) -> str:
    """Return the command that installs Hardpoint with an extra, such as "gpu"."""
    return f"pip install '{PIP_NAME}[{extra}]'"


class HardpointError(Exception):
    """The root of every error that Hardpoint raises on purpose.

    A message that quotes long values is cut, and UTF-8 can hold it.
    """

    def __init__(self, *args: object) -> None:
        """Store the arguments; the first one is the message."""
        super().__init__(*(_readable(arg) if isinstance(arg, str) else arg for arg in args))

    def _render_traceback_(self) -> list[str]:
        """Return the traceback that IPython and notebooks show: the caller's own lines.

        The frames of Hardpoint and of IPython are left out. `traceback.print_exception` has them.
        """
        frames = [
            frame
            for frame in traceback.extract_tb(self.__traceback__)
            if not frame.filename.startswith(_PACKAGE) and "/IPython/" not in frame.filename
        ]
        lines = [f"  {frame.filename}:{frame.lineno}: {frame.line}" for frame in frames]
        notes = [line for note in getattr(self, "__notes__", ()) for line in note.splitlines()]
        return [*lines, f"{type(self).__name__}: {self}", *notes[:_MOST_NOTE_LINES]]


class ConfigError(HardpointError, ValueError):
    """A configuration value is wrong; the message gives its path and where it came from."""


class PluginError(HardpointError):
    """A plugin is wrong or failed; the message names it, its distribution and its origin."""


class PluginNotFoundError(PluginError):
    """No component has the name, or the FQCN does not resolve."""


class PluginLoadError(PluginError):
    """The component exists but could not be imported or constructed."""


class PluginContractError(PluginError):
    """The component was imported but does not keep the contract of its kind."""


class PluginConflictError(PluginError):
    """Two components claim one name, or their stated order cannot be met."""


class PluginFaultError(PluginError):
    """A plugin failed while it ran.

    Attributes:
        plugin: its name, where a request failed by it; else empty.
    """

    plugin: str = ""


class ModelError(HardpointError):
    """A model cannot be found, read or supported."""


class RequestError(HardpointError, ValueError):
    """A request is wrong; the message names the field, its value and the expected one."""


class OverloadedError(RequestError):
    """The request is valid, but too many wait already; try again later."""


class QueueFullError(OverloadedError):
    """The prompts that wait have too many tokens; try again after `retry_after` seconds."""

    @classmethod
    def of(cls, waiting: int, more: int, limit: int, seconds: int) -> QueueFullError:
        """Return the error of a prompt.

        Args:
            waiting: tokens of the prompts that wait.
            more: tokens of this one.
            limit: `scheduler.max_waiting_tokens`.
            seconds: when there is room for it.
        """
        return cls(
            f"overloaded: prompts of {waiting} tokens are waiting, and {more} more would be above "
            f"the maximum, {limit} (scheduler.max_waiting_tokens); try again in {seconds} s"
        )

    @property
    def retry_after(self) -> int:
        """Seconds, as the message has them: it alone comes from an engine of another process."""
        return int(str(self).rpartition(" in ")[2].removesuffix(" s"))


class ConversationEndedError(RequestError):
    """The conversation has ended; the message has the reason: lease, abort or close."""


class PromptTooLongError(RequestError):
    """The prompt has more tokens than the model reads; send a shorter one."""

    @classmethod
    def of(cls, tokens: int, max_model_len: int, *, generates: bool = True) -> PromptTooLongError:
        """Return the error of a prompt, with a message that clients of other servers know."""
        return cls(
            f"prompt: the prompt is too long: {tokens} tokens; this model's maximum context length "
            f"is {max_model_len} tokens{', less one to generate' if generates else ''}"
        )


class EngineClosedError(HardpointError):
    """The engine was closed before the call was made."""


class EnginePausedError(HardpointError):
    """The call would wait for ever: only its own caller could resume the engine."""


class EngineTimeoutError(HardpointError, TimeoutError):
    """The engine did not answer a utility call in time; it may be busy, or hang."""


class BusyError(HardpointError):
    """Another live change is under way; try again once it is done."""


class RequestEndedError(HardpointError):
    """A request ended without a result: by its timeout, or because it was aborted.

    Attributes:
        finish_reason: "timeout" or "abort".
    """

    finish_reason: str = ""


class CommunicationAbortedError(HardpointError):
    """The ranks of a group no longer communicate, since one has failed or ended.

    The message has the reason, where it is known. It is not this rank's failure: executors prefer
    the error of another one.
    """


class EngineDeadError(HardpointError):
    """The engine has ended; requests in flight may be sent again to another one."""


class EngineFaultError(EngineDeadError, PluginFaultError):
    """A plugin's failure ended the engine; the plugin's exception is the cause."""


def size_text(count: int) -> str:
    """Return a number of bytes in KiB, MiB or GiB."""
    if count >= 2**30:
        return f"{count / 2**30:.1f} GiB"
    return f"{count / 2**20:.0f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"


def shown(value: object, limit: int = _MAX_VALUE) -> str:
    """Return a value as a message quotes it: its repr, or its type if it has none; cut if long.

    A tensor is described without its values.
    """
    torch = sys.modules.get("torch")  # it need not be installed
    if torch is not None and isinstance(value, torch.Tensor):
        where = f"{value.layout}, on {value.device}"
        return f"a {value.dtype} tensor {list(value.shape)} ({where})"
    try:
        return _cut(repr(value), limit)
    except KeyboardInterrupt:
        raise
    except BaseException:  # of the value's own __repr__, or of one that is nested too deeply
        return f"a {type(value).__qualname__}"


def reason_of(cause: BaseException) -> str:
    """Return the class and the message of an exception, in one line."""
    # Works even if the exception's own __str__ raises.
    return traceback.format_exception_only(cause)[-1].strip()


def _readable(text: str) -> str:
    if not text.isascii():
        text = text.encode(errors="backslashreplace").decode()
    return _cut(text, _MAX_MESSAGE)


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    ends = limit // 2
    return f"{text[:ends]}... ({len(text) - 2 * ends} more characters) ...{text[-ends:]}"
