"""Errors of requests and plugins: their kinds on the wire, and the plugin that caused one."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

from hardpoint import errors
from hardpoint.errors import EngineDeadError, EngineFaultError, PluginFaultError
from hardpoint.host.registry.blame import (
    component_of,
    describe,
    faults_as,
    innermost,
    raise_unless_fault,
    text_of,
)
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins import (
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    HardpointError,
    ModelError,
)
from hardpoint.plugins.component import Component, Source


class RefusedInCallError(Exception):
    """One of several requests of a call was refused, and so none of them runs.

    Attributes:
        index: which one.
        error: why.
    """

    def __init__(self, index: int, error: HardpointError) -> None:
        super().__init__(f"request {index} of a call: {error}")
        self.index, self.error = index, error


def kind_of(error: BaseException) -> str:
    """Return the name of the nearest class of Hardpoint's tree, the root's for all others."""
    names = (cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    return next(names, HardpointError.__name__)


def error_of(kind: str | None, message: str | None) -> HardpointError:
    """Return an error of the class of that name, of the root's if there is none."""
    cls = getattr(errors, kind, HardpointError) if kind in errors.__all__ else HardpointError
    error: HardpointError = cls(message or "the engine gave no reason")
    return error


def engine_dead(error: BaseException) -> EngineDeadError:
    """Return a new error for one waiter on an engine that `error` ended."""
    message = text_of(error)
    if not isinstance(error, HardpointError):
        message = f"the engine failed in its own code, not in a plugin's: {describe(error)}"
    by_plugin = isinstance(error, PluginFaultError)
    raised = EngineFaultError(message) if by_plugin else EngineDeadError(message)
    if isinstance(error, EngineDeadError):
        raised.__cause__ = error.__cause__
        for note in getattr(error, "__notes__", ()):
            raised.add_note(note)
    else:
        raised.__cause__ = error
    return raised


def death_of(error: BaseException, *, in_step: bool) -> EngineDeadError:
    """Return the error for a request in flight when the engine died.

    Args:
        in_step: whether the request was in the step in which it died, and so may be responsible.
    """
    return ended_by(error, "was in the step in which it died" if in_step else "may be sent again")


def ended_by(error: BaseException, why: str) -> EngineDeadError:
    """Return the error for a request that ends because its engine died, with the reason."""
    reported = engine_dead(error)
    reported.args = (f"{error}; the request {why}",)
    return reported


_WORKER = ("hardpoint.core.worker.", "hardpoint.core.weights.", "hardpoint.host.boundary.checked_")
"""Modules that run in a worker, as prefixes."""


def responsible_plugin(error: BaseException, plugins: PluginSet) -> Source | None:
    """Return the plugin that raised an error, the innermost of several.

    An executor runs the worker, and is not responsible for errors of the worker itself.
    """
    owner, _ = innermost(error, _owner_of) or (None, "")
    if not isinstance(owner, Component):
        return None
    for entry in plugins.manifest.tree():
        if entry.name == owner.name and plugins.loaded(entry) is type(owner):
            return entry.source
    return None


def _owner_of(frame: FrameType) -> Component | str | None:
    component = component_of(frame)
    if component is None and frame.f_globals.get("__name__", "").startswith(_WORKER):
        return "the worker"
    return component


def attribute_error(error: BaseException, plugins: PluginSet) -> BaseException:
    """Return an error that names the responsible plugin, with the error as its cause.

    An error of Hardpoint's tree, which names it already, and one of no plugin are returned as is.
    """
    source = None if isinstance(error, HardpointError) else responsible_plugin(error, plugins)
    if source is None:
        return error
    named = PluginFaultError(f"{source}: {describe(error)}")
    named.__cause__ = error
    return named


@contextlib.contextmanager
def naming_caller() -> Iterator[None]:
    """Add the plugin of the body that called a function of the worker to the function's error."""
    try:
        yield
    except ModelError as error:
        caller: Source | None = None
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_globals.get("__name__", "").startswith(_WORKER):
                break
            context = getattr(component_of(frame), "context", None)
            caller = getattr(context, "source", None) or caller
        else:
            raise
        if caller is None:
            raise
        raise ModelError(f"{caller}: {error}") from error


@contextlib.contextmanager
def naming_plugin(plugins: PluginSet) -> Iterator[None]:
    """Raise an exception of the body that a plugin caused as an error that names it."""
    try:
        yield
    except BaseException as error:
        raise_unless_fault(error)
        named = attribute_error(error, plugins)
        if named is error:
            raise
        raise named from error


def close_all(components: Iterable[Component]) -> None:
    """Close every component, last ones first, even if another one raises.

    Raises:
        PluginFaultError: a component's `close` failed.
    """
    with contextlib.ExitStack() as stack:
        for component in components:
            stack.callback(_close, component)


def close_named(source: Source, close: Callable[[], None]) -> None:
    """Close an object of a plugin.

    Raises:
        PluginFaultError: it failed; the message names the plugin.
    """
    with faults_as(PluginFaultError, f"{source}: its close()", passing=(HardpointError,)):
        close()


def _close(component: Component) -> None:
    cls = type(component)
    name = getattr(component, "name", cls.__name__)  # whatever it is, it is closed
    source = f"plugin {name!r} ({cls.__module__}:{cls.__qualname__})"
    # One of Hardpoint's errors is of a component that this one closes.
    with faults_as(PluginFaultError, f"{source}: its close", passing=(HardpointError,)):
        component.close()


def rejection_output(request_id: str, error: BaseException) -> EngineCoreOutputs:
    """Return the only output of a request that was rejected because of an error."""
    output = EngineCoreOutput(
        request_id=request_id,
        finish_reason=FinishReason.ERROR,
        error=text_of(error) if isinstance(error, HardpointError) else describe(error),
        error_kind=kind_of(error),
    )
    return EngineCoreOutputs(outputs=[output], finished_requests={request_id})
