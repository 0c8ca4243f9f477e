"""Which exceptions are the fault of the plugin that raised them, and how messages describe one
and the state of the plugin.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import logging
import signal
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any, NoReturn, TypeVar

import msgspec

from hardpoint.errors import HardpointError, PluginFaultError
from hardpoint.plugins.component import Component
from hardpoint.plugins.component.base import MAX_STATE_BYTES, Source

_log = logging.getLogger("hardpoint")

T = TypeVar("T")

_RAISE = dis.opmap["RAISE_VARARGS"]
_MAX_CHARACTERS = 4000


def is_fault(error: BaseException) -> bool:
    """Return whether an exception that left a plugin's method is a fault of the plugin.

    Each one is, of whatever class (`SystemExit`, a panic in Rust), unless a signal raised it: the
    user's Ctrl-C, or another signal for which the program has a handler that raises.
    """
    return not (_passed_handler(error) or _is_interrupt(error))


def raise_unless_fault(error: BaseException) -> None:
    """Raise an exception that is not a fault of the plugin that raised it.

    Raises:
        BaseException: the exception itself.
    """
    if not is_fault(error):
        raise error


@contextlib.contextmanager
def logged_after(end: str) -> Iterator[None]:
    """Log a fault of a plugin that no caller can get any more, after the `end` of something."""
    try:
        yield
    except PluginFaultError as fault:
        _log.warning("%s, after %s", fault, end)


@contextlib.contextmanager
def faults_as(
    error: type[HardpointError], message: str, *, passing: tuple[type[BaseException], ...] = ()
) -> Iterator[None]:
    """Raise exceptions of the body as an error with the text `<message> failed: <cause>`.

    Args:
        message: the plugin and its action.
        passing: classes of exceptions that are raised as they are.
    """
    try:
        yield
    except BaseException as cause:
        raise_as(error, message, cause, passing)


def raise_as(
    error: type[HardpointError],
    message: str,
    cause: BaseException,
    passing: tuple[type[BaseException], ...] = (),
) -> NoReturn:
    """Raise an exception as `faults_as` does, without a frame in each call that succeeds."""
    raise_unless_fault(cause)
    if isinstance(cause, passing):
        raise cause
    raise error(f"{message} failed: {describe(cause)}") from cause


def close_if_failed(undo: contextlib.ExitStack, close: Callable[[], None]) -> None:
    """Call a function if the body of a stack fails, which empties the stack if it does not.

    An error of the function is a note of the body's, so that it does not hide the first one.
    """

    def leave(_type: object, error: BaseException | None, _trace: object) -> None:
        try:
            close()
        except BaseException as further:
            raise_unless_fault(further)
            if error is None:
                raise
            error.add_note(f"closing failed, too: {text_of(further)}")

    undo.push(leave)


def innermost(
    error: BaseException, owner_of: Callable[[FrameType], T | None]
) -> tuple[T, str] | None:
    """Return the innermost owner in a traceback, and the name of its outermost function there.

    Args:
        owner_of: returns who owns a frame; None for a frame of the caller.
    """
    match: tuple[T, str] | None = None
    trace = error.__traceback__
    while trace is not None:
        owner = owner_of(trace.tb_frame)
        if owner is not None and (match is None or owner is not match[0]):
            match = owner, trace.tb_frame.f_code.co_name
        trace = trace.tb_next
    return match


def component_of(frame: FrameType) -> Component | None:
    """Return the component that owns the method of a frame."""
    owner = frame.f_locals.get("self")
    return owner if isinstance(owner, Component) else None


def responsible(error: BaseException, source: Source, method: str) -> tuple[Source, str]:
    """Return the plugin and the method that are responsible for an error.

    It is the innermost of the components that wrap one another.

    Args:
        error: left a method of a plugin.
    """
    owner, name = innermost(error, component_of) or (None, method)
    inner = getattr(getattr(owner, "context", None), "source", None)
    return (source, method) if inner in (None, source) else (inner, name)


def describe(error: BaseException) -> str:
    """Return the class and the text of an exception, even if its `__str__` raises."""
    return f"{type(error).__name__}: {text_of(error)}"


def text_of(error: BaseException) -> str:
    """Return the text of an exception, cut to a few lines; state it if its `__str__` raises."""
    try:
        text = str(error)
    except BaseException as further:
        raise_unless_fault(further)
        return f"(its __str__ raised {type(further).__name__})"
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."


def _is_interrupt(error: BaseException | None) -> bool:
    """Return whether Python's own handler of SIGINT raised an exception, or the one before it."""
    # That handler is written in C and has no frame. So the exception appears in the frame that the
    # signal interrupted, at an instruction of any kind but the one that a `raise` statement is.
    # A plugin that catches it may raise another one, and then has the first one as its context.
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler and handler is not None:  # None: one in C
        return False
    while isinstance(error, KeyboardInterrupt):
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is not None and not _is_raise(trace.tb_frame, trace.tb_lasti):
            return True
        error = error.__context__
    return False


def _is_raise(frame: FrameType, instruction: int) -> bool:
    return frame.f_code.co_code[instruction] == _RAISE


def _passed_handler(error: BaseException) -> bool:
    trace = error.__traceback__
    if trace is None:
        return False
    handlers = set(_handlers())
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _handlers() -> Iterator[CodeType]:
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        if handler is None or isinstance(handler, signal.Handlers):
            continue
        function = handler if hasattr(handler, "__code__") else type(handler).__call__
        if (code := getattr(function, "__code__", None)) is not None:
            yield code


def state_of(component: Component) -> dict[str, Any] | None:
    """Return the state of a component; the cause as `error` if that fails; None without a state."""
    original: Component = vars(component).get("wrapped", component)  # of a guarded one
    if getattr(type(original), "dump_state", Component.dump_state) is Component.dump_state:
        return None
    try:
        return _checked(original.dump_state())
    except BaseException as cause:
        raise_unless_fault(cause)
        return {"error": f"its dump_state failed: {describe(cause)}"}


def _checked(state: object) -> dict[str, Any]:
    if not isinstance(state, Mapping):
        raise TypeError(f"expected a mapping, got {type(state).__name__}")
    encoded = msgspec.json.encode(dict(state))
    if len(encoded) > MAX_STATE_BYTES:
        raise ValueError(f"expected at most {MAX_STATE_BYTES} bytes as JSON, got {len(encoded)}")
    plain: dict[str, Any] = msgspec.json.decode(encoded)
    return plain


class StateAtFault:
    """Logs the state of a component once: at its first fault."""

    def __init__(self, component: Component | None, source: Source) -> None:
        """Log the state of `component`, under the name `source`; without one, nothing.

        A component often holds this object: a reference back would keep it, and the device memory
        of models, until Python's collector runs.
        """
        self._component = None if component is None else weakref.ref(component)
        self._source = source

    def log(self) -> None:
        """Log it, if the component has one and this is the first call."""
        component = None if self._component is None else self._component()
        self._component = None
        if component is not None and (state := state_of(component)) is not None:
            _log.warning("%s: its state at its first fault: %s", self._source, state)
